"""The session: one training job from its opening to its one terminal state.

    decide(session, command, now)  -> what happened, what to answer, what to do; or raises a Refusal
    evolve(session, event)         -> the session after it
    resume(session)                -> the effects still owed after a restart
    next_deadline(session)         -> when to send the next Tick

A session waits in STANDBY until enough participants have gathered, asks for the initial model, and
opens round 0. An open round is COLLECTING: the selected train and hand in. When all that it wants
has come in (pacing.py), the round closes and is AGGREGATING: nothing more is taken in. The model
that comes back is published; the next round opens at once if enough are connected, else the session
waits in STANDBY. After the last round it is FINISHED, for ever.

While a round is open, participants may go. One whose update was accepted has done its part: the
update counts, whatever becomes of its sender. One that still owed an update leaves the selection,
and somebody from the pool takes its place. If too few are connected the round is paused: STANDBY,
with number, selection and accepted updates kept, until enough are back.

Nothing waits for ever. At its deadline a round closes with what it has. If that is too little it is
overdue: everybody else is selected too, and the update that makes enough closes it. A wait for
participants, for the updates of an overdue round, or for a model that is longer than the idle
timeout ends the session, with its cause.

In SSP and ASP the next round opens while some still train an earlier one. They are carried over:
what they are told, and what they hand in, is of the round that they train.

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
from xain_coordinator.core.pacing import (
    has_enough,
    is_complete,
    noted_every_s,
    num_selected,
    num_wanted,
    round_deadline,
    still_training,
)
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
    Base,
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
    training: between two rounds, those who still train an earlier one, with its number.
    bases: what earlier rounds that somebody still trains are trained from.
    counted: in SSP and ASP, where models may follow each other faster than an answer travels, the
        latest update of each participant, and the round that it was trained for.
    num_draws: selections made in the open round.
    since: when the phase was reached, or, in the first one, enough had gathered.
    noted_at: the session time that was written down last.
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
    training: Mapping[str, int] = field(default_factory=dict)
    bases: Mapping[int, Base] = field(default_factory=dict)
    counted: Mapping[str, tuple[int, Update]] = field(default_factory=dict)
    num_draws: int = 0
    since: float = 0.0
    noted_at: float = 0.0
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

    def trained_by(self, participant_id: str) -> int:
        """The round that this participant trains, or would train."""
        if self.open_round is not None:
            return self.open_round.trained_by(participant_id)
        if self.phase is Phase.FINISHED and self.last_round is not None:
            return self.last_round.carried.get(participant_id, self.round)
        return self.training.get(participant_id, self.round)

    @property
    def earlier_rounds(self) -> frozenset[int]:
        """The rounds before this one that somebody may still hand in for, or has handed in for."""
        carried = self.training if self.open_round is None else self.open_round.carried
        return frozenset(carried.values())

    def accepted(self, participant_id: str, round_: int | None) -> Update | None:
        """The update of this round (None: the one it trains) that was accepted from the
        participant, if that was in the open round or the one before, or was its latest."""
        if round_ is None:
            round_ = self.trained_by(participant_id)
        for known in (self.open_round, self.last_round):
            if known is not None and known.trained_by(participant_id) == round_:
                update = known.updates.get(participant_id)
                if update is not None:
                    return update
        number, update = self.counted.get(participant_id, (-1, None))
        return update if number == round_ else None

    @property
    def is_buffered(self) -> bool:
        """Models are made as updates come, without waiting for those who are late. Not the first:
        without it nothing can be trained."""
        is_synchronous = self.rules.consistency == "bsp"
        return not is_synchronous and self.model is not None and not self.model.is_empty

    @property
    def gives_up_at(self) -> float | None:
        """When it ends if nothing changes until then; None if something else comes before."""
        idle_s = self.rules.idle_timeout_s
        began: float | None = self.since
        overdue_at = self.open_round.overdue_at if self.open_round is not None else None
        if self.phase is Phase.COLLECTING or overdue_at is not None:
            # Also while it is paused: whoever comes back must not make it end earlier.
            began = overdue_at
        if self.phase is Phase.AGGREGATING:
            began = self.since
        if idle_s is None or began is None or self.phase is Phase.FINISHED:
            return None
        return began + idle_s


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
    return Session(
        opened.session_id,
        opened.rules,
        since=opened.at,
        noted_at=opened.at,
        lease_floor=opened.at,
    )


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
            after = published_point(after, _last(session), session.rules, event.at)
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
            return (*_noted(session, now), *expired), r.Done(), points
        case c.InitialisationDone(model):
            _require_waiting_for_model(session)
            return (e.ModelInitialised(model, now),), r.Done(), ()
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
    # At the end it is the last round for everybody, whatever they have trained.
    finished = phase is Phase.FINISHED
    number = session.round if finished else session.trained_by(participant_id)
    return r.Advertisement(phase, number, done)


def _assignment(session: Session, participant_id: str) -> r.Assignment:
    round_ = _require_selected(session, participant_id)
    number = round_.trained_by(participant_id)
    base = session.bases[number] if number != round_.number else _base(session)
    return r.Assignment(
        round=number,
        epochs=base.epochs,
        epoch_base=base.epoch_base,
        model=base.model,
        update_accepted=participant_id in round_.updates,
    )


def _begin_upload(session: Session, command: c.BeginUpload) -> r.Reply:
    known = session.accepted(command.participant_id, command.round)
    if known is not None and known.weights.ref.digest == command.digest:
        return r.AlreadyUploaded(known.weights.ref)
    # A model that is being made does not hold up what will go into the next one.
    goes_on = goes_on_training(session, command.participant_id)
    round_ = _require_selected(
        session, command.participant_id, command.round, may_be_closed=goes_on
    )
    if known is not None:
        # The accepted object must not be overwritten: it is what will be aggregated.
        raise errors.DuplicateUpdate(command.participant_id, command.round)
    name = command.upload_name or command.participant_id
    _bind_upload_name(session, round_, command.participant_id, name)
    check_size(_model(session), command.size_bytes)
    return r.UploadTo(update_key(command.round, name))


def _end_training_round(session: Session, command: c.EndTrainingRound) -> _Answer:
    participant_id = command.participant_id
    known = session.accepted(participant_id, command.round)
    # Before anything else: whoever has our acknowledgement may ask for it again, even when the
    # round has closed meanwhile or its lease has run out.
    if known is not None and _is_same(known, command):
        return (), r.Done(), ()
    round_ = _require_selected(session, participant_id, command.round)
    number = round_.trained_by(participant_id)
    if known is not None:
        raise errors.DuplicateUpdate(participant_id, number)
    bound = _bind_upload_name(session, round_, participant_id, command.upload_name)
    if command.weights is None:
        key = update_key(number, command.upload_name)
        raise errors.UploadMissing(f"there is no such upload under {key!r}; upload it first")
    update = Update(participant_id, command.weights, command.num_samples)
    check_update(_model(session), round_, update)
    accepted = e.UpdateAccepted(round_.number, update, staleness=round_.number - number)
    return (*bound, accepted), r.Done(), command.metrics


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
    require_free_key(round_, sender, name)
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


def _base(session: Session) -> Base:
    round_ = _open(session)
    return Base(_model(session), round_.epochs, session.epoch_base, round_.opened_at)


def _require_member(session: Session, participant_id: str) -> None:
    if participant_id not in session.members:
        raise errors.NotAMember(participant_id)


def goes_on_training(session: Session, participant_id: str) -> bool:
    """It trains while a model is made, and what it brings goes into the next one."""
    is_being_made = session.phase is Phase.AGGREGATING and session.is_buffered
    return is_being_made and participant_id in _still_training(session)


def _require_selected(
    session: Session, participant_id: str, sent: int | None = None, *, may_be_closed: bool = False
) -> Round:
    """The open round, if the participant is in it and it is the one that was sent.

    may_be_closed: a model may be being made of it.

    Raises NotAMember, StaleRound, NotInRound, RoundAlreadyClosed or NotSelected.
    """
    # After the end nobody is asked who they are: the answer is the same for all.
    if session.phase is Phase.FINISHED:
        raise errors.RoundAlreadyClosed(f"the session is finished: {session.cause}")
    _require_member(session, participant_id)
    trains = session.trained_by(participant_id)
    if sent is not None and sent != trains:
        raise errors.StaleRound(sent, trains)
    if session.phase is Phase.AGGREGATING and not may_be_closed:
        if goes_on_training(session, participant_id):
            raise errors.NotInRound(f"a model is being made; keep the result of round {trains}")
        raise errors.RoundAlreadyClosed(f"round {session.round} is closed and being aggregated")
    if session.phase is Phase.STANDBY or session.open_round is None:
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


def _noted(session: Session, now: float) -> Iterator[e.TimePassed]:
    note_at = _note_at(session)
    if note_at is not None and note_at <= now:
        yield e.TimePassed(now)


def _note_at(session: Session) -> float | None:
    every_s = noted_every_s(session.rules)
    if every_s is None or session.phase is Phase.FINISHED:
        return None
    return session.noted_at + every_s


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
    if session.phase is Phase.FINISHED:
        return None
    step: e.Event | None = None
    if session.open_round is None:
        step = _next_step_between_rounds(session, now)
    elif session.phase is not Phase.AGGREGATING:
        step = _next_step_of_round(session, session.open_round, now)
    gives_up_at = session.gives_up_at
    if step is None and gives_up_at is not None and gives_up_at <= now:
        step = e.SessionFinished(_why_given_up(session), now)
    return step


def _why_given_up(session: Session) -> str:
    rules, round_ = session.rules, session.open_round
    waited = f"for rounds.idle_timeout_s = {rules.idle_timeout_s:g} s"
    if session.phase is Phase.AGGREGATING:
        return f"the model of round {session.round} could not be made {waited}"
    if round_ is not None and round_.overdue_at is not None:
        return (
            f"round {round_.number} had too few updates at its deadline, and {waited} after it: "
            f"{len(round_.updates)} of {rules.min_participants}"
        )
    connected = len(session.members)
    if session.gathered and session.model is None and connected >= rules.num_required:
        return f"no initial model could be made {waited}: {session.trouble or 'it took too long'}"
    return (
        f"the session has waited for participants {waited}: {connected} of {rules.num_required} "
        "are connected"
    )


def _next_step_of_round(session: Session, round_: Round, now: float) -> e.Event | None:
    is_overdue = round_.overdue_at is not None
    missing = len(session.pool) if is_overdue else round_.target - len(round_.selected)
    if missing > 0 and session.pool:
        # Cut: the controller "all" answers with the whole pool, whatever is missing.
        return e.ParticipantsSelected(
            round_.number, _draw(session, session.pool, missing)[:missing]
        )
    if is_complete(round_, session.rules, buffered=session.is_buffered):
        return e.RoundClosed(round_.number, now)
    deadline = round_deadline(round_, session.rules)
    is_late = deadline is not None and deadline <= now
    # A pause that is about to end the session is late as well, if what is there makes a model.
    gives_up_at = session.gives_up_at
    is_over = is_late or (gives_up_at is not None and gives_up_at <= now)
    if is_over and has_enough(round_, session.rules):
        return e.RoundClosed(round_.number, now, "deadline")
    enough = len(session.members) >= session.rules.num_required
    if session.phase is Phase.COLLECTING and not enough:
        return e.RoundPaused(round_.number, now)
    if session.phase is Phase.STANDBY and enough:
        return e.RoundResumed(round_.number)
    if is_late and session.phase is Phase.COLLECTING:
        return e.RoundOverdue(round_.number, now)
    return None


def _next_step_between_rounds(session: Session, now: float) -> e.Event | None:
    rules = session.rules
    if not session.gathered:
        return e.ParticipantsGathered(now) if _have_gathered(session, now) else None
    if session.model is None:
        return _ask_for_model(session)
    if len(session.members) < rules.num_required:
        return None
    # An empty model has nothing to train: round 0 then only initialises.
    epochs = 0 if session.model.is_empty else rules.epochs
    carried, carried_rounds = tuple(session.training), tuple(session.training.values())
    free = tuple(p for p in session.members if p not in session.training)
    num_connected, fraction = len(session.members), rules.fraction_participants
    k = num_selected(num_connected, fraction, rules.over_selection)
    # Whoever trains for longer than a round may take holds nobody's place.
    num_busy = sum(not _is_past(session.bases[n].opened_at, rules, now) for n in carried_rounds)
    drawn = _draw(session, free, max(0, k - num_busy))
    selected = (*carried, *drawn)
    # A controller may choose more than it is asked for; then all of them are wanted.
    wanted = num_wanted(num_connected, fraction) if rules.over_selection else len(selected)
    return e.RoundOpened(session.round, selected, epochs, now, wanted)


def _is_past(opened_at: float, rules: Rules, now: float) -> bool:
    return rules.deadline_s is not None and opened_at + rules.deadline_s <= now


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
    """The start timeout after the first arrival; N would rather start than see the session end."""
    arrived = min(m.joined_at for m in session.members.values())
    gives_up_at = session.gives_up_at
    deadline = arrived + session.rules.start_timeout_s
    return deadline if gives_up_at is None else min(deadline, gives_up_at)


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
        case e.TimePassed(at):
            return replace(session, noted_at=at)
        case e.ParticipantsGathered(at):
            # The wait for participants is over. That for a model begins, at its full length.
            return replace(session, gathered=True, since=session.since if at is None else at)
        case e.ModelRequested(profiles):
            return replace(session, requested=profiles)
        case e.InitialisationRefused(reason):
            return replace(session, requested=None, refused=session.requested, trouble=reason)
        case e.ModelInitialised(model, at):
            since = session.since if at is None else at
            return replace(session, model=model, refused=None, trouble="", since=since)
        case e.RoundOpened(number, selected, epochs, at, wanted):
            opened = Round(
                number,
                selected,
                target=len(selected),
                epochs=epochs,
                opened_at=at,
                num_wanted=len(selected) if wanted is None else wanted,
                carried=session.training,
            )
            session = _to(session, Phase.COLLECTING, at)
            return replace(session, open_round=opened, training={}, num_draws=1)
        case e.ParticipantsSelected(_, more):
            grown = _open(session)
            grown = replace(grown, selected=(*grown.selected, *more))
            return replace(session, open_round=grown, num_draws=session.num_draws + 1)
        case e.RoundPaused(_, at):
            return _to(session, Phase.STANDBY, at)
        case e.RoundResumed():
            return _to(session, Phase.COLLECTING)
        case e.RoundOverdue(_, at):
            return replace(session, open_round=replace(_open(session), overdue_at=at))
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
            return replace(_to(session, Phase.AGGREGATING, at), open_round=closed)
        case e.ModelPublished(_, model, at):
            return _after_publication(session, model, at)
        case e.SessionFinished(cause, at):
            # open_round moves to last_round so that resends are still recognised.
            last = session.open_round or session.last_round
            session = _to(session, Phase.FINISHED, at)
            return replace(
                session, cause=cause, open_round=None, last_round=last, training={}, bases={}
            )
        case e.SessionOpened():
            raise AssertionError("a session is opened once, by `begin`")


def _to(session: Session, phase: Phase, at: float | None = None) -> Session:
    assert phase in TRANSITIONS[session.phase], f"{session.phase} does not lead to {phase}"
    return replace(session, phase=phase, since=session.since if at is None else at)


def _open(session: Session) -> Round:
    assert session.open_round is not None, "no round is open"
    return session.open_round


def _without(session: Session, participant_id: str) -> Session:
    """Gone. What it still owed, somebody else will do; what was accepted from it stays."""
    round_ = session.open_round
    if round_ is not None and participant_id in round_.outstanding:
        selected = tuple(p for p in round_.selected if p != participant_id)
        carried = {p: number for p, number in round_.carried.items() if p != participant_id}
        round_ = replace(round_, selected=selected, carried=carried)
    return replace(
        session,
        members={p: m for p, m in session.members.items() if p != participant_id},
        heard={p: h for p, h in session.heard.items() if p != participant_id},
        upload_names={n: p for n, p in session.upload_names.items() if p != participant_id},
        training={p: n for p, n in session.training.items() if p != participant_id},
        open_round=round_,
    )


def _still_training(session: Session) -> Mapping[str, int]:
    """Who goes on training when the open round is over."""
    return still_training(_open(session), session.rules) if session.is_buffered else {}


def _after_publication(session: Session, model: GlobalModel, at: float) -> Session:
    round_ = _open(session)
    training = _still_training(session)
    known = {**session.bases, round_.number: _base(session)}
    counted = session.counted
    if session.is_buffered:
        new = {p: (round_.trained_by(p), update) for p, update in round_.updates.items()}
        counted = {p: latest for p, latest in {**counted, **new}.items() if p in session.members}
    return replace(
        _to(session, Phase.STANDBY, at),
        # XAIN's round number stays at the last round when there is none after it.
        round=min(model.round, session.rules.rounds - 1),
        epoch_base=session.epoch_base + round_.epochs,
        model=model,
        open_round=None,
        last_round=round_,
        training=training,
        bases={number: known[number] for number in sorted(set(training.values()))},
        counted=counted,
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
        # By name: who came back after an absence stands elsewhere in the selection, and a sum of
        # floats depends on its order.
        names = sorted(round_.updates)
        updates = tuple(round_.updates[p] for p in names)
        staleness = tuple(round_.number - round_.trained_by(p) for p in names)
        # Initialisations weigh the same: nothing has been learnt from anybody's samples yet.
        if session.model.is_empty:
            updates = tuple(replace(update, num_samples=0) for update in updates)
        rule = session.rules.aggregation
        return (Aggregate(round_.number, rule, updates, session.model, staleness),)
    if session.phase is Phase.STANDBY and session.requested is not None and session.model is None:
        return (InitialiseModel(session.rules.initial, session.requested),)
    return ()


def next_deadline(session: Session) -> float | None:
    """Session time at which a Tick is due; None if nothing will happen by itself."""
    if session.phase is Phase.FINISHED:
        return None
    leases = expiries(session.members, session.heard, session.lease_floor, session.rules.lease_s)
    due = [expires_at for _, expires_at in leases]
    if not session.gathered and len(session.members) >= session.rules.num_required:
        due.append(_start_deadline(session))
    waits = (session.gives_up_at, _note_at(session), due_of_round(session))
    due += [at for at in waits if at is not None]
    return min(due, default=None)


def due_of_round(session: Session) -> float | None:
    """When the open round closes for its deadline, or is overdue; None if it will not."""
    round_ = session.open_round
    if round_ is None or session.phase is Phase.AGGREGATING:
        return None
    # While it is paused, it can be closed, but nobody could be late.
    if session.phase is Phase.STANDBY and not has_enough(round_, session.rules):
        return None
    return round_deadline(round_, session.rules)
