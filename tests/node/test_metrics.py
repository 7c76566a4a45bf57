"""Names, labels and gauges of /metrics."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sdcpd.node.metrics import METRICS, Gauge, RegistryMeters


def samples(meters: RegistryMeters) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(meters.scrape().decode())
        for sample in family.samples
    }


def test_names_follow_the_conventions() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith(".")
    for stem in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"):
        assert f"spec_decode_{stem}_total" in names


def calls() -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Place, method, name and labels of each call of a Meters in the source."""
    package = Path(__file__).parents[2] / "sdcpd"
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner, method = ast.unparse(node.func.value), node.func.attr
            if method not in ("count", "observe") or owner.rpartition(".")[2].lstrip("_") != "meters":
                continue
            name = node.args[0]
            assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: the name is to be seen by grep"
            assert isinstance(name.value, str)
            labels = tuple(sorted(keyword.arg or "**" for keyword in node.keywords))
            yield f"{path.name}:{node.lineno}", method, name.value, labels


def test_the_roles_feed_exactly_what_is_declared() -> None:
    """An undeclared name would end the node when it is first counted; one that nobody feeds is a lie at zero."""
    declared = {metric.name: (metric.kind, tuple(sorted(metric.labels))) for metric in METRICS}
    kinds = {"count": "counter", "observe": "histogram"}
    fed = set()
    for place, method, name, labels in calls():
        assert name in declared, f"{place}: {name} is not in node/metrics.py"
        assert declared[name] == (kinds[method], labels), place
        fed.add(name)
    assert set(declared) - fed == set()


def test_counting_and_observing() -> None:
    meters = RegistryMeters()
    meters.count("target_forwards_total")
    meters.count("target_forwards_total", 2)
    meters.count("spec_decode_num_accepted_tokens_per_pos_total", 3, position="0")
    meters.observe("commit_append_seconds", 0.004)
    found = samples(meters)
    assert found["sdcpd_target_forwards_total", ()] == 3
    assert found["sdcpd_spec_decode_num_accepted_tokens_per_pos_total", (("position", "0"),)] == 3
    assert found["sdcpd_commit_append_seconds_bucket", (("le", "0.005"),)] == 1
    assert found["sdcpd_commit_append_seconds_bucket", (("le", "0.002"),)] == 0


def test_counters_without_labels_stand_at_zero_from_the_start() -> None:
    assert samples(RegistryMeters())["sdcpd_fenced_appends_total", ()] == 0


def test_unknown_names_and_labels_are_our_mistake() -> None:
    meters = RegistryMeters()
    with pytest.raises(AssertionError, match="no counter named"):
        meters.count("target_forward_total")
    with pytest.raises(AssertionError, match="no histogram named"):
        meters.observe("target_forwards_total", 1)
    with pytest.raises(ValueError, match="Incorrect label"):
        meters.count("escalations_total", reason="x")
    with pytest.raises(ValueError, match="label"):
        meters.count("escalations_total")


def test_gauges_are_read_at_each_scrape_and_not_before() -> None:
    meters = RegistryMeters()
    readings = iter([1.0, 2.0])
    text = "Share of a tier in use."
    meters.add_gauges(
        lambda: [Gauge("kv_cache_usage_ratio", text, next(readings), (("tier", "gpu"),))],
    )
    key = ("sdcpd_kv_cache_usage_ratio", (("tier", "gpu"),))
    assert samples(meters)[key] == 1
    assert samples(meters)[key] == 2
