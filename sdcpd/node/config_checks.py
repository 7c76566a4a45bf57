"""What one section of the configuration cannot know of another: found before anything is started, all of it at once."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

from sdcpd.drafting.traffic_class import hidden_classes
from sdcpd.frontend.settings import is_loopback, listen_address
from sdcpd.node.toml_reader import Fault
from sdcpd.protocol import ladder as ladders
from sdcpd.protocol.ladder import LadderError
from sdcpd.protocol.uris import normalize_base_uri

if TYPE_CHECKING:
    from sdcpd.node.config import Config, NodeSettings

SOCKET_PATH_LIMIT: Final = 107
"""Octets of a Unix socket's path that the kernel takes."""

NEEDED_TOGETHER: Final = ("router", "verifier", "cache")
"""All that an answer passes through: a node without a port for others has them in one process, or serves nobody."""


def cross_check(config: "Config") -> Iterator[Fault]:
    """All faults, in the order of the file."""
    yield from _check_roles(config)
    yield from _check_node(config.node)
    faults = list(_check_port(config))
    yield from faults
    if not faults:
        yield from _check_peers(config)
    yield from _check_client_port(config)
    yield from _check_models(config)
    yield from _check_ladders(config)
    yield from _check_classes(config)


def _check_roles(config: "Config") -> Iterator[Fault]:
    from sdcpd.node.config import RoleName

    roles = config.roles
    if not roles:
        known = ", ".join(get_args(RoleName))
        yield Fault("roles", "names no role.", f"Say which, here or with --role: {known}.")
        return
    if len(set(roles)) < len(roles):
        yield Fault("roles", "names a role twice.", "Name each once.")
    missing = [role for role in NEEDED_TOGETHER if role not in roles]
    if missing and config.sdcp is None:
        yield Fault(
            "roles",
            f"{', '.join(missing)} missing, and without an [sdcp] section this node has no port for roles elsewhere.",
            f"Name {', '.join(NEEDED_TOGETHER)} together for one process alone, or add [sdcp], [tls] and [peers].",
        )
    if "verifier" in roles and "cache" in roles and not config.node.single_node:
        yield Fault(
            "node.single_node",
            "is false, but the cache role that keeps the commit logs is on the verifier's own node, so that losing "
            "this machine loses the sessions.",
            "Set it to true if there is only this machine.",
        )


def _check_node(node: "NodeSettings") -> Iterator[Fault]:
    yield from _check_uri("node.base_uri", node.base_uri, "http://127.0.0.1:8470/")
    yield from _check_path("node.state_dir", node.state_dir)
    yield from _check_path("node.runtime_dir", node.runtime_dir)
    if len(str(node.socket).encode()) > SOCKET_PATH_LIMIT:
        yield Fault(
            "node.runtime_dir",
            f"gives the admin socket a path of more than {SOCKET_PATH_LIMIT} octets.",
            "Choose a shorter one.",
        )


def _check_port(config: "Config") -> Iterator[Fault]:
    """[sdcp], [tls] and the scheme of base URIs go together."""
    sdcp, tls = config.sdcp, config.tls
    if sdcp is None:
        if tls is not None:
            yield Fault("tls", "is there, but no [sdcp]: nothing would use the certificates.", "Add [sdcp].")
        for name, uris in (("routers", config.peers.routers), ("caches", config.peers.caches)):
            if uris:
                yield Fault(f"peers.{name}", "is set, but without [sdcp] this node calls nobody.", "Add [sdcp].")
        return
    if sdcp.insecure_loopback and tls is not None:
        yield Fault("sdcp.insecure_loopback", "is true together with [tls].", "Remove one of them.")
    if not sdcp.insecure_loopback and tls is None:
        yield Fault(
            "tls",
            "is missing: nodes speak TLS 1.3 with client certificates.",
            "Add [tls] with certificate, key and ca (sdcpctl certs makes them), or, on one machine for one user, set "
            "sdcp.insecure_loopback = true.",
        )
    if tls is not None:
        for name, path in (("certificate", tls.certificate), ("key", tls.key), ("ca", tls.ca)):
            yield from _check_path(f"tls.{name}", path)
    scheme = "http" if sdcp.insecure_loopback else "https"
    named = [("node.base_uri", config.node.base_uri)]
    named += [(f"peers.routers[{index}]", uri) for index, uri in enumerate(config.peers.routers)]
    named += [(f"peers.caches[{index}]", uri) for index, uri in enumerate(config.peers.caches)]
    for place, uri in named:
        if place != "node.base_uri":
            yield from _check_uri(place, uri, f"{scheme}://r1.example:8470/router/")
        if not uri.lower().startswith(f"{scheme}://"):
            yield Fault(place, f"is {uri!r}.", f"Begin it with {scheme}://, as this node's [sdcp] section wants.")


def _check_peers(config: "Config") -> Iterator[Fault]:
    """Whom each role cannot do without. In one process all are there."""
    if config.sdcp is None:
        return
    reporters = [role for role in ("verifier", "drafter") if role in config.roles]
    if reporters and not config.routers():
        yield Fault(
            "peers.routers",
            f"names no router, so nobody would ever use this {reporters[0]}.",
            'Name those to report to: routers = ["https://r1.example:8470/router/"]',
        )
    clients = [role for role in ("router", "verifier", "drafter") if role in config.roles]
    if clients and not config.caches():
        yield Fault(
            "peers.caches",
            f"names no cache; a {clients[0]} needs the one that keeps the commit logs.",
            'Name it: caches = ["https://c1.example:8470/cache/"]',
        )
    if "cache" in config.roles and config.peers.calls.max_answer_bytes < config.cache.max_log_bytes:
        yield Fault(
            "peers.calls.max_answer_bytes",
            f"is {config.peers.calls.max_answer_bytes}, but a commit log may reach cache.max_log_bytes = "
            f"{config.cache.max_log_bytes} and could then not be read.",
            "Raise it at least to that, here and on all nodes that read logs.",
        )


def _check_client_port(config: "Config") -> Iterator[Fault]:
    """TLS, or plain on loopback because somebody said so."""
    port = config.frontend
    if port.keys is not None:
        yield from _check_path("frontend.keys", port.keys)
    if port.tls is not None:
        yield from _check_path("frontend.tls.certificate", port.tls.certificate)
        yield from _check_path("frontend.tls.key", port.tls.key)
    if "router" not in config.roles:
        return
    if port.tls is not None and port.insecure_loopback:
        yield Fault("frontend.insecure_loopback", "is true together with [frontend.tls].", "Remove one of them.")
    elif port.tls is None and not port.insecure_loopback:
        yield Fault(
            "frontend.tls",
            "is missing: keys, prompts and answers would go over the wire for all to read.",
            "Add [frontend.tls] with certificate and key, or, for clients on this machine, set "
            "frontend.insecure_loopback = true.",
        )
    elif port.tls is None and not is_loopback(listen_address(port.listen, allow_non_loopback=True)[0]):
        yield Fault(
            "frontend.listen",
            f"is {port.listen}, which is not on loopback, and frontend.insecure_loopback is for loopback only.",
            "Add [frontend.tls], or listen on 127.0.0.1 behind a proxy that speaks TLS.",
        )


def _check_models(config: "Config") -> Iterator[Fault]:
    if "verifier" in config.roles and config.engine is None:
        yield Fault("engine", "is missing; the verifier runs a model.", 'Add [engine] with model = "/path/to/it".')
    if config.engine is not None:
        yield from _check_model_folder("engine.model", config.engine.model)
    for index, model in enumerate(config.frontend.models):
        yield from _check_model_folder(f"frontend.models[{index}].path", model.path)
    serves_alone = "router" in config.roles and "verifier" not in config.roles
    if serves_alone and config.engine is None and not config.frontend.models:
        yield Fault(
            "frontend.models",
            "is empty, so clients could name no model.",
            'Add [[frontend.models]] with name and path, a folder with the text files of the model ("tokenizer.json").',
        )
    yield from _check_drafter(config)
    if config.drafter.tokenizer is not None:
        yield from _check_model_folder("drafter.tokenizer", config.drafter.tokenizer)
    elif "drafter" in config.roles and config.engine is None:
        yield Fault(
            "drafter.tokenizer",
            "is missing; a drafter must know whose tokens it proposes.",
            "Name the target model's folder; config.json and tokenizer.json are read, no weights.",
        )


def _check_drafter(config: "Config") -> Iterator[Fault]:
    """What the method of drafting needs."""
    settings = config.drafter
    if settings.draft_model is not None:
        yield from _check_model_folder("drafter.draft_model.model", settings.draft_model.model)
    elif settings.method in ("draft_model", "frequency_hybrid") and "drafter" in config.roles:
        yield Fault(
            "drafter.draft_model",
            f'is missing; method = "{settings.method}" runs a model.',
            'Add [drafter.draft_model] with model = "/path/to/it", or set method = "suffix", which needs none.',
        )
    if settings.suffix.corpus is not None:
        yield from _check_path("drafter.suffix.corpus", settings.suffix.corpus)


def _check_ladders(config: "Config") -> Iterator[Fault]:
    named = [("router.default_ladder", config.router.default_ladder)]
    named += [
        (f"frontend.models[{index}].ladder", model.ladder)
        for index, model in enumerate(config.frontend.models)
        if model.ladder is not None
    ]
    for place, name in named:
        try:
            ladders.named(config.ladder, name, place)
        except LadderError as error:
            yield Fault(place, f"{error}".removeprefix(f"{place}: "))


def _check_classes(config: "Config") -> Iterator[Fault]:
    names: set[str] = set()
    for index, one in enumerate(config.classes):
        place = f"class[{index}]"
        if one.name in names:
            yield Fault(f"{place}.name", f"{one.name!r} is another class's name as well.", "Give each its own.")
        names.add(one.name)
        if one.ladder is not None:
            try:
                ladders.named(config.ladder, one.ladder, f"{place}.ladder")
            except LadderError as error:
                yield Fault(f"{place}.ladder", f"{error}".removeprefix(f"{place}.ladder: "))


def class_warnings(config: "Config") -> Iterator[str]:
    """Classes that are legal and do less than they seem to."""
    classes = config.classes
    if classes and "router" not in config.roles:
        yield "class: traffic classes are the router's, and this node has none; they do nothing here"
        return
    for index, before in hidden_classes(classes):
        yield (
            f"class[{index}] ({classes[index].name}) takes no request: class[{before}] ({classes[before].name}) comes "
            "first and takes all of them; move it up, or narrow the other"
        )
    models = {model.name for model in config.client_models()}
    alone = config.sdcp is None and "drafter" in config.roles
    for index, one in enumerate(classes):
        if one.match.model is not None and one.match.model not in models:
            known = ", ".join(sorted(models))
            yield f"class[{index}].match.model = {one.match.model!r} is no model that clients may name ({known})"
        if alone and one.methods and config.drafter.method not in one.methods:
            yield (
                f"class[{index}].methods = {list(one.methods)}, but the only drafter has drafter.method = "
                f'"{config.drafter.method}"'
            )
        guarded = one.acceptance or one.ms_per_token or one.repeated or one.target_ms_per_token
        if guarded and one.probe_share == 0:
            yield f"class[{index}].probe_share is 0: once its sessions turned speculation off, it stays off"
        if one.target_ms_per_token is not None and one.compare_share == 0:
            yield (
                f"class[{index}].target_ms_per_token turns speculation off only where sessions without it are faster; "
                "set a compare_share, so that there are some"
            )


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


def _check_uri(place: str, text: str, example: str) -> Iterator[Fault]:
    try:
        normalize_base_uri(text)
    except ValueError as error:
        yield Fault(place, f"{error}.", f"Example: {example}")
