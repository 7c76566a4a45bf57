"""What the cache's tests share."""

import pytest

from tests.cache.sim_disk import SimDisk


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()
