"""Fitted estimators that stay at a participant: bagging with publish = false.

The folder `estimators` of the state directory has a file for each training, named after the digest
that the update tells the coordinator. A file has all that a vote needs: the estimators as files of
skops, which are checked against an allow-list before they are loaded, and the model's metadata.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xain_foundation.durable import make_directory
from xain_foundation.logs.logger import get_logger
from xain_foundation.settings.hints import hint
from xain_participant.sdk import sealed
from xain_workloads.ensembles.held import digest_of
from xain_workloads.errors import DataError

if TYPE_CHECKING:
    from xain_workloads.ensembles.bagging import LoadedEstimators

FOLDER = "estimators"
_MAGIC = b"XAIN estimators 1\n"


@dataclass(frozen=True, slots=True, eq=False)
class Votes:
    """Votes of one participant for some rows.

    mean: (n, k) float64, over its estimators, weighted; see LoadedEstimators.sum_of_votes().
    lost: digests of the trainings whose estimators it does not have any more.
    """

    mean: NDArray[np.float64]
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _InMemory:
    """The packed frames of a training, and the metadata of its model."""

    session_id: str
    metadata: Mapping[str, str]
    frames: bytes


class KeptEstimators:
    """The fitted estimators of one participant. Safe to use from several threads.

    folder: its state directory; None keeps the estimators in memory.
    """

    # Estimators of earlier sessions stay up to these bounds: a later session may go on from them.
    max_files = 1000
    max_memory_bytes = 256 << 20

    def __init__(self, folder: Path | None = None, participant_id: str = "") -> None:
        """List the files of estimators in the folder, the oldest first."""
        self._folder = None if folder is None else folder / FOLDER
        self._log = get_logger(__name__).bind(participant=participant_id)
        self._lock = threading.Lock()
        self._files: dict[str, Path] = {}  # by digest, the oldest first
        self._in_memory: dict[str, _InMemory] = {}  # likewise
        self._loaded: dict[str, LoadedEstimators] = {}  # of the latest question
        if self._folder is not None and self._folder.is_dir():
            files = sorted(self._folder.glob("*.bin"), key=lambda path: path.stat().st_mtime_ns)
            self._files = {path.stem: path for path in files}

    @property
    def is_empty(self) -> bool:
        """Whether there are no estimators."""
        return not self._files and not self._in_memory

    def keep(self, session_id: str, round_: int, metadata: Mapping[str, str], kept: bytes) -> None:
        """Keep the packed frames of one training; in a folder, they outlive a kill on return.

        Beyond the bounds the oldest ones are dropped, but neither those of this session nor those
        of the latest question. metadata: of the model.
        """
        digest = digest_of(kept)
        if self._folder is not None:
            path = self._folder / f"{digest}.bin"
            head = {"session": session_id, "round": round_, "metadata": dict(metadata)}
            try:
                make_directory(self._folder, mode=0o700)
                sealed.write(path, _MAGIC, head, kept)
                with self._lock:
                    self._files[digest] = path
                    self._loaded.pop(digest, None)
                self._drop_files(session_id, round_)
                return
            except OSError as error:
                # The training goes on, and memory has the estimators.
                self._log.warning("estimators_not_kept", round=round_, reason=error.strerror)
        elif not self._in_memory:
            self._log.warning(
                "estimators_in_memory",
                round=round_,
                hint="they end with this process, and no model is left of them: "
                + hint("xain-participant", "--state-dir FOLDER")
                + " and "
                + hint("xain-participant", "--serve")
                + " to answer questions, or let them travel: at the coordinator "
                + hint("xain-coordinator", "workload.options.publish = true"),
            )
        with self._lock:
            self._in_memory[digest] = _InMemory(session_id, dict(metadata), kept)
        self._drop_from_memory(session_id, round_)

    def votes(self, trainings: Sequence[tuple[str, int]], features: NDArray[Any]) -> Votes:
        """Vote for rows. trainings: digest and weight of each estimator, by training.

        features: (n, p), prepared as the model says. Not for two threads at once.
        Raises DataError if none is kept or the features do not fit the model, ModuleNotFoundError
        without scikit-learn and skops.
        """
        loaded = {digest: self._load(digest) for digest, _ in trainings}
        self._loaded = {digest: one for digest, one in loaded.items() if one is not None}
        lost = tuple(digest for digest, one in loaded.items() if one is None)
        sums, total_weight = [], 0
        for digest, weight in trainings:
            one = loaded[digest]
            if one is not None and weight > 0:
                sums.append(weight * one.sum_of_votes(features))
                total_weight += weight * len(one)
        if not sums:
            raise DataError(
                f"it has none of the estimators that it fitted in {len(trainings)} trainings; "
                "without a state directory they end with its process"
            )
        return Votes(np.sum(sums, axis=0) / total_weight, lost)

    def _load(self, digest: str) -> "LoadedEstimators | None":
        """The estimators with this digest; None if there are none, or they cannot be used."""
        from xain_workloads.ensembles.bagging import LoadedEstimators

        if (found := self._loaded.get(digest)) is not None:
            return found
        with self._lock:
            path, in_memory = self._files.get(digest), self._in_memory.get(digest)
        try:
            if in_memory is not None:
                return LoadedEstimators(in_memory.frames, in_memory.metadata)
            if path is None:
                return None
            head, body = sealed.read(path, _MAGIC)
            if digest_of(frames := body.tobytes()) != digest:
                raise ValueError("the file has other estimators than its name says")
            return LoadedEstimators(frames, head["metadata"])
        except OSError as error:
            self._log.warning("estimators_unreadable", file=str(path), reason=error.strerror)
        except ValueError as error:
            self._log.warning("estimators_unusable", file=str(path), reason=str(error))
        return None

    def _drop_files(self, session_id: str, round_: int) -> None:
        """Delete the oldest files beyond max_files, but neither those of this session nor those of
        the latest question. Raises OSError."""
        num_over = len(self._files) - self.max_files
        dropped = 0
        for digest, path in list(self._files.items()):
            if dropped >= num_over:
                break
            if digest not in self._loaded and _session_in(path) != session_id:
                with self._lock:
                    del self._files[digest]
                path.unlink(missing_ok=True)
                dropped += 1
        self._note_dropped(round_, dropped)

    def _drop_from_memory(self, session_id: str, round_: int) -> None:
        """Drop the oldest estimators beyond max_memory_bytes, but neither those of this session nor
        those of the latest question."""
        num_bytes = sum(len(one.frames) for one in self._in_memory.values())
        dropped = 0
        for digest, one in list(self._in_memory.items()):
            if num_bytes <= self.max_memory_bytes:
                break
            if digest not in self._loaded and one.session_id != session_id:
                with self._lock:
                    del self._in_memory[digest]
                num_bytes -= len(one.frames)
                dropped += 1
        self._note_dropped(round_, dropped)

    def _note_dropped(self, round_: int, num_trainings: int) -> None:
        """Log how many trainings' estimators were dropped, if any."""
        if num_trainings:
            self._log.warning("estimators_dropped", round=round_, num_trainings=num_trainings)


def _session_in(path: Path) -> str | None:
    """Read the session of a file; None if the file is damaged."""
    try:
        session_id: str = sealed.read_head(path, _MAGIC)["session"]
    except (ValueError, LookupError):
        return None
    return session_id
