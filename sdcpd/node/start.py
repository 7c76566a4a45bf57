"""A node in production: the real world around it, signals, and how the process ends.

SIGTERM or SIGINT ends the node in order, also while a model loads; a second one ends the process at once. SIGHUP reads
the configuration, the certificates and the API keys again: new sessions get its ladders, new connections the
certificates, new requests are known by the keys; a file that is wrong changes nothing, and the log says why.
"""

import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
import trio
from prometheus_client import disable_created_metrics

from sdcpd.cache.files import RealFiles
from sdcpd.drafting.settings import DraftModelSettings
from sdcpd.engine.device_nodes import why_no_cuda
from sdcpd.engine.model_config import ModelRefused
from sdcpd.engine.settings import EngineSettings
from sdcpd.node.config import Config, ConfigRefused
from sdcpd.node.draft_parts import make_lookup
from sdcpd.node.logs import configure_logs
from sdcpd.node.node import Node, NotStarted, World
from sdcpd.node.notify import Notifier, watchdog_limit_s
from sdcpd.node.real_ports import OsRandomness, PassThread, SystemClock, ThreadedEngine, ThreadWorkers
from sdcpd.roles.ports import Engine

if TYPE_CHECKING:
    from sdcpd.engine.forward import Engine as ModelEngine

log = structlog.get_logger(__name__)

OK, FAILED, NOT_STARTED = 0, 1, 3
JOURNAL: Final = "log"
DIGESTS: Final = "digests"
LOAD_STEP_S: Final = 120.0
"""More time to start, asked of the service manager with each line of progress."""
PROGRESS_SHARE: Final = 0.25
"""Of a step of loading between two lines about it."""


def run(config: Config, read_again: Callable[[], Config]) -> int:
    """Run the node until a signal ends it; the process's exit code. `read_again` may raise ConfigRefused."""
    configure_logs(config.log)
    # A time for each series would double the page, and is of use to nobody.
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library leaves this one without types
    thread = PassThread("passes")
    draft_thread = thread if shares_thread(config) else PassThread("drafts")
    notifier = Notifier(os.environ)
    code = OK
    try:
        world = real_world(config, thread, draft_thread, notifier)
        trio.run(_main, config, world, notifier, read_again, strict_exception_groups=True)
    except BaseException as error:
        code = _explain(error)
    if thread.busy or draft_thread.busy:
        # A model was still loading: its thread cannot be stopped, and the interpreter must not wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def real_world(config: Config, thread: PassThread, draft_thread: PassThread, notifier: Notifier) -> World:
    """What production runs on. Passes of the model run in `thread`, those of a draft model in `draft_thread`."""
    state = Path(config.node.state_dir)
    drafts = config.drafter.draft_model
    return World(
        clock=SystemClock(),
        wall_clock=time.time,
        randomness=OsRandomness(),
        workers=ThreadWorkers(),
        files=lambda: RealFiles(state / JOURNAL),
        load_engine=partial(_load_engine, config.engine, thread, state / DIGESTS, notifier),
        draft_source=partial(make_lookup, config),
        load_draft_engine=partial(_load_engine, drafts, draft_thread, state / DIGESTS, notifier),
    )


def shares_thread(config: Config) -> bool:
    """Whether the draft model's passes run in the target's thread: both on this node, and nobody divided the cores.

    Two pools of threads that each take all cores starve each other; passes that take turns do not.
    """
    drafts = config.drafter.draft_model
    return drafts is not None and drafts.threads == 0 and {"drafter", "verifier"} <= set(config.roles)


async def _load_engine(
    settings: EngineSettings | None, thread: PassThread, digests: Path, notifier: Notifier
) -> Engine:
    """Load in the thread that will run the passes. Given up at once when the node is told to stop."""
    assert settings is not None, "the configuration was checked"
    told: dict[str, float] = {}

    def tell(step: str, fraction: float) -> None:
        if fraction < 1.0 and fraction < told.get(step, -1.0) + PROGRESS_SHARE:
            return
        told[step] = fraction
        log.info("loading the model", step=step, percent=round(100 * fraction))
        notifier.status(f"loading the model: {step} {fraction:.0%}")
        notifier.extend_timeout(LOAD_STEP_S)

    engine = await thread.run(partial(_load, settings, tell, digests), abandon_on_cancel=True)
    return ThreadedEngine(engine, thread)


def _load(settings: EngineSettings, tell: Callable[[str, float], None], digests: Path) -> "ModelEngine":
    """In the pass thread: importing torch alone takes seconds, in which the event loop must go on."""
    from sdcpd.engine.forward import Engine as ModelEngine

    engine = ModelEngine.load(settings, tell, digests, drafts=isinstance(settings, DraftModelSettings))
    info = engine.info
    log.info(
        "model loaded",
        model=settings.model,
        device=info.device,
        dtype=info.dtype,
        quantization=info.quantization,
        numerics=info.numerics,
        weights_bytes=info.weights_bytes,
        context_tokens=info.context_tokens,
        pages=info.pages,
        page_tokens=info.page_tokens,
    )
    return engine


async def _main(config: Config, world: World, notifier: Notifier, read_again: Callable[[], Config]) -> None:
    node = Node(config, world, notifier)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_obey, signals, node, partial(_reload, node, world, notifier, read_again))
            limit_s = watchdog_limit_s(os.environ, os.getpid())
            if limit_s is not None:
                nursery.start_soon(_watch, node, world, notifier, limit_s)
            await _require_device(config.engine, world)
            await node.run()
            nursery.cancel_scope.cancel()


async def _require_device(settings: EngineSettings | None, world: World) -> None:
    """A device that is demanded must be there before anything listens. Raises NotStarted.

    Otherwise the node would answer /health for as long as it reads weights, and then be gone.
    """
    if settings is None or settings.device != "cuda":
        return
    try:
        await world.workers.run(_find_device, settings)
    except ModelRefused as refused:
        raise NotStarted(f"{refused}") from refused


def _find_device(settings: EngineSettings) -> None:
    """In a thread: importing torch takes seconds, if it comes to that. Raises ModelRefused."""
    reason = why_no_cuda(os.environ, Path("/dev"))
    if reason is not None:
        raise ModelRefused(f'device = "cuda", but there is no CUDA device: {reason}; or set device = "cpu".')
    from sdcpd.engine.device import choose

    choose(settings)


async def _watch(node: Node, world: World, notifier: Notifier, limit_s: float) -> None:
    """Tell the service manager that the node moves; silence makes it start a fresh one."""
    while True:
        if node.moves(limit_s):
            notifier.watchdog()
        await world.clock.sleep_until(world.clock.now() + limit_s / 2)


async def _reload(node: Node, world: World, notifier: Notifier, read_again: Callable[[], Config]) -> None:
    notifier.reloading()
    try:
        kept = node.take(await world.workers.run(read_again))
    except ConfigRefused as refused:
        log.error("configuration kept as it was: the file is wrong", reason=str(refused))
        notifier.ready("configuration kept as it was: the file is wrong")
        return
    log.info("configuration read again: new sessions get its ladders")
    if kept is None:
        notifier.ready("ready")
    else:
        log.error("certificates or keys kept as they were: the files are wrong", reason=kept)
        notifier.ready("certificates or keys kept as they were: the files are wrong")


async def _obey(signals: AsyncIterator[int], node: Node, reload: Callable[[], Awaitable[None]]) -> None:
    asked = False
    async for number in signals:
        if number == signal.SIGHUP:
            await reload()
            continue
        if asked:
            os._exit(128 + number)
        asked = True
        log.info("told to stop", signal=signal.Signals(number).name)
        node.stop()


def _explain(error: BaseException) -> int:
    """Say why the node ended, and the exit code that goes with it."""
    leaves = list(_leaves(error))
    refusals = [leaf for leaf in leaves if isinstance(leaf, NotStarted)]
    if refusals and len(refusals) == len(leaves):
        for refusal in refusals:
            log.error("cannot start", reason=str(refusal))
            print(f"sdcpd: cannot start: {refusal}", file=sys.stderr)
        return NOT_STARTED
    if all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return OK
    log.critical("the node fails", exc_info=error)
    return FAILED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
