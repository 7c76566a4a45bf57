"""Contract digest and prefix chain, against the draft's formulas written out by hand (4.1, 4.2)."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.protocol import digests
from sdcpd.protocol.encoding import encode
from sdcpd.protocol.messages import ContractSampling
from tests.support.messages import contract

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple)


def test_contract_digest_is_over_the_domain_separated_encoding() -> None:
    expected = hashlib.sha256(b"SDCP-CONTRACT-1" + b"\x00" + encode(contract())).digest()
    assert digests.contract_digest(contract()) == expected


def test_absent_and_default_hash_differently() -> None:
    """Decision 5: defaults are never filled in nor dropped."""
    forms = [contract(), contract(low_ratio=0), contract(sampling=ContractSampling())]
    assert len({digests.contract_digest(form) for form in forms}) == 3


@given(TOKENS, TOKENS)
def test_chain(prompt: tuple[int, ...], output: tuple[int, ...]) -> None:
    digest = hashlib.sha256()
    digest.update(b"SDCP-PREFIX-1\x00" + b"c" * 32)
    digest.update(struct.pack(">I", len(prompt)))
    for token in prompt:
        digest.update(struct.pack(">I", token))
    expected = digest.digest()
    assert digests.prompt_digest(b"c" * 32, prompt) == expected
    for token in output:
        expected = hashlib.sha256(expected + struct.pack(">I", token)).digest()
    assert digests.extend(digests.prompt_digest(b"c" * 32, prompt), output) == expected


@pytest.mark.parametrize("token", [2**32, -1])
def test_tokens_never_wrap_around(token: int) -> None:
    with pytest.raises(struct.error):
        digests.extend(bytes(32), (token,))
