"""Whether a session takes what its script has decided.

The same decision again changes nothing, so that a script may repeat what it was not answered.
"""

from collections.abc import Mapping

from xain_coordinator.core import errors
from xain_coordinator.core.script import RoundConfig
from xain_coordinator.core.session import Session
from xain_coordinator.core.values import Phase


def require_configurable(session: Session, round_: int, config: RoundConfig) -> bool:
    """Whether the decision for a round is new. Raises a Refusal if it cannot be taken."""
    require_scripted(session)
    script = session.script
    if script.round == round_:
        if script.config != config:
            raise errors.DecidedOtherwise(
                f"round {round_} is configured already, with {script.config}; it cannot become "
                f"{config}"
            )
        return False
    if session.phase is Phase.FINISHED:
        raise errors.NotFitting(f"the session is finished: {session.cause}")
    if not session.waits_for_script or session.is_trained or round_ != session.round:
        raise errors.StaleRound(round_, session.round)
    known = {*session.members, *session.members.heard}
    for name in (*config.selected, *config.by_site):
        if name not in known:
            raise errors.InvalidRequest(
                f"there is no participant {name!r}; there are: {', '.join(sorted(known))}"
            )
    if 0 < len(config.selected) < session.rules.min_participants:
        raise errors.InvalidRequest(
            f"{len(config.selected)} participants are selected, and a round needs "
            f"rounds.min_participants = {session.rules.min_participants}"
        )
    return True


def require_measurable(session: Session, model: int, metrics: Mapping[str, float]) -> bool:
    """Whether the evaluation of a model is new. Raises a Refusal if it cannot be taken."""
    require_scripted(session)
    script = session.script
    if script.model == model:
        if script.metrics != metrics:
            raise errors.DecidedOtherwise(
                f"model {model} is evaluated already, with {dict(script.metrics)}; it cannot "
                f"become {dict(metrics)}"
            )
        return False
    if session.phase is Phase.FINISHED or script.is_over:
        raise errors.NotFitting(f"the session is finished: {session.cause}")
    if session.model is None or session.model.round != model:
        there = "there is none yet" if session.model is None else f"it is {session.model.round}"
        raise errors.StaleModel(f"model {model} is not the present one: {there}")
    return True


def require_scripted(session: Session) -> None:
    if not session.rules.scripted:
        raise errors.InvalidRequest("no script drives this session: rounds.scripted is not set")
