"""The protocol against a world that answers whatever it likes, whenever it likes, and in which the
participant is killed and started again."""

from copy import deepcopy
from dataclasses import replace
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from xain_participant.agent.protocol import Held, Protocol
from xain_participant.sdk import actions as a
from xain_participant.sdk import events as e
from xain_participant.sdk.values import Call, State, Timer

ROUNDS = st.integers(0, 3)
SESSIONS = st.sampled_from(["", "s1", "s2", "s3"])
REASONS = st.sampled_from(
    [
        ("NOT_A_MEMBER", "PERMISSION_DENIED"),
        ("NOT_IN_ROUND", "FAILED_PRECONDITION"),
        ("NOT_SELECTED", "FAILED_PRECONDITION"),
        ("ROUND_CLOSED", "FAILED_PRECONDITION"),
        ("STALE_ROUND", "FAILED_PRECONDITION"),
        ("DUPLICATE_UPDATE", "ALREADY_EXISTS"),
        ("INVALID_UPDATE", "INVALID_ARGUMENT"),
        ("", "UNAVAILABLE"),
        ("", "DEADLINE_EXCEEDED"),
        ("", "INTERNAL"),
    ]
)


class World(RuleBasedStateMachine):
    """The adapter's side: which work runs, which result it holds, which timers are set, and what of
    it is on the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.running: a.Action | None = None
        self.held: int | None = None
        self.kept: int | None = None  # accepted, and on the disk only
        self.on_disk: Held | None = None
        self.trained_in = ""  # the session in which the running training began
        self.timers: set[Timer] = set()
        self.call: a.Action | None = None
        self.exits: list[a.Exit] = []
        self.acknowledged: set[int] = set()
        self.saving = False
        self.stale = False  # the running work may belong to a session that is gone
        self.session = ""
        self.watching = False

    def hear(self, event: e.Event) -> None:
        match event:
            case e.TimerFired(timer):
                self.timers.discard(timer)
            case e.Joined(session_id) if session_id != self.session:
                self.session = session_id
                self.acknowledged.clear()
                self.stale = True
        exited = bool(self.exits)
        before = self.protocol.session_id
        actions = self.protocol.handle(event)
        # A late advertisement of the session before is ignored, and changes nothing.
        if isinstance(event, e.Advertised) and self.protocol.session_id != before:
            self.acknowledged.clear()
            self.stale = True
        assert not (exited and actions), "something after the end"
        for action in actions:
            self.carry_out(action)

    def carry_out(self, action: a.Action) -> None:
        assert not self.exits, "Exit is the last action"
        match action:
            case a.SetTimer(timer, after_s):
                assert 0 <= after_s <= 60
                self.timers.add(timer)
            case a.BeginRound() | a.Train() | a.HandIn():
                assert self.running is None, "two pieces of work at a time"
                self.running = action
                self.stale = self.saving = False
                if isinstance(action, a.Train):
                    assert self.held is None, "a result is thrown away without being dropped"
                    assert action.round not in self.acknowledged, "nobody wants it again"
                    self.trained_in = self.protocol.session_id
                if isinstance(action, a.HandIn):
                    assert self.held == action.round, "nothing to hand in"
            case a.Rendezvous() | a.SendHeartbeat():
                self.call = action
            case a.StartWatch():
                assert not self.watching, "two streams"
                self.watching = True
            case a.Drop(round_, accepted=True):
                assert self.held == round_, "dropped what is not held"
                assert self.on_disk is not None, "there is nothing to keep"
                self.held, self.kept = None, round_
            case a.Drop(round_):
                assert round_ in (self.held, self.kept), "dropped what is not held"
                self.held = self.kept = self.on_disk = None
            case a.Exit():
                self.exits.append(action)

    alive = precondition(lambda self: not self.exits)

    @alive
    @precondition(lambda self: self.timers)
    @rule(data=st.data())
    def time_passes(self, data: st.DataObject) -> None:
        self.hear(e.TimerFired(data.draw(st.sampled_from(sorted(self.timers, key=str)))))

    @alive
    @precondition(lambda self: isinstance(self.call, a.Rendezvous))
    @rule(session=SESSIONS, accepted=st.sampled_from([True, True, True, False]))
    def rendezvous_answered(self, session: str, accepted: bool) -> None:
        self.call = None
        self.hear(e.Joined(session, 5.0) if accepted else e.AskedToWait(3.0))

    @alive
    @precondition(lambda self: self.call is not None)
    @rule(reason=REASONS)
    def contact_refused(self, reason: tuple[str, str]) -> None:
        call, self.call = self.call, None
        if isinstance(call, a.Rendezvous):
            self.hear(e.RefusedBy(Call.RENDEZVOUS, "", "UNAVAILABLE"))
        else:
            self.hear(e.RefusedBy(Call.HEARTBEAT, *reason))

    @alive
    @rule(
        round_=ROUNDS,
        update=st.sampled_from(["", "accepted", "damaged"]),
        late=SESSIONS,
        is_late=st.integers(0, 9),
    )
    def advertised(self, round_: int, update: str, late: str, is_late: int) -> None:
        state = State.STANDBY if round_ == 3 else State.ROUND
        session = late if is_late == 0 else self.session
        is_damaged = update == "damaged"
        if is_damaged:
            self.acknowledged.discard(round_)
        event = e.Advertised(state, round_, update == "accepted", session)
        self.hear(replace(event, update_damaged=is_damaged))

    @alive
    @precondition(lambda self: isinstance(self.running, a.BeginRound))
    @rule(round_=ROUNDS, same=st.sampled_from([True, True, False]), accepted=st.booleans())
    def assigned(self, round_: int, same: bool, accepted: bool) -> None:
        assert isinstance(self.running, a.BeginRound)
        number, self.running = self.running.round if same else round_, None
        self.hear(e.Assigned(number, accepted))

    @alive
    @precondition(lambda self: isinstance(self.running, a.Train) and self.trained_in)
    @rule()
    def saving_begins(self) -> None:
        assert isinstance(self.running, a.Train)
        self.saving = True
        self.hear(e.Saving(self.running.round))

    @alive
    @precondition(lambda self: isinstance(self.running, a.Train))
    @rule(disk_is_full=st.booleans())
    def trained(self, disk_is_full: bool) -> None:
        assert isinstance(self.running, a.Train)
        self.held, self.running = self.running.round, None
        is_kept = self.trained_in and not disk_is_full
        self.on_disk = Held(self.trained_in, self.held) if is_kept else None
        self.kept = None
        self.hear(e.Trained(self.held, is_durable=self.on_disk is not None))

    @alive
    @precondition(lambda self: isinstance(self.running, a.HandIn))
    @rule()
    def handed_in(self) -> None:
        assert isinstance(self.running, a.HandIn)
        number, self.running = self.running.round, None
        if not self.stale:
            self.acknowledged.add(number)
        self.hear(e.HandedIn(number))

    @alive
    @precondition(lambda self: self.running is not None)
    @rule(reason=REASONS)
    def work_refused(self, reason: tuple[str, str]) -> None:
        calls = {a.BeginRound: Call.BEGIN_ROUND, a.Train: Call.TRAIN, a.HandIn: Call.HAND_IN}
        call, self.running = calls[type(self.running)], None
        self.hear(e.RefusedBy(call, *reason))

    @initialize(session=st.sampled_from(["", "s1", "s2"]), round_=ROUNDS)
    def begins(self, session: str, round_: int) -> None:
        """Begin with a result from before, but for the session without a name."""
        if session:
            self.on_disk = Held(session, round_)
        self.start()

    @precondition(lambda self: self.held is not None or isinstance(self.running, a.Train))
    @rule(has_trained=st.booleans())
    def killed_and_started_again(self, has_trained: bool) -> None:
        """Kill and start the process, also after the end. It knows only what is on the disk, which
        may be there before the protocol was told."""
        if has_trained and isinstance(self.running, a.Train) and self.trained_in:
            self.on_disk = Held(self.trained_in, self.running.round)
        self.start()

    def start(self) -> None:
        self.protocol = Protocol(Random(0), self.on_disk)
        self.held = self.on_disk.round if self.on_disk is not None else None
        self.session = self.on_disk.session_id if self.on_disk is not None else ""
        self.running = self.call = self.kept = None
        self.timers.clear()
        self.exits.clear()
        self.acknowledged.clear()
        self.stale = self.watching = False
        self.hear(e.Started())

    @rule()
    def stream_breaks(self) -> None:
        """Break the stream, also after the end, when nothing must follow."""
        self.hear(e.ConnectionLost())

    @invariant()
    def stopped_participant_leaves_unless_its_result_can_survive(self) -> None:
        if not self.exits:
            actions = deepcopy(self.protocol).handle(e.StopRequested(143))
            if actions[-1] == a.Exit(143, "asked to stop"):
                is_saving = self.running is not None and self.saving and not self.stale
                is_durable = self.held is not None and self.on_disk is not None
                assert (a.Leave() in actions) == (not is_durable and not is_saving)

    @invariant()
    def the_disk_has_nothing_else_than_what_is_held(self) -> None:
        if self.on_disk is not None:
            assert self.on_disk.round in (self.held, self.kept)
            assert self.protocol.session_id == self.on_disk.session_id

    @invariant()
    def something_is_always_to_come(self) -> None:
        """The participant never waits without a pending call, timer or exit."""
        assert self.exits or self.call is not None or Timer.CONTACT in self.timers

    @invariant()
    def a_result_is_not_trained_again(self) -> None:
        if isinstance(self.running, a.Train):
            assert self.running.round != self.held

    def teardown(self) -> None:
        """However it stands, FINISHED ends it, at the latest when the next timers are over."""
        for session in ("s4", ""):  # whatever it thinks of these, it has not heard of both before
            self.hear(e.Advertised(State.FINISHED, 9, session_id=session))
        if not self.exits:
            self.hear(e.TimerFired(Timer.WORK))
        (end,) = self.exits
        assert end == a.Exit(0, "the session is finished") or end.code in (1, 5)
        if end.code in (0, 5):
            assert self.on_disk is None, "nobody wants it any more"


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
