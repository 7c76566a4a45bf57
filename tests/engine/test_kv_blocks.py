"""Blocks of a real model: what was taken gives the bits of what was computed, from every tier, where it may."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sdcpd.cache.block_file import read_block, read_head
from sdcpd.cache.block_orders import Order, Tier
from sdcpd.cache.blocks import BlockChain
from sdcpd.cache.host_tier import HostTierRefused, check_memlock
from sdcpd.cache.settings import CacheSettings
from sdcpd.engine.forward import Engine
from tests.cache.sim_disk import SimDisk
from tests.support.engines import feed, load, some_tokens, whole
from tests.support.tiny_models import make_tiny_llama

SIZE = 16
PROMPT = some_tokens(85)
FULL = len(PROMPT) // SIZE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


def open_engine(folder: Path, disk: SimDisk | None = None, pages: int = 64, **settings: Any) -> Engine:
    small = {"page_tokens": SIZE, "numerics": "batch_invariant", "dtype": "bf16", "kv_cache_bytes": pages * 4096}
    engine = load(folder, **small | settings)
    block = engine.pool.slots.nbytes // engine.pool.pages
    engine.keep_blocks(
        CacheSettings(cpu_bytes_to_use=0 if disk else 32 * block, disk_bytes_to_use=32 * block if disk else 0), disk
    )
    return engine


def names_of(engine: Engine, scope: bytes | None = None) -> list[bytes]:
    assert engine.blocks is not None
    return list(BlockChain(engine.blocks.store.root(scope), SIZE).up_to(FULL, lambda: PROMPT))


def compute(engine: Engine) -> None:
    """A session runs the prompt, and publishes its blocks."""
    assert engine.blocks is not None
    sequence = engine.open_sequence()
    for start in range(0, len(PROMPT), 20):
        feed(engine, sequence, PROMPT[start : start + 20])
    for name, page in zip(names_of(engine), engine.blocks.pages(sequence), strict=False):
        engine.blocks.store.publish(name, None, page, 0.0)
        engine.blocks.store.taken(name, 0.0)
    engine.close_sequence(sequence)


def carry_out(engine: Engine, order: Order) -> None:
    assert engine.blocks is not None
    engine.blocks.store.settle(order, order.run(), 0.0)


def sink(engine: Engine) -> None:
    """All blocks go down by a tier, and their pages are used for something else."""
    assert engine.blocks is not None
    store, pool = engine.blocks.store, engine.pool
    held = pool.allocate(pool.empty_pages)
    while pool.free_pages:
        while (order := store.next_spill(0.0)) is not None:
            carry_out(engine, order)
        held += pool.allocate(1)
    pool.slots.fill_(float("nan"))
    pool.release(held)


def taken(engine: Engine, beside: bool = False) -> tuple[int, torch.Tensor]:
    """A session takes what it finds and runs the rest, in other chunks; the logits of its last token."""
    assert engine.blocks is not None
    store, sequence = engine.blocks.store, engine.open_sequence()
    names = names_of(engine)
    assert engine.reserve(sequence, len(PROMPT))
    while store.fill(names, engine.blocks.pages(sequence)) is not None:
        order = store.next_fill()
        assert order is not None
        carry_out(engine, order)
    found = 0
    for place, name in enumerate(names):
        page = store.page_of(name)
        if page is None:
            break
        engine.blocks.place(sequence, place, page)
        found = place + 1
    logits = feed(engine, sequence, PROMPT[found * SIZE :])[-1]
    engine.close_sequence(sequence)
    return found, logits


@pytest.fixture(scope="module")
def cold(folder: Path) -> torch.Tensor:
    return whole(open_engine(folder), PROMPT)[-1]


def test_shared_pages_give_the_bits_of_a_cold_run(folder: Path, cold: torch.Tensor) -> None:
    engine = open_engine(folder)
    compute(engine)
    found, logits = taken(engine)
    assert found == FULL
    assert torch.equal(logits, cold)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_blocks_from_lower_tiers_give_the_bits_of_a_cold_run(folder: Path, cold: torch.Tensor, tier: Tier) -> None:
    engine = open_engine(folder, SimDisk() if tier is Tier.DISK else None, pages=16)
    compute(engine)
    sink(engine)
    assert engine.blocks is not None
    assert engine.blocks.store.lookup(names_of(engine)) == (tier,) * FULL
    found, logits = taken(engine)
    assert found == FULL
    assert torch.equal(logits, cold)
    (stats,) = [stats for stats in engine.blocks.store.stats() if stats.tier is tier]
    assert stats.promotions == FULL
    engine.pool.check_integrity()
    engine.blocks.store.check_integrity()


def filled(folder: Path) -> SimDisk:
    disk = SimDisk()
    engine = open_engine(folder, disk, pages=16)
    compute(engine)
    sink(engine)
    disk.kill()
    return disk


def after_restart(folder: Path, disk: SimDisk, **settings: Any) -> tuple[Engine, int, torch.Tensor]:
    engine = open_engine(folder, disk, **settings)
    assert engine.blocks is not None
    scan = engine.blocks.store.scan_order()
    assert scan is not None
    carry_out(engine, scan)
    found, logits = taken(engine)
    disk.kill()
    return engine, found, logits


def test_a_restart_finds_blocks_and_another_model_or_configuration_none(
    folder: Path, cold: torch.Tensor, tmp_path: Path
) -> None:
    """One weight, the rope, the dtype, the block size: each gives the tokens of its own cold run, from nothing."""
    _, found, logits = after_restart(folder, filled(folder))
    assert found == FULL
    assert torch.equal(logits, cold)
    other_weight = make_tiny_llama(tmp_path)
    octets = bytearray((tmp_path / "model.safetensors").read_bytes())
    octets[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(octets)
    other_rope = make_tiny_llama(tmp_path.parent)
    config = (other_rope / "config.json").read_text()
    (other_rope / "config.json").write_text(config.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    for changed, settings in (
        (other_weight, {}),
        (other_rope, {}),
        (folder, {"dtype": "fp32"}),
        (folder, {"page_tokens": 32}),
    ):
        disk = filled(folder)
        engine, found, logits = after_restart(changed, disk, **settings)
        assert found == 0
        assert torch.equal(logits, whole(engine, PROMPT)[-1])
        assert disk.names() == [], "what nobody can use any more is removed"


@pytest.mark.parametrize("damage", ["cut to nothing", "cut in the header", "cut in half", "last octet", "flip", "swap"])
def test_damaged_files_are_misses_and_go(folder: Path, cold: torch.Tensor, damage: str) -> None:
    disk = filled(folder)
    files = disk.names()
    assert len(files) == FULL
    for file, other in zip(files, files[1:] + files[:1], strict=True):
        content = disk.seen[file].octets
        size = len(content)
        match damage:
            case "flip":
                disk.flip(file, size - 7)
            case "swap":
                disk.seen[file].octets = bytearray(disk.durable[other])
            case _:
                kept = {"cut to nothing": 0, "cut in the header": 7, "cut in half": size // 2, "last octet": size - 1}
                del content[kept[damage] :]
    disk.seen["0" * 64 + ".part"] = type(disk.seen[files[0]])(bytearray(b"half a block"))
    _, found, logits = after_restart(folder, disk)
    assert found == 0
    assert torch.equal(logits, cold)
    assert len(disk.names()) < FULL, "what was looked at is gone, and so are leftovers"
    assert not any(name.endswith(".part") for name in disk.names())


def test_a_block_is_a_safetensors_file(folder: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    engine = open_engine(folder)
    compute(engine)
    assert engine.blocks is not None
    assert engine.layout is not None
    name = names_of(engine)[1]
    order = engine.blocks.store.read_order(name)
    assert order is not None
    octets = order.run()
    assert isinstance(octets, bytes)
    engine.blocks.store.settle(order, octets, 0.0)
    head = read_head(engine.layout, octets)
    assert not isinstance(read_block(engine.layout, name, octets), type(None))
    (tmp_path / "block.safetensors").write_bytes(octets)
    page = engine.pool.page_of(name)
    assert page is not None
    with safe_open(tmp_path / "block.safetensors", "pt") as file:
        assert file.metadata()["name"] == name.hex()
        assert torch.equal(file.get_tensor("kv"), engine.pool.slots[:, :, page * SIZE : (page + 1) * SIZE])
    assert getattr(head, "name", None) == name


def test_what_a_process_may_not_pin_is_refused_by_name() -> None:
    check_memlock(1 << 20, None)
    check_memlock(1 << 20, 1 << 20)
    with pytest.raises(HostTierRefused, match=r"RLIMIT_MEMLOCK.*cache\.cpu_bytes_to_use"):
        check_memlock(1 << 20, (1 << 20) - 1)
