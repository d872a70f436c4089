"""`xain-coordinator report`."""

import sys
from pathlib import Path

import typer

from xain_coordinator import status_view
from xain_coordinator.config import CoordinatorConfig
from xain_coordinator.report.files import snapshot_of_files
from xain_coordinator.report.page import page
from xain_messaging.process import logs

EXIT_OK = 0
EXIT_ERROR = 1


def report(config: CoordinatorConfig, address: str | None, html: Path) -> int:
    """Write the page of a session. Returns the exit status."""
    logs.configure("warning", console=sys.stderr.isatty(), third_party=False)
    try:
        if address is None:
            snapshot = snapshot_of_files(config)
        else:
            snapshot = status_view.fetch(address, everything=True)
        html.write_text(page(snapshot), encoding="utf-8")
    except (status_view.NoStatus, OSError) as error:
        typer.echo(f"xain-coordinator report: {error}", err=True)
        return EXIT_ERROR
    typer.echo(f"the report of session {snapshot.status.session_id} is in {html}")
    return EXIT_OK
