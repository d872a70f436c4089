"""Fence: only the newest of several coordinators of one session publishes.

Two of them meet when a journal was copied: restored from a backup, in a snapshot of a machine, or
on a disk that its former machine still has. Each start therefore takes the next number, as an
object "owners/NUMBER.TOKEN" beside the session's weights, and the greatest name is the owner. The
others notice when they look, which they do every few seconds, and right before they publish or
remove anything.

What a coordinator that was overtaken has acknowledged does not count any more, so it must not
overtake in its turn when it is restarted. A start therefore notes its name in its journal before
the store has it, and a journal that does not know the name of the owner is refused. Names are
unique, so they need no conditional create, and a late request to the store does no harm.
"""

import asyncio
import contextlib
import os
import re
import socket
import uuid
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any, cast

from xain_coordinator.driver.driver import Driver
from xain_coordinator.driver.outage import Outage
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import Fenced, StoreError, Unfinished, Upload, WeightsStore
from xain_foundation.logs.logger import get_logger
from xain_foundation.threads import run_to_end

log = get_logger(__name__)

FOLDER = "owners"
_NAME = re.compile(r"[0-9]{8}\.[0-9a-f]{32}")
_NOTE_BYTES = 256  # of what is shown of an owner's own words


class Fence:
    """Fence of a session: tells whether this coordinator is still the newest one.

    store: the session's own part of it.
    location: of the store, for messages.
    """

    # How long a coordinator that was overtaken may go on acknowledging, if it publishes nothing.
    look_every_s = 5.0

    def __init__(
        self, store: WeightsStore, journal: SqliteJournal, session_id: str, location: str
    ) -> None:
        self._store = store
        self._journal = journal
        self._session_id = session_id
        self._location = location
        self._name = ""

    def take_over(self) -> None:
        """Become the owner of the session: note a new name in journal and store, and remove older
        ones. Blocks.

        Raises Fenced if the session went on without this journal or is being taken over by
        another one, JournalError, and the store's errors; after those the owner may be the one
        before, or us.
        """
        noted = self._journal.owners(self._session_id)
        owner = self._known_owner(noted)
        number = 1 + max((_number(name) for name in (*noted, owner) if name), default=0)
        name = f"{number:08d}.{uuid.uuid4().hex}"
        # Names below the owner's are never asked for again.
        kept = [other for other in noted if other >= owner]
        self._journal.note_owners(self._session_id, [*kept, name])
        since = datetime.now(UTC).isoformat(timespec="seconds")
        note = f"host {socket.gethostname()}, pid {os.getpid()}, since {since}"
        self._store.put({_key(name): note.encode()})
        self._name = name
        self.check()
        for other in self._names():
            if other < name:
                with contextlib.suppress(StoreError):  # it does no harm
                    self._store.delete(_key(other))

    def require_known_owner(self) -> None:
        """Check that the session has not gone on without this journal. Blocks. Raises Fenced if
        it has, JournalError, and the store's errors."""
        self._known_owner(self._journal.owners(self._session_id))

    def _known_owner(self, noted: Collection[str]) -> str:
        """The session's owner; "" if there is none. noted: the names in the journal. Raises Fenced
        if the owner is not among them."""
        owner = self._owner()
        if owner and owner not in noted:
            raise Fenced(
                f"the session {self._session_id} in {self._location} has gone on from another copy "
                f"of this journal, under {self._describe(owner)}; start that one. If its journal "
                "is lost for good, and with it what was acknowledged there, delete "
                f"{self._session_id}/{FOLDER} in {self._location} and start again"
            )
        return owner

    def check(self) -> None:
        """Check that this coordinator is still the owner. Blocks. Raises Fenced if another one
        is, and the store's errors."""
        assert self._name, "take_over() comes first"
        owner = self._owner()
        # No owner: the store was emptied or is not mounted, and no coordinator is newer. An owner
        # with a lower number: our object was removed, and that coordinator was started afterwards.
        if owner and owner != self._name:
            raise Fenced(
                f"another coordinator has taken over the session {self._session_id} in "
                f"{self._location}: {self._describe(owner)}. This one, owner "
                f"{_number(self._name)}, publishes nothing more. Of the two journals the other "
                "one's goes on; do not start a coordinator on this one again"
            )

    async def watch(self, driver: Driver, outage: Outage | None = None) -> None:
        """Check the owner every few seconds, until cancelled, and fail the driver once another
        coordinator is the owner. outage: told when the store is away."""
        outage = outage if outage is not None else Outage()
        work = "look for a newer coordinator"
        while True:
            await asyncio.sleep(self.look_every_s)  # how soon it is noticed, and what it costs
            try:
                await run_to_end(self.check)
            except Fenced as error:
                driver.fail(error)
                return
            except StoreError as error:
                # No reason to stop: without the store no model is published.
                outage.note_failure(work, error, work=work, round=driver.session.round)
            except Exception as error:
                # A defect of ours: going on would be a coordinator that never notices.
                log.exception("fence_crashed", round=driver.session.round)
                driver.fail(error)
                return
            else:
                outage.note_success(work)

    def _owner(self) -> str:
        """Greatest name of an owner in the store; "" if there is none."""
        return max(self._names(), default="")

    def _names(self) -> list[str]:
        """Names of all owners in the store."""
        start = len(FOLDER) + 1
        names = (key[start:] for key in self._store.keys(f"{FOLDER}/"))
        return [name for name in names if _NAME.fullmatch(name)]

    def _describe(self, name: str) -> str:
        """An owner for a message: its number, and the host, process and time that it has noted."""
        try:
            with self._store.open(_key(name)) as reader:
                note = reader.read(0, _NOTE_BYTES).decode(errors="replace")
        except StoreError:
            note = "it cannot be read who that is"
        printable = "".join(each if each.isprintable() else "?" for each in note)
        return f"owner {_number(name)} ({printable})"


def _key(name: str) -> str:
    """Key of the object of an owner."""
    return f"{FOLDER}/{name}"


def _number(name: str) -> int:
    """Number of an owner, from its name."""
    return int(name.partition(".")[0])


class FencedStore:
    """A store that calls `check` right before an object is published, which is written once and
    never replaced, and before any are removed: the owner may need what we do not. If `check`
    raises, nothing is written or removed."""

    def __init__(self, store: WeightsStore, check: Callable[[], None]) -> None:
        self._store = store
        self._check = check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)  # other methods are those of the store

    def upload(self, key: str, label: str = "", size_bytes: int = 0) -> Upload:
        upload = self._store.upload(key, label, size_bytes)
        return cast(Upload, _FencedUpload(upload, self._check))

    def find_unfinished(self, key: str, label: str) -> Unfinished | None:
        found = self._store.find_unfinished(key, label)
        return None if found is None else cast(Unfinished, _FencedUpload(found, self._check))

    def delete(self, *keys: str) -> None:
        """Remove objects, if `check` does not raise."""
        self._check()
        self._store.delete(*keys)


class _FencedUpload:
    """An upload, or an unfinished one, that calls `check` before it publishes its object."""

    def __init__(self, upload: Upload | Unfinished, check: Callable[[], None]) -> None:
        self._upload = cast(Any, upload)
        self._check = check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upload, name)  # other methods are those of the upload

    def commit(self, *, overwrite: bool) -> None:
        if not overwrite:
            self._check()
        self._upload.commit(overwrite=overwrite)

    def resume(self, size: int) -> "_FencedUpload":
        return _FencedUpload(self._upload.resume(size), self._check)
