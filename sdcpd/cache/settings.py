"""Settings of the cache; the `[cache]` table. Each limit stands beside what it protects."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from sdcpd.protocol.commit_log import RECORD_LIMIT_BYTES

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


class CacheSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[cache]`. Raises ValueError for limits that contradict each other.

    The upper bounds keep a segment, with the last batch and the logs moved into it, well below the 4 GiB that its
    places can name.
    """

    commit_durability: Literal["fsync", "page_cache"] = "fsync"
    """What an acknowledged append survives: loss of power, or only the end of the process (decision 109)."""
    log_retention_s: Annotated[float, Meta(gt=0)] = 3_600.0
    """A log is kept this long after its session ended (decision 90)."""
    abandoned_log_retention_s: Annotated[float, Meta(gt=0)] = 86_400.0
    """A log that was never closed goes after this long without a read or an append; or it would stay for ever.
    So does a directory record after as long without a read or a change."""
    max_logs: Annotated[int, Meta(ge=1, le=1 << 20)] = 65_536
    """Each costs about a kilobyte of memory, however short."""
    max_log_bytes: Annotated[int, Meta(ge=1 * KIB, le=256 * MIB)] = 16 * MIB
    """Some 100,000 rounds. A log is read, and moved within the journal, as one piece."""
    max_record_bytes: Annotated[int, Meta(ge=256, le=RECORD_LIMIT_BYTES)] = 16 * KIB
    """As other messages (decision 117). A commit of 65 tokens takes under 1 KiB."""
    max_directory_records: Annotated[int, Meta(ge=1, le=1 << 20)] = 16_384
    """Sessions under way, of all routers together (decision 106): one has a record until some minutes after its end."""
    max_directory_record_bytes: Annotated[int, Meta(ge=1 * KIB, le=64 * MIB)] = 4 * MIB + 64 * KIB
    """A record holds a session-open, which may take 4 MiB (decision 117), and a few fixed members beside it."""
    segment_bytes: Annotated[int, Meta(ge=4 * KIB, le=1 * GIB)] = 64 * MIB
    """A new segment is begun at this size. Space comes back one segment at a time; recovery reads one at a time."""
    journal_bytes: Annotated[int, Meta(ge=16 * KIB)] = 1 * GIB
    """All segments together. Beyond it commits are refused (507); a sixteenth stays for fences and ends."""
    max_waiting_appends: Annotated[int, Meta(ge=1)] = 4_096
    """Appends that wait for the journal; one more is answered 503 at once. A session has one at a time."""
    max_waiting_bytes: Annotated[int, Meta(ge=1 * MIB)] = 64 * MIB
    """Octets those may hold together."""
    max_batch_bytes: Annotated[int, Meta(ge=64 * KIB, le=256 * MIB)] = 4 * MIB
    """Octets of one write, so that the last of many waits for a bounded write and its sync."""
    max_waiting_reads: Annotated[int, Meta(ge=1)] = 64
    """Log reads under way; one more is answered 503. Each may hold max_log_bytes."""
    maintenance_interval_s: Annotated[float, Meta(gt=0)] = 10.0
    """How often expired logs and objects are looked for."""
    max_objects: Annotated[int, Meta(ge=1)] = 65_536
    max_object_bytes: Annotated[int, Meta(ge=1 * KIB)] = 16 * MIB
    """One object, and one block that a peer sends: a token array of a million tokens is 5 MiB, 256 tokens of KV of an
    8B model 32 MiB."""
    object_memory_bytes: Annotated[int, Meta(ge=1 * KIB)] = 256 * MIB
    """All objects together, in memory. Beyond it a new one is refused (507); nothing unexpired is evicted."""
    default_object_ttl_s: Annotated[float, Meta(gt=0)] = 600.0
    """Life of an object whose writer names none (5.4: tokens 10 min)."""
    max_object_ttl_s: Annotated[float, Meta(gt=0)] = 3_600.0
    """A longer life asked for is cut to this."""
    max_waiting_object_reads: Annotated[int, Meta(ge=1)] = 1_024
    """Reads that wait for an object to be written; one more is answered 503. A round has one at a time."""
    max_lease_ttl_s: Annotated[float, Meta(gt=0, le=3_600)] = 60.0
    """A longer lease asked for is cut to this: what a peer that died has leased is free again a minute later."""
    max_leases: Annotated[int, Meta(ge=1)] = 4_096
    """All leases together. A round in flight has one or two."""
    max_leases_of_owner: Annotated[int, Meta(ge=1)] = 1_024
    """Leases of one peer, so that no peer takes all of them."""
    max_lease_objects: Annotated[int, Meta(ge=1)] = 128
    """Objects of one lease. So many of the longest names fit a message of 16 KiB (decision 117)."""
    enable_prefix_caching: bool = True
    """Keep the keys and values of full blocks of text for later sessions of the same scope."""
    cpu_bytes_to_use: Annotated[int, Meta(ge=0)] = 512 * MIB
    """Host memory for blocks that the page pool needs the place of; pinned where there is a CUDA device. 0: none.
    Enough for some 20,000 tokens of a small model, and felt on no machine that serves one."""
    disk_bytes_to_use: Annotated[int, Meta(ge=0)] = 0
    """Room on disk for blocks that leave host memory. 0, the default: none, since users' texts can be guessed from
    such files, and a disk that is written at every pressure wears; who wants either says so."""
    root_dir: str = ""
    """Where these files lie; by default `blocks` below node.state_dir. One process at a time."""
    eviction_policy: Literal["lru"] = "lru"
    """Which unpinned blocks go first: those longest unused."""

    def __post_init__(self) -> None:
        if self.journal_bytes < 4 * self.segment_bytes:
            raise ValueError("journal_bytes must be at least 4 times segment_bytes, or space could not be reclaimed")
        if self.max_record_bytes > self.max_log_bytes:
            raise ValueError("max_record_bytes must not exceed max_log_bytes")
        if self.max_object_bytes > self.object_memory_bytes:
            raise ValueError("max_object_bytes must not exceed object_memory_bytes")

    @property
    def reserved_journal_bytes(self) -> int:
        """Space that commits leave to fences and ends: a full journal must still let sessions be moved and closed."""
        return self.journal_bytes // 16

    @property
    def directory_bytes(self) -> int:
        """Space of all directory records. They hold whole prompts; commits must not go short of room for them."""
        return self.journal_bytes // 4

    @property
    def reserved_log_bytes(self) -> int:
        """The same within one log."""
        return 4 * self.max_record_bytes
