"""`sdcpd`: read the configuration, then run the node until it is told to stop.

Exit codes: 0 ended as asked (or `--check` found nothing wrong), 1 failed while running, 2 wrong usage or configuration,
3 could not start. What an operator can mend is said in one message without a traceback.
"""

import argparse
import os
import sys
from collections.abc import MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from sdcpd import __version__
from sdcpd.node.config import DEFAULT_PATH, Config, ConfigRefused, config_warnings, load_config

OK, FAILED, REFUSED, NOT_STARTED = 0, 1, 2, 3

PASSIVE_WAITING: Final = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""Compute threads that spin while they wait take the cores from the event loop and from other processes; two nodes on
one machine would starve each other. Read by the OpenMP library when torch loads it, so it is set before that."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (argparse itself exits with 2)."""
    options = parser().parse_args(arguments)
    read = partial(load_config, options.config, options.set, options.role)
    try:
        config = read()
    except ConfigRefused as refused:
        print(f"sdcpd: {refused}", file=sys.stderr)
        return REFUSED
    for warning in config_warnings(config):
        print(f"sdcpd: warning: {warning}", file=sys.stderr)
    if options.check:
        print(f"{options.config}: {_summary(config)}")
        return OK
    set_passive_waiting(os.environ)
    from sdcpd.node.start import run  # loads what the roles need, and only if there is something to run

    return run(config, read)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="sdcpd",
        description="Distributed speculative decoding: one node with the roles that its configuration names.",
        epilog="exit codes: 0 ended as asked, 1 failed while running, 2 usage or configuration, 3 could not start",
    )
    result.add_argument("--config", type=Path, default=DEFAULT_PATH, metavar="FILE", help="default %(default)s")
    result.add_argument("--role", metavar="ROLE,...", help="roles to play, in place of the file's `roles`")
    result.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting; the value is TOML, or plain text such as a path; may be given often",
    )
    result.add_argument("--check", action="store_true", help="check the configuration, say all that is wrong, and end")
    result.add_argument("--version", action="version", version=f"sdcpd {__version__}")
    return result


def set_passive_waiting(environment: MutableMapping[str, str]) -> None:
    """Fill in `PASSIVE_WAITING` where the operator has not chosen otherwise."""
    for name, value in PASSIVE_WAITING.items():
        environment.setdefault(name, value)


def _summary(config: Config) -> str:
    models = ", ".join(model.name for model in config.client_models()) or "none"
    return f"good; roles: {', '.join(config.roles)}; models for clients: {models}"


if __name__ == "__main__":
    sys.exit(main())
