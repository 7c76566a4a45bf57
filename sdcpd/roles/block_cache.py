"""The KV blocks of a node's models, as they are served to peers and operators (cache part 5.3, 5.4; 112).

A store (cache/block_store.py) belongs to a model that runs here: a verifier's target, a drafter's draft model. Its
index answers at once; octets are read and stored by workers, in finished orders, a few at a time. A block is found by
its name and its scope together: whoever names a block of another scope finds nothing, though the name be right.

Who may do what: verifiers and drafters read, and write into the store of their own kind of model; routers ask what is
here, to place sessions; pins and evictions are wishes of a writer, or the operator's.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Final, Protocol, assert_never

import trio
from msgspec import Struct

from sdcpd.cache.block_file import Damaged
from sdcpd.cache.block_index import ALL, BlockFacts, Pin, ScopeFilter
from sdcpd.cache.block_moves import BlockHeld, BlockRefused
from sdcpd.cache.block_orders import AcceptBlock, Order, Outcome, ReadBlock, Tier
from sdcpd.cache.block_store import BlocksLeased, TierStats
from sdcpd.cache.blocks import KvLayout, extend
from sdcpd.cache.leases import Lease, LeaseForeign, LeaseLapsed, LeasesFull
from sdcpd.cache.refs import BlockName
from sdcpd.protocol.problems import Forbidden, NoRoom, Overloaded, Problem, UnknownResource
from sdcpd.roles.ports import Peer, Ports

RETRY_AFTER_S: Final = 1
MOVED_AT_ONCE: Final = 4
"""Blocks that are read or stored for peers: each is in memory as a whole, some tens of MiB for a large model."""
LEASED_LIMIT: Final = 1024
"""Blocks of one lease: a text of some 260,000 tokens in the blocks of a GPU."""

BLOCK_READERS: Final = frozenset({"verifier", "drafter"})
BLOCK_ASKERS: Final = BLOCK_READERS | {"router"}


class UnsoundBlock(Problem):
    """The octets are not the block that the name says."""

    status: ClassVar[int] = 422
    title: ClassVar[str] = "Unsound block"


class BlockStores(Protocol):
    """What is asked of a model's blocks: BlockStore, or something in its place in the simulation."""

    @property
    def layout(self) -> KvLayout: ...
    def root(self, scope: bytes | None) -> bytes: ...
    def lookup(self, names: Sequence[bytes]) -> tuple[Tier, ...]: ...
    def entries(self, scope: ScopeFilter = ALL, *, now: float) -> list[BlockFacts]: ...
    def facts(self, name: bytes, *, now: float) -> BlockFacts | None: ...
    def read_order(self, name: bytes) -> ReadBlock | None: ...
    def accept_order(
        self, name: bytes, scope: bytes | None, octets: bytes
    ) -> AcceptBlock | BlockHeld | BlockRefused: ...
    def settle(self, order: Order, outcome: Outcome, now: float) -> BlockRefused | None: ...
    def lease(self, names: Sequence[bytes], owner: str, ttl_s: float, now: float) -> BlocksLeased | LeasesFull: ...
    def renew(self, lease_id: str, owner: str, ttl_s: float, now: float) -> Lease | LeaseLapsed | LeaseForeign: ...
    def release(self, lease_id: str, owner: str) -> LeaseForeign | None: ...
    def pin(self, name: bytes, level: Pin) -> BlockRefused | None: ...
    def evict(self, name: bytes) -> BlockRefused | None: ...
    def purge(self, scope: ScopeFilter) -> int: ...
    def stats(self) -> tuple[TierStats, ...]: ...


class BlockContent(Struct, frozen=True):
    """A block as the octets of its file, their tag, where they were, and how long ago it was used last."""

    octets: bytes
    tag: str
    tier: Tier
    age_s: float


class RunFound(Struct, frozen=True):
    """The longest run of blocks from the first on: the fastest tier of each; and the lease on the first `leased`."""

    tiers: tuple[Tier, ...]
    lease: str | None = None
    leased: int = 0
    ttl_ms: int = 0
    held: frozenset[bytes] = frozenset()


class BlockCache:
    """The blocks of a node. Models come when they are loaded."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._stores: dict[str, BlockStores] = {}
        """By the role that runs the model."""
        self._moving = trio.Semaphore(MOVED_AT_ONCE)

    def serve(self, role: str, store: BlockStores) -> None:
        """From now on the blocks of this role's model are served."""
        self._stores[role] = store

    # For peers

    async def read_block(self, peer: Peer, name: BlockName) -> BlockContent:
        """A block's octets. A miss is ordinary (404)."""
        _allow(peer, BLOCK_READERS, "read blocks")
        store = self._having(name)
        facts = None if store is None else store.facts(name.name, now=self._now())
        if store is None or facts is None:
            raise UnknownResource("no such block")
        async with self._moving:
            order = store.read_order(name.name)
            if order is None:
                raise UnknownResource("no such block")
            read: tuple[bytes, str] | Damaged | None = None
            try:
                read = await self._ports.workers.run(_read, order)
            finally:
                store.settle(order, read[0] if isinstance(read, tuple) else read, self._now())
        if not isinstance(read, tuple):
            raise UnknownResource("no such block any more")
        return BlockContent(octets=read[0], tag=read[1], tier=order.tier, age_s=facts.age_s)

    async def create_block(self, peer: Peer, name: BlockName, octets: bytes, pin: Pin | None = None) -> bool:
        """Store a block that the peer has; False: it was here already. Visible once it is verified and stored."""
        _allow(peer, BLOCK_READERS, "write blocks")
        store = self._stores.get(peer.role)
        if store is None:
            raise UnknownResource(f"no model of a {peer.role} runs on this node, for which a block would be of use")
        created = False
        async with self._moving:
            order = store.accept_order(name.name, name.scope, octets)
            match order:
                case BlockHeld():
                    if self._having(name) is not store:
                        raise UnsoundBlock("the name is of another scope")
                case BlockRefused():
                    raise _problem(order)
                case AcceptBlock():
                    await self._accept(store, order)
                    created = True
                case _:
                    assert_never(order)
        if pin is not None:
            refused = store.pin(name.name, pin)
            if refused is not None:
                raise NoRoom(refused.detail, retry_after_s=RETRY_AFTER_S)
        return created

    def look_up(
        self,
        peer: Peer,
        scope: bytes | None,
        root: bytes,
        *,
        names: Sequence[bytes] = (),
        tokens: Sequence[int] | None = None,
        lease_ms: int = 0,
    ) -> RunFound:
        """The longest run of a text's blocks that is here, from its first token on: by names, or by the tokens.

        With `lease_ms` the run is held in the same step, or its first LEASED_LIMIT blocks are.
        """
        _allow(peer, BLOCK_ASKERS, "look blocks up")
        found = next(((role, store) for role, store in self._stores.items() if store.root(scope) == root), None)
        if found is None:
            return RunFound(tiers=())
        role, store = found
        wanted = list(names) if tokens is None else list(_chain(store, root, tokens))
        run = store.lookup(wanted)
        now = self._now()
        for place in range(len(run)):  # names are a peer's: one of another scope ends the run
            facts = store.facts(wanted[place], now=now)
            if facts is None or facts.scope != scope:
                run = run[:place]
                break
        if not run or not lease_ms:
            return RunFound(tiers=run)
        match store.lease(wanted[: min(len(run), LEASED_LIMIT)], peer.uri, lease_ms / 1000, now):
            case BlocksLeased(lease=Lease() as lease):
                held = {bytes.fromhex(each) for each in lease.names}
                leased = next((k for k, name in enumerate(wanted[: len(run)]) if name not in held), len(run))
                return RunFound(run, _lease_id(role, lease), leased, int(1000 * (lease.until - now)))
            case BlocksLeased() | LeasesFull():
                return RunFound(tiers=run)

    def lease_blocks(self, peer: Peer, names: Sequence[BlockName], ttl_ms: int) -> RunFound:
        """Hold those of the blocks that are here; `leased` counts them. All are of one model."""
        _allow(peer, BLOCK_READERS, "lease blocks")
        now = self._now()
        for role, store in self._stores.items():
            here = [name.name for name in names if self._having(name) is store]
            if not here:
                continue
            match store.lease(here, peer.uri, ttl_ms / 1000, now):
                case BlocksLeased(lease=Lease() as lease):
                    held = frozenset(bytes.fromhex(each) for each in lease.names)
                    return RunFound((), _lease_id(role, lease), len(held), int(1000 * (lease.until - now)), held)
                case BlocksLeased():
                    continue
                case LeasesFull(detail=detail):
                    raise Overloaded(detail, retry_after_s=RETRY_AFTER_S)
        return RunFound(tiers=())

    def renew_lease(self, peer: Peer, lease_id: str, ttl_ms: int) -> int:
        """Hold on; the milliseconds that are left. One that has ended is not there (404)."""
        _allow(peer, BLOCK_ASKERS, "lease blocks")
        role, _, number = lease_id.partition(_SEPARATOR)
        store, now = self._stores.get(role), self._now()
        renewed = LeaseLapsed() if store is None else store.renew(number, peer.uri, ttl_ms / 1000, now)
        match renewed:
            case Lease():
                return int(1000 * (renewed.until - now))
            case LeaseLapsed():
                raise UnknownResource("no such lease, or not any more; look the blocks up anew")
            case LeaseForeign():
                raise Forbidden("the lease is another peer's")

    def release_lease(self, peer: Peer, lease_id: str) -> None:
        """End a lease. One that is not there is released already."""
        _allow(peer, BLOCK_ASKERS, "lease blocks")
        role, _, number = lease_id.partition(_SEPARATOR)
        store = self._stores.get(role)
        if store is not None and isinstance(store.release(number, peer.uri), LeaseForeign):
            raise Forbidden("the lease is another peer's")

    # For operators

    def figures(self) -> Mapping[str, tuple[TierStats, ...]]:
        """Each model's tiers, by the role that runs it."""
        return {role: store.stats() for role, store in self._stores.items()}

    def entries(self, scope: ScopeFilter = ALL) -> Iterator[tuple[str, BlockFacts]]:
        """All blocks of a scope, or of all, and the role whose model they are of."""
        now = self._now()
        for role, store in self._stores.items():
            for facts in store.entries(scope, now=now):
                yield role, facts

    def held_in(self, scope: bytes | None) -> int:
        """Blocks of a scope that leases hold."""
        return sum(facts.leases > 0 for _, facts in self.entries(scope))

    def purge(self, scope: bytes | None) -> int:
        """Forget all blocks of a scope, whoever holds them; how many."""
        return sum(store.purge(scope) for store in self._stores.values())

    def pin(self, name: bytes, level: Pin) -> BlockRefused | None:
        """Of a block by its name alone: operators see all scopes."""
        store = self._with(name)
        return BlockRefused("there is no such block here") if store is None else store.pin(name, level)

    def evict(self, name: bytes) -> BlockRefused | None:
        """Done already when it is not here."""
        store = self._with(name)
        return None if store is None else store.evict(name)

    def _with(self, name: bytes) -> BlockStores | None:
        now = self._now()
        return next((store for store in self._stores.values() if store.facts(name, now=now) is not None), None)

    def _having(self, name: BlockName) -> BlockStores | None:
        store = self._with(name.name)
        facts = None if store is None else store.facts(name.name, now=self._now())
        return store if facts is not None and facts.scope == name.scope else None

    async def _accept(self, store: BlockStores, order: AcceptBlock) -> None:
        outcome: Outcome = None
        try:
            outcome = await self._ports.workers.run(order.run)
        finally:
            refused = store.settle(order, outcome, self._now())
        if refused is not None:
            raise _problem(refused)

    def _now(self) -> float:
        return self._ports.clock.now()


_SEPARATOR: Final = "-"


def is_block_lease(lease_id: str) -> bool:
    """Objects' leases are drawn, and so long that none begins like this by chance; ours say whose model they are of."""
    return lease_id.partition(_SEPARATOR)[0] in BLOCK_READERS


def _lease_id(role: str, lease: Lease) -> str:
    return f"{role}{_SEPARATOR}{lease.id}"


def _chain(store: BlockStores, root: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
    """Names of the full blocks of a text."""
    name, size = root, store.layout.block_tokens
    for start in range(0, len(tokens) - size + 1, size):
        name = extend(name, tokens[start : start + size])
        yield name


def _read(order: ReadBlock) -> tuple[bytes, str] | Damaged | None:
    """The octets and their tag. For a worker."""
    octets = order.run()
    return (octets, f'"{hashlib.sha256(octets).hexdigest()}"') if isinstance(octets, bytes) else octets


def _problem(refused: BlockRefused) -> Problem:
    if refused.full:
        return NoRoom(refused.detail, retry_after_s=RETRY_AFTER_S)
    return UnsoundBlock(refused.detail)


def _allow(peer: Peer, roles: frozenset[str], what: str) -> None:
    if peer.role not in roles:
        raise Forbidden(f"role {peer.role} may not {what}")
