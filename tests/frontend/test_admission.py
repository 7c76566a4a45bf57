"""Keys, limits and origins at the client port, over ASGI."""

import pytest
from trio.testing import MockClock

from sdcpd.frontend.keys import Caller, KeyRing, key_digest
from sdcpd.frontend.settings import FrontendSettings
from sdcpd.roles.generation import GenerationRefused
from tests.support.frontend import EOS, World, make_world, page, tokens_of

HELLO = [page(tokens_of("Hel")), page([*tokens_of("lo"), EOS], final=True)]
KEY, SMALL = "key-of-ann-0123456", "key-of-bob-0123456"
RING = KeyRing(
    {
        key_digest(KEY): Caller(name="ann", group="lab"),
        key_digest(SMALL): Caller(name="bob", group="hall", max_open_requests=1, tokens_per_minute=8),
    }
)
ASK = {"model": "m", "prompt": "hi"}


def keyed(key: str) -> dict[str, str]:
    return {"content-type": "application/json", "authorization": f"Bearer {key}"}


@pytest.fixture
def world() -> World:
    return make_world(HELLO, keys=RING)


async def test_probes_need_no_key_and_all_else_does(world: World) -> None:
    for path in ("/health", "/ready"):
        assert (await world.call("GET", path)).status == 200
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/v1/models/m"),
        ("GET", "/metrics"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ):
        answer = await world.call(method, path)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert world.generations.requests == []


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"]
)
async def test_wrong_keys(world: World, authorization: str) -> None:
    headers = {"content-type": "application/json", "authorization": authorization}
    answer = await world.call("POST", "/v1/completions", json_body=ASK, headers=headers)
    assert answer.status == 401
    assert KEY not in answer.body.decode()


async def test_a_key_takes_its_groups_scope_into_the_session(world: World) -> None:
    for scheme in ("Bearer", "bearer"):
        headers = {"content-type": "application/json", "authorization": f"{scheme} {KEY}"}
        assert (await world.call("POST", "/v1/completions", json_body=ASK, headers=headers)).status == 200
    first, second = world.generations.requests
    assert first.facts.group == "lab"
    assert first.scope == Caller(name="x", group="lab").scope == second.scope


async def test_what_traffic_classes_look_at_reaches_the_router_and_secrets_do_not(world: World) -> None:
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}", "X-Team": "red", "cookie": "a=b"}
    body = {**ASK, "user": "u", "metadata": {"kind": "edit"}, "speculation": {"class": "batch"}}
    assert (await world.call("POST", "/v1/completions", json_body=body, headers=headers)).status == 200
    facts = world.generations.requests[0].facts
    assert (facts.user, facts.metadata, facts.asked) == ("u", (("kind", "edit"),), "batch")
    names = {name for name, _ in facts.headers}
    assert ("x-team", "red") in facts.headers
    assert names.isdisjoint({"authorization", "cookie"})


async def test_tokens_of_prompt_and_answer_count(world: World, autojump_clock: MockClock) -> None:
    assert (await world.call("POST", "/v1/completions", json_body=ASK, headers=keyed(SMALL))).status == 200
    refused = await world.call("POST", "/v1/completions", json_body=ASK, headers=keyed(SMALL))  # 2 + 6 of 8 are used
    assert (refused.status, refused.error["type"], refused.error["code"]) == (429, "tokens", "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1
    assert (await world.call("POST", "/v1/completions", json_body=ASK, headers=keyed(KEY))).status == 200


async def test_a_prompt_that_is_refused_costs_nothing_and_one_with_choices_counts_once(
    world: World, autojump_clock: MockClock
) -> None:
    world.generations.refusal = GenerationRefused("overloaded", "full", retry_after_s=1)
    for _ in range(9):
        refused = await world.call("POST", "/v1/completions", json_body=ASK, headers=keyed(SMALL))
        assert refused.status == 503, "2 tokens each would be more than the 8 of the key"
    world.generations.refusal = None
    with_choices = {"model": "m", "prompt": "hihi", "n": 2, "max_tokens": 1}
    await world.call("POST", "/v1/completions", json_body=with_choices, headers=keyed(SMALL))
    refused = await world.call("POST", "/v1/completions", json_body=ASK, headers=keyed(SMALL))
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) == 60 * (4 + 2 * 6 - 8) / 8, "4 for the prompt, 6 for each choice"


async def test_keys_are_taken_anew(world: World) -> None:
    world.app.take_keys(KeyRing({key_digest("a-newer-key-of-ann"): Caller(name="ann")}))
    assert (await world.call("GET", "/v1/models", headers=keyed(KEY))).status == 401
    assert (await world.call("GET", "/v1/models", headers=keyed("a-newer-key-of-ann"))).status == 200


async def test_origins_are_refused_by_default_and_listed_ones_served(world: World) -> None:
    asking = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    refused = await world.call("OPTIONS", "/v1/completions", headers=asking)
    assert (refused.status, refused.error["code"]) == (403, "origin_not_allowed")
    plain = await world.call("GET", "/health", headers={"origin": "https://chat.example"})
    assert not any(name.startswith("access-control") for name in plain.headers)

    open_world = make_world(HELLO, settings=FrontendSettings(cors_origins=("https://chat.example",)), keys=RING)
    wanted = asking | {"access-control-request-headers": "authorization, x-y"}
    allowed = await open_world.call("OPTIONS", "/v1/completions", headers=wanted)
    assert (allowed.status, allowed.body) == (204, b"")
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    assert allowed.headers["access-control-allow-headers"] == "authorization, x-y"
    answer = await open_world.call(
        "POST", "/v1/completions", json_body=ASK, headers=keyed(KEY) | {"origin": "https://chat.example"}
    )
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert "x-sdcp-session" in answer.headers["access-control-expose-headers"]
    unkeyed = await open_world.call("GET", "/v1/models", headers={"origin": "https://chat.example"})
    assert (unkeyed.status, unkeyed.headers["vary"]) == (401, "origin")
    other = await open_world.call("GET", "/health", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://a,https://b", "ftp://a"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="origin"):
        FrontendSettings(cors_origins=(origin,))
