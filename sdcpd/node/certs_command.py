"""`sdcpctl certs`: make an authority, issue certificates of nodes, show what certificates say.

    sdcpctl certs init --dir DIR
    sdcpctl certs issue --role ROLE,... --host HOST[:PORT] --dir DIR
    sdcpctl certs show FILE|DIR

Works on files alone; no daemon is asked. The library that makes certificates is loaded only when one is made or read.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from sdcpd.node.cert_facts import CertificateFacts
    from sdcpd.node.certs import Made

OK, REFUSED, USAGE, EXPIRING = 0, 1, 2, 4

ROLES: Final = ("router", "verifier", "drafter", "cache", "operator", "client")
FILE_WIDTH: Final = 400
"""Columns where the output goes to no terminal: nothing is cut that a script may look for."""

FINGERPRINT_DIGITS: Final = 16
"""Of a fingerprint in the overview, to tell certificates apart; `show FILE` has all of it."""

STYLES: Final = {"good": "", "expires soon": "yellow", "expired": "bold red", "not yet valid": "bold red"}


def add_certs(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `certs` command to the command line of sdcpctl."""
    certs = commands.add_parser("certs", help="make an authority, issue and show certificates of nodes (files only)")
    verbs = certs.add_subparsers(dest="verb", required=True, metavar="init|issue|show")
    made = argparse.ArgumentParser(add_help=False)
    made.add_argument("--dir", type=Path, required=True, metavar="DIR", help="folder of the authority (ca.pem, ca.key)")
    made.add_argument("--force", action="store_true", help="overwrite files that are there")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print the certificates as JSON")

    init = verbs.add_parser("init", parents=[made, shared], help="make an authority")
    init.add_argument("--name", help="the name it goes by (default sdcpd CA)")
    init.add_argument("--days", type=int, help="how long it holds (default 3650)")

    issue = verbs.add_parser("issue", parents=[made, shared], help="issue a node's certificate")
    roles = ", ".join(ROLES)
    issue.add_argument("--role", type=_roles, required=True, metavar="ROLE,...", help=f"roles of the node: {roles}")
    issue.add_argument(
        "--host", type=_host, required=True, metavar="HOST[:PORT]", help="as in node.base_uri; without a port 443"
    )
    issue.add_argument("--days", type=int, help="how long it holds (default 365)")
    issue.add_argument(
        "--out", type=Path, metavar="PATH", help="write PATH.pem and PATH.key, or into PATH where it is a folder"
    )

    show = verbs.add_parser(
        "show",
        parents=[shared],
        help="what certificates say, and for how much longer they hold",
        epilog=f"ends with {EXPIRING} when one has expired or does within 14 days",
    )
    show.add_argument("path", type=Path, metavar="FILE|DIR")


def run_certs(options: argparse.Namespace, now: float | None = None) -> int:
    """Do what the command line says; the exit code. `now`: Unix time, a test's or the clock's."""
    now = time.time() if now is None else now
    from sdcpd.node.cert_facts import CertsRefused

    try:
        match options.verb:
            case "init":
                return _init(options, now)
            case "issue":
                return _issue(options, now)
            case _:
                return _show(options, now)
    except CertsRefused as refused:
        sys.stderr.write(f"sdcpctl: {refused}\n")
        return REFUSED


def _init(options: argparse.Namespace, now: float) -> int:
    from sdcpd.node.certs import CA_DAYS, CA_NAME, init_authority

    made = init_authority(
        options.dir,
        name=CA_NAME if options.name is None else options.name,
        days=CA_DAYS if options.days is None else options.days,
        now=now,
        force=options.force,
    )
    after = f"Keep {made.key} to yourself. Next: sdcpctl certs issue --role ROLE --host HOST:PORT --dir {options.dir}"
    return _say_made(options, made, now, after)


def _issue(options: argparse.Namespace, now: float) -> int:
    from sdcpd.node.certs import NODE_DAYS, issue

    made = issue(
        options.dir,
        options.role,
        options.host,
        days=NODE_DAYS if options.days is None else options.days,
        now=now,
        out=options.out,
        force=options.force,
    )
    after = (
        f"Copy {made.certificate.name}, {made.key.name} and ca.pem to that host, owned by the user that runs sdcpd, "
        "and name them there as tls.certificate, tls.key and tls.ca. ca.key stays here."
    )
    return _say_made(options, made, now, after)


def _say_made(options: argparse.Namespace, made: "Made", now: float, after: str) -> int:
    if options.json:
        _print_json({"certificate": str(made.certificate), "key": str(made.key), **_row(made.facts, now)})
    else:
        _print([made.facts], now)
        sys.stdout.write(f"\nkey: {made.key}\n{after}\n")
    return OK


def _show(options: argparse.Namespace, now: float) -> int:
    from sdcpd.node.cert_facts import read_facts

    found = read_facts(options.path)
    bad = [facts for facts in found if facts.state(now) != "good"]
    if options.json:
        _print_json({"certificates": [_row(facts, now) for facts in found]})
    else:
        _print(found, now)
    for facts in bad:
        sys.stderr.write(f"sdcpctl: warning: {_warning(facts, now)}\n")
    return EXPIRING if bad else OK


def _warning(facts: "CertificateFacts", now: float) -> str:
    name = _plain(f"{facts.file} ({facts.subject})")
    anew = "make another authority and issue all certificates anew" if facts.authority else "issue another one"
    match facts.state(now):
        case "not yet valid":
            return f"{name} does not hold before {_date(facts.not_before_s)}; is this machine's clock right?"
        case "expired":
            return f"{name} has expired on {_date(facts.not_after_s)}: {anew} (sdcpctl certs)."
        case _:
            return f"{name} expires in {facts.days_left(now):.1f} days: {anew} in time (sdcpctl certs)."


def _print(found: Sequence["CertificateFacts"], now: float) -> None:
    """One certificate with all that it says, several as a line each."""
    _console().print(_details(found[0], now) if len(found) == 1 else _overview(found, now))


def _details(facts: "CertificateFacts", now: float) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    lines = {
        "file": facts.file,
        "subject": facts.subject,
        "issuer": facts.issuer,
        "roles": _roles_of(facts),
        "uris": "\n".join(facts.uris),
        "hosts": ", ".join(facts.hosts),
        "holds": f"{_date(facts.not_before_s)} to {_date(facts.not_after_s)}",
        "days_left": f"{facts.days_left(now):.1f}",
        "serial": facts.serial,
        "sha256": facts.sha256,
    }
    for name, value in lines.items():
        if value:
            table.add_row(name, Text(_plain(value)))
    state = facts.state(now)
    table.add_row("state", Text(state, STYLES[state]))
    return table


def _overview(found: Sequence["CertificateFacts"], now: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("file", "roles", "hosts", "ends", "days_left", "state", "sha256"):
        table.add_column(name, overflow="fold", no_wrap=name not in ("file", "roles", "hosts"))
    for facts in found:
        state = facts.state(now)
        days, digits = f"{facts.days_left(now):.1f}", facts.sha256[:FINGERPRINT_DIGITS]
        cells = [
            Path(facts.file).name,
            _roles_of(facts),
            ", ".join(facts.hosts) or "-",
            _date(facts.not_after_s)[:10],
            days,
        ]
        table.add_row(*(Text(_plain(cell)) for cell in cells), Text(state, STYLES[state]), digits)
    return table


def _roles_of(facts: "CertificateFacts") -> str:
    return ", ".join(facts.roles) or ("(authority)" if facts.authority else "none")


def _row(facts: "CertificateFacts", now: float) -> dict[str, Any]:
    return {
        "file": facts.file,
        "subject": facts.subject,
        "issuer": facts.issuer,
        "authority": facts.authority,
        "roles": list(facts.roles),
        "uris": list(facts.uris),
        "hosts": list(facts.hosts),
        "not_before": _date(facts.not_before_s),
        "not_after": _date(facts.not_after_s),
        "days_left": round(facts.days_left(now), 2),
        "state": facts.state(now),
        "serial": facts.serial,
        "sha256": facts.sha256,
    }


def _plain(text: str) -> str:
    """Names in certificates are other people's text: a terminal must not take orders from it."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _date(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _print_json(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=FILE_WIDTH)


def _roles(text: str) -> tuple[str, ...]:
    roles = tuple(role.strip() for role in text.split(","))
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no role; there are {', '.join(ROLES)}")
    if len(set(roles)) < len(roles):
        raise argparse.ArgumentTypeError(f"{text!r} names a role twice")
    return roles


def _host(text: str) -> object:
    from sdcpd.node.cert_hosts import HostRefused, parse_host

    try:
        return parse_host(text)
    except HostRefused as refused:
        raise argparse.ArgumentTypeError(str(refused)) from refused
