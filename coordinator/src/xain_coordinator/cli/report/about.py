"""Sections of the report on model, settings, columns, table one and checks."""

import json
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from html import escape
from typing import Any

from xain_coordinator.cli.report.charts import table
from xain_coordinator.inspection.client import Snapshot
from xain_wire.fl.inspection_pb2 import GetStatusResponse
from xain_workloads.errors import DataError
from xain_workloads.tables.checks.describe import TableOne
from xain_workloads.tables.preprocessing import CategoryColumn, Preprocessing, preprocessing_of

MAX_ROWS = 200  # of a table
MAX_NAMES = 60  # of columns
# Checks whose finding about all sites says why a column tells the model nothing.
_USELESS = frozenset(("constant", "empty", "untold_column"))


def metadata_of(snapshot: Snapshot) -> Mapping[str, str]:
    """Metadata of the latest model that has some; empty without one."""
    found = (dict(one.metadata) for one in reversed(snapshot.models.models) if one.metadata)
    return next(found, {})


def classes_of(metadata: Mapping[str, str]) -> list[str]:
    """Names of the classes of a model; empty for regression, and where they are not known."""
    return [str(name) for name in _json(metadata.get("classes", "")) or ()]


def prepared_of(metadata: Mapping[str, str]) -> Preprocessing | None:
    """The preprocessing of a model; None without one, and of a later version."""
    try:
        return preprocessing_of(metadata)
    except DataError:
        return None


def target_of(snapshot: Snapshot, described: TableOne | None) -> str:
    """Name of the target; "" if it is not known."""
    profiles = (one.profile.target for one in snapshot.participants.participants)
    known = (described.target.name if described is not None else "", *profiles)
    return next(filter(None, known), "")


def about(snapshot: Snapshot, described: TableOne | None, now: datetime | None) -> str:
    """The section of model, settings and columns. now: when the page is written."""
    status, metadata = snapshot.status, metadata_of(snapshot)
    classes, target = classes_of(metadata), target_of(snapshot, described)
    options = _json(metadata.get("options", "")) or {}
    opened = status.opened_unix_seconds
    left_out = _left_out(status, metadata, described)
    facts = [
        ("target", target),
        ("classes", ", ".join(classes)),
        ("model", metadata.get("workload", "")),
        ("planned length", status.plan),
        ("options of the model", _settings(options)),
        ("settings of the session", _settings(dict(status.settings))),
        ("columns used", _named(_columns(metadata, left_out))),
        ("columns left out", _named([f"{name}: {why}" for name, why in left_out.items()])),
        ("began with", status.began_with),
        ("session", status.session_id),
        ("opened", _date(datetime.fromtimestamp(opened, UTC)) if opened else ""),
        ("this page", _date(now) if now is not None else ""),
        ("version", f"xain-coordinator {status.version}" if status.version else ""),
    ]
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="reason">{escape(value)}</td></tr>'
        for name, value in facts
        if value
    )
    drops = "What a site leaves out by [data] drop or columns stays there, its names too."
    return f'<h2>What was trained</h2><table>{rows}</table><p class="soft">{drops}</p>'


def table_one(described: TableOne | None) -> str:
    """The section of table one; empty without one."""
    if described is None:
        return ""
    head, *rows = ([escape(cell) for cell in line] for line in described.cells())
    remarks = "".join(f'<p class="soft">{escape(one)}</p>' for one in described.remarks)
    return (
        '<h2>Data</h2><p class="soft">Rows that are trained on, without those held out, before they'
        " are prepared. What only a few rows of a site have is not told.</p>"
        f'<div class="one">{table(head, rows[: 5 * MAX_ROWS], texts=(1,))}</div>{remarks}'
    )


def findings(status: GetStatusResponse) -> str:
    """The section of what the checks of the data have found, the worst first; empty if nothing."""
    rows = [
        [
            escape(one.level),
            escape(one.participant_id or "all"),
            escape(one.column),
            escape(one.text),
            escape(one.fix),
        ]
        for one in status.findings[:MAX_ROWS]
    ]
    if not rows:
        return ""
    head = ("level", "site", "column", "finding", "what to do at the site")
    return "<h2>Checks of the data</h2>" + table(head, rows, texts=(1, 2, 3, 4))


def _columns(metadata: Mapping[str, str], left_out: Collection[str]) -> list[str]:
    """Columns that the model uses, with their types where these are known."""
    prepared = prepared_of(metadata)
    if prepared is None:
        return [str(one) for one in _json(metadata.get("columns", "")) or ()]
    types = prepared.types.items()
    return [f"{name} ({kind})" for name, kind in types if name not in left_out]


def _left_out(
    status: GetStatusResponse, metadata: Mapping[str, str], described: TableOne | None
) -> dict[str, str]:
    """Why columns tell the model nothing, by name. What a site leaves out before it joins is not
    known here."""
    prepared = prepared_of(metadata)
    if prepared is None:
        return {}
    why = {} if described is None else {row.name: "not in the schema" for row in described.rows}
    for column in prepared.columns:
        why.pop(column.name, None)
        if isinstance(column, CategoryColumn) and not column.categories:
            why[column.name] = "no category has enough rows at any site"
    for one in status.findings:
        if one.check in _USELESS and not one.participant_id and one.column in prepared.types:
            why[one.column] = one.text
    return why


def _json(text: str) -> Any:
    """The value of a JSON text; None for "" and where it is no JSON."""
    try:
        return json.loads(text or "null")
    except ValueError:
        return None


def _settings(settings: Any) -> str:
    """A JSON object as "key = value, ..."; empty for any other value."""
    if not isinstance(settings, dict):
        return ""
    return ", ".join(
        f"{key} = {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in sorted(settings.items())
    )


def _named(names: list[str]) -> str:
    """The first MAX_NAMES names, and how many there are more."""
    more = f", and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _date(at: datetime) -> str:
    """A time as text, in UTC."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
