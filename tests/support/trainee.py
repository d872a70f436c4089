"""A participant whose training is a function of its name, the model and the round alone.

    python trainee.py TARGET ID BOOK --size N [--training-s S] [--state-dir DIR] [--gates DIR]
                      [--scores A,B,...] [--predicts classes|numbers]

In a state directory that has joined it connects under the certificate there.

BOOK gets a line for each step that the agent tells of: what, and the round. A line outlives the
process, however that ends.
"""

import argparse
import os
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_foundation.security.tls import Certificates
from xain_participant import Agent, Participant, StateDirectory
from xain_participant.agent import agent
from xain_participant.agent.signals import stop_on_signals
from xain_participant.enrolment.kept import KeptCertificates
from xain_participant.sdk.participant import Assignment
from xain_workloads.measures.tallies import Tallies, tally_classes, tally_numbers

STEPS = ("training", "trained", "handed_in", "dropped")


def chance_of(participant_id: str, round_: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(participant_id.encode()), round_])


def predicted(participant_id: str, round_: int) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Classes of 31 to 60 rows of a participant, and the probabilities that a model gives them."""
    chance = chance_of(participant_id, round_)
    target = chance.integers(0, 3, chance.integers(31, 60))
    probabilities = chance.dirichlet((1.0, 1.0, 1.0), len(target))
    probabilities[np.arange(len(target)), target] += round_
    return target, probabilities / probabilities.sum(axis=1, keepdims=True)


def predicted_numbers(participant_id: str, round_: int) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Targets of 31 to 60 rows of a participant, and predictions. The participants' means differ
    by more than their rows do."""
    chance = chance_of(participant_id, round_)
    target = chance.normal(chance.normal(0.0, 50.0), 3.0, chance.integers(31, 60))
    return target, target + chance.normal(0.0, 4.0 / (1 + round_), len(target))


def tallied(what: str, participant_id: str, round_: int) -> Tallies | None:
    """Tallies of predicted() for "classes", of predicted_numbers() for "numbers", else None."""
    if what == "numbers":
        return tally_numbers(*predicted_numbers(participant_id, round_))
    if what == "classes":
        target, probabilities = predicted(participant_id, round_)
        return tally_classes(3, target, probabilities.argmax(axis=1), probabilities)
    return None


class Trainee(Participant):
    """size: of the model, in float32.

    training_s: a training takes up to this long, by name and round, so that the moments at which
        something is killed are not always the same.
    gates: a training waits as long as there is a file {id}-{round} in this folder; so does the
        evaluation of the last model, whose round is one more.
    scores: the accuracy of each model, the last one also of all later models; empty: it does not
        evaluate.
    predicts: what it tallies as well; see tallied().
    """

    def __init__(
        self,
        participant_id: str,
        size: int,
        *,
        training_s: float = 0.0,
        book: Path | None = None,
        gates: Path | None = None,
        scores: Sequence[float] = (),
        predicts: str = "",
    ) -> None:
        self._name = participant_id
        self._number = zlib.crc32(participant_id.encode())
        self._size = size
        self._training_s = training_s
        self._gates = gates
        self._scores = scores
        self._predicts = predicts
        self._asked = Assignment("", 0)
        self._round = -1
        self._book = -1
        if book is not None:
            self._book = os.open(book, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, step: str, round_: int, _: str) -> None:
        """The agent's observer."""
        self._round = round_
        if step in STEPS:
            self._write(step)

    def _write(self, what: str) -> None:
        if self._book >= 0:
            os.write(self._book, f"{what} {self._round}\n".encode())

    def init_weights(self) -> NDArray[Any]:
        self._take_time(np.random.default_rng(self._number))
        return self._noise(np.random.default_rng(self._number))

    @property
    def can_evaluate(self) -> bool:
        return bool(self._scores)

    def on_round(self, assignment: Assignment) -> None:
        self._asked = assignment

    def evaluate_round(self, weights: NDArray[Any]) -> None:
        self._take_time(np.random.default_rng(self._number))
        self._write("evaluated")
        self._report_score()

    def _report_score(self) -> None:
        score = self._scores[min(self._asked.round, len(self._scores) - 1)]
        tallies = tallied(self._predicts, self._name, self._asked.round)
        rows = 10 if tallies is None else tallies.num_rows
        self.report_evaluation({"accuracy": score}, rows, tallies)

    def train_round(
        self, weights: NDArray[Any], epochs: int, epoch_base: int
    ) -> tuple[NDArray[Any], int]:
        if self._asked.evaluate and self.can_evaluate:
            self._report_score()
        chance = np.random.default_rng([self._number, epoch_base])
        self._take_time(chance)
        # Neither linear nor the same for all: whatever is lost, doubled or exchanged shows.
        return np.tanh(weights) + self._noise(chance) / 8, 1 + self._number % 1000

    def _noise(self, chance: np.random.Generator) -> NDArray[np.float32]:
        return chance.standard_normal(self._size, dtype=np.float32)

    def _take_time(self, chance: np.random.Generator) -> None:
        time.sleep(chance.uniform(0.0, self._training_s))  # what training takes
        gate = self._gates / f"{self._name}-{self._round}" if self._gates is not None else None
        if gate is not None and gate.exists():
            self._write("at_gate")  # the model is here
            while gate.exists():
                time.sleep(0.02)  # a poll: whoever has put the gate there opens it


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("participant_id")
    parser.add_argument("book", type=Path)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--training-s", type=float, default=0.0)
    parser.add_argument("--state-dir", type=Path)
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--scores", default="")
    parser.add_argument("--predicts", default="")
    flags = parser.parse_args()
    trainee = Trainee(
        flags.participant_id,
        flags.size,
        training_s=flags.training_s,
        book=flags.book,
        gates=flags.gates,
        scores=[float(score) for score in flags.scores.split(",") if score],
        predicts=flags.predicts,
    )
    # Only one process at a time has this id, and one that is started again needs not wait for the
    # lease of the one that was killed.
    agent.new_instance_id = lambda chance=None: flags.participant_id
    with ExitStack() as stack:
        state = tls = None
        if flags.state_dir is not None:
            state = stack.enter_context(StateDirectory(flags.state_dir, flags.participant_id))
            kept = KeptCertificates(flags.state_dir)
            tls = Certificates(kept.folder) if kept.are_there else None
        running = Agent(
            trainee, flags.target, flags.participant_id, observer=trainee.note, state=state, tls=tls
        )
        stop_on_signals(running)
        return running.run()


if __name__ == "__main__":
    sys.exit(main())
