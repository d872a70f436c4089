"""`xain-coordinator extend`: train a finished session further.

The finished session stays as it is. Training goes on in a new session in the same journal and
store, under the same rules, that begins with the last model of the finished one.
"""

import re
import uuid
from contextlib import closing
from dataclasses import replace

from xain_coordinator.assembly.warm_start import LAST, model_of_session
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.events import SessionOpened
from xain_coordinator.core.values import Phase
from xain_coordinator.driver.model_copies import copy_latest
from xain_coordinator.journal.restore import open_stopped
from xain_coordinator.ports import Record
from xain_coordinator.stores.opening import open_store
from xain_coordinator.stores.prefixed import PrefixedStore
from xain_foundation.commands import CommandFailed, fail
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG
from xain_wire.limits import MAX_INT32

_ROUNDS = re.compile(r"\+?[0-9]{1,10}")


def extend(config: CoordinatorConfig, rounds: str) -> str:
    """Open a session that extends the finished one of the journal. Returns a line about it.

    rounds: "+20" for 20 more, "50" for 50 in all.
    Raises CommandFailed, CannotStartFrom, JournalError, StoreError and OSError, and ends the
    process if `rounds` is no such number.
    """
    if not _ROUNDS.fullmatch(rounds) or int(rounds) == 0:
        why = f"--rounds is {rounds!r}; it must be +N for N more rounds, or the number in all"
        fail("xain-coordinator extend", why, EXIT_BAD_CONFIG)
    if config.storage.format == "xain-pickle":
        raise CommandFailed(
            "XAIN's participants know one session a bucket; open one in another bucket"
        )
    with open_stopped(config.journal.path) as (journal, last):
        session = last.session
        if session.phase is not Phase.FINISHED:
            raise CommandFailed(
                f"the session {session.session_id} is not finished: it has "
                f"{session.num_trained} of {session.rules.rounds} rounds; start the "
                "coordinator to train the others first"
            )
        with closing(open_store(config.storage)) as opened:
            first = model_of_session(journal, opened, session.session_id, LAST, extends=True)
            trained = first.lineage.num_rounds
            more = int(rounds) if rounds.startswith("+") else int(rounds) - trained
            if more < 1:
                raise CommandFailed(f"--rounds is {rounds}, and {trained} are trained already")
            rules = first.rules(replace(session.rules, rounds=more))
            if (trained + more) * max(rules.epochs, 1) > MAX_INT32:
                raise CommandFailed(f"--rounds is {rounds}: that is more than can be counted")
            session_id = uuid.uuid4().hex[:12]
            events = first.events(PrefixedStore(opened, session_id), 0.0)
            copy_latest(opened, journal)
        begun = SessionOpened(session_id, rules, 0.0, first.lineage)
        journal.append([Record(0.0, event) for event in (begun, *events)])
    return (
        f"session {session_id}: {more} more rounds after the {trained} that led to "
        f"{first.lineage.source}; start the coordinator and its participants as before"
    )
