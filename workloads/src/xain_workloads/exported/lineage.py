"""The model of a session that is taken home, and what its file tells of it."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from xain_workloads.errors import NoModel
from xain_workloads.exported.formats import columns_of
from xain_workloads.measures.figures import Figure
from xain_workloads.measures.thresholds import Threshold


@dataclass(frozen=True, slots=True)
class Measured:
    """Metrics by name, and the number of rows that they were measured on. figures: those of the
    metrics that are no averages over sites."""

    num_samples: int
    metrics: Mapping[str, float]
    figures: Mapping[str, Figure]

    @classmethod
    def of(cls, message: Any) -> "Measured":
        """Read an Evaluation of the wire."""
        return cls(message.num_samples, dict(message.metrics), figures_of(message.figures))


def figures_of(messages: Mapping[str, Any]) -> dict[str, Figure]:
    """Read Figures of the wire, by name."""
    return {
        name: Figure(
            one.value,
            one.low if one.HasField("low") else None,
            one.high if one.HasField("high") else None,
            one.baseline if one.HasField("baseline") else None,
            one.bound,
        )
        for name, one in messages.items()
    }


def thresholds_of(status: Any) -> dict[int, Threshold]:
    """Read the thresholds of a GetStatusResponse, by the number of the model."""
    return {
        one.round: Threshold(one.value, one.criterion, one.resolution, figures_of(one.figures))
        for one in status.thresholds
    }


def choose(
    which: str, numbers: Collection[int], best: int | None, removed: Collection[int] = ()
) -> int:
    """Choose the model that "last", "best" or a number names, and return its number.

    numbers: of the models that there are, one at least. best: None if no model was evaluated.
    removed: those that [storage] keep_models has removed. Raises NoModel.
    """
    if which == "best" and best is None:
        raise NoModel(
            "there is no best model: none was evaluated, no metric is named by which averages are"
            " compared, or none is better than always predicting the commonest class or the mean;"
            " take the last, or see [evaluate]"
        )
    number = {"last": max(numbers), "best": best}.get(which)
    if number is None and which.isdecimal():
        number = int(which)
    if number in removed:
        raise NoModel(
            f"model {number} was removed by [storage] keep_models, which keeps the latest models"
            f" and the best one; take last or best, or one of {_spans(numbers)}"
        )
    if number is None or number not in numbers:
        raise NoModel(
            f"there is no model {which!r}: take last, best, or a number, {_spans(numbers)}"
        )
    return number


def _spans(numbers: Collection[int]) -> str:
    """Numbers in words: "0, 5 to 9"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)


def about(
    program: str,
    *,
    session_id: str,
    number: int,
    digest: str,
    metadata: Mapping[str, str],
    is_best: bool,
    is_last: bool,
    num_updates: int,
    num_samples: int,
    metrics: Mapping[str, float],
    evaluation: Measured | None,
    coordinator_evaluation: Measured | None,
    profile: Mapping[str, Any] | None = None,
    threshold: Threshold | None = None,
) -> dict[str, Any]:
    """The lineage and metrics of a model, its columns and classes, as a JSON object.

    program: the distribution that writes it. num_updates, num_samples, metrics: of the round that
    trained it. profile: that data must have to go on with the model; None if it is not known.
    threshold: by which the model of the file predicts; None: by the larger probability.
    """
    return {
        "program": f"{program} {version(program)}",
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "session": session_id,
        "round": number,
        "digest": digest,
        "is_best": is_best,
        "is_last": is_last,
        "workload": metadata.get("workload", ""),
        "target": metadata.get("target", ""),
        "classes": json.loads(metadata.get("classes", "[]")),
        "columns": columns_of(metadata),
        "profile": profile,
        "threshold": None if threshold is None else asdict(threshold),
        "num_updates": num_updates,
        "num_samples": num_samples,
        "metrics": dict(metrics),
        "evaluation": _plain(evaluation),
        "coordinator_evaluation": _plain(coordinator_evaluation),
    }


def _plain(measured: Measured | None) -> dict[str, Any] | None:
    """Convert an evaluation to JSON values: rows, metrics, figures, and averages over sites."""
    if measured is None:
        return None
    metrics, figures = measured.metrics, measured.figures
    return {
        "num_samples": measured.num_samples,
        "metrics": dict(metrics),
        "figures": {name: asdict(one) for name, one in figures.items()},
        "averages": {name: value for name, value in metrics.items() if name not in figures},
    }
