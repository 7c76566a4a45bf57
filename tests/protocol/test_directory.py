"""The directory record: deterministic, complete, and read strictly (decision 106)."""

import cbor2
import pytest
from msgspec import UNSET

from sdcpd.protocol.directory import read_directory_record, write_directory_record
from sdcpd.protocol.messages import Policy, Sampling
from sdcpd.protocol.problems import IllFormed
from tests.support.messages import DRAFTER, SESSION, VERIFIER
from tests.support.placement_world import World


def test_it_holds_what_a_restarted_router_needs() -> None:
    plan = World().machine.plan
    policy = Policy(session=SESSION, from_round=3, sampling=Sampling(temperature_milli=5))
    octets = write_directory_record(
        plan, prompt=plan.prompt, verifier=VERIFIER, epoch=4, drafter=DRAFTER, policies=[policy]
    )
    assert octets == write_directory_record(
        plan, prompt=plan.prompt, verifier=VERIFIER, epoch=4, drafter=DRAFTER, policies=[policy]
    )
    record = read_directory_record(octets)
    assert record.open == plan.opening(1, plan.prompt)
    assert (record.open.epoch, record.open.resume) == (1, UNSET)
    assert (record.verifier, record.epoch, record.drafter) == (VERIFIER, 4, DRAFTER)
    assert (record.incarnation, record.policies) == (plan.incarnation, (policy,))
    assert (record.m_init, record.speculation, record.vocabulary) == (plan.m_init, True, plan.vocabulary)


def test_its_maps_are_in_canonical_order_also_within_arrays() -> None:
    policy = Policy(session=SESSION, from_round=3, sampling=Sampling(temperature_milli=5, seed=1, top_k=2))
    octets = write_directory_record(
        World().machine.plan, prompt=(1,), verifier=VERIFIER, epoch=4, drafter=None, policies=[policy, policy]
    )
    assert octets == cbor2.dumps(cbor2.loads(octets), canonical=True)


def test_nobody_drafting_is_absent() -> None:
    octets = write_directory_record(World().machine.plan, prompt=(1,), verifier=VERIFIER, epoch=1, drafter=None)
    assert read_directory_record(octets).drafter is UNSET


@pytest.mark.parametrize("octets", [b"", b"\xa0", b"\xff", b"\xa1\x61"])
def test_what_is_no_record_is_refused(octets: bytes) -> None:
    with pytest.raises(IllFormed):
        read_directory_record(octets)
