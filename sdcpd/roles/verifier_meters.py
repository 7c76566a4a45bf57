"""What a settled round adds to the verifier's counters (conventions: the field's `spec_decode_*` stems, no rates)."""

from msgspec import UNSET

from sdcpd.protocol.commit_log import EndRecord
from sdcpd.protocol.session_values import Settled
from sdcpd.protocol.terms import Action
from sdcpd.roles.ports import Meters


def count_round(settled: Settled, meters: Meters) -> None:
    """One durable record. Positions are counted from 0, as dashboards of the field have them."""
    record = settled.record
    if isinstance(record, EndRecord):
        return
    assert record.ctl is not UNSET
    meters.count("rounds_total", kind="self_decoded" if settled.proposed is None else "proposal")
    if settled.proposed is None:
        return
    assert record.ctl.accepted is not UNSET
    meters.count("spec_decode_num_drafts_total")
    meters.count("spec_decode_num_draft_tokens_total", settled.proposed)
    meters.count("spec_decode_num_accepted_tokens_total", record.ctl.accepted)
    for position in range(record.ctl.accepted):
        meters.count("spec_decode_num_accepted_tokens_per_pos_total", position=str(position))
    if record.ctl.action in (Action.REDUCE, Action.SWITCH, Action.SELF_DECODE, Action.FAIL):
        meters.count("escalations_total", action=Action(record.ctl.action).name.lower())
