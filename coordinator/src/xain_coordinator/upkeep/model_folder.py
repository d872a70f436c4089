"""The folder `models` of a session in the embedded store: links to models under readable names.

    models/round-0012.npy  the global model that round 12 starts from: a link to its object
    models/last.npy        the latest model
    models/best.npy        the best model by the metric of [evaluate], once one was evaluated
    models/central.npz     the central model, once the coordinator has trained one
    models/index.json      the numbers of the last and the best model, layout, metadata and profile

Only people and `--from-model` read the folder, so it is written beside the rounds, at most once a
second, and not synced to the disk. Small models come to the store from the journal (see
model_copies.py), and have their links then. A start repairs links that are missing or wrong. On a
file system without links, index.json alone names the files.
"""

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts.profiles import described
from xain_coordinator.core.vocabulary.errors import Unavailable
from xain_coordinator.core.vocabulary.keys import model_key
from xain_coordinator.core.vocabulary.values import GlobalModel
from xain_coordinator.driver.driver import Driver
from xain_coordinator.stores.paths import folder_to_path, key_to_path
from xain_coordinator.upkeep.model_copies import ModelCopies
from xain_foundation.logs.logger import get_logger
from xain_foundation.threads import run_to_end
from xain_workloads.errors import NoModel

if TYPE_CHECKING:
    from xain_workloads.exported.formats import Exported

MODELS_INDEX = "index.json"
log = get_logger(__name__)

FOLDER = "models"
CENTRAL = "central.npz"
EVERY_S = 1.0


def folder_of(root: Path, session_id: str) -> Path:
    """The folder `models` of a session. root: of the store's files."""
    return root / folder_to_path(session_id) / FOLDER


def write_central(folder: Path, exported: "Exported") -> str:
    """Write the central model into the folder. Returns its path; "" if that failed, which is logged
    and costs the file alone."""
    from xain_workloads.exported import formats

    assert exported.model is not None, "no pipeline is exported"
    path, temp = folder / CENTRAL, folder / f".{CENTRAL}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        formats.write(temp, exported.model, exported.about)
        temp.replace(path)
    except (OSError, NoModel) as error:
        log.warning("central_model_not_written", file=str(path), error=str(error))
        return ""
    return str(path)


class ModelFolder:
    """root: of the store's files. copies: of the models that the store does not have yet.

    One thread at a time may call `show`.
    """

    def __init__(self, root: Path, session_id: str, copies: ModelCopies) -> None:
        self._copies = copies
        self._folder = folder_of(root, session_id)
        self._next = 0  # the models before this one have their links, but for those that wait
        self._waiting: list[int] = []
        self._last = -1  # number of the newest model that the folder shows
        self._shown: tuple[int, int | None] | None = None
        self._has_failed = False
        self._lock = threading.Lock()  # links are made, or removed

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove the links to models whose objects are gone. Blocks; for any thread."""
        with self._lock, contextlib.suppress(OSError):
            for number in numbers:
                (self._folder / _name(number)).unlink(missing_ok=True)

    async def watch(self, driver: Driver) -> None:
        """Update the folder at the start and after each new model, until the driver stops."""
        with contextlib.suppress(Unavailable):
            while True:
                await run_to_end(self.show, driver.session)
                await asyncio.sleep(EVERY_S)  # one update for all models of that time
                while _numbers(driver.session) == self._shown and not self._waiting:
                    await driver.wait_for_change()

    def show(self, session: Session) -> None:
        """Update the folder. Blocks. The first failure is logged; none harms a round."""
        model, numbers = session.model, _numbers(session)
        if numbers == self._shown and not self._waiting:
            return
        try:
            if model is not None and not model.is_empty:
                self._show(session, model)
        except (OSError, ValueError) as error:
            if not self._has_failed:
                log.warning("models_not_shown", folder=str(self._folder), error=str(error))
            self._has_failed = True
        self._shown = numbers

    def _show(self, session: Session, model: GlobalModel) -> None:
        """Link the models that the store has and that have no links yet, the last and the best one
        too, and write the file that describes them. Raises OSError and ValueError."""
        numbers = [*self._waiting, *range(self._next, model.round + 1)]
        self._next = model.round + 1
        self._waiting = [n for n in numbers if not self._copies.is_copied(model_key(n))]
        there = sorted({*numbers} - {*self._waiting})
        self._last = max([self._last, *there])
        if self._last < 0:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        best = session.evaluation.winner
        if best is not None and best.round in self._waiting:
            best = None
        with contextlib.suppress(OSError, NotImplementedError):  # a file system without links
            for number in there:
                with self._lock:
                    self._link(_name(number), f"../{_file_of(number)}")
            self._link("last.npy", _name(self._last))
            if best is not None:
                self._link("best.npy", _name(best.round))
        about = {
            "session": session.session_id,
            "last": _entry(self._last),
            "best": None if best is None else _entry(best.round) | {best.metric: best.value},
            "dtype": model.dtype,
            "layout": [asdict(tensor) for tensor in model.layout],
            "metadata": dict(model.metadata),
            "profile": described(
                session.requested or (), json.loads(model.metadata.get("classes", "[]"))
            ),
        }
        temp = self._folder / f".{MODELS_INDEX}"
        temp.write_text(json.dumps(about, indent=1), encoding="utf-8")
        temp.replace(self._folder / MODELS_INDEX)

    def _link(self, name: str, target: str) -> None:
        """Make a symbolic link, unless it is there; remove it if its target is gone. Raises
        OSError."""
        path = self._folder / name
        if not (self._folder / target).exists():
            path.unlink(missing_ok=True)  # [storage] keep_models has removed the model
            return
        with contextlib.suppress(OSError):
            if os.readlink(path) == target:  # noqa: PTH115  # a text, which Path would normalise
                return
        temp = self._folder / f".{name}"
        temp.unlink(missing_ok=True)
        temp.symlink_to(target)
        temp.replace(path)


def _numbers(session: Session) -> tuple[int, int | None]:
    """Numbers of the last model, -1 without one, and of the best one."""
    best = session.evaluation.winner
    last = -1 if session.model is None else session.model.round
    return last, None if best is None else best.round


def _name(number: int) -> str:
    """Name of the link to the model of this number."""
    return f"round-{number:04}.npy"


def _file_of(number: int) -> str:
    """Path of the model's object below the session's folder."""
    return key_to_path(model_key(number))


def _entry(number: int) -> dict[str, Any]:
    """A model as the index names it."""
    return {"round": number, "file": f"../{_file_of(number)}"}
