"""The router's machine for one session: open it, keep somebody decoding it, see it end (draft 6.1, 6.5.2, 6.7, 6.9).

Theory. A session has a verifier for life (failover is not built yet: a lost verifier fails the session, loudly) and,
at any time, somebody who carries it on, the *target*: a drafter, or the verifier itself (decision 110: speculation
switched off, no live permitted drafter, or speculation unprofitable at the verifier's load).

    OPENING -> NAMING -> [GATHERING -> PUBLISHING ->] ASSIGNING -> SETTLED      and from each of these back to NAMING
    any -> ENDING (the verifier says it is over; the last tokens are being read) -> ENDED

The order of 6.1 is in the transitions: only the verifier's answer to PUT drafter yields the assignment for the
drafter, with round, committed and digest copied from that answer (41). Where it states committed tokens, the
assignment waits until the output read so far reaches that length and its digest chain agrees (41), and until these
tokens are published as an object (91). Every naming takes a higher `seq` (111), so that late messages lose.

Beside this main lane run the reading of output (output_reader) and the closing (cleanup). What a drafter does wrong
costs time, never the session: it is rested or excluded and somebody else is named (drafter_choice). What the verifier
refuses for good ends the session.

Knows the fleet (who is alive, whom to prefer); refuses to know tasks, HTTP and clocks: `now` comes in. Every input
returns what to do next, in order, and none raises but `event`, when its sender is wrong.
"""

from enum import Enum
from typing import Final

from msgspec import UNSET, UnsetType

from sdcpd.protocol.cleanup import Cleanup, CleanupLane
from sdcpd.protocol.drafter_choice import DrafterChoice
from sdcpd.protocol.encoding import encode_tokens
from sdcpd.protocol.fleet import Fleet
from sdcpd.protocol.messages import Assignment, Event, Sampling, SessionState
from sdcpd.protocol.naming_order import NamingOrder
from sdcpd.protocol.output_copy import OutputCopy
from sdcpd.protocol.output_reader import OutputReader
from sdcpd.protocol.placement_values import (
    FIRST_EPOCH,
    Accepted,
    Assign,
    Ending,
    Lost,
    Moved,
    Name,
    Open,
    Outcome,
    Patience,
    Plan,
    Publish,
    Read,
    Refused,
    SetPolicy,
    passing,
    retry_after_s,
    words,
)
from sdcpd.protocol.policy_lane import PolicyLane
from sdcpd.protocol.retry_lane import Lane, Outbox, Step
from sdcpd.protocol.terms import Action, State

REPOLL_S: Final = 2.0
"""A poll for output that exists is answered at once; one that is not has been lost, and a new one is sent."""


class Phase(Enum):
    """Where the main lane of a session stands; see the module's text."""

    OPENING = "opening"
    NAMING = "naming"
    GATHERING = "gathering"
    PUBLISHING = "publishing"
    ASSIGNING = "assigning"
    SETTLED = "settled"
    ENDING = "ending"
    ENDED = "ended"


class Placement:
    """One session. `start` once; then `outcome`, `event`, `tick` and `cancel` in any order and number.

    `ending` is set when it is known how the session ended; `done` is true when nothing is left to be cleaned up.
    `target` is who carries the session on: a drafter's URI, the verifier's own (110), or None for nobody.
    `round` is the last one the verifier told of.
    """

    def __init__(self, plan: Plan, fleet: Fleet, patience: Patience) -> None:
        self.plan = plan
        self.epoch = FIRST_EPOCH
        self.ending: Ending | None = None
        self.phase = Phase.OPENING
        self.target: str | None = None
        self.round = 0
        self._fleet = fleet
        self._patience = patience
        self._outbox = Outbox(patience, plan.jitter)
        self._main: Lane[Open | Name | Publish | Assign] = Lane(self._outbox)
        self._reader = OutputReader(plan, self.epoch, self._outbox)
        self._cleanup = Cleanup(plan, fleet, self._outbox)
        self._policies = PolicyLane(plan, self._outbox)
        self._order = NamingOrder(plan.incarnation)
        self._choice = DrafterChoice(plan, fleet, patience.drafter_rest_s)
        self._state: SessionState | None = None  # last answer of the verifier
        self._target_boot: bytes | None = None
        self._named_at = 0  # committed length when the target was named
        self._assigned: str | None = None  # the drafter that may hold the latest assignment sent
        self._published: int | None = None  # the round whose tokens were published last
        self._output_wait_s = 0.0  # how long output may stand still while it is waited for ...
        self._output_due: float | None = None  # ... and until when; None while nothing waits for it
        self._repoll_at = 0.0  # when a poll under way counts as lost, while output is waited for
        self._unprofitable = False  # the verifier asked for 110 (event kind 3)
        self._decodes_alone = True  # until the answer to a 110 lacks state 3
        self._open_lost = False  # some session-open may have been carried out unanswered

    # -- what others may ask ------------------------------------------------------------------------------------

    @property
    def output(self) -> OutputCopy:
        """The tokens committed so far, as far as they were read; grows only while `ending` is None."""
        return self._reader.copy

    @property
    def seq(self) -> int:
        """The highest `seq` given out (decision 111)."""
        return self._order.latest

    @property
    def drafter(self) -> str | None:
        """The drafter named last, None while the verifier decodes alone or nobody is named."""
        return None if self.target == self.plan.verifier else self.target

    @property
    def done(self) -> bool:
        """Nothing is under way any more and nothing ever will be."""
        return self.ending is not None and self._main.action is None and self._cleanup.done

    def next_deadline(self) -> float | None:
        """When `tick` has something to do besides looking at the fleet."""
        dues = [lane.due for lane in self._lanes() if lane.due is not None]
        if self._output_due is not None:
            dues += [self._output_due, self._repoll_at]
        return min(dues, default=None)

    # -- inputs -------------------------------------------------------------------------------------------------

    def start(self, now: float) -> tuple[Step, ...]:
        """Send session-open (6.1). To this verifier only, whatever becomes of it (decision 30)."""
        assert self._outbox.calls == 0
        self._main.send(Open(verifier=self.plan.verifier, message=self.plan.opening(self.epoch)), now)
        return self._outbox.take()

    def outcome(self, call: int, outcome: Outcome, now: float) -> tuple[Step, ...]:
        """How a call ended. Outcomes of calls that were given up meanwhile change nothing."""
        if self._main.answers(call):
            self._main_outcome(outcome, now)
        elif self._reader.lane.answers(call):
            self._read_outcome(outcome, now)
        elif self._policies.lane.answers(call):
            if self._policies.outcome(outcome, now):
                self._policy_taken(now)
            elif self._policies.refused:
                self._fail("policy_refused", words(outcome), now)
        elif self._cleanup.outcome(call, outcome, now) and self.ending is not None and not self._cleanup.closing:
            self._main.clear()  # a session-open still under way no longer matters
        return self._outbox.take()

    def event(self, event: Event, now: float) -> tuple[Step, ...]:
        """The verifier reports a switch, the end of self-decoding, or the end of the session (6.5.2; 49, 83, 110).

        Raises StaleEpoch for another epoch (49) and Conflict for a `seq` never given out (111). Repeats and events
        that a newer naming has overtaken do nothing.
        """
        news = self._order.is_news(event, self.epoch, self._state)
        if news and self.ending is None and self.phase is not Phase.ENDING:
            if not isinstance(event.round, UnsetType):
                self.round = max(self.round, event.round)
            self._act_on(event, now)
        return self._outbox.take()

    def set_sampling(self, sampling: Sampling, now: float) -> tuple[Step, ...]:
        """Another sampling profile from the next round boundary on that can be had (6.6)."""
        if self.phase not in (Phase.ENDING, Phase.ENDED):
            self._policies.change(sampling, self.round, now)
        return self._outbox.take()

    def cancel(self, now: float) -> tuple[Step, ...]:
        """The client left: end the session at its verifier and drafter at once (decision 37)."""
        if self.ending is None:
            self._end(Ending(finish=Action.FAIL, reason="cancelled", cancelled=True), now)
        return self._outbox.take()

    def tick(self, now: float) -> tuple[Step, ...]:
        """Time passed or the fleet changed: judge verifier and target, look for a drafter, repeat what is due."""
        if self.ending is None:
            self._supervise(now)
        if self._output_due is not None and self._output_due <= now:
            self._fail("output_behind", "the verifier states more output than it delivers", now)
        elif self._output_due is not None and self._repoll_at <= now:
            self._repoll_at = now + REPOLL_S
            self._reader.again(now)
        for lane in self._lanes():
            lane.repeat(now)
        return self._outbox.take()

    # -- opening, naming, assigning -----------------------------------------------------------------------------

    def _main_outcome(self, outcome: Outcome, now: float) -> None:
        if self.ending is not None:
            # Only a session-open outlives its session: how it ends decides whether a 404 of DELETE is final.
            self._main.clear()
            self._cleanup.open_settled(outcome, now)
            return
        match self._main.action:
            case Open():
                self._open_outcome(outcome, now)
            case Name():
                self._name_outcome(outcome, now)
            case Publish():
                self._publish_outcome(outcome, now)
            case Assign(message=message):
                self._assign_outcome(message.drafter, outcome, now)
            case None:
                raise AssertionError("an idle lane has no outcome")

    def _open_outcome(self, outcome: Outcome, now: float) -> None:
        if isinstance(outcome, SessionState):
            self._main.clear()
            if self._note_state(outcome, now):
                self._reader.begin(now)
                self._place(None, now)
            return
        self._open_lost = self._open_lost or isinstance(outcome, Lost)
        self._retry_or_fail(outcome, self._patience.open_give_up_s, now)

    def _place(self, reason: str | None, now: float, avoid: str | None = None) -> None:
        """Choose who carries the session on and name it at the verifier. `reason` None: the first time."""
        self._main.clear()
        if self._policies.holds_back(now):
            self.phase = Phase.NAMING  # as soon as the policy is taken
            return
        self._output_due = None
        chosen = None
        if self._wants_drafter or not self._decodes_alone:
            chosen = self._choice.candidate(now, avoid=avoid, dropping=self._cleanup.dropping)
        target: str | None
        if chosen is not None:
            target, self._target_boot = chosen.uri, chosen.boot
            self._fleet.placed(chosen.uri)
        else:
            # Nobody at all (None): the verifier waits (state 2) and the fleet is looked at again with every tick.
            target, self._target_boot = (self.plan.verifier if self._decodes_alone else None), None
        if self._assigned is not None and self._assigned != target:
            self._cleanup.drop(self._assigned, now)
            self._assigned = None
        self.target = target
        if reason is not None:
            self._outbox.put(Moved(reason, target))
        if target is None:
            self.phase = Phase.SETTLED
            return
        self._named_at = len(self.output)
        self._name(target, now)

    def _name(self, target: str, now: float) -> None:
        self.phase = Phase.NAMING
        self._order.next()
        self._main.send(Name(verifier=self.plan.verifier, message=self._assignment(target)), now)

    def _policy_taken(self, now: float) -> None:
        """The verifier has the profile: name somebody if that waited for it, else tell the drafter (decision 51)."""
        if self.phase is Phase.NAMING and self._main.action is None:
            self._place(None, now)
        elif self.drafter is not None and self.phase in (Phase.ASSIGNING, Phase.SETTLED):
            self._name(self.drafter, now)

    def _name_outcome(self, outcome: Outcome, now: float) -> None:
        if isinstance(outcome, SessionState):
            self._main.clear()
            if not self._note_state(outcome, now):
                return
            self._named_at = outcome.committed
            if self.target != self.plan.verifier:
                self.phase = Phase.GATHERING
                self._gather(now)
            elif outcome.state == State.SELF_DECODING:
                self.phase = Phase.SETTLED
            else:
                self._decodes_alone = False
                self._place("self_decode_unknown", now)
        elif isinstance(outcome, Refused) and outcome.status == 410:
            self._await_end(now)
        elif isinstance(outcome, Refused) and outcome.status == 409 and self._order.catch_up(outcome.state):
            self._place("seq_overtaken", now)
        else:
            self._retry_or_fail(outcome, self._patience.name_give_up_s, now)

    def _gather(self, now: float) -> None:
        """Wait for output up to the length the verifier answered, check the chain, publish, assign (41, 91)."""
        state = self._known_state
        if len(self.output) < state.committed:
            if self._output_due is None:
                self._await_output(self._patience.gather_give_up_s, now)
            return
        self._output_due = None
        if self.output.digest_at(state.committed) != state.digest:
            self._fail("digest_mismatch", "the output read is not the prefix that the verifier states", now)
        elif state.committed == 0 or self._published == state.round:
            self._assign(now)
        else:
            self.phase = Phase.PUBLISHING
            octets = encode_tokens(self.output.tokens(0, state.committed))
            self._main.send(Publish(ref=self.plan.tokens_ref(self.epoch, state.round), octets=octets), now)

    def _publish_outcome(self, outcome: Outcome, now: float) -> None:
        if isinstance(outcome, Accepted):
            self._published = self._known_state.round
            self._assign(now)
        elif passing(outcome) and self._main.tries < self._patience.tries:
            self._main.wait(now, retry_after_s(outcome))
        else:
            self._choice.pause(now)  # without these tokens no drafter can start
            self._place("tokens_unpublished", now)

    def _assign(self, now: float) -> None:
        assert self.target is not None
        self.phase = Phase.ASSIGNING
        self._assigned = self.target
        self._main.send(Assign(message=self._assignment(self.target)), now)

    def _assign_outcome(self, drafter: str, outcome: Outcome, now: float) -> None:
        asked_s = retry_after_s(outcome)
        if isinstance(outcome, Accepted):
            self._main.clear()
            self.phase = Phase.SETTLED
        elif not passing(outcome):
            self._choice.exclude(drafter)  # it may not or cannot (44); another may
            self._assigned = None
            self._place("drafter_refused", now)
        elif asked_s is not None:
            self._choice.rest_for(drafter, asked_s, now)  # full (44)
            self._assigned = None
            self._place("drafter_overloaded", now)
        elif self._main.tries < self._patience.tries:
            self._main.wait(now)
        else:
            self._choice.rest(drafter, now)
            self._place("drafter_unreachable", now)

    # -- events and supervision ---------------------------------------------------------------------------------

    def _act_on(self, event: Event, now: float) -> None:
        if event.kind in (Action.FINISH, Action.FAIL):
            self._reader.announced = event
            self._reader.begin(now)
            self._await_end(now)
        elif self.phase is Phase.OPENING:
            pass  # the open is being repeated; its answer brings a fresh state
        elif event.kind is Action.SWITCH:
            if self.drafter is not None and event.committed <= self._named_at:
                # Not one token since it was named: naming it again at once (82) would stall the session for ever.
                self._choice.rest(self.drafter, now)
            self._place("switch", now, avoid=self.drafter)
        elif event.kind is Action.SELF_DECODE:
            self._unprofitable = event.reason == "unprofitable"
            known = event.reason in ("unprofitable", "profitable")
            self._place(str(event.reason) if known else "self_decode_end", now)

    def _supervise(self, now: float) -> None:
        """6.9 and decision 95: who is silent too long or restarted is lost; 110: who appears is used."""
        verifier = self._fleet.get(self.plan.verifier)
        if verifier is None or not self._fleet.alive(self.plan.verifier, now):
            self._fail("verifier_lost", "its status expired; failover is not built yet", now)
        elif self.plan.verifier_boot is not None and verifier.boot != self.plan.verifier_boot:
            self._fail("verifier_lost", "it restarted; failover is not built yet", now, gone=True)
        elif self.phase in (Phase.OPENING, Phase.ENDING):
            return
        elif self.drafter is not None:
            trouble = self._choice.trouble(self.drafter, self._target_boot, now)
            if trouble == "drafter_restarted":
                self._assigned = None  # the new process holds nothing to drop
            if trouble is not None:
                self._place(trouble, now)
        elif (
            self.phase is Phase.SETTLED
            and (self.target is None or self._wants_drafter)
            and self._choice.candidate(now, avoid=None, dropping=self._cleanup.dropping) is not None
        ):
            self._place("drafter_appeared", now)

    @property
    def _wants_drafter(self) -> bool:
        return self.plan.speculation and not self._unprofitable

    # -- ends ---------------------------------------------------------------------------------------------------

    def _note_state(self, state: SessionState, now: float) -> bool:
        """Take the verifier's word on where the session stands; False when there is nothing to place any more."""
        if state.session != self.plan.session or state.epoch != self.epoch:
            self._fail("verifier_breach", "it answered for another session or epoch", now)
            return False
        self._state = state
        self.round = max(self.round, state.round)
        if state.state in (State.FINISHED, State.FAILED):
            self._reader.begin(now)
            self._await_end(now)
            return False
        return True

    def _await_end(self, now: float) -> None:
        """The verifier says that the session is over: nobody is named any more, the last page tells how it ended."""
        self._main.clear()
        self.phase = Phase.ENDING
        self._await_output(self._patience.read_give_up_s, now)

    def _await_output(self, wait_s: float, now: float) -> None:
        """Output is known to exist that was not read yet: it must come, and may stand still for `wait_s` at most."""
        self._output_wait_s, self._output_due = wait_s, now + wait_s
        self._repoll_at = now + REPOLL_S
        self._reader.lane.hurry(now)

    def _read_outcome(self, outcome: Outcome, now: float) -> None:
        held = len(self.output)
        ending = self._reader.outcome(outcome, now)
        if self._output_due is not None and len(self.output) > held:
            self._output_due = now + self._output_wait_s
            self._repoll_at = now + REPOLL_S
        if ending is not None:
            self._end(ending, now)
        elif self.phase is Phase.GATHERING:
            self._gather(now)

    def _retry_or_fail(self, outcome: Outcome, give_up_s: float, now: float) -> None:
        """Decision 36: 5xx and lost answers again with the identical body; any other refusal is final."""
        tried_s = now - self._main.since
        if passing(outcome) and tried_s < give_up_s:
            self._main.wait(now, retry_after_s(outcome))
            return
        self._main.clear()
        if passing(outcome):
            code = "verifier_unreachable" if isinstance(outcome, Lost) else "verifier_overloaded"
            self._fail(code, f"gave up after {tried_s:.1f} s: {words(outcome)}", now)
        else:
            gone = isinstance(outcome, Refused) and outcome.status == 404
            lost = gone and self.phase is not Phase.OPENING
            self._fail("verifier_lost" if lost else "verifier_refused", words(outcome), now, gone=gone)

    def _fail(self, reason: str, detail: str, now: float, *, gone: bool = False) -> None:
        self._end(Ending(finish=Action.FAIL, reason=reason, detail=detail, gone=gone), now)

    def _end(self, ending: Ending, now: float) -> None:
        """The session is over for the client; what it holds elsewhere is being let go."""
        assert self.ending is None
        opening = self.phase is Phase.OPENING
        self.ending = ending
        self.phase = Phase.ENDED
        if ending.stats is not None:
            self.round = max(self.round, ending.stats.rounds)  # rounds are consecutive from 1, and this counts them
        self._output_due = None
        self._reader.lane.clear()
        self._policies.lane.clear()
        open_in_flight = opening and self._main.in_flight
        if not open_in_flight:
            self._main.clear()
        if not ending.gone and (open_in_flight or self._open_lost or not opening):
            self._cleanup.close(now, open_in_flight=open_in_flight, open_lost=opening and self._open_lost)
        else:
            self._main.clear()
        if self._assigned is not None and ending.finish is not Action.FINISH:
            # A finishing drafter learns it from its verdict; dropping it here would only race with that.
            self._cleanup.drop(self._assigned, now)

    # -- small change -------------------------------------------------------------------------------------------

    @property
    def _known_state(self) -> SessionState:
        assert self._state is not None, "the verifier answered before anything was placed"
        return self._state

    def _assignment(self, target: str) -> Assignment:
        """The assignment for `target`; where the session stands is copied from the verifier's last answer (41)."""
        state = self._known_state
        published = state.committed > 0 and self._published == state.round
        return Assignment(
            session=self.plan.session,
            epoch=self.epoch,
            contract=self.plan.contract,
            verifier=self.plan.verifier,
            drafter=target,
            prompt=self.plan.prompt,
            round=state.round,
            committed=state.committed,
            digest=state.digest,
            committed_tokens=self.plan.tokens_ref(self.epoch, state.round) if published else UNSET,
            sampling=self._policies.for_drafters(),
            m_init=self.plan.m_init,
            seq=self.seq,
        )

    def _lanes(self) -> tuple[Lane[Open | Name | Publish | Assign] | Lane[Read] | Lane[SetPolicy] | CleanupLane, ...]:
        return (self._main, self._reader.lane, self._policies.lane, *self._cleanup.lanes())
