"""`xain-coordinator extend`: train a finished session further.

The finished session stays as it is. Training goes on in a new session in the same journal and
store, under the same rules, that begins with the last model of the finished one.
"""

import re
import uuid
from contextlib import closing
from dataclasses import replace
from typing import NoReturn

from xain_coordinator.access.errors import AccessError
from xain_coordinator.assembly.warm_start import LAST, model_of_session
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.vocabulary.events import SessionOpened
from xain_coordinator.core.vocabulary.values import Phase
from xain_coordinator.journal.restore import open_stopped
from xain_coordinator.ports import Record
from xain_coordinator.stores.opening import open_store
from xain_coordinator.stores.prefixed import PrefixedStore
from xain_coordinator.upkeep.model_copies import copy_latest
from xain_foundation.commands import fail
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG, CommandFailed
from xain_foundation.settings.fields import WrongSetting
from xain_foundation.settings.hints import hint
from xain_wire.limits import MAX_INT32
from xain_wire.refusal import Refusal

_NUMBER = re.compile(r"\+?[0-9]{1,10}")


def _refuse(why: str) -> NoReturn:
    """Print why the command cannot be carried out, and end the process with status 2."""
    fail("xain-coordinator extend", why, EXIT_BAD_CONFIG)


def _note(config: CoordinatorConfig, **fields: object) -> None:
    """Note the extension in the audit log, if there is one. Raises CommandFailed."""
    if config.certificates is None:
        return
    from xain_coordinator.access.control import AccessControl

    try:
        with closing(AccessControl.open(config.access_folder, config.server.passphrase)) as access:
            access.note("session_extended", by="operator", **fields)
    except (AccessError, Refusal, WrongSetting) as error:
        raise CommandFailed(str(error)) from None


def extend(config: CoordinatorConfig, rounds: str | None, passes: str | None) -> str:
    """Open a session that extends the finished one of the journal. Returns a line about it.

    rounds, passes: one of them, "+20" for 20 more, "50" for 50 in all.
    Raises CommandFailed, CannotStart, JournalError, StoreError and OSError, and ends the
    process if it is no such number.
    """
    what, given = ("passes", passes) if rounds is None else ("rounds", rounds)
    flag = f"--{what} is {given!r}"
    if given is None or (rounds is not None and passes is not None):
        _refuse("one of --rounds and --passes is needed: +N for N more, or the number in all")
    if not _NUMBER.fullmatch(given) or int(given) == 0:
        _refuse(f"{flag}; it must be +N for N more {what}, or the number in all")
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
            lineage, is_passes = first.lineage, what == "passes"
            if is_passes and session.rules.aggregation == "ensemble":
                raise CommandFailed(
                    "bagging counts rounds: " + hint("xain-coordinator", "--rounds +1")
                )
            trained = lineage.num_passes if is_passes else lineage.num_rounds
            more = int(given) if given.startswith("+") else int(given) - trained
            if more < 1:
                raise CommandFailed(f"{flag}, and {trained} are trained already")
            rules = first.rules(
                replace(session.rules, rounds=more, passes=more if is_passes else 0)
            )
            if (trained + more) * max(rules.epochs, 1) > MAX_INT32:
                raise CommandFailed(f"{flag}: that is more than can be counted")
            session_id = uuid.uuid4().hex[:12]
            events = first.events(PrefixedStore(opened, session_id), 0.0)
            copy_latest(opened, journal)
        begun = SessionOpened(session_id, rules, 0.0, first.lineage)
        _note(config, session=session_id, began_with=lineage.source, **{what: more})
        journal.append([Record(0.0, event) for event in (begun, *events)])
    return (
        f"session {session_id}: {more} more {what} after the {trained} that led to "
        f"{first.lineage.source}; start the coordinator and its participants as before"
    )
