"""Names and shapes of the cache's bench: the figures say nothing."""

import json

import pytest

from tests.bench import cache


def test_cache(capsys: pytest.CaptureFixture[str]) -> None:
    cache.main(["--json", "--mib", "1", "--blocks", "1", "--repeats", "1"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    rows = ("disk_floor", "tls_floor", "peer", "peer_http2", "device", "host", "disk")
    names = {f"{row}.{way}_mb_per_s" for row in rows for way in ("get", "put")} | {"memcpy.mb_per_s"}
    assert set(figures) == names
    assert all(value > 0 for value in figures.values())


def test_nonsense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cache.main(["--mib", "0"])
    assert "at least 1" in capsys.readouterr().err
