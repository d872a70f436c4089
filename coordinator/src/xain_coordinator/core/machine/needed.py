"""Rounds whose updates and models a session still needs."""

from dataclasses import dataclass

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.vocabulary.values import Phase


@dataclass(frozen=True, slots=True)
class Needed:
    """updates_from, earlier: updates that were trained in this round, in a later one or in one of
    these earlier ones may still count. states_from: the model that the next one is made from; its
    optimiser's state goes with it."""

    updates_from: int
    states_from: int
    earlier: frozenset[int] = frozenset()

    def has_updates_of(self, round_: int) -> bool:
        """Whether updates that were trained in this round may still count."""
        return round_ >= self.updates_from or round_ in self.earlier


def models_in_use(session: Session) -> frozenset[int]:
    """Rounds of the models that a session may still read, whatever it is going to do: the last one,
    and the one before, with which a damaged last one is rebuilt; the best one; those that a
    participant trains from, or that are to be evaluated; and the first one of a session that began
    with a model of another session or of a file."""
    if session.model is None:
        return frozenset()
    evaluation, newest = session.evaluation, session.model.round
    used = {newest, newest - 1, *(model.round for model in evaluation.owed)}
    used |= {base.model.round for base in session.buffered.bases.values()}
    if evaluation.best is not None:
        used.add(evaluation.best.round)
    if session.lineage is not None:
        used.add(0)
    return frozenset(used)


def needed_by(session: Session) -> Needed:
    """The rounds whose updates and models a session still needs, whatever it is going to do."""
    newest = 0 if session.model is None else session.model.round
    if session.phase is Phase.FINISHED:
        return Needed(session.round + 1, newest)
    return Needed(newest, newest, session.earlier_rounds)
