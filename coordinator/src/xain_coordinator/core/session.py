"""The session: one training job from its opening to its one terminal state.

    decide(session, command, now)  -> what happened, what to answer, what to do; or raises a Refusal
    evolve(session, event)         -> the session after it
    resume(session)                -> the effects still owed after a restart
    next_deadline(session)         -> when to send the next Tick

A session waits in STANDBY until enough participants have gathered, asks for the initial model, and
opens round 0. An open round is COLLECTING: the selected train and hand in. When the last of them
has, the round closes and is AGGREGATING: nothing more is taken in. The model that comes back is
published; the next round opens at once if enough are connected, else the session waits in STANDBY.
After the last round it is FINISHED, for ever.

While a round is open, participants may go. One whose update was accepted has done its part: the
update counts, whatever becomes of its sender. One that still owed an update leaves the selection,
and somebody from the pool takes its place. If too few are connected the round is paused: STANDBY,
with number, selection and accepted updates kept, until enough are back.

A command is answered in two steps. First what it does by itself (`_answer`); then whatever must
follow from the state that is now reached (`_next_step`, until nothing follows). So it never matters
whose message, or whose departure, made a round complete.

XAIN's participants see COLLECTING and AGGREGATING as ROUND, and only if they are selected.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from xain_coordinator.core import commands as c
from xain_coordinator.core import errors
from xain_coordinator.core import events as e
from xain_coordinator.core import replies as r
from xain_coordinator.core.effects import (
    Aggregate,
    Effect,
    InitialiseModel,
    Notify,
    RecordMetrics,
)
from xain_coordinator.core.keys import place_of, update_key
from xain_coordinator.core.membership import (
    Heard,
    Member,
    check_name,
    expiries,
)
from xain_coordinator.core.pacing import is_complete, num_selected
from xain_coordinator.core.points import (
    coordinator_point,
    departure_point,
    participant_point,
    published_point,
)
from xain_coordinator.core.profiles import check_profile
from xain_coordinator.core.selection import select
from xain_coordinator.core.updates import check_size, check_update, require_free_key
from xain_coordinator.core.values import (
    DataProfile,
    GlobalModel,
    ParticipantState,
    Phase,
    Point,
    Round,
    Rules,
    Update,
)

# What can follow from a phase. Everything else is a broken invariant; the docs draw this table.
TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.STANDBY: frozenset({Phase.COLLECTING, Phase.AGGREGATING, Phase.FINISHED}),
    Phase.COLLECTING: frozenset({Phase.STANDBY, Phase.AGGREGATING, Phase.FINISHED}),
    Phase.AGGREGATING: frozenset({Phase.STANDBY, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Session:
    """The state, as folded from its events.

    round: the open one, or the next to open; after the end, the last one.
    epoch_base: epochs trained before this round.
    requested: the profiles that the initial model is being made from.
    refused, trouble: the profiles that no model could be made from, and why; "" if all is well.
    open_round, last_round: the last one is kept to recognise updates that are sent again.
    num_draws: selections made in the open round.
    heard, lease_floor: soft state, not part of the session's identity.
    """

    session_id: str
    rules: Rules
    phase: Phase = Phase.STANDBY
    round: int = 0
    epoch_base: int = 0
    gathered: bool = False
    requested: tuple[DataProfile, ...] | None = None
    refused: tuple[DataProfile, ...] | None = None
    trouble: str = ""
    model: GlobalModel | None = None
    members: Mapping[str, Member] = field(default_factory=dict)
    upload_names: Mapping[str, str] = field(default_factory=dict)
    open_round: Round | None = None
    last_round: Round | None = None
    num_draws: int = 0
    cause: str = ""
    heard: Mapping[str, Heard] = field(default_factory=dict, compare=False)
    lease_floor: float = field(default=0.0, compare=False)

    @property
    def pool(self) -> tuple[str, ...]:
        """Connected and not selected in the open round."""
        if self.open_round is None:
            return tuple(self.members)
        selected = frozenset(self.open_round.selected)
        return tuple(p for p in self.members if p not in selected)

    def accepted(self, participant_id: str, round_: int | None) -> Update | None:
        """The participant's accepted update of this round (None: the open one), if it is the open
        round or the one before."""
        if round_ is None:
            round_ = self.round
        for known in (self.open_round, self.last_round):
            if known is not None and known.number == round_:
                return known.updates.get(participant_id)
        return None


@dataclass(frozen=True, slots=True)
class Decision:
    """events in order; durable ones are to be committed before the reply goes out and the effects
    run."""

    events: tuple[e.Event, ...]
    reply: r.Reply
    effects: tuple[Effect, ...]


def open_session(session_id: str, rules: Rules, now: float) -> tuple[Session, e.SessionOpened]:
    """A new session and the event that begins its journal."""
    opened = e.SessionOpened(session_id, rules, now)
    return begin(opened), opened


def begin(opened: e.SessionOpened) -> Session:
    """The session that its first event describes."""
    return Session(opened.session_id, opened.rules, lease_floor=opened.at)


# --- decide ---------------------------------------------------------------------------------------


def decide(session: Session, command: c.Command, now: float) -> Decision:
    """What a command does to the session at session time `now`, in seconds.

    Raises a Refusal if it is not carried out; then nothing has changed.
    """
    events, reply, points = _answer(session, command, now)
    before = _point(session)
    session = fold(session, events)
    happened = list(events)
    # Soft events change nothing that anything could follow from; heartbeats are many, so skip it.
    if isinstance(command, c.Tick) or any(not isinstance(event, e.SoftEvent) for event in events):
        while (event := _next_step(session, now)) is not None:
            session = evolve(session, event)
            happened.append(event)
    effects: list[Effect] = []
    if any(isinstance(event, e.ModelRequested | e.RoundClosed) for event in happened):
        effects += resume(session)
    after = _point(session)
    for event in happened:
        if isinstance(event, e.ModelPublished):
            after = published_point(after, _last(session), event.at)
    if after != before:
        points = (*points, after)
    if points:
        effects.append(RecordMetrics(points))
    if any(isinstance(event, _NOTIFYING) for event in happened):
        effects.append(Notify())
    return Decision(tuple(happened), reply, tuple(effects))


def _last(session: Session) -> Round:
    assert session.last_round is not None, "a model was published without a round"
    return session.last_round


def _point(session: Session) -> Point:
    selected = session.open_round.selected if session.open_round is not None else ()
    return coordinator_point(session.phase, session.round, len(session.members), len(selected))


_Answer = tuple[tuple[e.Event, ...], r.Reply, tuple[Point, ...]]


def _answer(session: Session, command: c.Command, now: float) -> _Answer:
    match command:
        case c.Heartbeat():
            return _heartbeat(session, command, now)
        case c.Rendezvous():
            return _rendezvous(session, command, now)
        case c.StartTrainingRound(participant_id):
            return (), _assignment(session, participant_id), ()
        case c.BeginUpload():
            return (), _begin_upload(session, command), ()
        case c.EndTrainingRound():
            return _end_training_round(session, command)
        case c.Tick():
            expired = tuple(_expired(session, now))
            points = tuple(departure_point(left.participant_id) for left in expired)
            return expired, r.Done(), points
        case c.InitialisationDone(model):
            _require_waiting_for_model(session)
            return (e.ModelInitialised(model),), r.Done(), ()
        case c.InitialisationFailed(reason):
            _require_waiting_for_model(session)
            return (e.InitialisationRefused(reason),), r.Done(), ()
        case c.AggregationDone(model):
            return _aggregation_done(session, model, now), r.Done(), ()
        case c.EffectFailed(cause):
            if session.phase is Phase.FINISHED:
                return (), r.Done(), ()
            return (e.SessionFinished(cause, now),), r.Done(), ()


def _require_waiting_for_model(session: Session) -> None:
    waits = session.phase is Phase.STANDBY and session.requested is not None
    if not waits or session.model is not None:
        raise errors.StaleModel("the initial model is not asked for, or is there already")


def _rendezvous(session: Session, command: c.Rendezvous, now: float) -> _Answer:
    participant_id = command.participant_id
    rules = session.rules
    accepted = r.Accepted(rules.heartbeat_time_s)
    if session.phase is Phase.FINISHED:
        return (), accepted, ()  # it will hear FINISHED; the session does not change any more
    if participant_id in session.members:
        heard = e.ParticipantHeard(participant_id, ParticipantState.READY, -1, now)
        return (heard,), accepted, ()
    check_name(participant_id)
    if len(session.members) >= rules.max_participants:
        # A place is free again when a lease runs out, so that is the natural time to ask again.
        return (), r.Later(rules.lease_s), ()
    _check_profile(session, command.profile)
    joined = e.ParticipantJoined(participant_id, command.profile, now)
    return (joined,), accepted, ()


def _check_profile(session: Session, profile: DataProfile | None) -> None:
    """Raises ProfileMismatch."""
    needed = session.rules.initial == "workload"
    if profile is None:
        if needed:
            raise errors.ProfileMismatch(
                "the model of this session is made for the participants' data, "
                "so a rendezvous must carry a data profile"
            )
        return
    check_profile(profile, (*(session.requested or ()), *_profiles(session)), needs_rows=needed)


def _profiles(session: Session) -> tuple[DataProfile, ...]:
    return tuple(m.profile for m in session.members.values() if m.profile is not None)


def _heartbeat(session: Session, command: c.Heartbeat, now: float) -> _Answer:
    participant_id = command.participant_id
    if session.phase is Phase.FINISHED:
        return (), advertise(session, participant_id), ()  # served to everybody, member or not
    _require_member(session, participant_id)
    if command.state is ParticipantState.FINISHED:
        left = e.ParticipantLeft(participant_id, "left")
        reply = r.Advertisement(Phase.STANDBY, session.round, False)
        return (left,), reply, (participant_point(participant_id, command.state, command.round),)
    heard = e.ParticipantHeard(participant_id, command.state, command.round, now)
    point = participant_point(participant_id, command.state, command.round)
    return (heard,), advertise(session, participant_id), (point,)


def advertise(session: Session, participant_id: str) -> r.Advertisement:
    """The state as this participant sees it. Anybody may ask; strangers see STANDBY."""
    phase = session.phase
    round_ = session.open_round
    selected = round_ is not None and participant_id in round_.selected
    if phase in (Phase.COLLECTING, Phase.AGGREGATING) and not selected:
        phase = Phase.STANDBY
    done = round_ is not None and participant_id in round_.updates
    return r.Advertisement(phase, session.round, done)


def _assignment(session: Session, participant_id: str) -> r.Assignment:
    round_ = _require_selected(session, participant_id)
    return r.Assignment(
        round=round_.number,
        epochs=round_.epochs,
        epoch_base=session.epoch_base,
        model=_model(session),
        update_accepted=participant_id in round_.updates,
    )


def _begin_upload(session: Session, command: c.BeginUpload) -> r.Reply:
    known = session.accepted(command.participant_id, command.round)
    if known is not None and known.weights.ref.digest == command.digest:
        return r.AlreadyUploaded(known.weights.ref)
    round_ = _require_selected(session, command.participant_id, command.round)
    if known is not None:
        # The accepted object must not be overwritten: it is what will be aggregated.
        raise errors.DuplicateUpdate(command.participant_id, round_.number)
    name = command.upload_name or command.participant_id
    _bind_upload_name(session, round_, command.participant_id, name)
    check_size(_model(session), command.size_bytes)
    return r.UploadTo(update_key(round_.number, name))


def _end_training_round(session: Session, command: c.EndTrainingRound) -> _Answer:
    participant_id = command.participant_id
    known = session.accepted(participant_id, command.round)
    # Before anything else: whoever has our acknowledgement may ask for it again, even when the
    # round has closed meanwhile or its lease has run out.
    if known is not None and _is_same(known, command):
        return (), r.Done(), ()
    round_ = _require_selected(session, participant_id, command.round)
    if known is not None:
        raise errors.DuplicateUpdate(participant_id, round_.number)
    bound = _bind_upload_name(session, round_, participant_id, command.upload_name)
    if command.weights is None:
        key = update_key(round_.number, command.upload_name)
        raise errors.UploadMissing(f"there is no such upload under {key!r}; upload it first")
    update = Update(participant_id, command.weights, command.num_samples)
    check_update(_model(session), round_, update)
    return (*bound, e.UpdateAccepted(round_.number, update)), r.Done(), command.metrics


def _is_same(known: Update, command: c.EndTrainingRound) -> bool:
    return (
        command.weights is not None
        and known.weights.ref.digest == command.weights.ref.digest
        and known.num_samples == command.num_samples
    )


def _bind_upload_name(
    session: Session, round_: Round, sender: str, name: str
) -> tuple[e.UploadNameBound, ...]:
    """XAIN clients choose the name of their upload. It becomes theirs with the first use, so that
    nobody hands in what another has uploaded. Raises InvalidName or UploadNameTaken."""
    check_name(name)
    require_free_key(round_, name)
    if name == sender:
        return ()
    owner = session.upload_names.get(name)
    if owner == sender:
        return ()
    if owner is not None or name in session.members:
        raise errors.UploadNameTaken(f"the upload name {name!r} belongs to another participant")
    own = next((n for n, p in session.upload_names.items() if p == sender), None)
    if own is not None:
        raise errors.UploadNameTaken(f"{sender} uploads under the name {own!r}; it cannot change")
    return (e.UploadNameBound(sender, name),)


def _model(session: Session) -> GlobalModel:
    assert session.model is not None, "a round is open without a model"
    return session.model


def _require_member(session: Session, participant_id: str) -> None:
    if participant_id not in session.members:
        raise errors.NotAMember(participant_id)


def _require_selected(session: Session, participant_id: str, sent: int | None = None) -> Round:
    """The open round, if the participant is in it and it is the one that was sent.

    Raises NotAMember, StaleRound, NotInRound, RoundAlreadyClosed or NotSelected.
    """
    # After the end nobody is asked who they are: the answer is the same for all.
    if session.phase is Phase.FINISHED:
        raise errors.RoundAlreadyClosed(f"the session is finished: {session.cause}")
    _require_member(session, participant_id)
    if sent is not None and sent != session.round:
        raise errors.StaleRound(sent, session.round)
    if session.phase is Phase.AGGREGATING:
        raise errors.RoundAlreadyClosed(f"round {session.round} is closed and being aggregated")
    if session.phase is not Phase.COLLECTING or session.open_round is None:
        raise errors.NotInRound(
            f"no round is open: {len(session.members)} participants are connected, "
            f"{session.rules.num_required} are needed; wait for a heartbeat that says ROUND"
        )
    if participant_id not in session.open_round.selected:
        raise errors.NotSelected(participant_id, session.round)
    return session.open_round


def _expired(session: Session, now: float) -> Iterator[e.ParticipantLeft]:
    if session.phase is Phase.FINISHED:
        return
    leases = expiries(session.members, session.heard, session.lease_floor, session.rules.lease_s)
    for participant_id, expires_at in leases:
        if expires_at <= now:
            yield e.ParticipantLeft(participant_id, "expired")


def _aggregation_done(session: Session, model: GlobalModel, now: float) -> tuple[e.Event, ...]:
    if session.phase is not Phase.AGGREGATING or model.round != session.round + 1:
        raise errors.StaleModel(
            f"model {model.round} is not the one that round {session.round} "
            f"({session.phase}) waits for"
        )
    published = e.ModelPublished(session.round, model, now)
    if model.round < session.rules.rounds:
        return (published,)
    return published, e.SessionFinished("completed", now)


# --- what follows ---------------------------------------------------------------------------------


def _next_step(session: Session, now: float) -> e.Event | None:
    """What must happen in this state without anybody asking; None if nothing."""
    if session.phase in (Phase.FINISHED, Phase.AGGREGATING):
        return None
    if session.open_round is None:
        return _next_step_between_rounds(session, now)
    round_ = session.open_round
    missing = round_.target - len(round_.selected)
    if missing > 0 and session.pool:
        # Cut: the controller "all" answers with the whole pool, whatever is missing.
        return e.ParticipantsSelected(
            round_.number, _draw(session, session.pool, missing)[:missing]
        )
    if is_complete(round_, session.rules.min_participants):
        return e.RoundClosed(round_.number, now)
    enough = len(session.members) >= session.rules.num_required
    if session.phase is Phase.COLLECTING and not enough:
        return e.RoundPaused(round_.number)
    if session.phase is Phase.STANDBY and enough:
        return e.RoundResumed(round_.number)
    return None


def _next_step_between_rounds(session: Session, now: float) -> e.Event | None:
    rules = session.rules
    if not session.gathered:
        return e.ParticipantsGathered() if _have_gathered(session, now) else None
    if session.model is None:
        return _ask_for_model(session)
    if len(session.members) < rules.num_required:
        return None
    k = num_selected(len(session.members), rules.fraction_participants)
    # An empty model has nothing to train: round 0 then only initialises.
    epochs = 0 if session.model.is_empty else rules.epochs
    selected = _draw(session, tuple(session.members), k)
    return e.RoundOpened(session.round, selected, epochs, now)


def _ask_for_model(session: Session) -> e.Event | None:
    """Once. While it is being made nothing else can happen, and profiles that were refused would
    be refused again: then others must come."""
    profiles = _profiles(session)
    if session.requested is not None or profiles == session.refused:
        return None
    if len(session.members) < session.rules.num_required:
        return None
    return e.ModelRequested(profiles)


def _have_gathered(session: Session, now: float) -> bool:
    connected = len(session.members)
    if connected >= session.rules.start_participants:
        return True
    return connected >= session.rules.num_required and now >= _start_deadline(session)


def _start_deadline(session: Session) -> float:
    return min(m.joined_at for m in session.members.values()) + session.rules.start_timeout_s


def _draw(session: Session, candidates: tuple[str, ...], k: int) -> tuple[str, ...]:
    rules = session.rules
    return select(
        rules.controller,
        candidates,
        k,
        seed=rules.seed,
        round_=session.round,
        draw=session.num_draws,
    )


# --- evolve ---------------------------------------------------------------------------------------


def evolve(session: Session, event: e.Event) -> Session:
    """The session after an event. Never refuses: what is in the journal has happened."""
    match event:
        case e.ParticipantHeard(participant_id, state, round_, at):
            return replace(
                session, heard={**session.heard, participant_id: Heard(at, state, round_)}
            )
        case e.Restarted(at):
            return replace(session, heard={}, lease_floor=at)
        case e.ParticipantJoined(participant_id, profile, at):
            members = {**session.members, participant_id: Member(participant_id, profile, at)}
            # Its own name goes before one that somebody else has chosen.
            names = {n: p for n, p in session.upload_names.items() if n != participant_id}
            return replace(session, members=members, upload_names=names)
        case e.ParticipantLeft(participant_id):
            return _without(session, participant_id)
        case e.ParticipantsGathered():
            return replace(session, gathered=True)
        case e.ModelRequested(profiles):
            return replace(session, requested=profiles)
        case e.InitialisationRefused(reason):
            return replace(session, requested=None, refused=session.requested, trouble=reason)
        case e.ModelInitialised(model):
            return replace(session, model=model, refused=None, trouble="")
        case e.RoundOpened(number, selected, epochs, at):
            opened = Round(number, selected, target=len(selected), epochs=epochs, opened_at=at)
            return replace(_to(session, Phase.COLLECTING), open_round=opened, num_draws=1)
        case e.ParticipantsSelected(_, more):
            grown = _open(session)
            grown = replace(grown, selected=(*grown.selected, *more))
            return replace(session, open_round=grown, num_draws=session.num_draws + 1)
        case e.RoundPaused():
            return _to(session, Phase.STANDBY)
        case e.RoundResumed():
            return _to(session, Phase.COLLECTING)
        case e.UploadNameBound(participant_id, name):
            return replace(session, upload_names={**session.upload_names, name: participant_id})
        case e.UpdateAccepted(_, update):
            open_ = _open(session)
            assert update.participant_id in open_.selected, "an update from outside the selection"
            assert update.participant_id not in open_.updates, "an update counted twice"
            updates = {**open_.updates, update.participant_id: update}
            places = open_.places | {place_of(update.weights.ref.key)}
            return replace(session, open_round=replace(open_, updates=updates, places=places))
        case e.RoundClosed(_, at):
            closed = replace(_open(session), closed_at=at)
            return replace(_to(session, Phase.AGGREGATING), open_round=closed)
        case e.ModelPublished(_, model):
            return _after_publication(session, model)
        case e.SessionFinished(cause):
            # open_round moves to last_round so that resends are still recognised.
            last = session.open_round or session.last_round
            return replace(
                _to(session, Phase.FINISHED), cause=cause, open_round=None, last_round=last
            )
        case e.SessionOpened():
            raise AssertionError("a session is opened once, by `begin`")


def _to(session: Session, phase: Phase) -> Session:
    assert phase in TRANSITIONS[session.phase], f"{session.phase} does not lead to {phase}"
    return replace(session, phase=phase)


def _open(session: Session) -> Round:
    assert session.open_round is not None, "no round is open"
    return session.open_round


def _without(session: Session, participant_id: str) -> Session:
    """Gone. What it still owed, somebody else will do; what was accepted from it stays."""
    round_ = session.open_round
    if round_ is not None and participant_id in round_.outstanding:
        selected = tuple(p for p in round_.selected if p != participant_id)
        round_ = replace(round_, selected=selected)
    return replace(
        session,
        members={p: m for p, m in session.members.items() if p != participant_id},
        heard={p: h for p, h in session.heard.items() if p != participant_id},
        upload_names={n: p for n, p in session.upload_names.items() if p != participant_id},
        open_round=round_,
    )


def _after_publication(session: Session, model: GlobalModel) -> Session:
    round_ = _open(session)
    return replace(
        _to(session, Phase.STANDBY),
        # XAIN's round number stays at the last round when there is none after it.
        round=min(model.round, session.rules.rounds - 1),
        epoch_base=session.epoch_base + round_.epochs,
        model=model,
        open_round=None,
        last_round=round_,
        num_draws=0,
    )


def fold(session: Session, events: Iterable[e.Event]) -> Session:
    """evolve over many events."""
    for event in events:
        session = evolve(session, event)
    return session


# --- effects --------------------------------------------------------------------------------------

# After these, what a participant is told may differ from what it was told before.
_NOTIFYING = (
    e.ParticipantLeft,
    e.RoundOpened,
    e.ParticipantsSelected,
    e.RoundPaused,
    e.RoundResumed,
    e.ModelPublished,
    e.SessionFinished,
)


def resume(session: Session) -> tuple[Effect, ...]:
    """The work that the session is waiting for. After a restart it is owed again: whoever did it
    before has died, and doing it twice gives the same bytes."""
    if session.phase is Phase.AGGREGATING:
        round_ = _open(session)
        assert session.model is not None, "a round was closed without a model"
        # Initialisations weigh the same: nothing has been learnt from anybody's samples yet.
        updates = tuple(round_.updates[p] for p in round_.selected)
        if session.model.is_empty:
            updates = tuple(replace(update, num_samples=0) for update in updates)
        return (Aggregate(round_.number, session.rules.aggregation, updates, session.model),)
    if session.phase is Phase.STANDBY and session.requested is not None and session.model is None:
        return (InitialiseModel(session.rules.initial, session.requested),)
    return ()


def next_deadline(session: Session) -> float | None:
    """Session time at which a Tick is due; None if nothing will happen by itself."""
    if session.phase is Phase.FINISHED or not session.members:
        return None
    leases = expiries(session.members, session.heard, session.lease_floor, session.rules.lease_s)
    earliest = min(expires_at for _, expires_at in leases)
    if not session.gathered and len(session.members) >= session.rules.num_required:
        earliest = min(earliest, _start_deadline(session))
    return earliest
