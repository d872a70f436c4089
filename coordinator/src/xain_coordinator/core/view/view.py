"""Sentences that tell an operator of a session: what it waits for, and warnings.

Whatever shows a session, such as the Inspection service, the log and the report, says the same.
"""

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.machine.strategy import Strategy, builtin_strategy
from xain_coordinator.core.parts import descent
from xain_coordinator.core.parts.evaluation import loss_of
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.rules.pacing import names_of
from xain_coordinator.core.view.accounts import MAX_WARNINGS
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary.values import Phase, Plan, Rules, Task
from xain_foundation.settings.hints import hint

_STILL_FALLING = 1e-3  # share of the loss, by a pass over the rows
_LOSS_WORDS = {
    "log_loss": "log loss",
    "mse": "mean squared error",
    "auc": "difference of the AUC to 1",
    "balanced_accuracy": "difference of the balanced accuracy to 1",
}
MAX_ABSENT = 3  # participants that are named with what keeps them away


def not_eligible_because(session: Session, participant_id: str) -> str:
    """Reason why a participant cannot be selected, for an operator; empty if it can be."""
    if not session.members[participant_id].is_eligible:
        if session.rules.sites and participant_id not in session.rules.sites:
            return "it does not take part in this session of the study"
        return f"it lacks {_tags(session.rules)}"
    left_out_until = session.selection.left_out_until(participant_id, session.round)
    if left_out_until is not None:
        return (
            f"left out until round {left_out_until}: its updates were refused, its code failed or "
            "it missed deadlines"
        )
    return ""


def conflict(session: Session, participant_id: str) -> str:
    """Text that a second process with this participant's id is refused; "" if there is none, and
    after the end, when no process is refused."""
    if session.phase is Phase.FINISHED:
        return ""
    second = session.members.conflict(participant_id, session.rules)
    return f"a second process with this id, at {second.origin}, is refused" if second else ""


def warnings(session: Session, history: History) -> list[str]:
    """Warnings for an operator, one sentence each."""
    doubled = [
        f"Two processes have the participant id {participant_id}: {second}."
        for participant_id in sorted(
            p for p, sign in session.members.heard.items() if sign.contenders
        )
        if (second := conflict(session, participant_id))
    ]
    outside = [
        f"{name!r} was not let in: {why.removesuffix('.')}."
        for name, why in session.members.not_admitted.items()
    ]
    if len(outside) > MAX_WARNINGS:
        more = len(outside) - MAX_WARNINGS
        outside[MAX_WARNINGS:] = [f"{more} more were not let in; see status --json."]
    is_over = session.phase is Phase.FINISHED
    return [
        *doubled[:MAX_WARNINGS],
        *outside,
        *_of_the_missing(session),
        *_of_the_fit(session),
        *evaluation_warnings(session, history),
        *history.warnings(is_over=is_over),
    ]


def _of_the_missing(session: Session) -> list[str]:
    """The warning of expected participants that are not connected, once training has begun."""
    missing = session.missing if session.gathered else ()
    if not missing:
        return []
    number = len(session.rules.expected_participants)
    return [f"{len(missing)} of {number} expected participants are missing: {names_of(missing)}."]


def _of_the_fit(session: Session) -> list[str]:
    """Warnings of the rule that made the model, and of steps that have not come to their end."""
    model = session.model
    if model is None:
        return []
    is_over = session.phase is Phase.FINISHED
    if session.rules.aggregation != "newton" or not is_over or model.ended_because:
        return [*model.warnings]
    return [
        *model.warnings,
        f"The fit has not converged in {session.num_trained} rounds, so its coefficients are not"
        " those of the maximum; "
        + hint("xain-coordinator", "xain-coordinator extend --rounds +10")
        + ".",
    ]


def evaluation_warnings(session: Session, history: History) -> list[str]:
    """Warnings about evaluations, such as a metric that is missing, one sentence each."""
    progress, metric = session.evaluation, session.rules.evaluate_metric
    found = [progress.no_better] if progress.no_better else []
    is_measured = progress.measured_round >= 0
    if _keeps_estimators(session.rules):
        found.append(
            "The estimators stay at the sites, so that no model is measured, or can be taken home;"
            f" {hint('xain-coordinator', 'workload.options.publish = true')}."
        )
    # Why the coordinator's own evaluation has none is told by itself.
    is_sent_nothing = (
        not is_measured and session.num_trained > 0 and not session.rules.evaluate_data
    )
    if metric and (progress.lacks_metric or is_sent_nothing):
        found.append(
            f"No evaluation has the metric {metric!r} of evaluate.metric, so no model is the best "
            "one, and nothing stops early."
        )
    elif progress.lacks_metric and progress.best is not None:
        found.append(
            f"The latest evaluation lacks {progress.best.metric}, by which models are compared: a "
            "site has sent no probabilities. No later model is the best one, and nothing stops "
            "early."
        )
    elif progress.lacks_metric and session.rules.evaluate_patience and _is_patience_set(session):
        found.append(
            "Only averages over sites are sent, and no metric is named by which they are compared, "
            "so evaluate.patience stops nothing: name one of them, such as "
            + hint("xain-coordinator", 'evaluate.metric = "loss"')
            + "."
        )
    if names := history.not_in_figures:
        found.append(
            "The figures of all rows are without those of "
            f"{', '.join(names[:MAX_WARNINGS])}{' and others' if len(names) > MAX_WARNINGS else ''}"
            ", whose predictions are too far off to be squared, or that sent averages only."
        )
    criterion, best = session.rules.evaluate_threshold, progress.best
    if criterion and best is not None and not progress.thresholds(session.rules):
        found.append(
            f'No threshold is chosen by evaluate.threshold = "{criterion}": it needs a model of '
            "two classes with probabilities, and held-out rows of both."
        )
    if names := history.withheld:
        listed = ", ".join(names[:MAX_WARNINGS]) + (
            " and others" if len(names) > MAX_WARNINGS else ""
        )
        found.append(
            f"{len(names)} {'site has' if len(names) == 1 else 'sites have'} fewer than "
            f"{session.rules.evaluate_min_rows} held-out rows, so what is measured there stays "
            f"there: {listed}."
        )
    return found


def trend(session: Session, history: History) -> str:
    """One sentence on what further passes would bring, by the curve of the loss of the held-out
    rows; empty where it is not known.

    The models are measured on the same rows, so that their losses differ by no chance of these. The
    latest model is compared with one of a fifth of the passes before.
    """
    untrained = session.rules.num_initial if session.untrained is not None else -1
    known: list[tuple[int, str, float]] = []
    for record in history.rounds:
        own = session.rules.evaluate_data
        evaluation = record.coordinator_evaluation if own else record.evaluation
        loss = None if evaluation is None else loss_of(evaluation, session.rules)
        if loss is not None and record.round > untrained and loss[1] > 0:
            known.append((record.round, *loss))
    if len(known) < 2 or not session.num_trained:
        return ""
    last, name, value = known[-1]
    span = max(1, last // 5)
    earlier = next((one for one in reversed(known[:-1]) if one[0] <= last - span), known[0])
    first, other, before = earlier
    of_earlier = 0 if session.lineage is None else session.lineage.num_epochs
    epochs = session.epoch_base - of_earlier
    passes = (last - first) / session.num_trained * session.passes_of(epochs)
    if name != other or passes <= 0:
        return ""
    fall = 1 - (value / before) ** (1 / passes)
    what = f"The {_LOSS_WORDS[name]} on the held-out rows"
    since = f"from model {first} to model {last}"
    if fall >= _STILL_FALLING:
        fell = f"still fell by {100 * fall:.2g} % a pass {since}"
        return f"{what} {fell}: more passes are likely to help."
    if fall > -_STILL_FALLING:
        return f"{what} hardly changed {since}: more passes would change little."
    return f"{what} rose by {-100 * fall:.2g} % a pass {since}: more passes would not help."


def _is_patience_set(session: Session) -> bool:
    """Whether evaluate.patience is set; the patience by default asks for a number of held-out
    rows."""
    return session.rules.evaluate_patience_rows == 0


def planned(session: Session) -> str:
    """How long the training is; "" before it is decided, and where rounds alone are known."""
    return "" if session.plan is None else told(session.plan, session.rules)


def told(plan: Plan, rules: Rules) -> str:
    """A training plan in words: "50 passes over 1,460 rows at 4 sites: 50 rounds of 1 epoch"."""
    where = f"at {_counted(plan.num_sites, 'site')}"
    if plan.num_samples:
        where = f"over {_counted(plan.num_samples, 'row')} {where}"
    if plan.num_counted < plan.num_sites:
        where += f", {plan.num_counted:,} of them a round"
    rounds = _counted(plan.rounds, "round")
    if rules.aggregation == descent.RULE:
        rounds += " of a step each"
    elif rules.stride.levels > 1:
        rounds += f", {rules.stride.levels} for each boosting iteration"
    elif rules.aggregation == "trees":
        rounds += f" of {_counted(plan.epochs, 'boosting iteration')}"
    elif rules.aggregation != "ensemble":
        rounds += f" of {_counted(plan.epochs, 'epoch')}"
    if not plan.passes:
        return f"{rounds} {where}"
    passes = "1 pass" if plan.passes == 1 else f"{plan.passes:,} passes"
    return f"{passes} {where}: {rounds}"


def _counted(number: int, what: str) -> str:
    """A number with its noun, which gets an "s" unless the number is 1."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _keeps_estimators(rules: Rules) -> bool:
    """Whether bagging leaves its estimators at the sites."""
    # The options are JSON text, as json.dumps() writes it, and the core reads no JSON.
    return rules.workload == "bagging" and '"publish": true' not in rules.workload_options


def waiting_for(
    session: Session,
    trouble: str = "",
    strategy: Strategy | None = None,
    history: History | None = None,
) -> str:
    """Sentences on what the session waits for. trouble: a sentence on failing work, added at the
    end. history: where too few are connected, adds those that left after a failure or were not let
    in."""
    if session.phase is not Phase.FINISHED:
        told = [waiting_for(session, strategy=strategy)] if trouble or history else []
        if history is not None and session.members.num_eligible < session.rules.num_required:
            told += _absent(session, history)
        if told:
            return " ".join([*told, trouble]).rstrip()
    rules = session.rules
    connected = session.members.num_eligible
    match session.phase:
        case Phase.FINISHED:
            because = session.evaluation.ended_because
            return f"Nothing: the session has ended ({because or session.cause})."
        case Phase.AGGREGATING:
            return f"The updates of round {session.round} are being aggregated."
        case Phase.COLLECTING if session.open_round is not None:
            if session.open_round.task is Task.EVALUATE:
                return _evaluations_awaited(session, session.open_round)
            strategy = strategy or builtin_strategy(session.rules)
            return _updates_awaited(session, session.open_round, strategy)
        case _ if session.waits_for_request:
            return (
                f"A request to fit, POST /v1/fit: {connected} of {rules.num_required} participants "
                f"connected.{_not_eligible(session)}"
            )
        case _ if session.waits_for_script and session.is_trained:
            return "The script that drives the session, to come to the end of its loop."
        case _ if session.waits_for_script:
            return (
                f"The script that drives the session, to configure round {session.round}: "
                f"{connected} of {rules.num_required} participants connected."
            )
        case _ if not session.gathered and connected >= rules.num_required:
            more = _more_participants(rules.start_participants - connected, rules)
            since = "the request" if session.fit_requested else "the first arrival"
            missing = f" Missing: {names_of(session.missing)}." if session.missing else ""
            return f"{more}, or {rules.start_timeout_s:g} s after {since}.{missing}"
        case _ if connected < rules.num_required:
            needed = rules.num_required if session.gathered else rules.start_participants
            more = _more_participants(needed - connected, rules)
            return f"{more}: {connected} of {needed} connected.{_not_eligible(session)}"
        case _ if session.lacks_chosen:
            away = session.chosen_away or session.chosen
            return (
                f"Participants that the script has chosen for round {session.round}: "
                f"{names_of(away)}."
            )
        case _ if session.lacks_initialisers:
            return (
                f"Initial weights, which too few of the {connected} connected participants can "
                "make: call xain.rounds(model) in a script, or begin with --from-model."
            )
        case _ if session.trouble:
            return f"Other participants: no model can be made for these ({session.trouble})."
        case _:
            return "The initial model is being made."


def _absent(session: Session, history: History) -> list[str]:
    """Sentences on participants that left after a failure and on those that were not let in,
    MAX_ABSENT of each, with the reasons."""
    left = [
        f"{name} has left. Its last failure: {failure.removesuffix('.')}."
        for name, failure in history.accounts.failures_of_departed().items()
    ]
    outside = [
        f"{name} was not let in: {why.removesuffix('.')}."
        for name, why in reversed([*session.members.not_admitted.items()])
    ]
    return [*left[:MAX_ABSENT], *outside[:MAX_ABSENT]]


def _evaluations_awaited(session: Session, round_: Round) -> str:
    """The evaluations that the round of the last model waits for, as a sentence."""
    missing = round_.outstanding
    if not missing:
        if not session.evaluation.owed and session.central_due is not None:
            return "The central model, which is trained on the coordinator's own rows."
        return f"The coordinator's own evaluation of the last model, {round_.number}."
    return f"{len(missing)} of {len(round_.selected)} evaluations of the last model: " + (
        f"{names_of(missing)}."
    )


def _updates_awaited(session: Session, round_: Round, strategy: Strategy) -> str:
    """The updates that an open round waits for, as a sentence, with the participants that the
    script has chosen and that cannot answer."""
    missing = round_.outstanding
    if away := session.chosen_away:
        told = f"chosen by the script, and not connected or failed: {names_of(away)}"
        if not missing:
            return f"Participants {told}. At the deadline others are asked."
        awaited = _answers_awaited(session, round_, strategy).removesuffix(".")
        return f"{awaited}; participants {told}."
    return _answers_awaited(session, round_, strategy)


def _answers_awaited(session: Session, round_: Round, strategy: Strategy) -> str:
    """The updates or initial weights that an open round waits for, as a sentence."""
    rules = session.rules
    missing = round_.outstanding
    if not missing:
        return "Other participants: nobody owes an update, and more are needed."
    some = names_of(missing)
    if round_.task is Task.INITIALISE:
        return f"The initial weights, from {some}."
    if round_.overdue_at is not None:
        more = rules.min_participants - len(round_.updates)
        return (
            f"{more} of the {rules.min_participants} updates that an overdue round needs: {some}."
        )
    return strategy.pacing_of_round(session).awaited(round_)


def _more_participants(number: int, rules: Rules) -> str:
    """How many participants are still wanted, with the tags that they need, as text."""
    more = "1 more participant" if number == 1 else f"{number} more participants"
    return f"{more} with {_tags(rules)}" if rules.tags else more


def _not_eligible(session: Session) -> str:
    """Connected participants that are not eligible, as a sentence; "" without any."""
    others = [p for p, member in session.members.items() if not member.is_eligible]
    if not others:
        return ""
    why = f", for want of {_tags(session.rules)}" if session.rules.tags else ""
    return f" Not counted{why}: {names_of(others)}."


def _tags(rules: Rules) -> str:
    """Tags that the rules ask for, such as "site = north or south, ward = 7"."""
    return ", ".join(f"{key} = {' or '.join(values)}" for key, values in rules.tags.items())
