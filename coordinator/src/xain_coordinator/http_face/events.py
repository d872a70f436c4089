"""The journal as server-sent events.

The id of an event is SESSION/NUMBER, its position in the journal, so that a reader goes on after
the last one that it has. Each reader takes pages from the journal when it is ready for them: a slow
one holds up nobody and no queue grows.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, TypeVar

from xain_coordinator.core.vocabulary.values import Evaluation, GlobalModel, Update
from xain_coordinator.http_face.errors import HttpError
from xain_coordinator.http_face.fits import Fits
from xain_coordinator.ports import Journal, JournalError, Record
from xain_foundation.logs.logger import get_logger

T = TypeVar("T")

log = get_logger(__name__)

PAGE = 100
POLL_S = 0.2
KEEP_ALIVE_S = 15.0

# Data about the sites, code of a site in a traceback, settings, which may be secret, and the id
# with which a process takes the place of another one; and `at`, which the record has too.
_PRIVATE = frozenset(
    ("profile", "profiles", "statistics", "traceback", "rules", "lineage", "instance_id", "at")
)


class EventReaders:
    """The event readers of one HTTP face."""

    def __init__(self, fits: Fits) -> None:
        self._fits = fits

    def open(self, last_event_id: str | None) -> AsyncIterator[str]:
        """The stream after this event; of the present session from its beginning without one.
        Raises HttpError if that can be no event."""
        return self._stream(*self._position(last_event_id))

    def _position(self, last_event_id: str | None) -> tuple[str, int]:
        """(session, number) of the first event to send. Raises HttpError for a wrong id."""
        if not last_event_id:
            return self._fits.sessions.session.session_id, 0
        session_id, _, number = last_event_id.rpartition("/")
        if not number.isdecimal() or len(number) > 12:
            raise HttpError(
                "INVALID_REQUEST", "Last-Event-ID must be SESSION/NUMBER, the id of an event"
            )
        return session_id or self._fits.sessions.session.session_id, int(number) + 1

    async def _stream(self, session_id: str, number: int) -> AsyncIterator[str]:
        """Server-sent events of the journal from this one on, then those of the sessions after it,
        until the process stops. Without events for KEEP_ALIVE_S it sends a comment."""
        try:
            silent_s = 0.0
            yield ": hello\n\n"  # so that a reader knows at once that it listens
            while not self._fits.is_stopping:
                page = await asyncio.to_thread(self._read, session_id, number)
                if page:
                    # In one piece: asyncio logs a warning for each piece to a reader that has gone.
                    yield "".join(
                        _message(session_id, at, record) for at, record in enumerate(page, number)
                    )
                    number += len(page)
                    silent_s = 0.0
                    continue
                following = await asyncio.to_thread(self._after, session_id)
                if following is not None:
                    # Read once more: the end may have been written after the page was read.
                    if not await asyncio.to_thread(self._read, session_id, number):
                        session_id, number = following, 0
                    continue
                await asyncio.sleep(POLL_S)  # a poll for the events that follow
                silent_s += POLL_S
                if silent_s >= KEEP_ALIVE_S:
                    silent_s = 0.0
                    yield ": nothing new\n\n"
        except JournalError as error:  # the stream ends, so that its reader does not wait in vain
            log.warning("events_unreadable", session=session_id, error=str(error))

    def _read(self, session_id: str, number: int) -> list[Record]:
        """The next records of a session, PAGE at most. Blocks. Raises JournalError."""

        def ask(journal: Journal) -> list[Record]:
            return list(islice(journal.records_of(session_id, number) or (), PAGE))

        return self._ask(ask) or []

    def _after(self, session_id: str) -> str | None:
        """Id of the session after this one, None if there is none yet; of an unknown one, that of
        the last session in the journal."""
        if session_id == self._fits.sessions.session.session_id:
            return None
        known = self._ask(lambda journal: journal.session_ids()) or []
        if session_id not in known:
            return known[-1] if known else None
        at = known.index(session_id) + 1
        return known[at] if at < len(known) else None

    def _ask(self, ask: Callable[[Journal], T]) -> T | None:
        """Read from the journal; None while it is closed, because a session is opened or the
        process stops. Raises JournalError."""
        sessions = self._fits.sessions
        journal = sessions.current.journal
        try:
            return ask(journal)
        except JournalError:
            # The next session's journal is in its place before the opening is over.
            if sessions.is_opening or journal is not sessions.current.journal:
                return None
            if self._fits.is_stopping:
                return None
            raise


def _message(session_id: str, number: int, record: Record) -> str:
    """The server-sent event of a record."""
    event = record.event
    kind = type(event).__name__
    names = (field.name for field in fields(event) if field.name not in _PRIVATE)
    data = {
        "session": session_id,
        "number": number,
        "at": record.at,
        "type": kind,
        **{name: _plain(getattr(event, name)) for name in names},
    }
    text = json.dumps(data)  # one line
    return f"id: {session_id}/{number}\nevent: {kind}\ndata: {text}\n\n"


def _plain(value: Any) -> Any:
    """A value of an event as JSON takes it; updates, models and evaluations in short."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Update():
            return {"participant": value.participant_id, "num_samples": value.num_samples}
        case GlobalModel():
            return {
                "round": value.round,
                "digest": value.ref.digest,
                "size_bytes": value.ref.size_bytes,
            }
        case Evaluation():
            return {"num_samples": value.num_samples, "metrics": dict(value.metrics)}
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case tuple() | list():
            return [_plain(item) for item in value]
        case _ if is_dataclass(value):
            return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        case _:
            return str(value)
