"""The study that a session is a part of: what came of the sessions before it, and what follows."""

import uuid
from typing import Self

from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.config.sections.study import plan_of
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.view.history import History
from xain_coordinator.core.view.study import Outcome, Plan, next_step, outcome_of, why_not_compared
from xain_coordinator.core.vocabulary.values import Phase, Step
from xain_coordinator.export.studies import as_json
from xain_coordinator.journal.restore import restore_session
from xain_coordinator.ports import Journal

Known = dict[str, Outcome]  # of finished sessions, by their ids


def first_step(config: CoordinatorConfig) -> Step | None:
    """The step that a new study begins with; None if none is configured."""
    text = config.rules().study
    return next_step(plan_of(text), uuid.uuid4().hex[:12], ()) if text else None


class Study:
    """The study of a session.

    before: what came of the sessions before it, oldest first.
    """

    def __init__(self, plan: Plan, step: Step, before: tuple[Outcome, ...], known: Known) -> None:
        self.plan = plan
        self.step = step
        self.before = before
        self._known = known

    @classmethod
    def of(cls, session: Session, journal: Journal, known: Known) -> Self | None:
        """The study of a session; None if it is of none. known: outcomes that need not be read
        again. Blocks. Raises JournalError."""
        step = session.rules.step
        if step is None:
            return None
        before = []
        earlier = [one for one in journal.session_ids() if one != session.session_id]
        for session_id in reversed(earlier):
            if session_id not in known:
                records = journal.records_of(session_id)
                assert records is not None, "the journal has just named it"
                last = restore_session(records)
                other = last.session.rules.step
                if other is None or other.study != step.study:
                    break
                known[session_id] = outcome_of(last.session, last.history)
            if known[session_id].step.study != step.study:
                break
            before.append(known[session_id])
        return cls(plan_of(session.rules.study), step, tuple(reversed(before)), known)

    @property
    def took_part(self) -> frozenset[str]:
        """Participants that counted in a session before this one, or measured a model."""
        return frozenset(name for one in self.before for name in (*one.sites, *one.by_site))

    def outcomes(self, session: Session, history: History) -> tuple[Outcome, ...]:
        """Outcomes of the study's finished sessions, oldest first, with the present one if it is
        finished."""
        if session.phase is not Phase.FINISHED:
            return self.before
        name = session.session_id
        if name not in self._known:
            self._known[name] = outcome_of(session, history)
        return (*self.before, self._known[name])

    def why_not_compared(self, session: Session, history: History) -> str:
        """Why the options of the present session, which is finished, leave a search; "" if they do
        not."""
        return why_not_compared(self.plan, self.outcomes(session, history)[-1])

    def next_step(self, session: Session, history: History) -> Step | None:
        """The step after the present session, which is finished; None if that was the last one."""
        return next_step(self.plan, self.step.study, self.outcomes(session, history))

    def table(self, session: Session, history: History) -> str:
        """The table of the study as JSON."""
        return as_json(self.plan, self.step, self.outcomes(session, history))
