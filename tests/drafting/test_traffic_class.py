"""Which class takes a request: the first whose conditions all hold, or the one that is asked for."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.drafting.traffic_class import (
    Match,
    RequestFacts,
    TrafficClass,
    UnknownClass,
    choose_class,
    hidden_classes,
)

FACTS = RequestFacts(
    model="m",
    temperature_milli=300,
    headers=(("x-app", "ide"), ("accept", "*/*")),
    metadata=(("tag", "code"), ("team", "blue")),
    user="u",
    group="research",
)


def of(name: str, **match: object) -> TrafficClass:
    return msgspec.convert({"name": name, "match": match}, TrafficClass)


@pytest.mark.parametrize(
    "match",
    [
        {},
        {"model": "m"},
        {"user": "u"},
        {"group": "research"},
        {"header": {"x-app": "ide"}},
        {"metadata": {"tag": "code"}},
        {"metadata": {"tag": "code", "team": "blue"}},
        {"temperature": [0.3, 0.3]},
        {"temperature": [0.0, 2.0]},
        {"model": "m", "user": "u", "group": "research", "temperature": [0.1, 0.5], "header": {"x-app": "ide"}},
    ],
)
def test_conditions_that_hold_take_a_request(match: dict[str, object]) -> None:
    chosen = choose_class([of("one", **match)], FACTS)
    assert chosen is not None
    assert chosen.name == "one"


@pytest.mark.parametrize(
    "match",
    [
        {"model": "n"},
        {"user": "v"},
        {"group": "sales"},
        {"header": {"x-app": "mail"}},
        {"header": {"x-other": "ide"}},
        {"metadata": {"tag": "code", "team": "red"}},
        {"temperature": [0.31, 1.0]},
        {"temperature": [0.0, 0.29]},
        {"model": "m", "user": "v"},
    ],
)
def test_one_condition_that_fails_is_enough(match: dict[str, object]) -> None:
    assert choose_class([of("one", **match)], FACTS) is None


def test_the_first_that_matches_takes_it() -> None:
    chosen = choose_class([of("no", model="n"), of("yes", model="m"), of("later")], FACTS)
    assert chosen is not None
    assert chosen.name == "yes"


def test_a_class_is_asked_for_by_name_whatever_it_matches() -> None:
    classes = [of("first"), of("named", model="another")]
    chosen = choose_class(classes, msgspec.structs.replace(FACTS, asked="named"))
    assert chosen is classes[1]


@pytest.mark.parametrize("asked", ["none", "theirs"])
def test_no_such_class_or_one_of_another_group_is_refused(asked: str) -> None:
    with pytest.raises(UnknownClass, match=asked):
        choose_class([of("first"), of("theirs", group="sales")], msgspec.structs.replace(FACTS, asked=asked))


def test_a_class_of_ones_own_group_may_be_asked_for() -> None:
    chosen = choose_class([of("first"), of("ours", group="research")], msgspec.structs.replace(FACTS, asked="ours"))
    assert chosen is not None
    assert chosen.name == "ours"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "a b"}, "name"),
        ({"name": "a", "unknown": 1}, "unknown"),
        ({"name": "a", "match": {"modell": "m"}}, "modell"),
        ({"name": "a", "match": {"temperature": [0.5, 0.1]}}, "lower end first"),
        ({"name": "a", "match": {"temperature": [0.5, 2.1]}}, "temperature"),
        ({"name": "a", "match": {"header": {"X-App": "ide"}}}, "lower case"),
        ({"name": "a", "methods": ["eagle"]}, "methods"),
        ({"name": "a", "m_max": 65}, "m_max"),
        ({"name": "a", "acceptance": {"off": 0.5, "on": 0.4}}, "acceptance: on must not lie below off"),
        ({"name": "a", "kv_usage": {"off": 0.5, "on": 0.6}}, "kv_usage: on must not lie above off"),
        ({"name": "a", "acceptance": {"off": 0.5}}, "on"),
        ({"name": "a", "min_sessions": 9, "window_sessions": 8}, "min_sessions"),
        ({"name": "a", "compare_share": 0.6, "probe_share": 0.6}, "together at most 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.convert(settings, TrafficClass)


def test_classes_behind_one_that_takes_all_of_theirs_are_found() -> None:
    classes = [
        of("cool", temperature=[0.0, 0.5]),
        of("cold", temperature=[0.0, 0.1], model="m"),
        of("warm", temperature=[0.4, 1.0]),
        of("tagged", metadata={"tag": "code"}),
        of("twice", metadata={"tag": "code", "team": "blue"}, user="u"),
        of("all"),
        of("never", model="m"),
    ]
    assert hidden_classes(classes) == [(1, 0), (4, 3), (6, 5)]


MATCHES = st.builds(
    Match,
    model=st.sampled_from([None, "m", "n"]),
    user=st.sampled_from([None, "u", "v"]),
    group=st.sampled_from([None, "g"]),
    metadata=st.sampled_from([{}, {"tag": "code"}, {"tag": "chat"}]),
    header=st.sampled_from([{}, {"x-app": "ide"}]),
    temperature=st.sampled_from([None, (0.0, 2.0), (0.0, 0.5), (0.3, 1.0)]),
)
ANY_FACTS = st.builds(
    RequestFacts,
    model=st.sampled_from(["m", "n"]),
    user=st.sampled_from([None, "u", "v"]),
    group=st.sampled_from([None, "g"]),
    metadata=st.sampled_from([(), (("tag", "code"),), (("tag", "chat"),)]),
    headers=st.sampled_from([(), (("x-app", "ide"),)]),
    temperature_milli=st.sampled_from([0, 300, 500, 1000, 2000]),
)


@given(MATCHES, MATCHES, ANY_FACTS)
def test_what_covers_another_takes_all_that_it_takes(wide: Match, narrow: Match, facts: RequestFacts) -> None:
    if wide.covers(narrow) and narrow.takes(facts):
        assert wide.takes(facts)
