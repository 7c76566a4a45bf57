"""Draft 4.2, Committed-Prefix Digest Chain."""

from hashlib import sha256

import pytest

from sdcpd.protocol import digests
from sdcpd.protocol.encoding import encode
from sdcpd.protocol.problems import StaleBase
from tests.support.verifying import Verifying

# The contract of all tests here, and the prompt 1, 1, 1.
CONTRACT = sha256(b"SDCP-CONTRACT-1\x00" + encode(Verifying().contract)).digest()
D0 = sha256(
    b"SDCP-PREFIX-1\x00" + CONTRACT + b"\x00\x00\x00\x03" + b"\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x01"
).digest()
D1 = sha256(D0 + b"\x00\x00\x00\x14").digest()  # token 20
D2 = sha256(D1 + b"\x00\x00\x00\x14").digest()
D3 = sha256(D2 + b"\x00\x00\x00\x15").digest()  # token 21


def test_d0_is_over_contract_and_prompt() -> None:
    """ "d[0] = SHA-256( "SDCP-PREFIX-1" || 0x00 || contract_digest || uint32(P) || uint32(t[0]) || ... )" """
    at = Verifying().state
    assert (at.round, at.committed, at.digest) == (0, 0, D0)


def test_each_committed_token_extends_the_chain() -> None:
    """ "d[k] = SHA-256( d[k-1] || uint32(o[k]) )   for k = 1..n" """
    bench = Verifying()
    bench.assign()
    verdict = bench.round((20,), (20, 20))
    assert (verdict.committed, verdict.digest) == (2, D2)
    verdict = bench.round((30,), (21, 99))
    assert (verdict.committed, verdict.digest) == (3, D3)
    assert [record.digest for record in bench.records if hasattr(record, "digest")] == [D2, D3]


@pytest.mark.parametrize(
    ("token", "octets"), [(0, "00000000"), (258, "00000102"), (65536, "00010000"), (2**32 - 1, "ffffffff")]
)
def test_uint32_is_four_octets_in_network_byte_order(token: int, octets: str) -> None:
    """ "uint32() is four octets in network byte order" """
    assert digests.extend(D0, (token,)) == sha256(D0 + bytes.fromhex(octets)).digest()
    prefix = b"SDCP-PREFIX-1\x00" + CONTRACT + b"\x00\x00\x00\x01"
    assert digests.prompt_digest(CONTRACT, (token,)) == sha256(prefix + bytes.fromhex(octets)).digest()


def test_the_number_of_prompt_tokens_separates_prompt_from_output() -> None:
    """ "uint32(P)": the same tokens split elsewhere are another prefix."""
    assert digests.extend(digests.prompt_digest(CONTRACT, (1, 1)), (1,)) != D0
    assert digests.prompt_digest(CONTRACT, ()) == sha256(b"SDCP-PREFIX-1\x00" + CONTRACT + bytes(4)).digest()


def test_a_proposal_on_another_prefix_is_detected() -> None:
    """ "a proposal built on a different or outdated prefix is detected without comparing token lists" """
    bench = Verifying()
    bench.assign()
    bench.round((20,), (20, 20))
    other = sha256(D1 + b"\x00\x00\x00\x15").digest()  # of the same length, with another last token
    for base, digest in ((2, other), (1, D1), (0, D0), (2, D1)):
        with pytest.raises(StaleBase):
            bench.propose(20, base=base, base_digest=digest)
    bench.propose(20, base=2, base_digest=D2)
