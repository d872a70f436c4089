"""Whether a session takes what its script has decided.

The same decision again changes nothing, so that a script may repeat what it was not answered.
"""

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts import descent
from xain_coordinator.core.rules.pacing import names_of
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary.script import RoundConfig
from xain_coordinator.core.vocabulary.values import Evaluation, Phase, Rules

SCRIPT_ENDED = "the script came to its end"  # cause of the end of a session that has rounds left

MAX_EPOCHS = 2**31 - 1  # of all rounds, as an int32 of the wire
# A round of these rules is one step, or a fit that has no epochs.
_OF_ONE_EPOCH = frozenset((descent.RULE, "newton", "ensemble"))


def require_configurable(session: Session, command: c.ConfigureRound) -> bool:
    """Whether the decision for a round is new; False if the script repeats the one that it has
    made. Raises a Refusal if it cannot be taken: the session waits for none, or a name or a number
    of epochs is wrong."""
    require_scripted(session, command.session_id)
    script, round_, config = session.script, command.round, command.config
    if script.round == round_:
        if script.config != config:
            raise errors.Refusal(
                errors.Reason.DECIDED_OTHERWISE,
                f"round {round_} is configured already, with {script.config}; it cannot become "
                f"{config}",
            )
        return False
    _require_open(session)
    if session.is_trained:
        raise errors.Refusal(
            errors.Reason.NOT_FITTING,
            f"round {round_} cannot be configured: the last model is there",
        )
    if not session.waits_for_script or round_ != session.round:
        state = "waits to be configured" if session.waits_for_script else "does not"
        raise errors.Refusal(
            errors.Reason.NOT_FITTING,
            f"round {round_} cannot be configured now: the session is at round {session.round}, "
            f"which {state}",
        )
    _check_names(session, config)
    _check_epochs(session, config)
    return True


def evaluation_of(command: c.RecordEvaluation) -> Evaluation:
    """The evaluation of a script; of one row where their number is not known: it counts, too."""
    return Evaluation(command.num_samples or 1, command.metrics)


def require_measurable(
    session: Session, command: c.RecordEvaluation, evaluation: Evaluation
) -> bool:
    """Whether the evaluation of the present model is new; False if the script repeats the one that
    it has sent. Raises a Refusal if it cannot be taken: it differs from that one, is of another
    model, or the coordinator measures the models itself."""
    require_scripted(session, command.session_id)
    script, model = session.script, command.model
    if script.model == model:
        if (script.num_samples, script.metrics) != (evaluation.num_samples, evaluation.metrics):
            raise errors.Refusal(
                errors.Reason.DECIDED_OTHERWISE,
                f"model {model} is evaluated already, with {dict(script.metrics)} of "
                f"{script.num_samples} rows; it cannot become {dict(evaluation.metrics)} of "
                f"{evaluation.num_samples}",
            )
        return False
    _require_open(session)
    if session.rules.evaluate_data:
        raise errors.invalid_request(
            "the coordinator measures the models of this session on its own rows: evaluate.data "
            "is set"
        )
    if session.model is None or session.model.is_empty or session.model.round != model:
        is_there = session.model is not None and not session.model.is_empty
        there = f"it is {session.model.round}" if is_there and session.model else "there is none"
        raise errors.StaleModel(f"model {model} is not the present one: {there}")
    return True


def require_scripted(session: Session, session_id: str = "") -> None:
    """Raise a Refusal unless a script drives the session, and that of this id if one is given."""
    require_session(session, session_id)
    if not session.rules.scripted:
        raise errors.invalid_request("no script drives this session: rounds.scripted is not set")


def require_session(session: Session, session_id: str) -> None:
    """Raise a Refusal if an id is given, and it is not that of the session."""
    if session_id not in ("", session.session_id):
        raise errors.Refusal(
            errors.Reason.NOT_FITTING,
            f"the script drives session {session_id}, and the present one is {session.session_id}",
        )


def _require_open(session: Session) -> None:
    """Refuse a decision after the end of the session or of its script. Raises a Refusal,
    NOT_FITTING."""
    if session.phase is Phase.FINISHED:
        raise errors.Refusal(errors.Reason.NOT_FITTING, f"the session is finished: {session.cause}")
    if session.script.is_over:
        raise errors.Refusal(
            errors.Reason.NOT_FITTING, f"{SCRIPT_ENDED} already, and decides nothing more"
        )


def _check_names(session: Session, config: RoundConfig) -> None:
    """Check that a configuration names known participants, and enough of them. One that is away for
    a moment is known by its part in the last round, or by what the script has said before."""
    rules, members, last = session.rules, session.members, session.last_round
    known = {*members, *rules.expected_participants, *session.script.config.names}
    known |= {*session.declared, *(() if last is None else last.selected)}
    known -= session.removed
    for name in config.names:
        if name not in known:
            raise errors.invalid_request(
                f"there is no participant {name!r}; there are: {names_of(sorted(known))}"
            )
    for name in config.selected:
        if name in members and not members[name].is_eligible:
            raise errors.invalid_request(f"participant {name!r} lacks the tags of rounds.tags")
    if 0 < len(config.selected) < rules.min_participants:
        raise errors.invalid_request(
            f"{len(config.selected)} participants are selected, and a round needs "
            f"rounds.min_participants = {rules.min_participants}"
        )


def _check_epochs(session: Session, config: RoundConfig) -> None:
    """Check the epochs that a script gives a round and single sites: countable, and as the rule of
    aggregation allows. Raises INVALID_REQUEST."""
    for epochs in (config.epochs, *config.site_epochs.values()):
        if epochs < 0 or session.epoch_base + epochs > MAX_EPOCHS:
            raise errors.invalid_request(
                f"round {session.round} is to have {epochs} epochs after {session.epoch_base}; at "
                f"most {MAX_EPOCHS} can be counted"
            )
    if 0 in config.site_epochs.values():
        raise errors.invalid_request("a participant is to have 0 epochs; it must be 1 or more")
    rule = session.rules.aggregation
    if _is_of_one_epoch(session.rules) and {config.epochs, *config.site_epochs.values()} - {0, 1}:
        raise errors.invalid_request(
            f'a round of aggregation.rule = "{rule}" has one epoch; leave epochs out'
        )
    if rule == "trees" and config.site_epochs:
        raise errors.invalid_request(
            'the sites of aggregation.rule = "trees" have the same epochs; set those of the round'
        )


def _is_of_one_epoch(rules: Rules) -> bool:
    """Whether a round of these rules has one epoch, whatever is configured."""
    if rules.aggregation == "trees":
        return rules.aggregation_options.get("mode") == "histogram"
    return rules.aggregation in _OF_ONE_EPOCH
