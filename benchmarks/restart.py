"""Seconds until a restarted coordinator serves: 1,000 participants, 1,000 rounds in the journal.

    python benchmarks/restart.py [--participants 1000] [--rounds 1000]

Writes the journal of such a session, in which everybody was selected and accepted in every round,
straight into its table: a million records. A real coordinator is started on it, which finds no
snapshot and reads everything; stopped, it leaves one behind. Then come as many rounds as a snapshot
may be behind, and one that is still open with half of its updates, and coordinators are started on
that and killed. Measured is the time from the start of the process to the line that says that it
serves. Prints seconds; writes bench-results/restart.json.
"""

import hashlib
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import flags
import numpy as np
import results
import xxhash

from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.keys import attempt_key, model_key, update_key
from xain_coordinator.core.vocabulary.values import GlobalModel, StoredWeights, Update, WeightsRef
from xain_coordinator.driver.driver import Driver
from xain_coordinator.journal.codec import Row, digest_of, encode, encode_record
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import Record
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.prefixed import PrefixedStore
from xain_wire.np import npy_header
from xain_workloads.model import TensorSpec

SESSION = "benchmark"
STARTS = 5  # with a snapshot
ROUND_S = 10.0
LAYOUT = (TensorSpec("weights", (64, 10), "float32"), TensorSpec("bias", (10,), "float32"))
SHAPE = (650,)
# Every model and every update. A start compares the latest model with its digest.
OBJECT = npy_header(np.dtype("float32"), SHAPE) + bytes(4 * 650)
DIGEST = xxhash.xxh3_128_hexdigest(OBJECT)


def model(round_: int) -> GlobalModel:
    ref = WeightsRef(model_key(round_), len(OBJECT), DIGEST)
    return GlobalModel(round_, ref, "float32", SHAPE, LAYOUT, {"workload": "sgd"})


def attempt(round_: int, name: str) -> str:
    unique = hashlib.md5(f"{round_}/{name}".encode(), usedforsecurity=False).hexdigest()
    return attempt_key(update_key(round_, name), unique)


class Journal:
    """The journal of a session, written from the outside."""

    def __init__(self, folder: Path, num_participants: int, num_rounds: int) -> None:
        self.path = folder / "journal.sqlite"
        self.num_records = 0
        self._store = PrefixedStore(FileStore(folder / "weights"), SESSION)
        self._names = tuple(f"site-{i:04}" for i in range(num_participants))
        rounds = {
            "rounds": num_rounds + 1,
            "min_participants": num_participants,
            "initial_weights": "average",
        }
        rules = CoordinatorConfig.model_validate({"rounds": rounds}).rules()
        # Nothing is due while a coordinator is up for a moment, so that it writes nothing here.
        self._rules = replace(rules, deadline_s=None, idle_timeout_s=None)
        SqliteJournal(self.path).close()

    def begin(self) -> None:
        """Up to the first round."""
        events = [
            e.SessionOpened(SESSION, self._rules, 0.0),
            *(e.ParticipantJoined(name, None, 0.0) for name in self._names),
            e.ParticipantsGathered(),
            e.ModelRequested(()),
            e.ModelInitialised(model(0)),
        ]
        self._write(encode_record(Record(0.0, event)) for event in events)

    def add_rounds(self, rounds: range) -> None:
        """Rounds that are over."""
        self._write(row for round_ in rounds for row in self._round(round_))
        self._store.put({model_key(rounds.stop): OBJECT})

    def open_round(self, round_: int) -> None:
        """Open a round, with half of its updates accepted."""
        some = self._names[: len(self._names) // 2]
        self._write(self._opening(round_, some))
        self._store.put(dict.fromkeys((attempt(round_, name) for name in some), OBJECT))

    def _round(self, round_: int) -> Iterator[Row]:
        yield from self._opening(round_, self._names)
        at = (round_ + 1) * ROUND_S
        yield encode_record(Record(at, e.RoundClosed(round_, at)))
        yield encode_record(Record(at, e.ModelPublished(round_, model(round_ + 1), at)))

    def _opening(self, round_: int, accepted: tuple[str, ...]) -> Iterator[Row]:
        at = round_ * ROUND_S
        names = self._names
        yield encode_record(Record(at, e.RoundOpened(round_, names, 1, at, len(names))))
        # Encoding a million events one by one would take longer than all the rest.
        weights = StoredWeights(WeightsRef("KEY", len(OBJECT), DIGEST), "float32", SHAPE)
        kind, body = encode(e.UpdateAccepted(round_, Update("NAME", weights, 100)))
        for name in accepted:
            yield at, kind, body.replace("NAME", name).replace("KEY", attempt(round_, name))

    def _write(self, rows: Iterator[Row]) -> None:
        numbered = ((1, seq, *row) for seq, row in enumerate(rows, self.num_records))
        checked = ((*fields, digest_of(*fields)) for fields in numbered)
        with closing(sqlite3.connect(self.path)) as db, db:
            db.executemany("INSERT INTO record VALUES (?, ?, ?, ?, ?, ?)", checked)
            (self.num_records,) = db.execute("SELECT count(*) FROM record").fetchone()


def start(folder: Path) -> tuple["subprocess.Popen[str]", float]:
    """A coordinator that serves, and the seconds that it took."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "xain_coordinator", f"--data-dir={folder}", "--port=0", "--resume"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = ""
    for line in process.stderr:
        if json.loads(line)["event"] == "coordinator_serving":
            return process, time.perf_counter() - begin
    raise SystemExit(f"the coordinator ended with status {process.wait()}: {line}")


def main() -> None:
    parser = flags.parser(__doc__, quick="a short journal: does it work?")
    parser.add_argument("--participants", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=1000)
    arguments = parser.parse_args()
    results.begin(quick=arguments.quick, any_load=arguments.any_load)
    num_starts = STARTS
    if arguments.quick:
        arguments.participants, arguments.rounds, num_starts = 10, 10, 1
    participants, rounds = arguments.participants, arguments.rounds
    # One more, and the first of the coordinators would save another snapshot.
    num_behind = min(rounds, (Driver.snapshot_records - 1) // (participants + 3))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journal = Journal(folder, participants, rounds)
        journal.begin()
        journal.add_rounds(range(rounds - num_behind))
        process, without = start(folder)
        process.terminate()
        process.communicate()
        journal.add_rounds(range(rounds - num_behind, rounds))
        journal.open_round(rounds)
        size = journal.path.stat().st_size
        seconds = []
        for _ in range(num_starts):
            process, took = start(folder)
            process.kill()
            process.communicate()
            seconds.append(took)
    results.report(
        "restart",
        {
            "participants": participants,
            "rounds": rounds,
            "records": journal.num_records,
            "journal_mb": round(size / 1e6),
            "serving_s_median": round(statistics.median(seconds), 2),
            "serving_s_max": round(max(seconds), 2),
            "without_snapshot_s": round(without, 2),
        },
    )


if __name__ == "__main__":
    main()
