"""A script with a loop over xain.rounds(), which counts its rounds in round.state.

    python script.py TARGET ID BOOK [--state-dir DIR] [--dies MOMENT:ROUND] [--raises ROUND]
                     [--waits ROUND] [--gate FILE] [--forks] [--thread]
                     [--no-model]

BOOK gets a line when the body of a round begins: the round, and how many rounds the state counts.
MOMENT: the script kills itself (kill -9) in the "body", when the state is "saved" and the result is
not, or when the result is "kept" and nobody has it yet. The body of the round that
waits does so until the file is gone. One that forks has a data loader's process in each round.
Without a model the script declares none, and takes the weights of the session.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import xain
from xain.state import ScriptState
from xain_participant.keep.state import StateDirectory


def die_after(kind: type, method: str, is_due: Any) -> None:
    """Kill the process when a method of this class has returned."""
    original = getattr(kind, method)

    def dying(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        if is_due(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(kind, method, dying)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("id")
    parser.add_argument("book")
    parser.add_argument("--state-dir")
    parser.add_argument("--dies", default=":-1")
    parser.add_argument("--raises", type=int, default=-1)
    parser.add_argument("--waits", type=int, default=-1)
    parser.add_argument("--gate", default=".")
    parser.add_argument("--forks", action="store_true")
    parser.add_argument("--thread", action="store_true")
    parser.add_argument("--no-model", action="store_true")
    args = parser.parse_args()
    moment, _, dies = args.dies.partition(":")
    if moment == "saved":
        die_after(ScriptState, "save", lambda session_id, round_, *_: round_ == int(dies))
    if moment == "kept":
        die_after(StateDirectory, "keep", lambda result: result.round == int(dies))

    def train() -> None:
        rounds = xain.rounds(
            None if args.no_model else {"w": np.zeros(4, np.float32)},
            coordinator=args.target,
            id=args.id,
            state_dir=args.state_dir,
        )
        for round_ in rounds:
            with Path(args.book).open("a") as book:
                book.write(f"{round_.number} {round_.state.get('n', 0)}\n")
            if round_.number == args.raises:
                raise KeyError("no such column")
            if (moment, int(dies)) == ("body", round_.number):
                os.kill(os.getpid(), signal.SIGKILL)
            if args.forks:
                loader = multiprocessing.get_context("fork").Process(target=sys.stdout.flush)
                loader.start()
                loader.join()
            if round_.number == args.waits:
                while Path(args.gate).exists():
                    time.sleep(0.01)  # a poll: the test removes the file, or interrupts this
            round_.state["n"] = round_.state.get("n", 0) + 1
            round_.submit({"w": round_.weights["w"] + 1}, samples=1)
        sys.stdout.write("over\n")

    if args.thread:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    else:
        train()


main()
