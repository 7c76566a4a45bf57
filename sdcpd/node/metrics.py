"""Every metric's name, help, labels and buckets in one place, and the Meters port over them.

Theory: counters and histograms are fed by the roles while things happen; no gauge of a rate or a mean is kept, since a
sampled window lies to whoever divides it. The few gauges describe a state (sessions running, pages in use) and are
read from the roles' snapshots at the moment of a scrape, so that they cannot drift. The stems are those that vLLM and
llama.cpp share (`spec_decode_*`), under the prefix `sdcpd_` with an underscore, since a colon is for recording rules.

Callers use the names without the prefix. An unknown name or label is our mistake and asserts.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

PREFIX: Final = "sdcpd_"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

SECONDS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560,
)  # fmt: skip
"""From a pass on an accelerator to an answer that takes the better part of an hour."""

TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
SMALL_COUNTS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Tokens of one round (m_max is at most 64) and sessions of one pass."""


class Metric(Struct, frozen=True):
    """One name. `buckets` only for histograms."""

    name: str
    kind: Literal["counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", text, labels)


def _histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Metric:
    return Metric(name, "histogram", text, labels, buckets)


METRICS: Final = (
    # Speculation. Acceptance rate = accepted / draft tokens; mean acceptance length = 1 + accepted / drafts.
    _counter("spec_decode_num_drafts_total", "Proposals verified, one for each round of one session."),
    _counter("spec_decode_num_draft_tokens_total", "Tokens proposed in verified rounds."),
    _counter("spec_decode_num_accepted_tokens_total", "Proposed tokens accepted, without the additional token."),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "Proposed tokens accepted, by position in the proposal, from 0.",
        "position",
    ),
    _counter("rounds_total", "Rounds committed, by kind: proposal or self_decoded.", "kind"),
    _counter("escalations_total", "Escalation actions applied (draft 6.5.2).", "action"),
    _counter("proposals_refused_total", "Proposals that the verifier refused, by problem.", "reason"),
    _counter("near_ties_total", "Rows whose two best logits are so close that another batch shape may swap them."),
    _counter("draft_audit_alarms_total", "Drafters found not to sample from the rows they show (rule 2)."),
    # Passes of the target model.
    _counter("target_forwards_total", "Passes of the target model."),
    _counter("num_preemptions_total", "Sessions whose KV pages were given to an older one, to be computed anew."),
    _histogram("target_forward_seconds", "Time of one pass of the target model."),
    _histogram("target_forward_sessions", "Sessions that share one pass.", buckets=SMALL_COUNTS),
    # Commit log.
    _histogram("commit_append_seconds", "From handing a record to the log until it is durable."),
    _counter("fenced_appends_total", "Appends that a fence refused."),
    _counter("log_records_total", "Records made durable by this node's cache role."),
    _counter("log_syncs_total", "Times the journal was synced; fewer than records when appends share one."),
    # The drafter.
    _histogram("draft_seconds", "Time to draft one proposal."),
    _counter("drafts_settled_total", "Own proposals that had their verdict, by source of the draft.", "source"),
    _counter("drafted_tokens_total", "Their tokens.", "source"),
    _counter("drafted_tokens_accepted_total", "Those accepted.", "source"),
    _counter("draft_ahead_total", "Drafts made for the next round while one was out: hit or miss.", "outcome"),
    _counter("draft_ahead_wasted_tokens_total", "Tokens drafted ahead that the verdict made useless."),
    _counter("draft_forwards_total", "Passes of the draft model."),
    _histogram("draft_forward_seconds", "Time of one pass of the draft model."),
    _counter("drafter_proposals_total", "Proposals sent, repetitions included."),
    _counter("drafter_refusals_total", "Proposals that brought no verdict, by problem.", "suffix"),
    # The router.
    _counter("routed_sessions_total", "Sessions opened by the router."),
    _counter("adopted_sessions_total", "Sessions taken up from the directory after a restart of the router."),
    _counter("routed_sessions_ended_total", "Sessions ended, by outcome.", "finish"),
    _counter("reassignments_total", "Sessions given to another drafter, by reason.", "reason"),
    _counter("failover_total", "Sessions taken from their verifier, by what was wrong with it.", "kind"),
    _counter("instance_expirations_total", "Instances whose status ran out.", "role"),
    # Traffic classes. speculation: on, off, or mixed (changed within, cancelled, or never drafted for). The gain of a
    # class is seconds / tokens with "off" over the same with "on".
    _counter("class_sessions_total", "Sessions ended, by traffic class.", "traffic_class", "speculation"),
    _counter("class_tokens_total", "Their tokens after the first page.", "traffic_class", "speculation"),
    _counter("class_decode_seconds_total", "Time in which these came.", "traffic_class", "speculation"),
    _counter("class_looped_sessions_total", "Those whose text ended in a loop.", "traffic_class", "speculation"),
    _counter("class_target_missed_total", "Those slower than target_ms_per_token.", "traffic_class", "speculation"),
    _counter("class_turns_total", "Times that speculation was turned on or off.", "traffic_class", "to", "reason"),
    # Requests, as the client port sees them.
    _counter("requests_total", "Requests to the client port.", "endpoint", "status"),
    _counter("request_success_total", "Requests answered, by what ended the text.", "finished_reason"),
    _counter("prompt_tokens_total", "Tokens of prompts."),
    _counter("generation_tokens_total", "Tokens committed as output."),
    _histogram("time_to_first_token_seconds", "From a request's arrival to its first committed token."),
    _histogram("inter_token_latency_seconds", "Between output pages, apportioned to each token of the page."),
    _histogram("request_time_per_output_token_seconds", "Decode time of a request by its tokens after the first."),
    _histogram("e2e_request_latency_seconds", "From a request's arrival to its last token."),
    _histogram("request_prompt_tokens", "Prompt tokens of a request.", buckets=TOKENS),
    _histogram("request_generation_tokens", "Output tokens of a request.", buckets=TOKENS),
    # Between roles.
    _counter("peer_calls_total", "Calls to other roles, by operation and end.", "operation", "outcome"),
    _counter("peer_requests_total", "Requests served to other roles.", "operation", "status"),
)


class Gauge(Struct, frozen=True):
    """One gauge's reading at a scrape; `labels` are pairs of name and value, in the same order for every reading."""

    name: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


class RegistryMeters:
    """The Meters port over a registry of its own (nothing global). Safe to feed from worker threads as well."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._children: dict[tuple[object, ...], Counter] = {}  # the library's own look-up by labels takes a lock
        for metric in METRICS:
            name = PREFIX + metric.name
            if metric.kind == "counter":
                self._counters[metric.name] = Counter(name, metric.help, metric.labels, registry=self._registry)
            else:
                self._histograms[metric.name] = Histogram(
                    name, metric.help, metric.labels, buckets=metric.buckets, registry=self._registry
                )

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Raise a counter by `amount` >= 0."""
        assert name in self._counters, f"no counter named {name}; node/metrics.py lists them"
        if not labels:
            self._counters[name].inc(amount)
            return
        series = (name, *labels.items())
        child = self._children.get(series)
        if child is None:
            child = self._children[series] = self._counters[name].labels(**labels)
        child.inc(amount)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        assert name in self._histograms, f"no histogram named {name}; node/metrics.py lists them"
        histogram = self._histograms[name]
        (histogram.labels(**labels) if labels else histogram).observe(value)

    def add_gauges(self, read: Callable[[], Iterable[Gauge]]) -> None:
        """Have `read` called at each scrape; it must not block."""
        self._registry.register(_Gauges(read))

    def scrape(self) -> bytes:
        """The whole registry in the text format of `CONTENT_TYPE`."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    def __init__(self, read: Callable[[], Iterable[Gauge]]) -> None:
        self._read = read

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()  # without this, registering would read the gauges before anything runs

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for gauge in self._read():
            family = families.get(gauge.name)
            if family is None:
                names = [name for name, _ in gauge.labels]
                family = families[gauge.name] = GaugeMetricFamily(PREFIX + gauge.name, gauge.help, labels=names)
            family.add_metric([value for _, value in gauge.labels], gauge.value)
        yield from families.values()
