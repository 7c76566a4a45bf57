"""A node in production: the real world around it, signals, and how the process ends.

SIGTERM or SIGINT ends the node in order, also while a model loads; a second one ends the process at once.
"""

import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import trio

from sdcpd.cache.files import RealFiles
from sdcpd.drafting.lookup_source import LookupSource
from sdcpd.engine.settings import EngineSettings
from sdcpd.node.config import Config
from sdcpd.node.logs import configure_logs
from sdcpd.node.node import Node, NotStarted, World
from sdcpd.node.notify import Notifier
from sdcpd.node.real_ports import OsRandomness, PassThread, SystemClock, ThreadedEngine, ThreadWorkers
from sdcpd.roles.ports import Engine

log = structlog.get_logger(__name__)

OK, FAILED, NOT_STARTED = 0, 1, 3
JOURNAL: Final = "log"
DIGESTS: Final = "digests"
PROGRESS_SHARE: Final = 0.25
"""Of a step of loading between two lines about it."""


def run(config: Config) -> int:
    """Run the node until a signal ends it; the process's exit code."""
    configure_logs(config.log)
    thread = PassThread("passes")
    notifier = Notifier(os.environ)
    code = OK
    try:
        trio.run(_main, config, real_world(config, thread, notifier), notifier, strict_exception_groups=True)
    except BaseException as error:
        code = _explain(error)
    if thread.busy:  # a model was still loading: its thread cannot be stopped, and the interpreter must not wait for it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def real_world(config: Config, thread: PassThread, notifier: Notifier) -> World:
    """What production runs on. Passes of the model run in `thread`."""
    state = Path(config.node.state_dir)
    return World(
        clock=SystemClock(),
        wall_clock=time.time,
        randomness=OsRandomness(),
        workers=ThreadWorkers(),
        files=lambda: RealFiles(state / JOURNAL),
        load_engine=partial(_load_engine, config.engine, thread, state / DIGESTS, notifier),
        draft_source=lambda: LookupSource(config.drafter.lookup),
    )


async def _load_engine(
    settings: EngineSettings | None, thread: PassThread, digests: Path, notifier: Notifier
) -> Engine:
    """Load in the thread that will run the passes. Given up at once when the node is told to stop."""
    from sdcpd.engine import forward  # torch, which takes seconds to import: hence here, and in the thread's turn

    assert settings is not None, "the configuration was checked"
    told = -1.0

    def tell(step: str, fraction: float) -> None:
        nonlocal told
        if fraction == 0.0 or fraction >= told + PROGRESS_SHARE or fraction == 1.0:
            told = fraction
            log.info("loading the model", step=step, percent=round(100 * fraction))
            notifier.status(f"loading the model: {step} {fraction:.0%}")

    engine = await thread.run(partial(forward.Engine.load, settings, tell, digests), abandon_on_cancel=True)
    log.info("model loaded", model=settings.model, **_describe(engine))
    return ThreadedEngine(engine, thread)
