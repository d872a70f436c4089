"""`xain-coordinator extend`: train a finished session further.

A session that is finished stays so. What goes on is a new session in the same journal and store,
under the same rules, that begins with the last model of the finished one.
"""

import re
import sys
import uuid
from contextlib import ExitStack, closing
from dataclasses import replace

import typer

from xain_coordinator.app import open_store
from xain_coordinator.config import CoordinatorConfig
from xain_coordinator.config_fields import MAX_INT32
from xain_coordinator.core.events import SessionOpened
from xain_coordinator.core.session import Session
from xain_coordinator.core.values import Phase
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import JournalError, Record, StoreError
from xain_coordinator.restore import restore
from xain_coordinator.stores.prefixed import PrefixedStore
from xain_coordinator.warm_start import LAST, CannotStartFrom, model_of_session
from xain_messaging.process import logs
from xain_messaging.process.commands import EXIT_BAD_CONFIG

EXIT_OK = 0
EXIT_ERROR = 1

_ROUNDS = re.compile(r"\+?[0-9]{1,10}")


class _Refused(Exception):
    """The session is not extended. The message is one line for the operator."""

    def __init__(self, message: str, status: int = EXIT_ERROR) -> None:
        super().__init__(message)
        self.status = status


def extend(config: CoordinatorConfig, rounds: str) -> int:
    """Open a session that extends the finished one of the journal.

    rounds: "+20" for 20 more, "50" for 50 in all. Returns the exit status.
    """
    logs.configure("warning", console=sys.stderr.isatty(), third_party=False)
    try:
        typer.echo(_extend(config, rounds))
    except (JournalError, StoreError, CannotStartFrom, OSError) as error:
        typer.echo(f"xain-coordinator extend: {error}", err=True)
        return EXIT_ERROR
    except _Refused as refused:
        typer.echo(f"xain-coordinator extend: {refused}", err=True)
        return refused.status
    return EXIT_OK


def _extend(config: CoordinatorConfig, rounds: str) -> str:
    if not _ROUNDS.fullmatch(rounds) or int(rounds) == 0:
        raise _Refused(
            f"--rounds is {rounds!r}; it must be +N for N more rounds, or the number in all",
            EXIT_BAD_CONFIG,
        )
    path = config.journal.path
    if config.storage.kind == "memory" or not path.exists():
        raise _Refused(f"there is no journal at {path}")
    if config.storage.format == "xain-pickle":
        raise _Refused("XAIN's participants know one session a bucket; open one in another bucket")
    with ExitStack() as stack:
        journal = stack.enter_context(closing(SqliteJournal(path)))
        restored = restore(journal)
        if restored is None:
            raise _Refused(f"there is no session in {path}")
        session = restored[0].session
        _require_finished(session)
        opened = open_store(config)
        stack.callback(opened.close)
        first = model_of_session(journal, opened.store, session.session_id, LAST, extends=True)
        trained = first.lineage.num_rounds
        more = int(rounds) if rounds.startswith("+") else int(rounds) - trained
        if more < 1:
            raise _Refused(f"--rounds is {rounds}, and {trained} are trained already")
        rules = first.rules(replace(session.rules, rounds=more))
        if (trained + more) * max(rules.epochs, 1) > MAX_INT32:
            raise _Refused(f"--rounds is {rounds}: that is more than can be counted")
        session_id = uuid.uuid4().hex[:12]
        events = first.events(PrefixedStore(opened.store, session_id), 0.0)
        begun = SessionOpened(session_id, rules, 0.0, first.lineage)
        journal.append([Record(0.0, event) for event in (begun, *events)])
    return (
        f"session {session_id}: {more} more rounds after the {trained} that led to "
        f"{first.lineage.source}; start the coordinator and its participants as before"
    )


def _require_finished(session: Session) -> None:
    if session.phase is not Phase.FINISHED:
        raise _Refused(
            f"the session {session.session_id} is not finished: it has {session.round} of "
            f"{session.rules.rounds} rounds; start the coordinator to train the others first"
        )
