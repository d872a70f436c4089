"""Checks of classes, and of how columns go with the target."""

import re
from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from xain_foundation.settings.hints import hint
from xain_workloads.tables.checks.findings import Finding
from xain_workloads.tables.checks.fixes import dropped, replaced
from xain_workloads.tables.checks.summaries import Summary
from xain_workloads.tables.schema import shown
from xain_workloads.tables.statistics import MAX_ASSOCIATIONS

_MIN_EVENTS = 10
_MANY_CLASSES = 20
_MOST_SWAPPED = 6  # classes: of each two of them it is asked whether they are swapped
_ALONE = 0.99  # |r|, or AUC, of a column that predicts the target
_ALONE_AT_ONE = 0.995
_ROWS_OF_ALONE = 50
_AGAINST = -0.5  # cosine of the angle between a site's associations and the others'
_MIN_SIGMAS = 4.0
_FOLLOW_UP = re.compile(
    r"(follow.?up|fu|fup|surv(ival)?.?(time|days|months|years)|(time|days|months|years).?(to|until)"
    r".*|futime|survtime|os.?(time|days|months)|pfs.*|time|days|months|stime|ttime|duration|los)"
)
_UNLIKE = 0.3  # of the rows of a site that would need another class to have the others' shares
_ROWS_OF_UNLIKE = 20
_GOES_WITH = 0.2  # AUC away from a half, of a time of follow-up


def check_labels(summary: Summary) -> Iterator[Finding]:
    """Findings of the classes, of leaks and of labels that mean the opposite."""
    yield from _many_classes(summary)
    if "regression" not in summary.tasks:
        yield from _not_looked_for(summary)
        yield from _lone_classes(summary)
        yield from _few_events(summary)
        yield from _unlike_classes(summary)
    yield from _unassociated(summary)
    yield from _leaks(summary)
    if "regression" not in summary.tasks:
        yield from _reversed(summary)


def _many_classes(summary: Summary) -> Iterator[Finding]:
    """Refuse a target of many different numbers with few rows each: probably a quantity."""
    if "regression" in summary.tasks:
        return
    classes = {name for names in summary.classes for name in names}
    rows = sum(summary.num_rows)
    most = 100 if len(classes) > 50 else 10  # rows of a class
    if len(classes) <= _MANY_CLASSES or rows / len(classes) >= most:
        return
    if not all(name.lstrip("-").replace(".", "", 1).isdecimal() for name in classes):
        return
    text = (
        f"the target has {len(classes)} different numbers in {rows} rows, taken for classes, too"
        " few of each; name the right column, [data] target, if it is another. Is it a quantity?"
    )
    fix = hint("xain-participant", 'data.task = "regression"')
    yield Finding("refuse", "many_classes", "", summary.target_name, text, fix)


def _not_looked_for(summary: Summary) -> Iterator[Finding]:
    """Note the checks that are left out, since there are more classes than they compare."""
    classes = len({name for names in summary.classes for name in names})
    if len(summary.names) < 2 or classes <= _MOST_SWAPPED:
        return
    text = (
        f"labels that mean the opposite at one site are looked for among {_MOST_SWAPPED} classes at"
        f" most, and there are {classes}"
    )
    if classes > _MANY_CLASSES:
        text += (
            "; classes of one site alone, and classes of few rows, are looked for among"
            f" {_MANY_CLASSES}"
        )
    yield Finding("note", "reversed_labels", "", summary.target_name, text)


def _lone_classes(summary: Summary) -> Iterator[Finding]:
    """Warn of a class of one site alone; note it if others have fewer than five rows of it."""
    having: dict[str, list[int]] = {}
    for at, names in enumerate(summary.classes):
        for name in names:
            having.setdefault(name, []).append(at)
    if len(summary.names) < 2 or len(having) > _MANY_CLASSES:
        return
    told = summary.class_counts.sites
    tells = sum(bool(labels) for labels in summary.labels)
    for name, sites in having.items():
        rows = list(told.get(name, ()))
        text = f"class {name!r} is at this site only"
        if len(sites) == 1:
            text += "; correct these rows if it is another name of a class, or an error"
            yield Finding("warn", "lone_class", summary.names[sites[0]], summary.target_name, text)
        elif len(rows) == 2 and rows[1] >= 20 and tells == len(summary.names):
            text += ", but for fewer than five rows at others"
            yield Finding("note", "lone_class", summary.names[rows[0]], summary.target_name, text)


def _few_events(summary: Summary) -> Iterator[Finding]:
    """Warn of classes with fewer than _MIN_EVENTS rows at all sites together."""
    classes = {name for names in summary.classes for name in names}
    if not any(summary.labels) or len(classes) > _MANY_CLASSES:
        return
    few = []
    for name in sorted(classes):
        rows = summary.class_counts.sites.get(name, ())
        untold = sum(name in names for names in summary.classes) - len(rows) // 2
        if sum(rows[1::2]) + 2 * untold < _MIN_EVENTS:
            few.append(name)
    if few:
        one = len(few) == 1
        text = (
            f"class{'' if one else 'es'} {shown(few)} {'has' if one else 'have'} fewer than"
            f" {_MIN_EVENTS} rows at all sites together, too few to learn {'it' if one else 'them'}"
        )
        yield Finding("warn", "few_events", "", summary.target_name, text)


def _unlike_classes(summary: Summary) -> Iterator[Finding]:
    """Note how many sites have shares of the classes unlike the others', and the remedy to try."""
    names, counts = sorted(summary.class_counts.sites), _counts(summary)
    rows = np.array([[counts[n].get(at, 0) for n in names] for at in range(len(summary.names))])
    if rows.size == 0:
        return
    sums = rows.sum(axis=1, keepdims=True)
    others = rows.sum(axis=0) - rows
    told = (sums[:, 0] >= _ROWS_OF_UNLIKE) & (others.sum(axis=1) >= _ROWS_OF_UNLIKE)
    if not told.any():
        return
    shares, of_others = rows[told] / sums[told], others[told]
    distances = np.abs(shares - of_others / of_others.sum(axis=1, keepdims=True)).sum(axis=1) / 2
    if (num := int((distances >= _UNLIKE).sum())) > 0:
        text = (
            f"the shares of the classes at {num} of {len(summary.names)} sites are unlike those of"
            " the others, which draws an averaged model of sgd, mlp or neural to each site's own"
            " classes; the remedy to try, at the coordinator: "
            + hint("xain-coordinator", 'workload.remedy = "scaffold"')
        )
        yield Finding("note", "unlike_classes", "", summary.target_name, text)


def _unassociated(summary: Summary) -> Iterator[Finding]:
    """Note that leaks are not looked for, since pairs of a column and a class are too many."""
    num_classes = max((len(labels) for labels in summary.labels), default=0) or 1
    pairs = len(summary.columns) * num_classes
    if pairs > MAX_ASSOCIATIONS and all(matrix is None for matrix in summary.associations):
        text = (
            "columns that give the target away, and labels that mean the opposite at one site, are"
            f" not looked for: there are {pairs:,} pairs of a column and a class, and sites tell of"
            f" {MAX_ASSOCIATIONS:,} at most"
        )
        yield Finding("note", "leak", "", "", text)


def _leaks(summary: Summary) -> Iterator[Finding]:
    """Warn of columns that alone predict the target, at all sites or at one of many rows."""
    names = list(summary.columns)
    is_number = "regression" in summary.tasks
    strengths = np.zeros((len(names),))
    weights = np.zeros((len(names),))
    best: dict[int, tuple[float, int]] = {}
    for at, matrix in enumerate(summary.associations):
        if matrix is None:
            continue
        # Each class must be decided, so that one that is easy to tell is no leak.
        values = np.abs(matrix) if is_number else np.abs(matrix - 0.5) * 2
        strength = np.nanmin(np.where(np.isnan(values), np.inf, values), axis=1)
        for i in np.flatnonzero(np.isfinite(strength)).tolist():
            rows = summary.num_rows[at]
            strengths[i] += rows * strength[i]
            weights[i] += rows
            if strength[i] > best.get(i, (0.0, 0))[0]:
                best[i] = (float(strength[i]), at)
    threshold = _ALONE if is_number else 2 * (_ALONE - 0.5)
    lone = _ALONE_AT_ONE if is_number else 2 * (_ALONE_AT_ONE - 0.5)
    for i, (strength, at) in sorted(best.items()):
        everywhere = strengths[i] / weights[i] >= threshold and weights[i] >= _ROWS_OF_ALONE
        here = strength >= lone and summary.num_rows[at] >= 2 * _ROWS_OF_ALONE
        name = names[i]
        what = f"r = {strength:.3f}" if is_number else f"AUC {0.5 + strength / 2:.3f}"
        if everywhere or here:
            text = (
                f"it alone predicts the target ({what}). Is it the target in other words, or"
                " not yet known when a prediction is to be made?"
            )
            site = "" if everywhere and len(summary.names) > 1 else summary.names[at]
            yield Finding("warn", "leak", site, name, text, dropped(name))
        elif not is_number and _FOLLOW_UP.fullmatch(name.lower()) and strength >= 2 * _GOES_WITH:
            text = (
                f"it goes with the target ({what}) and is called like a time of follow-up. Is it"
                " known only after the outcome?"
            )
            site = "" if len(summary.names) > 1 else summary.names[at]
            yield Finding("warn", "follow_up", site, name, text, dropped(name))


def _reversed(summary: Summary) -> Iterator[Finding]:
    """Warn of sites at which columns go with two classes as elsewhere with the other of the two."""
    width = len(summary.columns)
    classes = next((labels for labels in summary.labels if len(labels) >= 2), ())
    if not 2 <= len(classes) <= _MOST_SWAPPED:
        return
    found: dict[int, NDArray[np.float64]] = {}
    for at, matrix in enumerate(summary.associations):
        if matrix is None or not set(classes) <= set(summary.labels[at]):
            continue
        order = [summary.labels[at].index(name) for name in classes]
        padded = np.full((width, len(classes)), np.nan)
        padded[: len(matrix)] = matrix[:, order] - 0.5
        found[at] = padded
    if len(found) < 2:
        return
    stack = np.stack(list(found.values()))
    told = ~np.isnan(stack).all(axis=0)
    median = np.full(told.shape, np.nan)
    median[told] = np.nanmedian(stack[:, told], axis=0)
    swaps = [order for order in permutations(range(len(classes))) if _is_swap(order)]
    counts = _counts(summary)
    for i, (at, own) in enumerate(found.items()):
        # The median withstands a site that is wrong; of two nobody knows which is.
        others = stack[1 - i] if len(found) == 2 else median
        usable = ~np.isnan(own) & ~np.isnan(others)
        own, others = np.where(usable, own, 0.0), np.where(usable, others, 0.0)
        size = float(np.sqrt(np.square(own).sum() * np.square(others).sum()))
        if size <= 0:
            continue
        cosine = float((own * others).sum()) / size
        if cosine > _AGAINST and len(classes) == 2:
            continue
        noise = _noise([counts[name][at] for name in classes])
        sigmas = float(np.abs(own * others).sum() / np.sqrt(np.square(others).sum())) / noise
        best = max(swaps, key=lambda order: float((own[:, order] * others).sum()))
        better = float((own[:, best] * others).sum()) / size
        gain = 1.0 if len(classes) == 2 else 0.4
        if better < 0.6 or better - cosine < gain or sigmas < _MIN_SIGMAS:
            continue
        one, two = (classes[i] for i, j in enumerate(best) if i != j)
        text = (
            f"columns go with the classes {one!r} and {two!r} as they go with the other of the two"
            " at other sites. Do these labels mean the opposite here?"
        )
        fix = replaced(summary.target_name, {one: two, two: one})
        yield Finding("warn", "reversed_labels", summary.names[at], summary.target_name, text, fix)


def _is_swap(order: tuple[int, ...]) -> bool:
    return sum(i != j for i, j in enumerate(order)) == 2


def _noise(counts: Sequence[int]) -> float:
    """Standard deviation of an AUC without association, for the rarest of the classes."""
    least = max(min(counts), 1)
    rest = max(sum(counts) - least, 1)
    return float(np.sqrt((1 / least + 1 / rest) / 12))


def _counts(summary: Summary) -> dict[str, dict[int, int]]:
    """Rows by class and site."""
    return {
        name: dict(zip(pairs[::2], pairs[1::2], strict=True))
        for name, pairs in summary.class_counts.sites.items()
    }
