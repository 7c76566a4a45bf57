"""The node's configuration: one TOML file into one frozen Struct, each floor's settings under a section of their own.

    roles                  which roles this node plays; `sdcpd --role` overrides it
    [node]                 addresses and directories of this node
    [log]                  node/logs.py
    [sdcp] [tls]           edge/wire_settings.py, edge/tls.py      the port for other nodes, and its certificates
    [peers] [metrics]      node/peers_settings.py    whom this node works with; the operators' port
    [router]               roles/router_settings.py
    [frontend]             frontend/settings.py      the client port and the models that clients may name
    [verifier] [engine]    roles/verifier_settings.py, engine/settings.py
    [drafter]              roles/drafter_settings.py
    [cache]                cache/settings.py
    [ladder.NAME]          protocol/ladder.py        how sessions escalate
    [[class]]              drafting/traffic_class.py which requests are alike, and what their sessions get

A node without [sdcp] has all roles that an answer needs, in one process. What one section cannot know of another is
checked in config_checks.py. Nothing is expanded in values: neither `~` nor
`$VARIABLE`; `--set engine.model="$HOME/models/x"` lets the shell do that. Imports no torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

from sdcpd.cache.settings import CacheSettings
from sdcpd.drafting.traffic_class import CLASSES_LIMIT, TrafficClass
from sdcpd.edge.tls import TlsSettings
from sdcpd.edge.wire_settings import PeerServerSettings
from sdcpd.engine.settings import EngineSettings
from sdcpd.frontend.settings import ClientModel, FrontendSettings
from sdcpd.node.config_checks import class_warnings, cross_check
from sdcpd.node.logs import LogSettings
from sdcpd.node.peers_settings import MetricsSettings, PeersSettings
from sdcpd.node.toml_reader import ConfigRefused, apply_override, build, read_toml
from sdcpd.protocol import ladder as ladders
from sdcpd.protocol.ladder import Ladder
from sdcpd.protocol.uris import normalize_base_uri
from sdcpd.roles.drafter_settings import DrafterSettings
from sdcpd.roles.router_settings import RouterSettings
from sdcpd.roles.verifier_settings import VerifierSettings

DEFAULT_PATH: Final = Path("/etc/sdcpd/sdcpd.toml")
SOCKET_NAME: Final = "sdcpd.sock"

RoleName = Literal["router", "verifier", "drafter", "cache"]


class NodeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[node]`."""

    base_uri: str = "http://127.0.0.1:8470/"
    """By which peers reach this node: its roles are at `{base_uri}router/` and so on, and its certificate carries
    these URIs. Without [sdcp] a name only, and nothing listens there."""
    state_dir: str = "/var/lib/sdcpd"
    """The cache role's journal of commit logs, and digests of model files. Made if missing; one process at a time."""
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
    """The whole file. Sections that have no meaning by default are None when absent."""

    roles: tuple[RoleName, ...] = ()
    node: NodeSettings = NodeSettings()
    log: LogSettings = LogSettings()
    sdcp: PeerServerSettings | None = None
    tls: TlsSettings | None = None
    peers: PeersSettings = PeersSettings()
    metrics: MetricsSettings | None = None
    router: RouterSettings = RouterSettings()
    frontend: FrontendSettings = FrontendSettings()
    engine: EngineSettings | None = None
    verifier: VerifierSettings = VerifierSettings()
    drafter: DrafterSettings = DrafterSettings()
    cache: CacheSettings = CacheSettings()
    ladder: dict[str, Ladder] = {}
    classes: Annotated[tuple[TrafficClass, ...], Meta(max_length=CLASSES_LIMIT)] = field(default=(), name="class")

    def role_uri(self, role: RoleName) -> str:
        """The base URI of a role on this node (decisions 27, 31)."""
        return f"{normalize_base_uri(self.node.base_uri)}{role}/"

    def served(self) -> tuple[RoleName, ...]:
        """The roles under which this node answers: its own, and `cache` for the objects of its drafter or verifier,
        which every writer keeps on its own node (decision 112)."""
        keeps = self.sdcp is not None and "cache" not in self.roles and {"drafter", "verifier"} & set(self.roles)
        return (*self.roles, "cache") if keeps else self.roles

    def routers(self) -> tuple[str, ...]:
        """Canonical base URIs of the routers that this node reports to."""
        return self._among("router", self.peers.routers)

    def caches(self) -> tuple[str, ...]:
        """Canonical base URIs of the caches that keep logs and token arrays, first the one for new logs."""
        return self._among("cache", self.peers.caches)

    def _among(self, role: RoleName, named: tuple[str, ...]) -> tuple[str, ...]:
        own = (self.role_uri(role),) if role in self.roles else ()
        return tuple(dict.fromkeys((*own, *map(normalize_base_uri, named))))

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
        faults = list(cross_check(config))
    if config is None or faults:
        raise ConfigRefused(str(path), faults)
    return config


def config_warnings(config: Config) -> list[str]:
    """What is legal but probably not meant (decision 103)."""
    found = [warning for name, ladder in config.ladder.items() for warning in ladders.warnings(name, ladder)]
    found += class_warnings(config)
    drafter = config.drafter
    if drafter.draft_model is not None and drafter.method in ("ngram", "suffix"):
        found.append(f'drafter.draft_model is there, but drafter.method = "{drafter.method}" runs no model')
    return found


__all__ = ["DEFAULT_PATH", "Config", "ConfigRefused", "NodeSettings", "RoleName", "config_warnings", "load_config"]
