"""Fixtures of the edge's tests."""

import pytest

from tests.edge.wire.pki import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The CA of all nodes in a test run."""
    return Authority(tmp_path_factory.mktemp("authority"))
