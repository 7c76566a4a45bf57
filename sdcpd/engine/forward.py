"""The engine: a model, its page pool and the sequences in it, behind calls that block.

A session's life here: `open_sequence` gives a handle; before each pass `reserve` makes sure of pages; `plan` turns the
spans of many sessions into one `Batch`; `run` computes it; after a rejection `truncate` takes back what was proposed in
vain; `close_sequence` frees the pages. Valid keys and values are always those of the committed tokens but the last.

Threads. All calls but `run` are bookkeeping in plain Python, touch no tensor and belong to one thread (the event
loop's). `run` blocks for the length of a pass and belongs to one worker thread, always the same one: torch's thread
pool is bound to the thread that calls it, and a second caller would make a second pool on the same cores. Batches are
run in the order they were planned, each exactly once. While one runs, the next may be planned, and sequences may be
truncated and closed: their pages can only serve passes that are planned later, and therefore run later.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from msgspec.structs import replace

from sdcpd.cache.block_store import BlockStore
from sdcpd.cache.blocks import KvLayout
from sdcpd.cache.disk_tier import DiskTier
from sdcpd.cache.files import Files
from sdcpd.cache.gpu_tier import PagePool
from sdcpd.cache.host_tier import HostTier
from sdcpd.cache.settings import CacheSettings
from sdcpd.engine.acceptance import judge_pass, judge_rows
from sdcpd.engine.batch import Batch, plan_batch
from sdcpd.engine.block_tables import BlockTable
from sdcpd.engine.device import DTYPES, choose, free_bytes, on_device
from sdcpd.engine.draft_rows import in_full
from sdcpd.engine.draft_vocabulary import read_draft_vocabulary
from sdcpd.engine.invariance import rows_keep_their_bits
from sdcpd.engine.kv_blocks import KvBlocks
from sdcpd.engine.model import Decoder
from sdcpd.engine.model_config import ModelConfig, ModelRefused, read_model_config
from sdcpd.engine.model_digest import target_digest, tokenizer_digest
from sdcpd.engine.settings import EngineSettings
from sdcpd.engine.spans import EngineInfo, Row, Shelf, Span, Weighed
from sdcpd.engine.weights import Weights, load_weights

Progress = Callable[[str, float], None]
"""Told the step ("digest", "weights", "warm-up") and the fraction of it that is done."""

_WARM_UP_TOKENS: Final = 8


class Engine:
    """A loaded model. See the module for who may call what from where."""

    def __init__(
        self,
        info: EngineInfo,
        decoder: Decoder,
        pool: PagePool,
        device: torch.device,
        threads: int,
        head_tokens: torch.Tensor | None = None,
    ) -> None:
        """`head_tokens` int64: the token of each row of the head, rising, where these are not all."""
        self.info = info
        self._head_tokens = None if head_tokens is None else head_tokens.tolist()
        self.pool = pool
        self._decoder = decoder
        self._device = device
        self._threads = threads or torch.get_num_threads()
        self.layout: KvLayout | None = None
        self.blocks: KvBlocks | None = None
        """Blocks that sequences may share, once `keep_blocks` was called."""
        self._tables: dict[int, BlockTable] = {}
        self._next_sequence = 0
        self.read_bytes = 0
        """Octets of weights that one pass reads, as they lie in memory: what bounds its time from below."""

    @classmethod
    def load(
        cls,
        settings: EngineSettings,
        progress: Progress | None = None,
        digest_cache: Path | None = None,
        *,
        drafts: bool = False,
    ) -> "Engine":
        """Read a model and run one pass. Blocks for seconds or minutes. Raises ModelRefused.

        `digest_cache` is a folder where hashes of weight files are kept. A model that only `drafts` may have a head
        over a part of the vocabulary; a target with one is refused, for the tokens that it never says.
        """
        tell: Progress = progress or (lambda _step, _fraction: None)
        folder = Path(settings.model)
        config = read_model_config(folder, settings.context_tokens)
        device, dtype = choose(settings)
        tokenizer = tokenizer_digest(folder)
        quantization = settings.quantization
        model = target_digest(
            folder, config, dtype, digest_cache, lambda fraction: tell("digest", fraction), quantization
        )
        if settings.threads:
            torch.set_num_threads(settings.threads)
        head_tokens = read_draft_vocabulary(folder, config.vocabulary) if drafts else None
        weights = load_weights(
            folder,
            config,
            device,
            DTYPES[dtype],
            lambda fraction: tell("weights", fraction),
            int8=quantization == "int8",
            invariant=wants_invariance(settings, device),
            head_tokens=head_tokens,
        )
        digests = {"model": model, "tokenizer": tokenizer}
        return cls.assemble(settings, config, weights, **digests, tell=tell, head_tokens=head_tokens)

    @classmethod
    def assemble(
        cls,
        settings: EngineSettings,
        config: ModelConfig,
        weights: Weights,
        *,
        model: bytes = bytes(32),
        tokenizer: bytes = bytes(32),
        tell: Progress = lambda _step, _fraction: None,
        head_tokens: torch.Tensor | None = None,
    ) -> "Engine":
        """An engine of weights that are there already, made for the device, dtype and numerics of `settings`.

        `model` and `tokenizer` are the digests it goes by; `head_tokens` as in the constructor. Runs one pass.
        Raises ModelRefused.
        """
        device, dtype = choose(settings)
        invariant = wants_invariance(settings, device)
        pool = _make_pool(settings, config, device, DTYPES[dtype])
        info = EngineInfo(
            model=model,
            tokenizer=tokenizer,
            vocabulary=config.vocabulary,
            context_tokens=config.context_tokens,
            page_tokens=pool.page_tokens,
            pages=pool.pages,
            dtype=dtype,
            device=device.type,
            quantization=settings.quantization,
            numerics="batch_invariant" if invariant else "fast",
            weights_bytes=weights.octets,
        )
        decoder = Decoder(config, weights, device, DTYPES[dtype], invariant=invariant)
        engine = cls(info, decoder, pool, device, settings.threads, head_tokens)
        engine.read_bytes = weights.read_octets
        tell("warm-up", 0.0)
        engine._warm_up()
        if invariant and not rows_keep_their_bits(engine):
            if settings.numerics == "batch_invariant":
                raise ModelRefused(
                    'numerics = "batch_invariant" does not hold here: the same token got other bits in another pass '
                    f'({device.type}, {dtype}, torch {torch.__version__}). Set numerics = "fast", or another dtype.'
                )
            engine.info = replace(info, numerics="fast")
        engine.layout = _layout(engine.info, config)
        tell("warm-up", 1.0)
        return engine

    def keep_blocks(
        self, settings: CacheSettings, files: Files | None = None, memlock_limit_bytes: int | None = None
    ) -> BlockStore:
        """From now on keep full blocks of valid KV for other sequences, in the pool and the tiers of `settings`.

        `files` is the directory of the disk tier, if there is one. Raises HostTierRefused, StateInUse, OSError.
        """
        assert self.layout is not None, "the engine was assembled"
        self.pool.forget_all()
        memory = HostTier(self.pool, self.layout, settings.cpu_bytes_to_use, memlock_limit_bytes)
        disk = None if files is None else DiskTier(files, self.layout)
        store = BlockStore(settings, self.layout, self.pool, memory, disk)
        self.blocks = KvBlocks(store, self._tables)
        return store

    def _warm_up(self) -> None:
        """One pass, so that the first request pays for no lazy initialisation and a broken set-up shows now."""
        sequence = self.open_sequence()
        count = min(_WARM_UP_TOKENS, self.info.context_tokens, self.info.page_tokens)
        reserved = self.reserve(sequence, count)
        assert reserved, "the pool is empty but for us"
        self.run(self.plan([Span(sequence=sequence, tokens=(0,) * count, start=0, rows=1)]))
        self.close_sequence(sequence)

    @property
    def free_pages(self) -> int:
        return self.pool.free_pages

    def open_sequence(self) -> int:
        """A new sequence without pages. Handles are never used twice."""
        sequence = self._next_sequence
        self._next_sequence += 1
        self._tables[sequence] = BlockTable(self.pool)
        return sequence

    def close_sequence(self, sequence: int) -> None:
        """Give the sequence's pages back."""
        self._tables.pop(sequence).close()

    def truncate(self, sequence: int, length: int) -> None:
        """Keep the first `length` valid positions; pages wholly past them go back."""
        self._tables[sequence].truncate(length)

    def reserve(self, sequence: int, length: int) -> bool:
        """Make sure of pages for `length` positions. False, and nothing changed, when too few are free."""
        assert length <= self.info.context_tokens, "callers clamp to the context"
        return self._tables[sequence].reserve(length)

    def valid_tokens(self, sequence: int) -> int:
        """Positions of the sequence whose keys and values are valid, counting planned passes."""
        return self._tables[sequence].length

    def plan(self, spans: Sequence[Span]) -> Batch:
        """Turn spans into one pass. See `plan_batch` for what callers owe."""
        assert all(span.start + len(span.tokens) <= self.info.context_tokens for span in spans), "callers clamp"
        return plan_batch(spans, self._tables, self.info.vocabulary)

    def run(self, batch: Batch) -> list[tuple[Row, ...]]:
        """Compute a planned pass: for each span, in order, its wanted rows. In the worker thread."""
        answers = judge_pass(self.compute(batch), batch)
        if self._head_tokens is None:
            return answers
        return [tuple(in_full(row, self._head_tokens) for row in rows) for rows in answers]

    def judge(self, shelf: Shelf, tokens: tuple[int, ...], weighed: Weighed) -> tuple[Row, ...]:
        """Judge what a pass left on a shelf, for the span that had these tokens. In the worker thread."""
        logits = shelf.logits
        assert isinstance(logits, torch.Tensor), "the pass has run"
        return judge_rows(logits, [(weighed, tokens)], [shelf.logprobs])[0]

    @torch.inference_mode()
    def compute(self, batch: Batch) -> torch.Tensor:
        """Run a planned pass up to the logits of the wanted rows, [wanted, vocabulary]. In the worker thread."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        states = self._decoder.hidden_states(
            self._tensor(batch.tokens),
            self._tensor(batch.positions),
            self._tensor(batch.slots),
            batch.segments,
            self.pool.slots,
            self.pool.page_tokens,
        )
        if not batch.wanted:
            return states.new_empty((0, len(self._head_tokens or ()) or self.info.vocabulary))
        if len(batch.wanted) < len(states):
            states = states[self._tensor(batch.wanted)]
        return self._decoder.logits(states)

    def _tensor(self, numbers: list[int]) -> torch.Tensor:
        return on_device(numbers, self._device)


def wants_invariance(settings: EngineSettings, device: torch.device) -> bool:
    """Asked for, or to be tried: a CPU keeps its bits at little cost, elsewhere the promise has a price."""
    return settings.numerics == "batch_invariant" or (settings.numerics == "auto" and device.type == "cpu")


def _layout(info: EngineInfo, config: ModelConfig) -> KvLayout:
    """All that keys and values depend on but the text (decision 108). Who promises bits names what computes them."""
    numerics = info.numerics
    if numerics == "batch_invariant":
        numerics += f" {info.device} torch {torch.__version__}"
    return KvLayout(
        model=info.model,
        tokenizer=info.tokenizer,
        block_tokens=info.page_tokens,
        dtype=info.dtype,
        quantization=info.quantization,
        numerics=numerics,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        config=config.pass_fields,
    )


def _make_pool(settings: EngineSettings, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> PagePool:
    """As many pages as the settings allow. Called when the weights are loaded, so that what is free is free."""
    shape = {"layers": config.layers, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    page = PagePool.page_bytes(page_tokens=settings.page_tokens, dtype=dtype, **shape)
    size, source = settings.kv_cache_bytes, "kv_cache_bytes"
    if size is None:
        size, source = int(free_bytes(device) * settings.kv_cache_share), "kv_cache_share of the free memory"
    if size < page:
        raise ModelRefused(
            f"{source} is {size} bytes, but one page of {settings.page_tokens} tokens takes {page}. Allow more memory "
            "or set a smaller page_tokens."
        )
    try:
        return PagePool(pages=size // page, page_tokens=settings.page_tokens, dtype=dtype, device=device, **shape)
    except RuntimeError as error:
        raise ModelRefused(f"the page pool of {size} bytes cannot be had: {error}. Lower {source}.") from error
