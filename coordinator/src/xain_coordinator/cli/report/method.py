"""The section of the report on how the model was made, for the methods section of a paper."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from xain_coordinator.cli.report.about import metadata_of, prepared_of
from xain_coordinator.cli.report.charts import number, table
from xain_coordinator.inspection.client import Snapshot
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.inspection_pb2 import GetStatusResponse, RoundStatus
from xain_workloads.linear.glm.options import NAME as GLM
from xain_workloads.model import GROUP
from xain_workloads.tables.checks.describe import TableOne
from xain_workloads.tables.preprocessing import CategoryColumn, NumberColumn, Preprocessing
from xain_workloads.tables.reading.scales import Scale

MAX_ROWS = 200  # of the table of columns
MAX_CATEGORIES = 30  # of a column

BAGGING = "bagging"
_STUDIES = frozenset(("study.folds", "study.leave_out", "study.cross"))

_KINDS: Mapping[str, str] = {
    BAGGING: "an ensemble of estimators, each trained at one site",
    "glm": "a generalised linear model without a penalty, of the largest likelihood",
    "mlp": "a neural network of fully connected layers",
    "neural": "a neural network",
    "xgboost": "gradient-boosted trees",
}
_LINEAR: Mapping[str, str] = {
    "log_loss": "a logistic regression",
    "hinge": "a linear support vector machine",
    "squared_error": "a linear regression",
}
_RULES: Mapping[str, str] = {
    "weighted_average": "In each round the sites train the model on their own rows, and the"
    " coordinator averages their models, each weighted by its number of rows (federated averaging)",
    "gradient": "In each round the sites send gradients of the loss over their rows, and the"
    " coordinator adds them up and takes the step",
    "newton": "In each round the sites send the score and the information matrix of their rows, and"
    " the coordinator adds them up and takes a Newton step",
    "trees": "The coordinator grows the trees of what the sites send of their rows",
    "ensemble": "The estimators of all sites together are the model, with a linear model of their"
    " votes and of the columns where later rounds have trained one",
}

_REMEDIES: Mapping[str, str] = {
    "proximal": "a proximal term holds local training near the global model (FedProx)",
    "scaffold": "control variates of the sites correct the local steps (SCAFFOLD)",
    "personal": "the intercepts, or the output layer, stay at each site",
}


def method(
    snapshot: Snapshot, rounds: Sequence[RoundStatus], described: TableOne | None = None
) -> str:
    """The section on how the model was made; empty for a session without a workload, of whose
    training nothing is known."""
    metadata = metadata_of(snapshot)
    workload = metadata.get("workload", "")
    if not workload or workload == "describe":
        return ""
    prepared = prepared_of(metadata)
    told = "".join(
        f"<li>{escape(one)}</li>" for one in _told(snapshot, rounds, metadata, prepared, described)
    )
    sites = {name for one in rounds if one.task == pb.TRAIN for name in one.contributors}
    # The table of a single site would tell more than table one does.
    columns = _columns(prepared) if prepared is not None and len(sites) > 1 else ""
    return f"<h2>How was it made?</h2><ul>{told}</ul>{columns}"


def _told(
    snapshot: Snapshot,
    rounds: Sequence[RoundStatus],
    metadata: Mapping[str, str],
    prepared: Preprocessing | None,
    described: TableOne | None,
) -> Iterator[str]:
    """Sentences on the method, one an item of the list: model, training, held-out rows,
    preparation, and what left the sites."""
    status = snapshot.status
    settings = dict(status.settings)
    workload = metadata["workload"]
    is_trained_here = status.num_trained > 0
    options = _options(metadata)
    weighed = "; rows weigh by the inverse of the count of their class" * status.weighs_classes
    yield f"Model: {_kind(workload, options)}{_size(prepared)}{weighed}."
    if is_trained_here or _STUDIES.intersection(settings):
        yield _training(settings)
    remedy = _text(settings.get("workload.remedy", ""))
    if is_trained_here and remedy in _REMEDIES:
        yield f"Since sites differ, {_REMEDIES[remedy]}."
    if is_trained_here:
        if status.state == pb.FINISHED:
            why = f"; {status.ended_because}" if status.ended_because else ""
            yield f"Length: {status.num_trained:,} of {status.num_rounds:,} rounds{why}."
    elif status.began_with:
        yield f"Nothing was trained: model {status.began_with} was measured."
    if (held_out := _held_out(status.study, rounds)) and is_trained_here:
        yield held_out
    if (central := _central(status, rounds)) and is_trained_here:
        yield central
    if described is not None and described.groups is not None:
        yield _groups(described.groups.name, described.groups.together.known)
    elif described is None and status.study and GROUP in metadata:
        yield _groups(metadata[GROUP], 0)
    if prepared is not None:
        yield from _preparing(prepared, settings, workload)
        update = _update(workload, options)
        if remedy == "scaffold":
            update += " with the change of the site's control variate, a mean of gradients"
        is_local = any(one.evaluation.HasField("local") for one in rounds)
        local = ", at the end also of a model of its own rows alone" if is_local else ""
        if status.HasField("importance"):
            local += ", and sums of the losses with each column permuted"
        yield (
            "What left a site: before the training names and types of the columns, and of each"
            " column and the outcome counts, mean, spread and means of groups of rows; in each"
            f" round {update}, and its loss on the training rows"
            + (
                "; and sums over the held-out rows (rows by class and predicted class, and by"
                f" score; sums of losses){local}"
                if any(one.evaluation.num_samples for one in rounds)
                else ""
            )
            + ". No row. docs/data.md has each field."
        )


def _central(status: GetStatusResponse, rounds: Sequence[RoundStatus]) -> str:
    """The sentence on the central model; empty where there is none."""
    central = status.central
    if not central.evaluation.local.figures:
        return ""
    held_out = central.evaluation.num_samples
    known = (one.coordinator_evaluation.num_samples for one in rounds)
    total = next((number for number in known if number), 0)
    on = f"{total - held_out:,} of the {total:,}" if total else "four fifths of the"
    return (
        f"Central model: the coordinator trained the same on {on} rows of its own alone, for"
        f" {central.evaluation.local.passes:,} passes, and measured it and model {central.round} on"
        f" the other {held_out:,}. Both models were chosen by rows that include these: the global"
        " one as the best of its rounds on all rows of the coordinator, the central one as the best"
        " of up to ten points of its training; the interval does not count that."
    )


def _options(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Options of the workload; empty where they are not known."""
    try:
        options: Any = json.loads(metadata.get("options", ""))
    except ValueError:
        return {}
    return options if isinstance(options, dict) else {}


def _update(workload: str, options: Mapping[str, Any]) -> str:
    """Words for what leaves a site in a round of training."""
    if workload == GLM:
        return "sums over its rows"
    if workload != BAGGING:
        return "an update of the model"
    if options.get("publish"):
        return "its fitted estimators, or sums over its rows"
    return "the number and digest of its fitted estimators, which stay there, or sums over its rows"


def _kind(workload: str, options: Mapping[str, Any]) -> str:
    """The kind of a model in words; for `sgd` with loss, penalty and step."""
    if workload != "sgd":
        return f"{_KINDS.get(workload, workload)} (workload {workload})"
    loss, penalty = options.get("loss") or "log_loss", options.get("penalty", "none")
    kind = _LINEAR.get(loss, f"a linear model with the loss {loss}")
    weight = f"with the penalty {penalty}, alpha = {options.get('alpha')}"
    how = "gradient descent" if options.get("mode") == "gradient" else "stochastic gradient descent"
    step = (
        f"step {eta0:g}" if (eta0 := options.get("eta0")) else "a step that follows from the rows"
    )
    penalised = "without a penalty" if penalty == "none" else weight
    return f"{kind} {penalised}, by {how} with {step} (workload sgd)"


def _size(prepared: Preprocessing | None) -> str:
    """The number of features and columns, as the end of a phrase; empty where it is not known."""
    if prepared is None:
        return ""
    return f", of {prepared.num_features:,} features made of {len(prepared.columns):,} columns"


def _training(settings: Mapping[str, str]) -> str:
    """Sentence on how the coordinator combines updates, and which optimiser makes the step."""
    rule = _text(settings.get("aggregation.rule", "weighted_average"))
    optimizer = _text(settings.get("aggregation.optimizer", ""))
    known = _RULES.get(rule, f"The coordinator combines what the sites send by the rule {rule}")
    return f"{known}; the step is {optimizer}'s." if optimizer else f"{known}."


def _held_out(study: str, rounds: Sequence[RoundStatus]) -> str:
    """The sentence on held-out rows; empty without any."""
    trained = max((one.num_samples for one in rounds if one.task == pb.TRAIN), default=0)
    held_out = max((one.evaluation.num_samples for one in rounds), default=0)
    if not trained or not held_out:
        return ""
    share = held_out / (trained + held_out)
    of = " that are left" if study else ""
    return (
        f"Rows{of}: {trained + held_out:,}, of which {held_out:,} ({share:.1%}) were held out. Each"
        " site drew these by chance before the training, of each class (or tenth of a target of"
        " numbers) its share; the same rows measure every model."
    )


def _groups(name: str, number: int) -> str:
    """The sentences on groups of rows. name: of their column. number: 0 if it is not known."""
    told = f" Rows to train on are those of {number:,} of them." if number else ""
    return (
        f"Rows with the same {name} were kept together: all of them were trained on or all held"
        f" out, and all are in one fold.{told} Intervals take rows for independent, and are too"
        f" narrow as far as rows with the same {name} are alike."
    )


def _preparing(
    prepared: Preprocessing, settings: Mapping[str, str], workload: str
) -> Iterator[str]:
    """Sentences on how numbers, categories and target are prepared."""
    if prepared.numbers:
        yield f"Numbers: {', '.join(_of_numbers(prepared, settings))}."
    if prepared.categories and workload == GLM:
        yield "Categories: each is compared with the reference of its column, see Coefficients."
    elif prepared.categories:
        yield (
            "Categories: a column of zeros and ones for each category with enough rows at a site;"
            " a missing or other one is all zeros."
        )
    if prepared.target is not None:
        yield (
            "Target: centred and divided as numbers are, for the training alone; predictions and"
            " figures are in its own unit."
        )
    if prepared.limit:
        yield f"Rows whose target is beyond ±{prepared.limit:g} spreads were not trained on."


def _of_numbers(prepared: Preprocessing, settings: Mapping[str, str]) -> Iterator[str]:
    """Phrases on how numbers are filled, scaled and cut off."""
    whose = "of the site" if prepared.is_per_site else "of the training rows of all sites"
    is_mean = _text(settings.get("workload.preprocessing.missing", "")) == "mean"
    fill = "mean" if is_mean and not prepared.is_per_site else "median"
    if all(column.fill != column.fill for column in prepared.numbers):
        yield "a missing one stays missing"
    else:
        yield f"a missing one is replaced by the {fill} {whose}"
    if any(column.has_indicator for column in prepared.numbers):
        yield "and told by a column of zeros and ones"
    scaling = _text(settings.get("workload.preprocessing.scaling", ""))
    by = "median and distance of the quartiles" if scaling == "robust" else "mean and SD"
    if prepared.is_per_site or any(column.scale != Scale() for column in prepared.numbers):
        yield f"centred and divided by {by} {whose}, or by those of most sites where one is far off"
    else:
        yield "not scaled"
    if prepared.clip:
        yield f"and cut off at ±{prepared.clip:g}"


def _columns(prepared: Preprocessing) -> str:
    """The table of columns as the model takes them, folded."""
    rows = [_row(column, prepared) for column in prepared.columns[:MAX_ROWS]]
    head = ("column", "missing", "replaced by", "centre", "divided by", "categories")
    left = len(prepared.columns) - MAX_ROWS
    more = f'<p class="soft">and {left:,} more</p>' if left > 0 else ""
    return (
        "<details><summary>Columns as the model takes them</summary>"
        f"{table(head, rows, texts=(5,))}{more}</details>"
    )


def _row(column: NumberColumn | CategoryColumn, prepared: Preprocessing) -> list[str]:
    """Cells of a column: its share of missing values, and how it is prepared."""
    missing = f"{column.unknown:.1%}"
    if isinstance(column, CategoryColumn):
        names = list(column.categories[:MAX_CATEGORIES])
        left = len(column.categories) - len(names)
        more = f", and {left:,} more" if left else ""
        return [escape(column.name), missing, "", "", "", escape(", ".join(names) + more)]
    fill = "" if column.fill != column.fill else number(column.fill)
    scale = [number(column.scale.center), number(column.scale.scale)]
    if prepared.is_per_site:
        fill, scale = "the site's", ["the site's", "the site's"]
    return [escape(column.name), missing, fill, *scale, ""]


def _text(value: str) -> str:
    """A setting without its quotation marks."""
    return value.strip('"')
