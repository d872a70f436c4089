"""The protocol of a participant: decides what comes next, without I/O, clock or threads.

    Protocol(chance).handle(event) -> actions

An adapter carries out the actions (actions.py) in their order and hands back what comes of them as
events (events.py). The same events with the same chance give the same actions, so a recorded list
replays any failure.

Two things go on side by side:

- contact: rendezvous until accepted, then heartbeats for as long as the session lasts. Their
  answers, and the messages of a Watch stream in between, are the advertisement: the round to train
  now.
- work: one piece at a time. BeginRound asks for the assignment, Train makes a result, HandIn
  delivers it. Whatever goes wrong, `_work` decides the next step from three things alone: the
  latest advertisement, the result that is held, and the rounds that are done.

The coordinator may ask again for a result that it accepted, if its stored copy is damaged. The
participant then begins the round anew, and the adapter uses the copy on its disk if it has one.

A result may have taken hours. It is kept until the coordinator has accepted it (HandedIn,
update_accepted) or refuses it (the round is over, the update invalid), until another round is to be
trained, or until the session is another one. While a result is held its round is not trained again.
An adapter that keeps results on disk begins with the kept one, as Held.

With `serve` the end of a session is not the end of the participant: it drops what it holds, goes on
with its heartbeats, and joins the next session as soon as the coordinator has one. A training that
fails is reported, and is the end of its round. The latter holds in a study, too, of whose sessions
the coordinator tells the end of the last one alone.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import assert_never

from xain_foundation.exit_statuses import (
    EXIT_FAILED,
    EXIT_NO_BETTER,
    EXIT_NOTHING_COUNTED,
    EXIT_OK,
)
from xain_foundation.net.backoff import Backoff
from xain_participant.sdk import actions as a
from xain_participant.sdk import events as e
from xain_participant.sdk.values import Call, State, Timer
from xain_participant.wire.refusal_kinds import RefusalKind, kind_of
from xain_wire.fl.refusals_pb2 import RefusalReason
from xain_wire.metadata import COMPLETED

MIN_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
DEFAULT_HEARTBEAT_INTERVAL_S = 10.0

# A heartbeat comes earlier by at most this share of the interval.
HEARTBEAT_JITTER = 0.25

# A participant that is asked to wait comes later by at most this share of the time: participants
# that were all told the same time would come at once.
RETRY_JITTER = 0.25

# The longest pause between two attempts of a joined participant to reach its coordinator, unless
# the coordinator asks for more. A restarted coordinator is found within this time.
MAX_RECONNECT_S = 2.0

# Number of rounds remembered as done. A few suffice: an advertisement can be late only by the
# rounds that happen while it travels.
NUM_DONE_KEPT = 256

# Attempts at one round whose updates are refused as invalid. After three in a row a coordinator
# selects others for some rounds, unless it is configured otherwise, and then takes a better update:
# so the participant stays. One that is asked for the same round once more is needed there, and
# cannot help. It leaves, so that the coordinator waits for another participant.
MAX_INVALID = 4

# The time that an update which is being sent has for its answer when the session is finished.
FINISHING_S = 2.0


def _is_same_round(before: e.Advertised | None, now: e.Advertised) -> bool:
    """Whether two advertisements are of the same state, round and attempt."""
    if before is None or before.attempt != now.attempt:
        return False
    return (before.state, before.round) == (now.state, now.round)


def jittered(chance: Random, retry_after_s: float) -> float:
    """Time to wait when the coordinator asks for retry_after_s: up to a quarter longer, at
    random."""
    return chance.uniform(retry_after_s, (1.0 + RETRY_JITTER) * retry_after_s)


class _Contact(Enum):
    JOINING = auto()
    JOINED = auto()
    EXITED = auto()


@dataclass(slots=True)
class _Busy:
    """The piece of work that the adapter does now. void: it belongs to a session that is gone, or
    to an attempt at a round that is over.
    saving: its result is being written to the disk."""

    call: Call
    round: int
    void: bool = False
    saving: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """A result on the disk that an earlier process has left. session_id: not empty.
    is_training: as in Trained."""

    session_id: str
    round: int
    is_training: bool = True


class Protocol:
    """The decisions of one participant, from Started to Exit.

    chance: spreads retries over time, so that a fleet does not come back at the same instant.
    serve: stay after the end of a session, and take part in the next one.
    """

    def __init__(self, chance: Random, held: Held | None = None, *, serve: bool = False) -> None:
        self._chance = chance
        self._serve = serve
        self._is_studied = False  # whether the session is one of a study
        self._out: list[a.Action] = []

        self._contact = _Contact.JOINING
        self._contact_backoff = Backoff(MIN_BACKOFF_S, MAX_BACKOFF_S)
        self._heartbeat_interval_s = DEFAULT_HEARTBEAT_INTERVAL_S
        self._reconnect_spread_s = 0.0
        self._has_settled = False  # its heartbeats come at moments of their own
        self._watching = False
        self._session_id = held.session_id if held is not None else ""
        self._previous_session_id = ""
        self._finishing = False
        self._cause = ""  # why the session is finished
        self._no_better = ""  # why the model of the finished session is no better than a constant
        self._has_counted = False  # what we have trained, as far as is known
        self._was_asked_to_wait = False

        self._advertised: e.Advertised | None = None
        self._held = held.round if held is not None else None
        self._is_durable = held is not None  # what is held
        # Round of the latest result if that was not trained: initial weights, or an evaluation.
        self._untrained = held.round if held is not None and not held.is_training else None
        self._has_trained = held is not None and held.is_training  # a result, as far as is known
        self._accepted: int | None = None  # round of a result whose copy on the disk stays
        self._done: deque[int] = deque(maxlen=NUM_DONE_KEPT)
        self._invalid: tuple[int, int] = (-1, 0)  # round, updates of it that were refused
        self._attempt: tuple[int, int] = (-1, 0)  # round, and the latest attempt of its group
        self._broken: int | None = None  # round whose process group broke, to be reported
        self._busy: _Busy | None = None
        self._last_round = -1
        self._work_backoff = Backoff(MIN_BACKOFF_S, MAX_BACKOFF_S)
        self._backing_off = False
        self._was_away = False  # the coordinator, since its last advertisement

    @property
    def round(self) -> int:
        """The last round that was begun; -1 before the first."""
        return self._last_round

    @property
    def is_busy(self) -> bool:
        """Whether a piece of work is under way, maybe one of a session that is gone."""
        return self._busy is not None

    @property
    def session_id(self) -> str:
        """The participant's session, or that of the result that it holds; empty if unknown."""
        return self._session_id

    def handle(self, event: e.Event) -> tuple[a.Action, ...]:
        """Take an event, and return the actions that follow; none after Exit."""
        if self._contact is _Contact.EXITED:
            return ()
        self._on(event)
        actions, self._out = tuple(self._out), []
        return actions

    def _on(self, event: e.Event) -> None:
        """Add the actions that follow from an event."""
        match event:
            case e.Started():
                self._out.append(a.SetTimer(Timer.CONTACT, 0.0))
            case e.TimerFired(timer):
                if timer is Timer.CONTACT:
                    self._make_contact()
                else:
                    self._backing_off = False
                    self._go_on()
            case e.Joined():
                self._on_joined(event)
            case e.AskedToWait(retry_after_s):
                self._was_asked_to_wait = True
                self._set_contact(
                    jittered(self._chance, retry_after_s)
                    if retry_after_s
                    else self._backoff_after_contact()
                )
            case e.Advertised():
                self._on_advertised(event)
            case e.Saving():
                if self._busy is not None:
                    self._busy.saving = True
            case (
                e.Assigned()
                | e.Trained()
                | e.GroupBroken()
                | e.Reported()
                | e.HandedIn()
                | e.TrainingFailed()
            ):
                self._on_outcome(event)
            case e.RefusedBy():
                self._on_refused(event)
            case e.ConnectionLost():
                # All participants notice at the same instant, so each waits a little, by chance.
                # Among thousands the wait is longer, or connections would take all of the
                # coordinator's time.
                self._was_away = True
                if self._contact is _Contact.JOINED:
                    self._has_settled = False
                    self._set_contact(self._spread(MIN_BACKOFF_S))
            case e.StopRequested() if self._finishing:
                self._exit_finished()
            case e.StopRequested(code):
                # A participant that says goodbye is replaced. One that comes back with its result
                # before the lease is over is still selected, and its result counts.
                if self._accepted is not None:
                    self._drop("it is accepted, and its sender leaves")
                if not self._comes_back_with_a_result:
                    self._out.append(a.Leave())
                self._exit(code, "asked to stop")
            case _:
                assert_never(event)

    @property
    def _comes_back_with_a_result(self) -> bool:
        """Whether the next process of the participant will start with a result on disk, as far as
        is known."""
        if self._busy is not None and self._busy.saving and not self._busy.void:
            return True
        return self._held is not None and self._is_durable

    # --- contact ---

    def _make_contact(self) -> None:
        """Send a rendezvous, or a heartbeat and set the timer of the next."""
        if self._contact is _Contact.JOINING:
            self._out.append(a.Rendezvous())
            return
        # Counted from when it is sent: the lease runs on while the answer is on its way.
        # Earlier by chance, since participants that joined together would send heartbeats together
        # for ever. The first heartbeat comes at any moment of the interval, to spread a fleet.
        whole = self._heartbeat_interval_s
        shortest = (1.0 - HEARTBEAT_JITTER) * whole if self._has_settled else 0.0
        self._has_settled = True
        self._set_contact(self._chance.uniform(shortest, whole))
        self._out.append(a.SendHeartbeat(self._busy is not None, self._last_round))

    def _on_joined(self, event: e.Joined) -> None:
        """Begin with the session that let us in: its heartbeats, and the Watch stream if there is
        none."""
        if event.session_id != self._session_id:
            self._forget_session(event.session_id)
        self._is_studied = event.stays
        self._contact = _Contact.JOINED
        self._has_settled = False
        self._heartbeat_interval_s = event.heartbeat_interval_s or DEFAULT_HEARTBEAT_INTERVAL_S
        self._spread_reconnects(event.reconnect_spread_s)
        if not self._watching:
            self._watching = True
            self._out.append(a.StartWatch())
        self._set_contact(0.0)  # a heartbeat, to learn the state

    def _on_advertised(self, event: e.Advertised) -> None:
        """Take what the coordinator says of the session, unless it is late: accepted and damaged
        updates, the end, a new session, a round to work for."""
        if event.session_id and event.session_id == self._previous_session_id:
            return  # late: said by a coordinator that has been replaced meanwhile
        if event.state is State.FINISHED and not self._serve:
            if event.rounds_contributed is not None:
                # The coordinator knows of an earlier process of this participant.
                # In a study another session may have counted that this process has been in.
                counted_before = self._has_counted and self._is_studied
                self._has_counted = counted_before or event.rounds_contributed > 0
            self._no_better = event.no_better
            self._on_finished(event.cause)
            return
        if self._contact is not _Contact.JOINED:
            return  # an unregistered client sees STANDBY in every round
        if event.session_id and event.session_id != self._session_id:
            self._forget_session(event.session_id)
            self._rejoin()
            return
        if not self._meet(event.round, event.attempt):
            return  # late: the round has started again since
        # The timer stays as it is: what a Watch stream tells does not renew the lease.
        before, self._advertised = self._advertised, event
        is_back = self._was_away or self._contact_backoff.has_failed
        self._was_away = self._was_asked_to_wait = False
        self._contact_backoff.reset()
        if event.reconnect_spread_s is not None:
            self._spread_reconnects(event.reconnect_spread_s)
        if event.update_accepted:
            self._accept(event.round, "it is accepted")
        elif event.update_damaged and event.round in self._done and self._busy is None:
            self._done.remove(event.round)
        if self._accepted not in (None, event.round):
            self._drop("its round is over")
        if event.state is State.ROUND and (is_back or not _is_same_round(before, event)):
            # The coordinator is back, or the round is open only now: no reason to wait any longer.
            # The same advertisement once more says nothing of what made us wait, such as a full
            # disk: a heartbeat must not send the update again.
            self._backing_off = False
        if event.state is State.FINISHED:
            self._stay()
        self._begin_next()

    def _meet(self, round_: int, attempt: int) -> bool:
        """Note the attempt at a round that a process group trains. A new attempt starts the round
        again and drops the result of the attempt before.

        Returns whether no later attempt is known.
        """
        if not attempt or self._attempt == (round_, attempt):
            return True
        if (round_, attempt) < self._attempt:
            return False
        is_again, self._attempt = self._attempt[0] == round_, (round_, attempt)
        if not is_again:
            return True
        self._broken = None
        if self._held == round_:
            self._drop("its round starts again")
        if round_ in self._done:
            self._done.remove(round_)
        if self._busy is not None and self._busy.call is not Call.BEGIN_ROUND:
            self._busy.void = True
            if self._busy.call is Call.TRAIN:
                self._out.append(a.EndAttempt(round_, attempt))
        return True

    def _on_finished(self, cause: str) -> None:
        """Exit, once an update that is being handed in has its answer, or after FINISHING_S."""
        self._cause = cause
        # Often it is our own update that finishes the session. Its acknowledgement is on its way.
        if self._busy is not None and self._busy.call is Call.HAND_IN:
            if not self._finishing:
                self._finishing = True
                self._out.append(a.SetTimer(Timer.WORK, FINISHING_S))
            return
        self._exit_finished()

    def _stay(self) -> None:
        """Drop the work of a finished session and wait for the next one. An update that is being
        sent gets its answer first."""
        if self._busy is None:
            self._drop("the session is finished")
        elif self._busy.call is not Call.HAND_IN:
            self._busy.void = True

    def _rejoin(self) -> None:
        """Rendezvous again. A result that is held stays, and so does work that is under way."""
        if self._contact is _Contact.JOINING:
            return
        self._contact = _Contact.JOINING
        self._advertised = None  # it was meant for a member
        self._set_contact(self._backoff_after_contact())

    def _forget_session(self, session_id: str) -> None:
        """Drop round numbers and results of a session that is gone: neither fits another
        session."""
        if self._session_id:
            self._previous_session_id = self._session_id
        self._session_id = session_id
        self._drop("it belongs to another session")
        self._done.clear()
        self._invalid = (-1, 0)
        self._attempt, self._broken = (-1, 0), None
        self._untrained, self._has_trained = None, False
        self._advertised = None
        if self._busy is not None:
            self._busy.void = True

    # --- work ---

    def _begin_next(self) -> None:
        """Begin the next piece of work if the state calls for one: ask, train, hand in."""
        advertised = self._advertised
        if self._busy is not None or self._backing_off or self._finishing:
            return
        if self._broken is not None:
            self._begin(Call.REPORT, self._broken)
            return
        if advertised is None or advertised.state is not State.ROUND:
            return
        round_ = advertised.round
        if self._held == round_:
            self._begin(Call.HAND_IN, round_)
        elif round_ not in self._done:
            self._begin(Call.BEGIN_ROUND, round_)

    def _begin(self, call: Call, round_: int) -> None:
        """Begin a piece of work for a round: add its action, and be busy until its outcome
        comes."""
        assert self._busy is None, f"{call} while {self._busy} goes on"
        self._busy = _Busy(call, round_)
        # A session goes forward. News of an earlier round were long on their way, and the work that
        # came with them is done; what is true now, only an answer can tell.
        is_old = call is Call.BEGIN_ROUND and round_ < self._last_round
        is_damaged = self._advertised is not None and self._advertised.update_damaged
        if not is_old:
            self._last_round = round_
        match call:
            case Call.BEGIN_ROUND:
                self._out.append(a.BeginRound(round_, ask=is_old or is_damaged))
            case Call.TRAIN:
                assert self._held is None, f"round {self._held} would be lost"
                self._out.append(a.Train(round_))
            case Call.HAND_IN:
                assert self._held == round_, f"holding {self._held}, not {round_}"
                self._out.append(a.HandIn(round_))
            case Call.REPORT:
                self._out.append(a.ReportGroupBroken(round_))
            case _:
                raise AssertionError(f"{call} is not work")

    def _on_outcome(
        self,
        event: e.Assigned | e.Trained | e.GroupBroken | e.Reported | e.HandedIn | e.TrainingFailed,
    ) -> None:
        """Go on after a piece of work is done; the outcome of void work is dropped."""
        busy, self._busy = self._busy, None
        if busy is None:
            return
        if busy.void:
            if isinstance(event, e.Trained):
                self._out.append(a.Drop(event.round, "its session or attempt is over"))
            self._begin_next()
            return
        match event:
            case e.Assigned(round_, update_accepted, attempt):
                if self._meet(round_, attempt):
                    self._on_assigned(round_, update_accepted)
                else:
                    self._back_off()
            case e.GroupBroken(round_):
                self._broken = round_
                self._begin_next()
            case e.Reported(round_):
                self._work_backoff.reset()
                self._broken = None
                self._note_over(round_, "its process group broke")
                self._begin_next()
            case e.Trained(round_, is_durable, is_training):
                self._work_backoff.reset()
                self._untrained = None if is_training else round_
                self._has_trained = self._has_trained or is_training
                self._held, self._accepted = round_, None
                self._is_durable = is_durable
                if round_ in self._done:
                    self._drop("its round is over")
                self._begin_next()
            case e.HandedIn(round_):
                self._work_backoff.reset()
                self._accept(round_, "it is handed in")
                self._go_on()
            case e.TrainingFailed(round_, message, failure):
                self._out.append(a.ReportFailure(round_, failure))
                if self._serve or self._is_studied:  # the next session may ask for what can be done
                    self._work_backoff.reset()
                    self._note_over(round_, "its training failed")
                    self._begin_next()
                    return
                self._out.append(a.Leave())
                self._exit(EXIT_FAILED, f"training of round {round_} failed: {message}")

    def _on_assigned(self, round_: int, update_accepted: bool) -> None:
        """Hand in the result of the assigned round, or train it, unless that is done."""
        if update_accepted:
            self._accept(round_, "it is accepted")
        if self._held == round_:
            self._begin(Call.HAND_IN, round_)
        elif round_ in self._done:
            # The advertisement is older or newer than the answer; asking at once might loop.
            self._back_off()
        else:
            if self._accepted != round_:
                self._drop(f"round {round_} is open")
            self._begin(Call.TRAIN, round_)

    def _accept(self, round_: int, why: str) -> None:
        """Note that the coordinator has the update of this round. It may ask again if its stored
        copy gets damaged, so a copy on the disk, which costs no memory, stays until the round is
        over."""
        if round_ != self._untrained:
            self._has_counted = True
        if self._held == round_ and self._is_durable:
            self._out.append(a.Drop(round_, why, accepted=True))
            self._held, self._accepted = None, round_
        self._note_over(round_, why)

    def _note_over(self, round_: int, why: str) -> None:
        """Note that nothing is left to do for this round."""
        if round_ not in self._done:
            self._done.append(round_)
        if self._held == round_:
            self._drop(why)

    def _drop(self, why: str, *, invalid: bool = False) -> None:
        """Drop the result that is held, or the copy of an accepted one. invalid: the coordinator
        has refused it."""
        round_ = self._held if self._held is not None else self._accepted
        if round_ is not None:
            self._out.append(a.Drop(round_, why, invalid))
        self._held = self._accepted = None

    # --- what went wrong ---

    def _on_refused(self, event: e.RefusedBy) -> None:
        """Hand the refusal of a call to the handler of contacts or of work, with its kind."""
        kind = kind_of(event)
        match event.call:
            case Call.RENDEZVOUS | Call.HEARTBEAT:
                self._on_contact_refused(event, kind)
            case _:
                self._on_work_refused(event, kind)

    def _on_contact_refused(self, event: e.RefusedBy, kind: RefusalKind) -> None:
        """Give up, join again or back off after a refused rendezvous or heartbeat."""
        if self._finishing:
            return
        stays = self._serve or self._is_studied
        if stays and event.reason == RefusalReason.Name(RefusalReason.PROFILE_MISMATCH):
            kind = RefusalKind.RETRY  # the data do not fit this session, and may fit the next one
        if kind is RefusalKind.FATAL:
            self._give_up(event)
        elif kind is RefusalKind.REJOIN:
            self._rejoin()
        else:
            self._set_contact(self._at_least(event.retry_after_s, self._backoff_after_contact()))

    def _on_work_refused(self, event: e.RefusedBy, kind: RefusalKind) -> None:
        """Give up, join again, leave the round or back off after a refused piece of work."""
        busy, self._busy = self._busy, None
        if busy is None:
            return
        if self._finishing or busy.void:
            self._go_on()
            return
        match kind:
            case RefusalKind.FATAL:
                self._give_up(event)
                return
            case RefusalKind.REJOIN:
                self._rejoin()
            case RefusalKind.OVER:
                self._broken = None
                self._note_over(busy.round, event.message or event.reason or event.status)
            case RefusalKind.INVALID | RefusalKind.UNFIT:
                if self._on_invalid(busy.round, event, for_good=kind is RefusalKind.UNFIT):
                    return
            case RefusalKind.RETRY:
                pass
        self._back_off(event.retry_after_s)

    def _on_invalid(self, round_: int, event: e.RefusedBy, *, for_good: bool) -> bool:
        """Handle an update that is refused as invalid; returns whether the participant ends."""
        why = event.message or event.reason or event.status
        times = self._invalid[1] + 1 if self._invalid[0] == round_ else 1
        self._invalid = (round_, times)
        self._drop(why, invalid=True)
        if not for_good and times < MAX_INVALID:
            return False
        self._out.append(a.Leave())
        self._exit(EXIT_FAILED, f"the update of round {round_} was refused: {why}")
        return True

    def _back_off(self, retry_after_s: float = 0.0) -> None:
        """Set the timer of the next try of the work, not before retry_after_s."""
        self._backing_off = True
        pause_s = self._at_least(retry_after_s, self._spread(self._work_backoff.next_s()))
        self._out.append(a.SetTimer(Timer.WORK, pause_s))

    def _go_on(self) -> None:
        """Exit if the session is finished, else begin the next piece of work."""
        if self._finishing:
            self._exit_finished()
        else:
            self._begin_next()

    def _exit_finished(self) -> None:
        """Exit after the end of the session: with failure, with no better model, with success, or
        with nothing that counted."""
        self._drop("the session is finished")
        if self._cause not in ("", COMPLETED):
            self._exit(EXIT_FAILED, f"the session has ended without a result: {self._cause}")
        elif self._has_counted and self._no_better:
            self._exit(EXIT_NO_BETTER, f"the session is finished: {self._no_better}")
        elif self._has_counted:
            self._exit(EXIT_OK, "the session is finished")
        else:
            why = self._why_nothing_counted()
            self._exit(EXIT_NOTHING_COUNTED, f"the session is finished without this one: {why}")

    def _why_nothing_counted(self) -> str:
        """Why nothing that this participant trained counted, in words."""
        if self._untrained is not None and not self._has_trained:
            return "it has made initial weights or an evaluation, and trained nothing"
        if self._last_round >= 0:
            return "none of its updates counted; the coordinator's report says why"
        if self._was_asked_to_wait:
            return "it was never let in, since rounds.max_participants were connected"
        return "it was never selected to train"

    def _give_up(self, event: e.RefusedBy) -> None:
        """Leave, and exit with failure."""
        self._out.append(a.Leave())
        self._exit(EXIT_FAILED, event.message or event.reason or event.status)

    def _exit(self, code: int, message: str) -> None:
        """Exit with a status; no action follows later."""
        self._contact = _Contact.EXITED
        self._out.append(a.Exit(code, message))

    def _set_contact(self, after_s: float) -> None:
        """Set the timer of the next rendezvous or heartbeat."""
        self._out.append(a.SetTimer(Timer.CONTACT, after_s))

    def _spread_reconnects(self, spread_s: float) -> None:
        """Take the time over which the coordinator has participants spread their calls."""
        # Never longer than between two heartbeats: the lease is not much longer.
        self._reconnect_spread_s = min(spread_s, self._heartbeat_interval_s)

    def _at_least(self, retry_after_s: float, pause_s: float) -> float:
        """The longer of a back-off and the pause that the coordinator asks for."""
        return max(pause_s, jittered(self._chance, retry_after_s)) if retry_after_s else pause_s

    def _backoff_after_contact(self) -> float:
        """The wait before the next try to join or to send a heartbeat."""
        is_member = self._contact is _Contact.JOINED
        longest_s = min(MAX_RECONNECT_S, self._heartbeat_interval_s) if is_member else MAX_BACKOFF_S
        return self._spread(min(longest_s, self._contact_backoff.next_s()))

    def _spread(self, longest_s: float) -> float:
        """A pause by chance, so that the retries of a fleet spread evenly. A failure of one of
        thousands is a failure of all of them, so that from the first time on they spread as the
        coordinator asks for."""
        return self._chance.uniform(0.0, max(longest_s, self._reconnect_spread_s))
