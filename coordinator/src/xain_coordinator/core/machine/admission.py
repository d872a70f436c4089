"""Answers to participants that ask to join: who is let in, who waits and why, and which process a
name belongs to."""

import dataclasses
from collections.abc import Iterator

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts import attempts
from xain_coordinator.core.parts.membership import (
    MIN_CONTENDER_PAUSE_S,
    Member,
    check_name,
    check_tags,
    without_statistics,
)
from xain_coordinator.core.parts.points import departure_point
from xain_coordinator.core.parts.profiles import check_profile, outvoted
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.values import DataProfile, ParticipantState, Phase, Point

# Events, the reply, and points of metrics that one command leads to.
Answer = tuple[tuple[e.Event, ...], r.Reply, tuple[Point, ...]]


def rendezvous(session: Session, command: c.Rendezvous, now: float) -> Answer:
    """Answer a participant that asks to join or to return, with the events of its joining.
    Accepted: it is a member, or the session has ended; Later: no slot is free, or its data are
    unlike the members' and it waits; Divide: it must divide its rows as the study asks; IdInUse:
    another process has its name.
    Raises Refusal for a removed participant, ProfileMismatch, INVALID_NAME, INVALID_TAGS,
    INVALID_REQUEST."""
    participant_id = command.participant_id
    rules = session.rules
    accepted = r.Accepted(rules.heartbeat_time_s)
    if session.phase is Phase.FINISHED:
        return (), accepted, ()  # it will hear FINISHED; the session does not change any more
    if participant_id in session.removed:
        raise errors.Refusal(
            errors.Reason.REMOVED_BY_OPERATOR,
            f"an operator has removed participant {participant_id!r} from session "
            f"{session.session_id}",
        )
    if command.division != rules.division:
        if not command.can_divide:
            raise errors.ProfileMismatch(_cannot_divide(participant_id))
        return (), r.Divide(rules.division), ()
    member = session.members.get(participant_id)
    if member is not None and not member.is_instance(command.instance_id):
        check_name(command.instance_id)  # it is kept for a while
        return _id_in_use(session, member, command, now)
    if member is not None:
        _check_group_address(session, command.group_address)
        known: list[e.Event] = [e.ParticipantHeard(participant_id, ParticipantState.READY, -1, now)]
        opened = session.open_round
        if session.is_untrained and command.can_initialise != member.can_initialise:
            # A process of another script now uses this participant id. Only initial weights can be
            # lost.
            left = e.ParticipantLeft(participant_id, "left")
            again = dataclasses.replace(
                _joined(session, command, now),
                profile=member.profile,
                tags=member.tags,
                instance_id=member.instance_id,
            )
            return (left, again), accepted, ()
        if opened is not None and participant_id in opened.failed:
            known.insert(0, e.ParticipantReturned(participant_id))
        if (address := _group_address(session, command)) != member.group_address:
            known.insert(0, e.GroupAddressChanged(participant_id, address))
        return tuple(known), accepted, ()
    check_name(participant_id)
    check_tags(command.tags)
    if command.instance_id:
        check_name(command.instance_id)
    if _is_full(session, is_eligible=rules.is_eligible(participant_id, command.tags)):
        # A place is free again when a lease runs out, so that is the natural time to ask again.
        why = f"rounds.max_participants, {rules.max_participants}, were connected"
        return (e.NotAdmitted(participant_id, why),), r.Later(rules.lease_s), ()
    try:
        _check_group_address(session, command.group_address)
        if not rules.sites or participant_id in rules.sites:
            _check_profile(session, command.profile)
    except errors.ProfileMismatch as refusal:
        if command.is_enrolled and refusal.is_unlike_others and command.profile is not None:
            return _vote(session, command, command.profile, str(refusal), now)
        raise errors.ProfileMismatch(f"participant {participant_id!r}: {refusal}") from None
    return (_joined(session, command, now),), accepted, ()


def _vote(
    session: Session, command: c.Rendezvous, profile: DataProfile, reason: str, now: float
) -> Answer:
    """Decide on an enrolled participant whose data are unlike the members'. If more participants
    have data like it than there are members, it joins and the members with other data leave,
    outvoted; else it is told Later, and waits.

    A participant that comes first with wrong data then keeps nobody out. Between two of them only
    an operator knows who is right.
    """
    participant_id, rules = command.participant_id, session.rules
    members = {
        p: one.profile
        for p, one in session.members.items()
        if one.profile is not None and one.profile.num_samples
    }
    known = session.members.unlike.items()
    waiting = [
        one
        for p, (one, at) in known
        if p != participant_id and p not in session.removed and at + rules.lease_s > now
    ]
    is_open = session.requested is None
    replaced = outvoted(profile, members, waiting, rules.schema) if is_open else None
    if replaced is None:
        if session.model is None:
            until = (
                "more sites have data like its own, or an operator removes the site that is wrong: "
                "xain-coordinator participants remove NAME"
            )
        else:
            until = (
                "an operator ends this session, whose model was made for one site alone, if that "
                "site is wrong: xain-coordinator session finish"
            )
        why = f"{reason}. {participant_id!r} waits until {until}"
        noted = e.WaitsAsUnlike(participant_id, without_statistics(profile), why, now)
        return (noted,), r.Later(rules.heartbeat_time_s, why), ()
    events: list[e.Event] = []
    for name, why in replaced.items():
        events += [e.ParticipantLeft(name, "outvoted"), e.NotAdmitted(name, why)]
    joined = _joined(session, command, now)
    points = tuple(departure_point(name) for name in replaced)
    return (*events, joined), r.Accepted(rules.heartbeat_time_s), points


def _cannot_divide(participant_id: str) -> str:
    """The refusal of a participant that cannot divide its rows as the session asks for, as text."""
    return (
        f"participant {participant_id!r}: each session of this study trains on a part of the rows,"
        " which this participant does not divide: it is of an earlier version, a script, or has"
        " participant.require_approval, and only all rows were approved"
    )


def _joined(session: Session, command: c.Rendezvous, now: float) -> e.ParticipantJoined:
    """The event that makes the sender of a rendezvous a member."""
    return e.ParticipantJoined(
        command.participant_id,
        command.profile,
        now,
        command.tags,
        command.can_evaluate,
        command.instance_id,
        command.can_initialise,
        _group_address(session, command),
    )


def _id_in_use(session: Session, member: Member, command: c.Rendezvous, now: float) -> Answer:
    """Refuse a process that asks to join with a connected member's name: IdInUse says when to ask
    again, or never once the member was heard after this process's first call, since both are alive.

    A process that was killed and started again waits here for the end of its old lease.
    """
    participant_id, rules = member.participant_id, session.rules
    sign = session.members.heard.get(participant_id)
    heard_at = max(member.joined_at if sign is None else sign.at, session.members.lease_floor)
    lease_s = heard_at + rules.lease_s - now
    known = None if sign is None else sign.contenders.get(command.instance_id)
    is_alive = known is not None and known.is_second(heard_at, rules)
    pause_s = max(MIN_CONTENDER_PAUSE_S, min(rules.heartbeat_time_s, lease_s))
    refused = e.InstanceRefused(participant_id, command.instance_id, command.origin, now)
    reply = r.IdInUse(now - heard_at, lease_s, None if is_alive else pause_s)
    return (refused,), reply, ()


def _is_full(session: Session, *, is_eligible: bool) -> bool:
    """Whether the session has no free slot for one more participant. is_eligible: whether that one
    may be selected; eligible participants and others are counted apart."""
    num_eligible = session.members.num_eligible
    num_alike = num_eligible if is_eligible else len(session.members) - num_eligible
    return num_alike >= session.rules.max_participants


def _check_profile(session: Session, profile: DataProfile | None) -> None:
    """Check that the data profile of a joining participant fits the session. Only a session whose
    model the coordinator makes needs a profile. Raises ProfileMismatch."""
    needed = session.rules.initial == "workload"
    if profile is None:
        if needed:
            raise errors.ProfileMismatch(
                "the model of this session is made for the participants' data, "
                "so a rendezvous must carry a data profile"
            )
        return
    check_profile(
        profile,
        _profiles_to_fit(session),
        session.rules.schema,
        needs_rows=needed,
        is_model_requested=session.requested is not None,
        first=lambda: _first_with_data(session),
    )


def _group_address(session: Session, command: c.Rendezvous) -> str:
    """Address of a participant for process groups; "" in a session without them."""
    return command.group_address if session.rules.aggregation == attempts.RULE else ""


def _check_group_address(session: Session, address: str) -> None:
    """Check a joining participant's address in a session of the rule "assemble"; others need none.
    Raises ProfileMismatch if it is empty, INVALID_REQUEST if it is malformed."""
    if session.rules.aggregation != attempts.RULE:
        return
    if not address:
        raise errors.ProfileMismatch(
            "the participants of this session train one model in a process group, which this one "
            "cannot join; install xain-participant[torch]"
        )
    attempts.check_address(address)


def _first_with_data(session: Session) -> str:
    """The name of the participant whose data complete the schema, for messages; it may have left.
    "" if there is none, or the requested model was made of several."""
    if session.model is not None:
        # Where several had data alike, a later participant is one against many.
        return session.requested_of[0] if len(session.requested_of) == 1 else ""
    members = session.members.values()
    return next(
        (
            m.participant_id
            for m in members
            if m.is_eligible and m.profile and m.profile.num_samples
        ),
        "",
    )


def _profiles_to_fit(session: Session) -> Iterator[DataProfile]:
    """Profiles that a new one must fit: first those of the requested model, also of participants
    that have left, then those of the members."""
    yield from session.requested or ()
    for _, profile in session.eligible_profiles():
        yield profile
