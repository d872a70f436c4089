"""State that a participant keeps from round to round, in memory and in its state directory.

Two versions are kept, each with the number of the round that wrote it. A round begins with the
newest version of an earlier round, or with that of the round that the coordinator names. So a round
that is trained again, because the process was killed before its result was kept, begins with the
version that it began with before, and a result that is handed in after a restart finds the version
that belongs to it.
"""

from dataclasses import dataclass
from pathlib import Path

from xain_foundation.logs.logger import get_logger
from xain_participant.sdk import sealed


@dataclass(frozen=True, slots=True)
class Version:
    """The state that one round has left. data: as its kind encodes it."""

    session_id: str
    round: int
    data: bytes


class Versions:
    """The versions of one kind of state of one participant.

    folder: the state directory; None keeps the versions in memory.
    name: name of the kind; the files are called NAME-0.bin and NAME-1.bin.
    """

    def __init__(self, folder: Path | None, name: str, participant_id: str) -> None:
        """Read the versions in the folder, if there is one."""
        self._folder = folder
        self._files = (f"{name}-0.bin", f"{name}-1.bin")
        self._magic = f"XAIN {name.replace('-', ' ')} 1\n".encode()
        self._log = get_logger(__name__).bind(participant=participant_id)
        self._versions = [None if folder is None else self._read(folder / f) for f in self._files]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever saved."""
        return not any(self._versions)

    def close(self) -> None:
        """End writing, so that another process may use the folder."""
        self._folder = None

    def load(self, session_id: str, round_: int) -> bytes | None:
        """The state that a round of a session begins with; None if there is none."""
        earlier = [
            v for v in self._versions if v and v.session_id == session_id and v.round < round_
        ]
        return max(earlier, key=lambda version: version.round).data if earlier else None

    def of_round(self, session_id: str, round_: int) -> bytes | None:
        """The state that this round of a session has left; None if it is not there any more."""
        for version in self._versions:
            if version and (version.session_id, version.round) == (session_id, round_):
                return version.data
        return None

    def save(
        self, session_id: str, round_: int, data: bytes, begun_with: int | None = None
    ) -> None:
        """Keep the state that a round leaves; in a folder, it outlives a kill on return.

        begun_with: the round whose version it began with, if that was named.
        """
        slot = self._slot(session_id, round_)
        if begun_with is not None:
            kept = self._versions[0]
            is_first = kept is not None and (kept.session_id, kept.round) == (
                session_id,
                begun_with,
            )
            slot = 1 if is_first else 0
        self._versions[slot] = Version(session_id, round_, data)
        if self._folder is None:
            return
        head = {"session_id": session_id, "round": round_}
        try:
            sealed.write(self._folder / self._files[slot], self._magic, head, data)
        except OSError as error:
            # The training goes on, and memory has the state; as with a result that is not kept.
            self._log.warning("state_not_kept", round=round_, reason=error.strerror)

    def _slot(self, session_id: str, round_: int) -> int:
        """The slot whose version this round does not need to begin with again."""
        ages = []
        for slot, version in enumerate(self._versions):
            if version is None or version.session_id != session_id or version.round >= round_:
                return slot
            ages.append((version.round, slot))
        return min(ages)[1]

    def _read(self, path: Path) -> Version | None:
        """The version in a file; None if there is none, or it cannot be used, which is logged."""
        try:
            head, data = sealed.read(path, self._magic)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._log.warning("state_unreadable", file=str(path), reason=error.strerror)
            return None
        except sealed.Damaged:
            self._log.warning("state_damaged", file=str(path))
            return None
        return Version(head["session_id"], head["round"], data.tobytes())
