"""`cache_mbps`: assumed, then measured, then smoothed."""

from sdcpd.cache.bandwidth import ASSUMED_MBPS, MEASURED_FROM_BYTES, Bandwidth


def test_the_first_measurement_takes_the_place_of_the_assumption() -> None:
    bandwidth = Bandwidth()
    assert (bandwidth.mbps, bandwidth.measured) == (ASSUMED_MBPS, False)
    bandwidth.moved(10_000_000, 0.1)
    assert (bandwidth.mbps, bandwidth.measured) == (800, True)


def test_later_ones_draw_it_towards_themselves() -> None:
    bandwidth = Bandwidth()
    bandwidth.moved(10_000_000, 0.1)
    bandwidth.moved(10_000_000, 0.01)
    assert bandwidth.mbps == 2240  # 0.8 * 800 + 0.2 * 8000
    for _ in range(30):
        bandwidth.moved(10_000_000, 0.01)
    assert 7900 < bandwidth.mbps <= 8000


def test_small_and_timeless_transfers_say_nothing() -> None:
    bandwidth = Bandwidth()
    bandwidth.moved(MEASURED_FROM_BYTES - 1, 0.5)
    bandwidth.moved(MEASURED_FROM_BYTES, 0.0)
    assert not bandwidth.measured
    bandwidth.moved(MEASURED_FROM_BYTES, 1e6)
    assert bandwidth.mbps == 1, "a status has a whole number, and a bandwidth is never none"
