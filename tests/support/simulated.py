"""Scripts for xain.simulate(): a worker imports them by name."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import xain


def count(site: xain.Site) -> None:
    """Add 1 to every weight; count the rounds of the site in its state, and the threads."""
    for calls, round_ in enumerate(xain.rounds({"w": np.zeros(3, np.float32)}), 1):
        round_.state["n"] = round_.state.get("n", 0) + 1
        metrics = {
            "calls": calls,
            "n": round_.state["n"],
            "index": site.index,
            "pid": os.getpid(),
            "threads": threading.active_count(),
        }
        assert site.id == round_.participant_id
        round_.submit({"w": round_.weights["w"] + 1}, samples=1, metrics=metrics)


def evaluate(site: xain.Site) -> None:
    """Report the first weight as accuracy; train only where that is asked for."""
    for round_ in xain.rounds({"w": np.zeros(3, np.float32)}):
        round_.evaluate({"accuracy": round_.weights["w"][0] / 10}, samples=2)
        if round_.task == "train":
            weights = {"w": round_.weights["w"] + 1}
            round_.submit(weights, samples=1, metrics={"loss": 1 / weights["w"][0]})


def configured(site: xain.Site) -> None:
    """Report whether [train] is TRAIN, of the same types."""
    for round_ in xain.rounds({"w": np.zeros(3, np.float32)}):
        own = {"epochs", "epoch_base"}
        train = {name: value for name, value in round_.config.items() if name not in own}
        as_given = repr(plain(train)) == repr(dict(sorted(TRAIN.items())))
        round_.submit(round_.weights, samples=1, metrics={"as_given": int(as_given)})


def plain(value: object) -> object:
    """A Config and the tables within it as mappings, which have the order of the alphabet."""
    return {k: plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


TRAIN = {
    "version": "1.0",
    "flag": "true",
    "number": "7",
    "list": "[1]",
    "on": True,
    "whole": 7,
    "fraction": 7.0,
    "many": [1, 2.0, "3", False, [], {"a": 1}],
    "opt": {"b": {"c": "0"}, "d": 1e-9, 'é "\n': ""},
    "empty": {},
}


def hold(site: xain.Site) -> None:
    """Train with numbers of the round, the site and its state. In the round HELD each site shows
    the worker that trains it and its node, in train.folder, and waits there for the file "go"."""
    for round_ in xain.rounds({"w": np.zeros(64, np.float32)}):
        folder = Path(round_.config.folder)
        if round_.number == HELD:
            (folder / f"{site.id} {os.environ.get('NODE', '')} {os.getpid()}").touch()
            while not (folder / "go").exists():
                time.sleep(0.05)  # a poll of the file, which the test makes
        round_.state["n"] = round_.state.get("n", 0) + 1
        numbers = np.random.default_rng([round_.number, site.index]).standard_normal(64)
        numbers *= round_.state["n"]
        weights = 0.7 * round_.weights["w"] + numbers.astype(np.float32)
        round_.submit({"w": weights}, samples=1 + site.index)


HELD = 2


def large(site: xain.Site) -> None:
    """Add 1 to each weight of a model that does not travel inside a call."""
    for round_ in xain.rounds({"w": np.zeros(LARGE, np.float32)}):
        round_.submit({"w": round_.weights["w"] + 1}, samples=1)


LARGE = 200_000


def fail(site: xain.Site) -> None:
    for round_ in xain.rounds({"w": np.zeros(3, np.float32)}):
        if site.index == 2 and round_.number > 0:
            raise ZeroDivisionError("a mistake of the script")
        round_.submit(round_.weights, samples=1)


def save(site: xain.Site, folder: Path) -> None:
    """Write the last model to a file of the site, after the loop."""
    rounds = xain.rounds({"w": np.zeros(3, np.float32)})
    for round_ in rounds:
        round_.submit({"w": round_.weights["w"] + 1}, samples=1, metrics={"loss": 0.5})
    result = rounds.result
    saved = {"w": result.weights["w"], "model": result.round, "loss": result.metrics["loss"]}
    np.savez(folder / f"{site.id}.npz", **saved)


def break_off(site: xain.Site, num_staying: int) -> None:
    """Leave the loop in the first round that trains, unless the site is one of the first; the code
    after the loop has no result then."""
    rounds = xain.rounds({"w": np.zeros(3, np.float32)})
    for round_ in rounds:
        round_.submit({"w": round_.weights["w"] + 1}, samples=1, metrics={"index": site.index})
        if round_.number == 1 and site.index >= num_staying:
            break
    else:
        assert rounds.result.round > 1
        return
    with contextlib.suppress(RuntimeError):
        raise AssertionError(f"{site.id} has left, and has {rounds.result}")


def fail_at_the_end(site: xain.Site) -> None:
    for round_ in xain.rounds({"w": np.zeros(3, np.float32)}):
        round_.submit(round_.weights, samples=1)
    if site.index == 2:
        raise ZeroDivisionError("a mistake after the loop")


def forget(site: xain.Site) -> None:
    """Has no loop."""


def wait(site: xain.Site) -> None:
    for round_ in xain.rounds({"w": np.zeros(3, np.float32)}):
        Path(sys.argv[1]).touch()
        time.sleep(600)  # longer than the test lasts
        round_.submit(round_.weights, samples=1)


if __name__ == "__main__":
    xain.simulate(wait, 2, workers=1)
