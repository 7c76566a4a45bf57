"""`sdcpctl cache`: what a node's cache holds, and what is to stay or to go of it. Asked over the admin socket.

    sdcpctl cache stats                        objects, each tier of each model's blocks, the measured bandwidth
    sdcpctl cache ls [--scope SCOPE]           objects and blocks
    sdcpctl cache show NAME                    one of them
    sdcpctl cache pin NAME [none|soft|hard]    how much a block is wanted: soft, it goes last; hard, it does not go
    sdcpctl cache evict NAME                   drop it from all tiers, unless somebody holds it
    sdcpctl cache purge --scope SCOPE          drop all of a tenant, logs too; refused while logs are open or something
                                               is leased, unless `--force`

NAME is a block's in hexadecimal, or an unambiguous beginning of it, or an object's path. SCOPE is base64url as in
paths, `-` for what has none; one that begins with a dash is written `--scope=SCOPE`.
"""

import argparse
from typing import Any, Final
from urllib.parse import quote, urlencode

from rich.console import Console

from sdcpd.node.ctl_tables import print_or, table_of, text_of

_GETS: Final = {"stats": "/cache", "ls": "/cache/list", "show": "/cache/entry"}


def add_cache(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", shared: argparse.ArgumentParser) -> None:
    """The commands below `sdcpctl cache`."""
    cache = commands.add_parser("cache", help="what the node's cache holds, and what is to stay or go of it")
    below = cache.add_subparsers(dest="cache_command", required=True, metavar="COMMAND")
    below.add_parser("stats", parents=[shared], help="what each tier holds and has been asked")
    listing = below.add_parser("ls", parents=[shared], help="objects and blocks")
    listing.add_argument("--scope", metavar="SCOPE", help="of this tenant only; - for what has no scope")
    helps = {"show": "one object or block", "pin": "how much a block is wanted", "evict": "drop it from all tiers"}
    for name, text in helps.items():
        command = below.add_parser(name, parents=[shared], help=text)
        command.add_argument("name", metavar="NAME", help="a block's name or an unambiguous beginning, or a path")
        if name == "pin":
            levels = ("none", "soft", "hard")
            command.add_argument("level", choices=levels, nargs="?", default="hard", help="default %(default)s")
    purge = below.add_parser("purge", parents=[shared], help="drop all of a tenant, its logs too")
    purge.add_argument("--scope", metavar="SCOPE", required=True, help="the tenant; - for what has no scope")
    purge.add_argument("--force", action="store_true", help="though logs are open or something is leased")


def cache_resource(options: argparse.Namespace) -> tuple[str, str]:
    """Method and resource of a command."""
    given = vars(options)
    fields = {name: given[name] for name in ("name", "level", "scope") if given.get(name) is not None}
    if given.get("force"):
        fields["force"] = "1"
    query = urlencode(fields, quote_via=quote, errors="surrogateescape")
    command = options.cache_command
    method, path = ("GET", _GETS[command]) if command in _GETS else ("POST", f"/cache/{command}")
    return method, f"{path}?{query}" if query else path


def _stats(out: Console, answer: dict[str, Any]) -> None:
    """One line a tier; objects lie in host memory."""
    names = ("model", "tier", "blocks", "bytes", "capacity_bytes", "hits", "misses", "evictions", "damaged")
    table = table_of("model", "tier", "items", *names[3:])
    objects = answer["objects"]
    kept = {"model": "objects", "tier": "host", "blocks": objects["objects"]} | objects
    for row in (kept, *answer["blocks"]):
        table.add_row(*(text_of(row.get(name)) for name in names))
    out.print(table)
    out.print(f"leases on objects: {objects['leases']}; cache_mbps: {answer['cache_mbps']}")


def _ls(out: Console, answer: dict[str, Any]) -> None:
    """One line each."""
    rows = answer["entries"]
    names = ("name", "kind", "model", "scope", "tiers", "bytes", "uses", "age_s", "leases", "pin")
    table = table_of(*names)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    print_or(out, table, rows, "the cache is empty")
    if answer["left_out"]:
        out.print(f"and {answer['left_out']} more")


def _members(out: Console, answer: dict[str, Any]) -> None:
    """Members down."""
    table = table_of("member", "value")
    for name, value in answer.items():
        table.add_row(name, _cell(value))
    out.print(table)


def _cell(value: object) -> str:
    return ",".join(value) if isinstance(value, list) else text_of(value)


CACHE_RENDER: Final = {"stats": _stats, "ls": _ls} | dict.fromkeys(("show", "pin", "evict", "purge"), _members)
