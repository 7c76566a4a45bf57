"""The node's configuration: the shipped file, checks across sections, and what --check says."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from sdcpd.node import main
from sdcpd.node.config import Config, ConfigRefused, config_warnings, load_config

SHIPPED = Path(__file__).parents[2] / "config" / "all-in-one.toml"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes for a model as far as the configuration looks."""
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def write(tmp_path: Path, model: Path) -> Callable[[str], Path]:
    """Write a file that is good but for what the test adds."""

    def write_file(text: str = "", roles: str = '["router", "verifier", "cache"]', single_node: str = "true") -> Path:
        path = tmp_path / "sdcpd.toml"
        common = f"[node]\nsingle_node = {single_node}\n[frontend]\ninsecure_loopback = true\n"
        path.write_text(f'roles = {roles}\n{common}[engine]\nmodel = "{model}"\n{text}\n')
        return path

    return write_file


def faults(path: Path, *overrides: str, roles: str | None = None) -> list[str]:
    with pytest.raises(ConfigRefused) as raised:
        load_config(path, overrides, roles)
    return [str(fault) for fault in raised.value.faults]


def test_the_shipped_file_is_good(model: Path) -> None:
    config = load_config(SHIPPED, [f"engine.model={model}"])
    assert config.roles == ("router", "verifier", "drafter", "cache")
    assert config_warnings(config) == []
    assert [(entry.name, entry.path) for entry in config.client_models()] == [("a-model", str(model))]
    assert config.role_uri("drafter") == "http://127.0.0.1:8470/drafter/"


ROLE_FILES = SHIPPED.parent


def role_overrides(role: str, model: Path) -> list[str]:
    """What a host of one's own changes: where the model is."""
    match role:
        case "router":
            return [f'frontend.models=[{{ name = "m", path = "{model}", ladder = "patient" }}]']
        case "verifier":
            return [f"engine.model={model}"]
        case "drafter":
            return [f"drafter.tokenizer={model}"]
        case _:
            return []


@pytest.mark.parametrize("role", ["router", "verifier", "drafter", "cache"])
def test_the_file_of_each_role_is_good(role: str, model: Path) -> None:
    config = load_config(ROLE_FILES / f"{role}.toml", role_overrides(role, model))
    assert config.roles == (role,)
    assert config_warnings(config) == []
    assert config.sdcp is not None
    assert not config.sdcp.insecure_loopback
    assert config.role_uri(role) == f"https://{role[0]}1.example:8470/{role}/"  # type: ignore[arg-type]  # one of the four
    if role in ("verifier", "drafter"):
        assert config.routers() == ("https://r1.example:8470/router/",)
    assert config.caches() == ("https://c1.example:8470/cache/",)


@pytest.mark.parametrize(
    ("role", "override", "message"),
    [
        ("verifier", "peers.routers=[]", "peers.routers: names no router, so nobody would ever use this verifier."),
        ("drafter", "peers.caches=[]", "peers.caches: names no cache; a drafter needs the one that keeps the commit"),
        (
            "router",
            "peers.caches=['http://c:1/cache/']",
            "peers.caches[0]: is 'http://c:1/cache/'. Begin it with https",
        ),
        ("router", "peers.caches=['c:1']", "peers.caches[0]: base URI 'c:1' does not begin with http:// or https://"),
        ("cache", "sdcp.insecure_loopback=true", "sdcp.insecure_loopback: is true together with [tls]."),
        ("cache", "node.base_uri=http://c1:8470/", "node.base_uri: is 'http://c1:8470/'. Begin it with https"),
        ("cache", "tls.key=node.key", "tls.key: is 'node.key', not an absolute path."),
        ("cache", "peers.calls.max_answer_bytes=1048576", "peers.calls.max_answer_bytes: is 1048576, but a commit log"),
        ("router", "frontend.models=[]", "frontend.models: is empty, so clients could name no model."),
        ("cache", "sdcp.listen=nowhere", "sdcp: listen = 'nowhere' is not host:port"),
        ("cache", "metrics.listen=1", "metrics.listen: is 1. Expected str, got int."),
    ],
)
def test_nodes_that_cannot_work_with_others(role: str, override: str, message: str, model: Path) -> None:
    found = faults(ROLE_FILES / f"{role}.toml", *role_overrides(role, model), override)
    assert any(fault.startswith(message) for fault in found), found


def test_a_port_wants_certificates_or_loopback(tmp_path: Path) -> None:
    file = tmp_path / "bare.toml"
    file.write_text('roles = ["cache"]\n[sdcp]\n[node]\nbase_uri = "http://127.0.0.1:8470/"\n')
    assert faults(file)[0].startswith("tls: is missing: nodes speak TLS 1.3 with client certificates.")
    config = load_config(file, ["sdcp.insecure_loopback=true"])
    assert config.caches() == ("http://127.0.0.1:8470/cache/",)
    file.write_text('roles = ["cache"]\n[tls]\ncertificate = "/a"\nkey = "/b"\nca = "/c"\n')
    assert any(fault.startswith("tls: is there, but no [sdcp]") for fault in faults(file))


def test_a_model_may_name_its_ladder(model: Path) -> None:
    file = ROLE_FILES / "router.toml"
    models = f'frontend.models=[{{ name = "m", path = "{model}", ladder = "hasty" }}]'
    (fault,) = faults(file, models)
    assert fault.startswith("frontend.models[0].ladder: there is no [ladder.hasty]")


CODE = {"name": "code", "match": {"metadata": {"tag": "code"}}}


def with_classes(model: Path, *classes: dict[str, object]) -> Config:
    """The shipped file with these classes."""
    return load_config(SHIPPED, [f"engine.model={model}", f"class=[{', '.join(map(_inline, classes))}]"])


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_inline(each)}" for name, each in value.items()) + "}"
    return json.dumps(value)


def test_the_class_that_is_shown_is_a_good_one(model: Path) -> None:
    shown = re.search(r"\[\[class\]\]\n.*", SHIPPED.read_text(), re.DOTALL)
    assert shown is not None
    lines = [re.sub(r"^#   ", "", line) for line in shown[0].splitlines()]
    path = model.parent / "class.toml"
    path.write_text(SHIPPED.read_text() + "\n".join(lines))
    (one,) = load_config(path, [f"engine.model={model}"]).classes
    assert one.name == "code"
    assert one.acceptance is not None
    assert config_warnings(load_config(path, [f"engine.model={model}"])) == []


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([CODE | {"colour": 1}], "class: is"),
        ([CODE, CODE], "class[1].name: 'code' is another class's name as well. Give each its own."),
        ([CODE | {"ladder": "steep"}], "class[0].ladder: there is no [ladder.steep]"),
        ([CODE | {"kv_usage": {"off": 0.1, "on": 0.2}}], "class: is"),
    ],
)
def test_classes_that_cannot_be(model: Path, classes: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ConfigRefused) as refused:
        with_classes(model, *classes)
    assert str(refused.value.faults[0]).startswith(message)


@pytest.mark.parametrize(
    ("classes", "warning"),
    [
        ([{"name": "all"}, CODE], "class[1] (code) takes no request: class[0] (all) comes first and takes all of them"),
        ([CODE | {"match": {"model": "none"}}], "class[0].match.model = 'none' is no model that clients may name (a"),
        ([CODE | {"methods": ["suffix"]}], "class[0].methods = ['suffix'], but the only drafter has drafter.method ="),
        (
            [CODE | {"probe_share": 0.0, "repeated": {"off": 1, "on": 0}}],
            "class[0].probe_share is 0: once its sessions",
        ),
        ([CODE | {"target_ms_per_token": 1}], "class[0].target_ms_per_token turns speculation off only where"),
    ],
)
def test_classes_that_do_less_than_they_seem_to(model: Path, classes: list[dict[str, object]], warning: str) -> None:
    (found,) = config_warnings(with_classes(model, *classes))
    assert found.startswith(warning)


def test_classes_without_a_router_are_warned_of(model: Path) -> None:
    overrides = [*role_overrides("drafter", model), 'class=[{name = "c"}]']
    (found,) = config_warnings(load_config(ROLE_FILES / "drafter.toml", overrides))
    assert found.startswith("class: traffic classes are the router's")


def test_the_shipped_file_shows_true_defaults(model: Path) -> None:
    """Each commented-out setting of the file, uncommented, changes nothing."""
    text = SHIPPED.read_text()
    shown = re.sub(r"^# (\[[a-z.]+\]|[a-z_]+ = .*)$", r"\1", text, flags=re.MULTILINE)
    shown = re.sub(r"^model = .*$", "", shown, flags=re.MULTILINE)
    assert len(tomllib.loads(shown)["cache"]) == 8
    path = model.parent / "shown.toml"
    path.write_text(shown)
    plain = load_config(SHIPPED, [f"engine.model={model}"])
    uncommented = load_config(path, [f"engine.model={model}"])
    for section in Config.__struct_fields__:
        assert getattr(uncommented, section) == getattr(plain, section), section


def test_roles_from_the_command_line(write: Callable[..., Path]) -> None:
    assert load_config(write(), roles="router, cache,verifier").roles == ("router", "cache", "verifier")
    assert faults(write(), roles="router,cook") == [
        "roles: is ['router', 'cook']. Invalid enum value 'cook' at position [1]."
    ]


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ("[]", "roles: names no role. Say which"),
        ('["router", "router", "verifier", "cache"]', "roles: names a role twice"),
        (
            '["router", "drafter"]',
            "roles: verifier, cache missing, and without an [sdcp] section this node has no port",
        ),
    ],
)
def test_roles_that_cannot_work(write: Callable[..., Path], roles: str, message: str) -> None:
    assert faults(write(roles=roles))[0].startswith(message)


def test_logs_beside_their_verifier_are_asked_for(write: Callable[..., Path]) -> None:
    """Decision 105."""
    (fault,) = faults(write(single_node="false"))
    assert fault.startswith("node.single_node: is false, but")


def test_a_verifier_needs_a_model(write: Callable[..., Path], tmp_path: Path) -> None:
    bare = tmp_path / "bare.toml"
    bare.write_text(
        'roles = ["router", "verifier", "cache"]\nnode.single_node = true\n[frontend]\ninsecure_loopback = true'
    )
    assert faults(bare) == ['engine: is missing; the verifier runs a model. Add [engine] with model = "/path/to/it".']
    path = write()
    assert "is no folder" in faults(path, f"engine.model={tmp_path / 'none'}")[0]
    assert "has no config.json" in faults(path, f"engine.model={tmp_path}")[0]
    assert "not an absolute path" in faults(path, "engine.model=models/x")[0]
    assert "~ and $ are not expanded" in faults(path, "engine.model=$HOME/x")[0]


def test_what_a_method_of_drafting_needs(write: Callable[..., Path], model: Path) -> None:
    path = write(roles='["router", "verifier", "drafter", "cache"]')
    for method in ("draft_model", "frequency_hybrid"):
        (fault,) = faults(path, f"drafter.method={method}")
        assert fault.startswith(f'drafter.draft_model: is missing; method = "{method}" runs a model.')
        config = load_config(path, [f"drafter.method={method}", f"drafter.draft_model.model={model}"])
        assert config_warnings(config) == []
    assert "is no folder" in faults(path, "drafter.draft_model.model=/none")[0]
    assert "not an absolute path" in faults(path, "drafter.suffix.corpus=texts.jsonl")[0]
    assert "drafter.method: is 'eagle3'" in faults(path, "drafter.method=eagle3")[0]
    (warning,) = config_warnings(load_config(path, [f"drafter.draft_model.model={model}"]))
    assert "runs no model" in warning


def test_places_of_the_node(write: Callable[..., Path]) -> None:
    path = write()
    assert faults(path, "node.base_uri=127.0.0.1:8470")[0].startswith("node.base_uri: ")
    assert faults(path, "node.state_dir=state")[0].startswith("node.state_dir: is 'state', not an absolute path")
    assert "more than 107 octets" in faults(path, f"node.runtime_dir=/{'x' * 100}")[0]


def test_the_client_port_is_plain_only_where_somebody_says_so(write: Callable[..., Path]) -> None:
    path = write()
    tls = 'frontend.tls={ certificate = "/c.pem", key = "/k.pem" }'
    (fault,) = faults(path, "frontend.insecure_loopback=false")
    assert fault.startswith("frontend.tls: is missing: keys, prompts and answers")
    assert faults(path, tls) == [
        "frontend.insecure_loopback: is true together with [frontend.tls]. Remove one of them."
    ]
    load_config(path, ["frontend.insecure_loopback=false", tls, "frontend.keys=/k", "frontend.listen=0.0.0.0:443"])
    (fault,) = faults(path, "frontend.insecure_loopback=false", tls, "frontend.listen=0.0.0.0:443")
    assert "name a file of API keys (keys), or set allow_non_loopback" in fault
    (fault,) = faults(path, "frontend.listen=0.0.0.0:80", "frontend.allow_non_loopback=true")
    assert fault.startswith("frontend.listen: is 0.0.0.0:80, which is not on loopback")
    assert faults(path, "frontend.keys=keys.toml")[0].startswith("frontend.keys: is 'keys.toml', not an absolute path")


def test_models_for_clients(write: Callable[..., Path], model: Path) -> None:
    path = write(f'[[frontend.models]]\nname = "a"\npath = "{model}"\n[[frontend.models]]\nname = "b"\npath = "/none"')
    assert faults(path) == [
        "frontend.models[1].path: /none is no folder. Name the folder of a Hugging Face model (config.json, "
        "safetensors)."
    ]


def test_ladders(write: Callable[..., Path]) -> None:
    (fault,) = faults(write('[router]\ndefault_ladder = "slow"'))
    assert "there is no [ladder.slow]" in fault
    (fault,) = faults(write('[ladder.slow]\nfallback = ["redcue"]'))
    assert fault.startswith("ladder.slow: ")
    assert 'did you mean "reduce"?' in fault
    warnings = config_warnings(load_config(write('[ladder.slow]\nfallback = ["reduce"]')))
    assert len(warnings) == 1
    assert "can run out" in warnings[0]


def test_check_says_all_and_starts_nothing(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good = write('[ladder.slow]\nfallback = ["reduce"]')
    assert main.main(["--check", "--config", str(good)]) == main.OK
    said = capsys.readouterr()
    assert "good; roles: router, verifier, cache; models for clients: a-model" in said.out
    assert "sdcpd: warning: ladder.slow" in said.err

    assert main.main(["--check", "--config", str(write("[verifer]"))]) == main.REFUSED
    assert "verifer: is no known setting. Did you mean verifier?" in capsys.readouterr().err

    assert main.main(["--check", "--config", str(tmp_path / "absent.toml")]) == main.REFUSED
    assert "--config FILE" in capsys.readouterr().err


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main.main(["--rolle", "router"])
    assert raised.value.code == main.REFUSED
    assert "usage: sdcpd" in capsys.readouterr().err


def test_threads_wait_passively_unless_told_otherwise() -> None:
    environment = {"OMP_WAIT_POLICY": "active"}
    main.set_passive_waiting(environment)
    assert environment == {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "0"}


def test_a_router_node_starts_without_torch(write: Callable[..., Path]) -> None:
    code = (
        "import sys; from sdcpd.node import main, config\n"
        f"main.main(['--check', '--config', {str(write())!r}])\n"
        "import sdcpd.roles.router, sdcpd.roles.drafter, sdcpd.roles.verifier, sdcpd.frontend.server\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
