"""Events that follow from the state or from time alone: the second step of `decide`."""

from dataclasses import replace
from math import inf

from xain_coordinator.core.machine.scripted import SCRIPT_ENDED
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.machine.strategy import Strategy
from xain_coordinator.core.parts import attempts
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.rules.pacing import (
    closing_time,
    has_enough,
    is_complete,
    names_of,
    num_needed,
    num_selected,
    num_wanted,
    plan_of,
    round_deadline,
)
from xain_coordinator.core.rules.selection import Candidate, Controller, select
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import Phase, Task
from xain_wire.metadata import COMPLETED


def next_step(session: Session, now: float, strategy: Strategy) -> e.Event | None:
    """The next event that this state causes by itself; None if there is none. Raises
    PluginFailed."""
    if session.phase is Phase.FINISHED:
        return None
    step: e.Event | None = None
    controller = strategy.controller
    open_round = session.open_round
    if open_round is None:
        # However good the last model turns out to be, no training follows on its evaluation.
        if session.gathered and session.is_trained:
            return _next_step_at_the_end(session, now)
        step = _next_step_between_rounds(session, now, controller)
    elif open_round.task is Task.EVALUATE:
        return _next_step_at_the_end(session, now)
    elif open_round.attempt and session.phase is not Phase.AGGREGATING:
        step = _next_step_of_attempt(session, open_round, now, controller)
    elif session.phase is not Phase.AGGREGATING:
        step = _next_step_of_round(session, open_round, now, strategy)
    gives_up_at = session.gives_up_at
    if step is None and gives_up_at is not None and gives_up_at <= now:
        step = e.SessionFinished(_why_given_up(session), now)
    return step


def _next_step_at_the_end(session: Session, now: float) -> e.Event | None:
    """The next event once the last model is there: open the round that evaluates it, if a
    participant or the coordinator can; select a late site of a study; end the session when all have
    answered or the deadline has passed. None while it waits."""
    round_ = session.open_round
    if round_ is None:
        assert session.model is not None, "nothing was trained"
        if session.waits_for_script:
            return None
        evaluators = session.evaluators
        is_owed = session.evaluation_due.owed or session.central_due is not None
        # Without a round the record of the session would lack what the script has measured.
        is_owed = is_owed or session.script.model == session.model.round
        if evaluators or is_owed or _absent_sites(session):
            return e.RoundOpened(
                session.model.round, evaluators, 0, now, len(evaluators), Task.EVALUATE
            )
        return _completed(session, now)
    deadline = round_deadline(round_, session.rules)
    is_late = deadline is not None and deadline <= now
    if late := _late_evaluators(session, round_):
        return e.ParticipantsSelected(round_.number, late)
    is_owed = session.evaluation.owed or session.central_due is not None
    is_complete = round_.all_in and not is_owed and not _absent_sites(session)
    return _completed(session, now) if is_complete or is_late else None


def _sites(session: Session) -> tuple[str, ...]:
    """Sites of a study that evaluate the last model. The session waits for them until the deadline:
    its table must not depend on a site's absence for a moment. Empty without a study."""
    if session.rules.step is None:
        return ()
    return session.rules.sites or session.requested_of


def _absent_sites(session: Session) -> list[str]:
    """Sites of a study that may still come: not connected, not refused, without an answer or a
    failure in the open round."""
    round_ = session.open_round
    known = () if round_ is None else (*round_.answers, *round_.failed)
    known = (*known, *session.members, *session.members.not_admitted)
    return [site for site in _sites(session) if site not in known]


def _late_evaluators(session: Session, round_: Round) -> tuple[str, ...]:
    """Sites of a study that can evaluate the last model, and were away when its round opened."""
    known = {*round_.selected, *round_.answers, *round_.failed}
    return tuple(p for p in session.evaluators if p in _sites(session) and p not in known)


def _completed(session: Session, now: float) -> e.SessionFinished:
    """The end of a session that has its last model, with the reason if that came before the last
    round."""
    model, best = session.model, session.evaluation.best
    assert model is not None, "nothing was trained"
    if model.round >= session.rules.num_rounds:
        return e.SessionFinished(COMPLETED, now)
    because = session.evaluation.descent.ended_because or model.ended_because
    if session.script.is_over and not because and not session.is_out_of_patience:
        because = SCRIPT_ENDED
    if best is not None and not because:
        because = f"stopped early: {best.metric} has not improved since round {best.improved_round}"
        if session.plan is not None and session.plan.passes:
            passes = (
                (model.round - best.improved_round) * session.plan.passes // session.plan.rounds
            )
            because += f", for {passes} passes"
    return e.SessionFinished(COMPLETED, now, because)


def _why_given_up(session: Session) -> str:
    """The cause of the end of a session that has waited for rounds.idle_timeout_s: what it waited
    for."""
    rules, round_ = session.rules, session.open_round
    waited = f"for rounds.idle_timeout_s = {rules.idle_timeout_s:g} s"
    if session.phase is Phase.AGGREGATING:
        return f"the model of round {session.round} could not be made {waited}"
    if round_ is not None and round_.overdue_at is not None:
        return (
            f"round {round_.number} had too few updates at its deadline, and {waited} after it: "
            f"{len(round_.updates)} of {num_needed(round_, rules)}"
        )
    connected = session.members.num_eligible
    if session.gathered and session.model is None and connected >= rules.num_required:
        return f"no initial model could be made {waited}: {session.trouble or 'it took too long'}"
    if session.lacks_chosen:
        return (
            f"round {session.round} has waited for participants that the script has chosen "
            f"{waited}: {names_of(session.chosen_away)}"
        )
    if session.lacks_initialisers:
        return (
            f"the session has waited for initial weights {waited}: too few of the {connected} "
            "connected participants can make some"
        )
    return (
        f"the session has waited for participants {waited}: {connected} of {rules.num_required} "
        "are connected"
    )


def _next_step_of_round(
    session: Session, round_: Round, now: float, strategy: Strategy
) -> e.Event | None:
    """The next event of the open round: a change of its selection, its closing, its pause or
    resumption as participants go and come, or that it is overdue. None while it waits."""
    step = _change_of_selection(session, round_, strategy.controller)
    if step is not None:
        return step
    deadline = round_deadline(round_, session.rules)
    is_late = deadline is not None and deadline <= now
    if has_enough(round_, session.rules):
        pacing = strategy.pacing_of_round(session)
        if is_complete(round_, pacing):
            return e.RoundClosed(round_.number, now)
        closes_at = closing_time(round_, pacing)
        if closes_at is not None and closes_at <= now:
            return e.RoundClosed(round_.number, now)
        # A pause that is about to end the session is late as well.
        gives_up_at = session.gives_up_at
        if is_late or (gives_up_at is not None and gives_up_at <= now):
            return e.RoundClosed(round_.number, now, "deadline", _missed(session, round_))
    has_required = session.members.num_eligible >= session.rules.num_required
    enough = has_required and not session.lacks_initialisers
    if session.phase is Phase.COLLECTING and not enough:
        return e.RoundPaused(round_.number, now)
    if session.phase is Phase.STANDBY and enough:
        return e.RoundResumed(round_.number)
    if is_late and session.phase is Phase.COLLECTING:
        return e.RoundOverdue(round_.number, now, _missed(session, round_))
    return None


def _next_step_of_attempt(
    session: Session, round_: Round, now: float, controller: Controller
) -> e.Event | None:
    """The next event of a round of the rule "assemble": closed with all slices in, paused, resumed,
    or restarted once a member has stopped or the deadline has passed; after MAX_ATTEMPTS the end of
    the session. None while it waits. A lost member is not replaced."""
    if round_.selected and round_.all_in and not round_.broken:
        return e.RoundClosed(round_.number, now)
    enough = session.members.num_eligible >= session.rules.num_required
    if session.phase is Phase.COLLECTING and not enough:
        return e.RoundPaused(round_.number, now)
    if not enough:
        return None
    if session.phase is Phase.STANDBY:
        return e.RoundResumed(round_.number)
    deadline = round_deadline(round_, session.rules)
    is_late = deadline is not None and deadline <= now
    if not is_late and not round_.broken:
        return None
    if round_.attempt >= attempts.MAX_ATTEMPTS:
        return e.SessionFinished(attempts.why_given_up(round_), now)
    there = session.chosen_of(session.members.eligible)
    if not is_late:  # at a deadline those that failed are asked once more
        there = tuple(p for p in there if p not in round_.failed)
    selected = _members_of_attempt(session, there, len(there), controller)
    if not selected:
        return None  # all have failed: they are asked once more at the deadline
    owing = _missed(session, round_) if is_late else ()
    missed = tuple(p for p in owing if p not in round_.broken)
    reason = attempts.why_broken(round_)
    return e.RoundRestarted(round_.number, round_.attempt + 1, selected, now, reason, missed)


def _members_of_attempt(
    session: Session, candidates: tuple[str, ...], k: int, controller: Controller
) -> tuple[str, ...]:
    """Participants for an attempt at a round of the rule "assemble": at most one for each stage,
    and those left out only if the others are too few. k: how many at most."""
    pool = tuple(p for p in candidates if p not in session.selection.left_out)
    if len(pool) < session.rules.min_participants:
        pool = candidates
    assert session.model is not None, "a round is open without a model"
    k = min(k, attempts.max_stages(session.rules, session.model))
    return _draw(session, pool, k, controller)[:k]


def _missed(session: Session, round_: Round) -> tuple[str, ...]:
    """Participants that have missed the deadline: they owe an update, and are neither left out nor
    at fault in this round already.

    A participant that goes on with its round is not late. A damaged copy is no fault of its sender;
    in a later attempt at the round the sender has another slice to bring. A refused update is
    counted already.
    """
    return tuple(
        p
        for p in round_.outstanding
        if (p not in round_.damaged or round_.attempt)
        and p not in session.selection.left_out
        and session.selection.faults_of(p).last != round_.number
        and not session.outlasts_round(p)
    )


def _change_of_selection(session: Session, round_: Round, controller: Controller) -> e.Event | None:
    """The event that fills the open round's free slots from the pool. Participants that are left
    out fill only the slots that min_participants needs, while no others can; where others have come
    since, one of them is left out again. An overdue round selects all. None if nothing is to
    change."""
    if round_.overdue_at is not None:
        others = session.available
        return _selected(session, others, len(others), controller) if others else None
    drafted = session.drafted
    num_good = len(round_.selected) - len(drafted)
    num_free = round_.target - num_good
    if num_free > 0 and (pool := session.pool):
        return _selected(session, pool, num_free, controller)
    missing = num_needed(round_, session.rules) - num_good - len(drafted)
    if drafted and missing < 0 and not session.chosen:
        # Enough others have come, and would wait for one of whom little is to be expected.
        participant_id = next(p for p in reversed(round_.selected) if p in drafted)
        until = session.selection.faults_of(participant_id).left_out_until
        return e.ParticipantLeftOut(participant_id, until)
    if missing > 0 and (reserve := session.reserve):
        return _selected(session, reserve, missing, controller)
    return None


def _selected(
    session: Session, candidates: tuple[str, ...], k: int, controller: Controller
) -> e.ParticipantsSelected:
    """The event that adds at most k of the candidates to the open round."""
    # Cut: the controller "all" answers with all candidates, whatever is missing.
    drawn = _draw(session, candidates, k, controller)[:k]
    return e.ParticipantsSelected(session.opened.number, drawn)


def _next_step_between_rounds(
    session: Session, now: float, controller: Controller
) -> e.Event | None:
    """The next event while no round is open, in the order of a training: participants have
    gathered, the initial model is asked for, a participant with too many faults is left out, the
    rounds are planned, a round opens. None while participants, a request, a script or a model are
    waited for."""
    rules = session.rules
    if session.waits_for_request or session.waits_for_script:
        return None
    if not session.gathered:
        connected = session.members.num_eligible
        enough = connected >= rules.num_required and now >= session.starts_at
        have_gathered = enough or connected >= rules.start_participants
        return e.ParticipantsGathered(now) if have_gathered else None
    if session.model is None:
        return _ask_for_model(session, now)
    if session.members.num_eligible < rules.num_required or session.lacks_initialisers:
        return None
    if session.lacks_chosen:
        return None
    if (left_out := _left_out(session)) is not None:
        return left_out
    if session.plan is None and (rules.passes or rules.workload):
        return _planned(session)
    if session.is_untrained and rules.initial == "first":
        # One participant makes the initial weights.
        first = _draw(session, session.pool or session.reserve, 1, controller)[:1]
        return e.RoundOpened(session.round, first, 0, now, 1, Task.INITIALISE)
    # An empty model has nothing to train: round 0 then only initialises.
    config = session.script.config_of(session.round)
    epochs = 0 if session.is_untrained else config.epochs or rules.epochs
    carried, bases = session.buffered.carried, session.buffered.bases
    chosen = session.chosen
    # Participants that are left out count as gone, but N are always there.
    num_good = session.members.num_eligible - len(session.selection.left_out)
    num_connected = max(num_good, rules.num_required)
    fraction = rules.fraction_participants
    if chosen and rules.aggregation != attempts.RULE:
        # No share of them, and left-out ones among them: the script knows whom it has chosen.
        selected = (*carried, *session.available)
        there = frozenset(selected)
        absent = tuple(p for p in chosen if p not in there)
        return e.RoundOpened(session.round, selected, epochs, now, len(chosen), absent=absent)
    k = num_selected(num_connected, fraction, rules.over_selection)
    # A participant that trains for longer than a round may take occupies no slot.
    limit_s = inf if rules.deadline_s is None else rules.deadline_s
    num_busy = sum(bases[n].opened_at + limit_s > now for n in carried.values())
    drawn = _draw(session, session.pool, max(0, k - num_busy), controller)
    if rules.aggregation == attempts.RULE and not session.is_untrained:
        selected = _members_of_attempt(session, session.available, k, controller)
        return e.RoundOpened(session.round, selected, epochs, now)
    selected = (*carried, *drawn)
    missing = rules.min_participants - len(selected)
    if missing > 0 and session.reserve:
        selected += _draw(session, session.reserve, missing, controller)[:missing]
    # A controller may choose more than it is asked for; then all of them are wanted.
    wanted = num_wanted(num_connected, fraction) if rules.over_selection else len(selected)
    return e.RoundOpened(session.round, selected, epochs, now, wanted)


def _planned(session: Session) -> e.TrainingPlanned:
    """The event that decides the rounds of the training for the participants that are there now."""
    profiles = [session.members[p].profile for p in session.members.eligible]
    samples = [0 if profile is None else profile.num_samples for profile in profiles]
    plan = plan_of(session.rules, samples)
    if session.model is not None and (steps := session.model.steps_per_pass) > 1:
        plan = replace(plan, steps=steps, rounds_per_pass=steps)
    return e.TrainingPlanned(plan)


def _left_out(session: Session) -> e.ParticipantLeftOut | None:
    """The event that leaves out, for refused_rounds, the first participant with refused_limit
    faults of any kind in a row; None without one."""
    rules = session.rules
    for participant_id, known in session.selection.faults.items():
        is_over = 0 < rules.refused_limit <= known.in_a_row
        if is_over and participant_id in session.members:
            return e.ParticipantLeftOut(participant_id, session.round + rules.refused_rounds)
    return None


def _ask_for_model(session: Session, now: float) -> e.Event | None:
    """The event that requests the initial model from the profiles of the members, once: refused
    profiles would be refused again, so other participants must join first. The end of the session
    where something waits for that; None while there is nothing to ask for."""
    if session.requested is not None or session.members.num_eligible < session.rules.num_required:
        return None
    # Profiles by name, so that the model does not depend on who came first: the first decides what
    # [schema] leaves open, such as the order of the columns.
    members = tuple(sorted(name for name, _ in session.eligible_profiles()))
    if session.profiles_of(members) == session.refused:
        if session.rules.start == "request" or session.rules.sites:  # something waits for the end
            return e.SessionFinished(f"no initial model could be made: {session.trouble}", now)
        return None
    return e.ModelRequested(participants=members)


def _draw(
    session: Session, participants: tuple[str, ...], k: int, controller: Controller
) -> tuple[str, ...]:
    """Let the controller choose k of these members, or all if they are fewer; some controllers
    choose more. Raises PluginFailed."""
    members, last = session.members, session.selection.last_selected
    candidates = [
        Candidate(p, members[p].profile, members[p].tags, last[p].round, last[p].at)
        for p in participants
    ]
    return select(
        controller,
        candidates,
        k,
        seed=session.rules.seed,
        round_=session.round,
        draw=session.selection.num_draws,
    )
