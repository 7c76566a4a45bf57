"""The router's machine for one session: open it, keep somebody decoding it, see it end (draft 6.1, 6.5.2, 6.7, 6.9).

Theory. A session has one verifier at a time and, at any time, somebody who carries it on, the *target*: a drafter, or
the verifier itself (decision 110: speculation switched off, no live permitted drafter, or speculation unprofitable at
the verifier's load).

    OPENING -> NAMING -> [GATHERING -> PUBLISHING ->] ASSIGNING -> SETTLED      and from each of these back to NAMING
    any -> ENDING (the verifier says it is over; the last tokens are being read) -> ENDED
    any -> RECOVERING (the verifier is lost: failover.py takes the session from it) -> OPENING at the next epoch

The order of 6.1 is in the transitions: the session is opened (opening), somebody is chosen (drafter_choice), named at
the verifier and assigned (naming).

Beside this main lane run the reading of output (output_reader), the renewals of a prompt that goes by reference
(prompt_object) and the closing (cleanup). What a drafter does wrong
costs time, never the session: it is rested or excluded and somebody else is named (drafter_choice). A verifier is lost
when its status expires, when another process answers in its place, when it does not know the session or serves it no
longer (95), or when an operator says so; a false alarm is safe. What a verifier refuses for good ends the session.

Knows the fleet (who is alive, whom to prefer); refuses to know tasks, HTTP and clocks: `now` comes in. Every input
returns what to do next, in order, and none raises but `event`, when its sender is wrong.
"""

from msgspec import UnsetType

from sdcpd.protocol.assigning import Assignments
from sdcpd.protocol.cleanup import Cleanup
from sdcpd.protocol.drafter_choice import DrafterChoice
from sdcpd.protocol.failover import Adopted, Failover, GaveUp, Over, Result, Resumable, ending_of
from sdcpd.protocol.fleet import Fleet
from sdcpd.protocol.messages import Event, Sampling, SessionState
from sdcpd.protocol.naming import Another, Gone, Naming, Progress, Unnamed, Yielded
from sdcpd.protocol.opening import Opening, Overtaken, Unopened
from sdcpd.protocol.output_copy import OutputCopy
from sdcpd.protocol.output_reader import OutputReader, Unserved, unserved_kind
from sdcpd.protocol.placement_values import (
    FIRST_EPOCH,
    Assign,
    Ending,
    FailingOver,
    Moved,
    Name,
    Open,
    Outcome,
    Patience,
    Phase,
    Plan,
    Publish,
    ReadRecord,
    WriteRecord,
    passing,
    words,
)
from sdcpd.protocol.policy_lane import PolicyLane
from sdcpd.protocol.prompt_object import PromptObject
from sdcpd.protocol.retry_lane import AnyLane, Lane, MainLane, Outbox, Step
from sdcpd.protocol.terms import Action, State
from sdcpd.protocol.verifier_watch import VerifierWatch


class Placement:
    """One session. `start` once; then `outcome`, `event`, `tick`, `fail_over`, `switch` and `cancel` in any order.

    `verifier` serves the session at `epoch`, is asked to open it, or was lost while it is RECOVERING. `ending`: how it
    ended, once known; `done`: nothing is left to be cleaned up. `target` carries the session on: a drafter's URI, the
    verifier's own (110), or None. `round` is the last one told of. `speculates` may be set; `tick` carries it out.
    """

    def __init__(self, plan: Plan, fleet: Fleet, patience: Patience) -> None:
        self.plan = plan
        self.epoch = FIRST_EPOCH
        self.verifier = plan.verifier
        self.ending: Ending | None = None
        self.phase = Phase.OPENING
        self.target: str | None = None
        self.round = 0
        self.speculates = plan.speculation
        self._fleet = fleet
        self._patience = patience
        self._outbox = Outbox(patience, plan.jitter)
        self._main: MainLane = Lane(self._outbox)
        self._reader = OutputReader(plan, self.epoch, self._outbox)
        self._policies = PolicyLane(plan, self._outbox)
        self._prompt = PromptObject(plan, self._main, patience, self._outbox)
        self._opening = Opening(plan, self._main, patience, self._policies, self._prompt)
        self._failover = Failover(plan, fleet, patience, self._outbox, self._reader.copy)
        self._cleanup = Cleanup(plan, fleet, self._outbox)
        self._choice = DrafterChoice(plan, fleet, patience)
        self._assignments = Assignments(plan, self._policies, self._prompt)
        self._naming = Naming(plan, self._main, patience, self._reader, self._assignments, self._choice, self._prompt)
        self._watch = VerifierWatch(fleet, plan.verifier, plan.verifier_boot)
        self._target_boot: bytes | None = None
        self._unprofitable = False  # the verifier asked for 110 (event kind 3)
        self._follows = False  # another router cares for the session: it is read, and nobody is named (89)

    @property
    def output(self) -> OutputCopy:
        """The tokens committed so far, as far as they were read; grows only while `ending` is None."""
        return self._reader.copy

    @property
    def seq(self) -> int:
        """The highest `seq` given out (decision 111)."""
        return self._naming.order.latest

    @property
    def drafter(self) -> str | None:
        """The drafter named last, None while the verifier decodes alone or nobody is named."""
        return None if self.target == self.verifier else self.target

    @property
    def done(self) -> bool:
        """Nothing is under way any more and nothing ever will be."""
        return self.ending is not None and self._main.action is None and self._cleanup.done

    def next_deadline(self) -> float | None:
        """When `tick` has something to do besides looking at the fleet."""
        dues = [lane.due for lane in self._lanes() if lane.due is not None]
        others = (*self._reader.next_deadlines(), self._failover.next_deadline(), self._cleanup.next_deadline())
        dues += [due for due in others if due is not None]
        return min(dues, default=None)

    def start(self, now: float) -> tuple[Step, ...]:
        """Send session-open (6.1). At this epoch to this verifier only, whatever becomes of it (decision 30)."""
        assert self._outbox.calls == 0
        self._opening.first(now)
        return self._outbox.take()

    def adopt(self, epoch: int, tag: str, now: float) -> tuple[Step, ...]:
        """Instead of `start`: take the session up where the directory says that it is, at `epoch` (106). `tag` is that
        of its record, in which the incarnation was raised."""
        if epoch > FIRST_EPOCH:
            self._reader.move(self.verifier, epoch)
        self.epoch, self._opening.tag = epoch, tag
        self.phase = Phase.RECOVERING
        self._prompt.renew(now)
        self._failover.adopt(epoch, self.verifier, now)
        return self._outbox.take()

    def outcome(self, call: int, outcome: Outcome, now: float) -> tuple[Step, ...]:
        """How a call ended. Outcomes of calls that were given up meanwhile change nothing."""
        if self._main.answers(call):
            self._main_outcome(outcome, now)
        elif self._reader.lane.answers(call):
            self._read_outcome(outcome, now)
        elif self._failover.lane.answers(call):
            self._recover(self._failover.outcome(outcome, now), now)
        elif self._prompt.lane.answers(call):
            self._prompt.renewed(outcome, now)
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

        Raises StaleEpoch (49), and Conflict for a `seq` never given out (111). Repeats and overtaken ones do nothing.
        """
        news = self._naming.order.is_news(event, self.epoch, self._assignments.state)
        if news and self.ending is None and self.phase not in (Phase.ENDING, Phase.RECOVERING):
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

    def fail_over(self, now: float, to: str | None = None) -> tuple[Step, ...]:
        """An operator wants another verifier for it, `to` where that lives. On the same path as a lost one (6.9)."""
        if self.ending is None:
            self._fail_over("operator", now, to=to)
        return self._outbox.take()

    def switch(self, now: float) -> tuple[Step, ...]:
        """An operator wants another drafter for it, the same one only for want of another (6.5.2, decision 82)."""
        if self.ending is None and self.phase not in (Phase.OPENING, Phase.RECOVERING, Phase.ENDING):
            self._place("operator", now, avoid=self.drafter)
        return self._outbox.take()

    def tick(self, now: float) -> tuple[Step, ...]:
        """Time passed or the fleet changed: judge verifier and target, look for a drafter, repeat what is due."""
        if self.ending is None:
            self._supervise(now)
        self._recover(self._failover.tick(now), now)
        if self._reader.tick(now):
            self._fail("output_behind", "the verifier states more output than it delivers", now)
        self._cleanup.tick(now)
        for lane in self._lanes():
            lane.repeat(now)
        return self._outbox.take()

    def _main_outcome(self, outcome: Outcome, now: float) -> None:
        if self.ending is not None:
            # Only a session-open outlives its session: how it ends decides whether a 404 of DELETE is final.
            self._main.clear()
            self._cleanup.open_settled(outcome, now)
            return
        match self._main.action:
            case WriteRecord() | ReadRecord() | Open():
                self._open_outcome(outcome, now)
            case Name():
                self._name_outcome(outcome, now)
            case Publish() if self.phase is Phase.OPENING:
                self._open_outcome(outcome, now)
            case Publish():
                self._go_on(self._naming.published(outcome, now), now)
            case Assign(message=message):
                self._go_on(self._naming.taken(message.drafter, outcome, now), now)
            case None:  # pragma: no cover - `answers` is false for an idle lane
                raise AssertionError("an idle lane has no outcome")

    def _open_outcome(self, outcome: Outcome, now: float) -> None:
        match self._opening.outcome(outcome, now, elsewhere=self._failover.elsewhere(now, self.verifier)):
            case SessionState() as state:
                if self._note_state(state, now):
                    self._reader.begin(now)
                    self._place(None, now)
            case Unopened():
                self._fail_over("unopened", now)
            case Overtaken():
                self._failover.yields = True
                self._fail_over("overtaken", now)
            case Ending() as ending:
                self._end(ending, now)
            case None:  # pragma: no branch
                pass

    def _place(self, reason: str | None, now: float, avoid: str | None = None) -> None:
        """Choose who carries the session on and name it at the verifier. `reason` None: the first time."""
        self._main.clear()
        self._reader.await_nothing()
        if self._follows:
            self.phase, self.target = Phase.SETTLED, None
            return
        if self._policies.holds_back(now):
            self.phase = Phase.NAMING  # as soon as the policy is taken
            return
        # Nobody at all (None): the verifier waits (state 2) and the fleet is looked at again with every tick.
        chosen, target, self._target_boot = None, self.verifier if self._naming.may_self_decode else None, None
        if self._wants_drafter or not self._naming.may_self_decode:
            chosen = self._choice.candidate(now, avoid=avoid, dropping=self._cleanup.dropping)
        if chosen is not None:
            target, self._target_boot = chosen.uri, chosen.boot
            self._fleet.placed(chosen.uri)
        if self._naming.assigned is not None and self._naming.assigned != target:
            self._cleanup.drop(self._naming.assigned, now)
            self._naming.assigned = None
        self.target = target
        if reason is not None:
            self._outbox.put(Moved(reason, target))
        if target is None:
            self.phase = Phase.SETTLED
            return
        self.phase = self._naming.name(self.verifier, target, now)

    def _policy_taken(self, now: float) -> None:
        """The verifier has the profile: name somebody if that waited for it, else tell the drafter (decision 51)."""
        if self.phase is Phase.NAMING and self._main.action is None:
            self._place(None, now)
        elif self.drafter is not None and self.phase in (Phase.ASSIGNING, Phase.SETTLED):
            self.phase = self._naming.name_again(now)

    def _name_outcome(self, outcome: Outcome, now: float) -> None:
        if not isinstance(outcome, SessionState):
            self._go_on(self._naming.not_answered(outcome, now), now)
            return
        self._main.clear()
        if self._note_state(outcome, now):
            self._go_on(self._naming.answered(outcome, now), now)

    def _go_on(self, progress: Progress, now: float) -> None:
        """How far the naming has come, or what is to be done about it."""
        match progress:
            case Phase():
                self.phase = progress
            case Another(reason=reason):
                self._place(reason, now)
            case Yielded():
                self._follows = self._failover.yields = True
                self._place(None, now)
            case Gone():
                self._await_end(now)
            case Unnamed(outcome=outcome):
                kind = "unreachable" if passing(outcome) else unserved_kind(outcome)
                if kind in ("unreachable", "forgotten", "fenced"):
                    self._fail_over(kind, now)
                else:
                    self._fail("verifier_refused", words(outcome), now)
            case Ending() as ending:
                self._end(ending, now)
            case None:  # pragma: no branch
                pass

    def _act_on(self, event: Event, now: float) -> None:
        if event.kind in (Action.FINISH, Action.FAIL):
            self._reader.announced = event
            self._reader.begin(now)
            self._await_end(now)
        elif self.phase is Phase.OPENING:
            pass  # the open is being repeated; its answer brings a fresh state
        elif event.kind is Action.SWITCH:
            if self.drafter is not None and event.committed <= self._naming.named_at:
                # Not one token since it was named: naming it again at once (82) would stall the session for ever.
                self._choice.rest(self.drafter, now)
            self._place("switch", now, avoid=self.drafter)
        elif event.kind is Action.SELF_DECODE:
            self._unprofitable = event.reason == "unprofitable"
            known = event.reason in ("unprofitable", "profitable")
            self._place(str(event.reason) if known else "self_decode_end", now)

    def _supervise(self, now: float) -> None:
        """6.9 and decision 95: who is silent too long or restarted is lost; 110: who appears is used."""
        lost = None if self.phase is Phase.RECOVERING else self._watch.trouble(now)
        if lost is not None:
            self._fail_over(lost, now)
        elif self.phase in (Phase.OPENING, Phase.ENDING, Phase.RECOVERING):
            return
        elif self.drafter is not None:
            off = self._naming.may_self_decode and not self.speculates
            trouble = "speculation_off" if off else self._choice.trouble(self.drafter, self._target_boot, now)
            if trouble == "drafter_restarted":
                self._naming.assigned = None  # the new process holds nothing to drop
            if trouble is not None:
                self._place(trouble, now)
        elif (
            self.phase is Phase.SETTLED
            and not self._follows
            and (self.target is None or self._wants_drafter)
            and self._choice.candidate(now, avoid=None, dropping=self._cleanup.dropping) is not None
        ):
            self._place("drafter_appeared", now)

    @property
    def _wants_drafter(self) -> bool:
        return self.speculates and not self._unprofitable

    def _fail_over(self, kind: str, now: float, to: str | None = None) -> None:
        """The verifier is lost or taken for lost: nothing it says counts any more, its log decides (6.9)."""
        self._outbox.put(FailingOver(kind, self.verifier, self.epoch))
        self.phase, self.target = Phase.RECOVERING, None
        self._main.clear()
        self._reader.leave()
        self._policies.lane.clear()
        avoid = None if kind in ("restarted", "moved") else self.verifier  # these are as good as any
        self._failover.begin(self.epoch, now, avoid=avoid, to=to)

    def _recover(self, result: Result | None, now: float) -> None:
        match result:
            case Resumable(verifier=verifier, boot=boot, epoch=epoch, resume=resume, sampling=sampling):
                self._watch.moved(verifier, boot, now, unsure=verifier == self.verifier)
                self.verifier, self.epoch = verifier, epoch
                self.round = max(self.round, resume.round)
                self._assignments.moved(resume.round)
                self._policies.reopened(verifier, resume.round, sampling)
                self._unprofitable, self._naming.may_self_decode, self._follows = False, True, False
                self._reader.move(verifier, epoch)
                self.phase = Phase.OPENING
                self._opening.resume(result, now)
            case Adopted(verifier=verifier, state=state, follow=follow, sampling=sampling):
                self._watch.found(verifier, now)
                if not follow:
                    self._policies.found(verifier, state.round, sampling)
                self.verifier = verifier
                if state.epoch > self.epoch or verifier != self._reader.verifier:
                    # The same epoch elsewhere: this router was about to open it when the other one did.
                    self.epoch = state.epoch
                    self._reader.move(verifier, state.epoch)
                self._follows = follow
                if self._note_state(state, now):
                    self._reader.begin(now)
                    self._place(None, now)
            case Over() | GaveUp():
                self._end(ending_of(result), now)
            case None:  # pragma: no branch
                pass

    def _note_state(self, state: SessionState, now: float) -> bool:
        """Take the verifier's word on where the session stands; False when there is nothing to place any more."""
        if state.session != self.plan.session or state.epoch != self.epoch:
            self._fail("verifier_breach", "it answered for another session or epoch", now)
            return False
        self._assignments.state = state
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
        self._reader.await_more(self._patience.read_give_up_s, now)

    def _read_outcome(self, outcome: Outcome, now: float) -> None:
        ending = self._reader.outcome(outcome, now)
        if isinstance(ending, Unserved):
            self._fail_over(ending.kind, now)
        elif ending is not None:
            self._end(ending, now)
        elif self.phase is Phase.GATHERING:
            self._go_on(self._naming.gather(now), now)

    def _fail(self, reason: str, detail: str, now: float) -> None:
        self._end(Ending(finish=Action.FAIL, reason=reason, detail=detail), now)

    def _end(self, ending: Ending, now: float) -> None:
        """The session is over for the client; what it holds elsewhere is being let go. A finishing drafter learns it
        from its verdict: dropping it here would only race with that."""
        assert self.ending is None
        opening, recovering = self.phase is Phase.OPENING, self.phase is Phase.RECOVERING
        gone = ending.gone or self._follows or (recovering and not self._watch.alive(now))
        self.ending, self.phase = ending, Phase.ENDED
        if ending.stats is not None:
            self.round = max(self.round, ending.stats.rounds)  # rounds are consecutive from 1, and this counts them
        self._reader.leave()
        self._failover.stop()
        self._policies.lane.clear()
        self._prompt.lane.clear()
        open_in_flight = self._main.in_flight and isinstance(self._main.action, Open)
        open_lost = opening and self._opening.lost
        reason = ending.reason or "failed"
        if closes := not gone and (open_in_flight or self._opening.lost or not opening):
            self._cleanup.close(
                self.verifier, self.epoch, reason, now, open_in_flight=open_in_flight, open_lost=open_lost
            )
        elif recovering and ending.cancelled and not self._follows and not ending.gone:
            self._cleanup.close_log(self.epoch, reason, now)
        if not (closes and open_in_flight):
            self._main.clear()
        if self._naming.assigned is not None and ending.finish is not Action.FINISH:
            self._cleanup.drop(self._naming.assigned, now)

    def _lanes(self) -> tuple[AnyLane, ...]:
        beside = (self._reader.lane, self._failover.lane, self._prompt.lane, self._policies.lane)
        return (self._main, *beside, *self._cleanup.lanes())
