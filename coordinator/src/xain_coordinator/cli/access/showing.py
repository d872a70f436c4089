"""Certificates and lines of the audit log, for people."""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

from rich.console import Console
from rich.table import Table

from xain_coordinator.access.audit_log import Line
from xain_coordinator.access.values import Entry
from xain_coordinator.inspection.client import clean


def moment(at: float) -> str:
    """A time for people, in UTC, to the minute."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


# Characters of a serial number that tell certificates apart; the whole has 40.
SHOWN_SERIAL: Final = 12


def show_entries(entries: Iterable[Entry], console: Console) -> None:
    """Print a table of certificates and tokens."""
    now = time.time()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("name", "role", "kind", "state", "expires (UTC)", "serial"):
        table.add_column(heading, no_wrap=heading != "name", overflow="fold")
    for one in entries:
        table.add_row(
            clean(one.name),
            one.role or "",
            one.kind,
            _state(one, now),
            moment(one.expires_at).removesuffix(" UTC") if one.expires_at else "",
            one.serial[:SHOWN_SERIAL],
        )
    console.print(table)


def _state(one: Entry, now: float) -> str:
    """The state of an entry in a word: revoked, expired, or whether a token was used."""
    if one.revoked:
        return "revoked"
    if one.expires_at < now:
        return "expired"
    if one.kind == "token":
        return "reusable" if one.reusable else "used" if one.used else "unused"
    return "valid"


def audit_line(line: Line, *, as_json: bool) -> str:
    """A line of the audit log, as JSON or for people."""
    if as_json:
        return json.dumps(asdict(line))
    fields = " ".join(
        f"{name}={moment(value) if name.endswith('_at') else json.dumps(value)}"
        for name, value in line.fields.items()
        if value not in ("", [])
    )
    return clean(f"{moment(line.at)}  {line.event}  by {line.by}  {fields}").rstrip()
