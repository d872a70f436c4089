"""The commands around a coordinator: check its settings, ask for its status, look after its files.

What a command needs is imported within it, so that --help does not wait for numpy and gRPC.
"""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from xain_coordinator.cli.commands.common import (
    PROGRAM,
    AskInsecure,
    Assignments,
    DataDir,
    Host,
    Insecure,
    MinParticipants,
    Passes,
    Port,
    Rounds,
    Tls,
    WorkloadName,
    explained,
    given,
    resolve,
    running,
    settings_of,
    with_port,
)
from xain_foundation.commands import DEFAULT_PORT, Config, fail, make_app
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG

app = make_app()


@app.command("check-config")
def _check_config(
    config: Config = None,
    host: Host = None,
    port: Port = None,
    insecure: Insecure = False,
    data_dir: DataDir = None,
    workload: WorkloadName = None,
    rounds: Rounds = None,
    passes: Passes = None,
    min_participants: MinParticipants = None,
    assignments: Assignments = None,
) -> None:
    """Show the settings in force and where each comes from; exit status 2 if one is wrong."""
    values = given(
        data_dir,
        assignments,
        host,
        port,
        workload,
        rounds,
        passes,
        min_participants,
        insecure=insecure,
    )
    resolved = resolve(config, values)

    from xain_coordinator.cli.check_config import show
    from xain_foundation.logs.line_file import why_unwritable
    from xain_foundation.settings.fields import WrongSetting

    logging, server = resolved.config.logging, resolved.config.server
    try:
        resolved.config.require_certificates()
    except WrongSetting as error:
        fail(PROGRAM, str(error), EXIT_BAD_CONFIG)
    for key, path in (
        ("logging.status_file", logging.status_file),
        ("logging.latency_file", logging.latency_file),
        ("server.port_file", server.port_file),
    ):
        if path is not None and (reason := why_unwritable(path)):
            fail(PROGRAM, f"{key}: {path} cannot be written: {reason}", EXIT_BAD_CONFIG)
    show(resolved)


@app.command("status")
def _status(
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help=f"Where the coordinator listens, at port {DEFAULT_PORT} unless another is given. "
            "By default on this machine: the one with these settings, or else at this port.",
            callback=with_port,
        ),
    ] = None,
    tls: Tls = None,
    insecure: AskInsecure = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Everything, as one JSON object.")
    ] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Go on showing it until the session has ended, or Ctrl-C."),
    ] = False,
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    """Ask a running coordinator how the training is going."""
    import json

    from rich.console import Console
    from rich.text import Text

    from xain_coordinator.cli import status as status_view
    from xain_coordinator.inspection import client as inspection_client
    from xain_coordinator.inspection.plain import snapshot_json

    if watch and as_json:
        fail(PROGRAM, "command line: --watch and --json exclude each other", EXIT_BAD_CONFIG)
    settings = settings_of(config, data_dir, assignments)
    with explained("status", tls, address, insecure=insecure):
        address = running(settings, address) or with_port("localhost")
        assert address is not None
        if watch:
            from xain_coordinator.cli import live_view

            live_view.watch(address, Console())
            return
        snapshot = inspection_client.fetch(
            address, everything=as_json, num_rounds=status_view.CURVE_ROUNDS
        )
        described = ""
        with suppress(inspection_client.NoStatus):  # an earlier version
            described = "" if as_json else inspection_client.description(address)
        of_study = None
        if snapshot.status.study and not as_json:
            with suppress(inspection_client.NoStatus):
                of_study = inspection_client.study_of(address)
    if as_json:
        typer.echo(json.dumps(snapshot_json(snapshot)))
        return
    from xain_workloads.tables.checks.describe import TableOne

    table = TableOne.from_json(described) if described else None
    console = Console()
    console.print(status_view.frame(snapshot, table))
    for line in status_view.parameter_lines(snapshot.status):
        console.print(Text(line), soft_wrap=True)
    if of_study is not None:
        from xain_coordinator.cli import study

        typer.echo("\nStudy")
        study.show(study.parsed(of_study), Console(), intervals=False)
        typer.echo("with intervals: xain-coordinator study")


_REPAIR_HELP = """With the coordinator stopped, read all that it has and say what is damaged.

It prints one line for the journal, for every global model, and for every accepted update of the
open round, and repairs nothing by itself. The next start rebuilds a damaged global model, if the
updates that it was made of are in the store. When a round is aggregated, the coordinator asks the
senders of damaged updates for them again. It does not start while an update is missing from the
store: drop that one here, by the name of its participant.

Exit status: 0 if nothing is damaged; 1 if something is; 2 if it could not be read, as while the
coordinator runs.
"""

_REPAIR_EXAMPLES = """**Examples**

- `xain-coordinator repair --config fleet.toml` : is anything damaged?

- `xain-coordinator repair --config fleet.toml --drop-update ward-7` : go on without this update;
  its round takes updates again, and the reason stands in the record of the round
"""


@app.command("repair", help=_REPAIR_HELP, epilog=_REPAIR_EXAMPLES)
def _repair(
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
    drop_update: Annotated[
        str | None,
        typer.Option(
            metavar="PARTICIPANT",
            help="Drop the update of PARTICIPANT in the open round, if it is damaged or missing.",
        ),
    ] = None,
) -> None:
    """The command `repair`: check the journal and its objects, and drop a damaged update."""
    settings = settings_of(config, data_dir, assignments)

    from xain_coordinator.cli.repair import repair

    raise typer.Exit(repair(settings, drop_update))


_BACKUP_HELP = """Copy all that a coordinator goes on from to a new folder, also while it runs.

DIR gets the journal and the objects that it names, of the embedded store or of the bucket. A
coordinator that runs goes on with its rounds meanwhile; it is asked through the socket beside its
journal, so run this on its machine, in its container, and with its settings.

Exit status: 0 if the copy is whole; 1 if an object is missing or damaged, which is named; 2 if
there is no copy.
"""

_BACKUP_EXAMPLES = """**Examples**

- `xain-coordinator backup --config fleet.toml /backups/monday` : of a coordinator in production

- `xain-coordinator backup --data-dir wards monday` : of one that runs on its embedded stores
"""


_RESTORE_HELP = """Put a backup where a coordinator has its journal and its weights, and check it.

There must be no journal yet. Objects that the weights store has are left as they are. The check is
that of `repair`, whose lines it prints. Never start a restored coordinator beside the one that the
backup was made of.

Exit status: 0 if all is there and sound; 1 if something is damaged; 2 if nothing was restored.
"""

_RESTORE_EXAMPLES = """**Examples**

- `xain-coordinator restore monday --data-dir wards` : into a new folder
"""


Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the backup.")]


@app.command("restore", help=_RESTORE_HELP, epilog=_RESTORE_EXAMPLES)
@app.command("backup", help=_BACKUP_HELP, epilog=_BACKUP_EXAMPLES)
def _backup_or_restore(
    context: typer.Context,
    folder: Folder,
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    """The commands `backup` and `restore`: copy journal and objects to a folder, or back."""
    settings = settings_of(config, data_dir, assignments)

    from xain_coordinator.cli import backup

    work = backup.back_up if context.info_name == "backup" else backup.restore
    raise typer.Exit(work(settings, folder))


_EXTEND_HELP = """With the coordinator stopped, prepare a finished session to be trained further.

It opens a new session in the same journal and weights store that begins with the last model of the
finished one, under the same rules, with more rounds or passes. Its rounds are counted from 0;
`status` shows where it comes from. The finished session stays as it is. Start the coordinator and
the participants as before: a configuration that still has the old number of rounds or passes, or
has the new one, fits.

Exit status: 0 if there is a new session; 1 if there is none; 2 if a setting is wrong.
"""

_EXTEND_EXAMPLES = """**Examples**

- `xain-coordinator extend --config fleet.toml --rounds +20` : 20 more rounds

- `xain-coordinator extend --data-dir wards --rounds 50` : 50 rounds, with those that are trained

- `xain-coordinator extend --data-dir wards --passes +20` : 20 more passes over all rows
"""


@app.command("extend", help=_EXTEND_HELP, epilog=_EXTEND_EXAMPLES)
def _extend(
    rounds: Annotated[
        str | None,
        typer.Option(metavar="+N|N", help="How many rounds more, or how many in all."),
    ] = None,
    passes: Annotated[
        str | None,
        typer.Option(metavar="+N|N", help="How many passes over all rows more, or in all."),
    ] = None,
    config: Config = None,
    data_dir: DataDir = None,
    assignments: Assignments = None,
) -> None:
    """The command `extend`: open a session that trains the finished one further."""
    settings = settings_of(config, data_dir, assignments)

    with explained("extend"):
        from xain_coordinator.cli.extend import extend

        typer.echo(extend(settings, rounds, passes))


_TIMINGS_HELP = """Print how long calls and training took, from a latency stream.

FILE is what [logging] latency_file names; the coordinator may be running. The first table has a row
for each endpoint, the second one for each participant and endpoint: how many calls there were, how
many of them did not end with OK, and median, 90th and 99th percentile and maximum of their seconds
in the coordinator. The endpoint `training` counts accepted updates: from the opening of the round
until the update is accepted. A Watch lasts for as long as its participant listens.

Lines that are not of a latency stream are counted and left out.

Exit status: 0; 1 if FILE cannot be read or has no latency.
"""

_TIMINGS_EXAMPLES = """**Examples**

- `xain-coordinator --set logging.latency_file=latency.jsonl` : write a latency stream

- `xain-coordinator timings latency.jsonl` : which calls are slow, and whose training?

- `xain-coordinator timings latency.jsonl --json` : the same, as one JSON object
"""


@app.command("timings", help=_TIMINGS_HELP, epilog=_TIMINGS_EXAMPLES)
def _timings(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A latency stream.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """The command `timings`: print percentiles of a latency stream."""
    with explained("timings"):
        from xain_coordinator.cli.timings import show

        show(file, as_json=as_json)
