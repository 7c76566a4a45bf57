"""The node's configuration: one TOML file into one frozen Struct, each floor's settings under a section of their own.

    roles                  which roles this node plays; `sdcpd --role` overrides it
    [node]                 addresses and directories of this node
    [log]                  node/logs.py
    [router]               roles/router_settings.py
    [frontend]             frontend/settings.py      the client port and the models that clients may name
    [verifier] [engine]    roles/verifier_settings.py, engine/settings.py
    [drafter]              roles/drafter_settings.py
    [cache]                cache/settings.py
    [ladder.NAME]          protocol/ladder.py        how sessions escalate

What one section cannot know of another is checked in `_cross_check`. Nothing is expanded in values: neither `~` nor
`$VARIABLE`; `--set engine.model="$HOME/models/x"` lets the shell do that. Imports no torch.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from msgspec import Struct

from sdcpd.cache.settings import CacheSettings
from sdcpd.engine.settings import EngineSettings
from sdcpd.frontend.settings import ClientModel, FrontendSettings
from sdcpd.node.logs import LogSettings
from sdcpd.node.toml_reader import ConfigRefused, Fault, apply_override, build, read_toml
from sdcpd.protocol import ladder as ladders
from sdcpd.protocol.ladder import Ladder, LadderError
from sdcpd.protocol.uris import normalize_base_uri
from sdcpd.roles.drafter_settings import DrafterSettings
from sdcpd.roles.router_settings import RouterSettings
from sdcpd.roles.verifier_settings import VerifierSettings

DEFAULT_PATH: Final = Path("/etc/sdcpd/sdcpd.toml")
SOCKET_NAME: Final = "sdcpd.sock"
SOCKET_PATH_LIMIT: Final = 107
"""Octets of a Unix socket's path that the kernel takes."""

RoleName = Literal["router", "verifier", "drafter", "cache"]
NEEDED_TOGETHER: Final = ("router", "verifier", "cache")
"""Roles talk inside one process in this version, so a node needs all that an answer passes through."""


class NodeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[node]`."""

    base_uri: str = "http://127.0.0.1:8470/"
    """Roles are addressed below it, as `{base_uri}router/` and so on. A name only: in this version roles talk inside
    the process and nothing listens there."""
    state_dir: str = "/var/lib/sdcpd"
    """The cache role's journal of commit logs. Made if missing; one process at a time."""
    runtime_dir: str = "/run/sdcpd"
    """Holds the admin socket, `sdcpd.sock`, which sdcpctl asks."""
    single_node: bool = False
    """Allows commit logs on the node of the verifier that writes them (decision 105): whoever loses the machine loses
    the sessions. The right setting for one machine, never for several."""

    @property
    def socket(self) -> Path:
        """Path of the admin socket."""
        return Path(self.runtime_dir) / SOCKET_NAME


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. `engine` is None without an [engine] section."""

    roles: tuple[RoleName, ...] = ()
    node: NodeSettings = NodeSettings()
    log: LogSettings = LogSettings()
    router: RouterSettings = RouterSettings()
    frontend: FrontendSettings = FrontendSettings()
    engine: EngineSettings | None = None
    verifier: VerifierSettings = VerifierSettings()
    drafter: DrafterSettings = DrafterSettings()
    cache: CacheSettings = CacheSettings()
    ladder: dict[str, Ladder] = {}

    def role_uri(self, role: RoleName) -> str:
        """The base URI of a role on this node (decisions 27, 31)."""
        return f"{normalize_base_uri(self.node.base_uri)}{role}/"

    def client_models(self) -> tuple[ClientModel, ...]:
        """`[[frontend.models]]`; without any, the engine's model under the name of its folder."""
        if self.frontend.models or self.engine is None:
            return self.frontend.models
        return (ClientModel(name=Path(self.engine.model).name, path=self.engine.model),)


def load_config(path: Path, overrides: Sequence[str] = (), roles: str | None = None) -> Config:
    """Read, override and check the configuration.

    `overrides` are texts of the form `section.key=value`, `roles` a comma-separated list that replaces the file's.
    Raises ConfigRefused with everything that is wrong.
    """
    tables = read_toml(path)
    for override in overrides:
        apply_override(tables, override)
    if roles is not None:
        tables["roles"] = [role.strip() for role in roles.split(",")]
    config, faults = build(Config, tables)
    if config is not None:
        faults = list(_cross_check(config))
    if config is None or faults:
        raise ConfigRefused(str(path), faults)
    return config


def config_warnings(config: Config) -> list[str]:
    """What is legal but probably not meant (decision 103)."""
    return [warning for name, ladder in config.ladder.items() for warning in ladders.warnings(name, ladder)]


def _cross_check(config: Config) -> Iterator[Fault]:
    yield from _check_roles(config)
    yield from _check_node(config.node)
    yield from _check_models(config)
    try:
        ladders.named(config.ladder, config.router.default_ladder, "router.default_ladder")
    except LadderError as error:
        yield Fault("router.default_ladder", f"{error}")


def _check_roles(config: Config) -> Iterator[Fault]:
    roles = config.roles
    if not roles:
        known = ", ".join(get_args(RoleName))
        yield Fault("roles", "names no role.", f"Say which, here or with --role: {known}.")
        return
    if len(set(roles)) < len(roles):
        yield Fault("roles", "names a role twice.", "Name each once.")
    missing = [role for role in NEEDED_TOGETHER if role not in roles]
    if missing:
        yield Fault(
            "roles",
            f"{', '.join(missing)} missing: this version connects roles inside one process only.",
            f"Name {', '.join(NEEDED_TOGETHER)} together, with drafter unless all answers are to be decoded plainly.",
        )
    if "verifier" in roles and "cache" in roles and not config.node.single_node:
        yield Fault(
            "node.single_node",
            "is false, but the cache role that keeps the commit logs is on the verifier's own node, so that losing "
            "this machine loses the sessions.",
            "Set it to true if there is only this machine.",
        )


def _check_node(node: NodeSettings) -> Iterator[Fault]:
    try:
        normalize_base_uri(node.base_uri)
    except ValueError as error:
        yield Fault("node.base_uri", f"{error}.", "Example: http://127.0.0.1:8470/")
    yield from _check_path("node.state_dir", node.state_dir)
    yield from _check_path("node.runtime_dir", node.runtime_dir)
    if len(str(node.socket).encode()) > SOCKET_PATH_LIMIT:
        yield Fault(
            "node.runtime_dir",
            f"gives the admin socket a path of more than {SOCKET_PATH_LIMIT} octets.",
            "Choose a shorter one.",
        )


def _check_models(config: Config) -> Iterator[Fault]:
    if "verifier" in config.roles:
        if config.engine is None:
            yield Fault("engine", "is missing; the verifier runs a model.", 'Add [engine] with model = "/path/to/it".')
        else:
            yield from _check_model_folder("engine.model", config.engine.model)
    for index, model in enumerate(config.frontend.models):
        yield from _check_model_folder(f"frontend.models[{index}].path", model.path)


def _check_model_folder(place: str, text: str) -> Iterator[Fault]:
    faults = list(_check_path(place, text))
    yield from faults
    if not faults and not (Path(text) / "config.json").is_file():
        what = "has no config.json" if Path(text).is_dir() else "is no folder"
        yield Fault(place, f"{text} {what}.", "Name the folder of a Hugging Face model (config.json, safetensors).")


def _check_path(place: str, text: str) -> Iterator[Fault]:
    if not text.startswith("/"):
        expands = " ~ and $ are not expanded here; let your shell do it (--set)." if text[:1] in ("~", "$") else ""
        yield Fault(place, f"is {text!r}, not an absolute path.{expands}", "Begin it with /.")


__all__ = ["DEFAULT_PATH", "Config", "ConfigRefused", "NodeSettings", "RoleName", "config_warnings", "load_config"]
