"""The command line: run a coordinator, check its configuration, ask a running one for its status.

What a command needs is imported within it, so that --help does not wait for numpy and gRPC.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from xain_coordinator.cli.access import commands as access
from xain_foundation.commands import (
    DEFAULT_PORT,
    Builders,
    Config,
    IdColumn,
    MaxUnknown,
    PredictionsFile,
    RowAssignments,
    RowsFile,
    fail,
    make_app,
    note,
    parse_assignments,
    refuse_flags_before,
    run_app,
    set_option,
    split_host_port,
    version_option,
    why_failed,
)
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK, CommandFailed
from xain_foundation.settings.hints import hint

if TYPE_CHECKING:
    from pydantic import BaseModel

    from xain_coordinator.config.coordinator import CoordinatorConfig
    from xain_foundation.settings.settings import Resolved

Settings = TypeVar("Settings", bound="BaseModel")

PROGRAM = "xain-coordinator"
EXAMPLE = "rounds.epochs=3"

app = make_app()


Host = Annotated[
    str | None,
    typer.Option(
        metavar="HOST",
        help="Listen here; 0.0.0.0 for other machines, by default 127.0.0.1. [server.host]",
    ),
]
# Numbers are text here: a wrong one is then refused in the same words as one in the file.
Port = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help=f"On this port, by default {DEFAULT_PORT}; 0 takes a free one. [server.port]",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Listen beyond this machine without certificates, in a network that you trust. "
        "[server.insecure]",
    ),
]
AskInsecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Ask a coordinator on another machine without certificates, in a network that you "
        "trust.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of all data: weights, journal, metrics. By default xain-data.",
    ),
]
WorkloadName = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="NAME",
        help="Model to train on tables: sgd, glm, mlp, xgboost, bagging or neural; describe "
        "compares the tables and trains none. Without it, scripts of the participants bring the "
        "model. [workload.name]",
    ),
]
Rounds = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Rounds to train, instead of passes; by default 10 for scripts, and 6 for bagging. "
        "[rounds.rounds]",
    ),
]
Passes = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Passes over all rows of all sites, by default 50; rounds follow from them. "
        "[rounds.passes]",
    ),
]
MinParticipants = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Updates that a round needs, by default 1. [rounds.min_participants]",
    ),
]
Assignments = Annotated[list[str] | None, set_option(EXAMPLE)]

_HELP = """Coordinate the federated training of a fleet of participants.

Without a command, run a coordinator until the training has ended and it is stopped. It keeps its
state on disk: started again with the same settings it goes on where it was, in the middle of a
round. With other settings it says which, and ends, unless --resume or --new-session is given.

Settings come from --config, or the file that XAIN_COORDINATOR_CONFIG names, over it from the
environment (XAIN_COORDINATOR_ROUNDS__EPOCHS=3 is rounds.epochs), over that from flags.

Exit status: 0 when it was stopped; 1 if the journal, the weights store or the port cannot be used;
2 if a setting is wrong, or is not that of the session; 3 if another coordinator has taken over the
session: do not start it again.
"""

_EXAMPLES = """**Examples**

- `xain-coordinator --workload sgd --min-participants 2` : train a linear model with two others

- `xain-coordinator --config fleet.toml --set rounds.epochs=3` : settings from a file, one changed

- `xain-coordinator --config fleet.toml --new-session` : train anew instead of going on

- `xain-coordinator --config fleet.toml --new-session --from-model 5d1c0a9be3f2/last` : train anew,
  beginning with the last model of an earlier session

- `xain-coordinator extend --config fleet.toml --rounds +20` : train a finished session further

- `xain-coordinator check-config --config fleet.toml` : what would be in force, and why

- `xain-coordinator repair --config fleet.toml` : is anything damaged on the disk?

- `xain-coordinator backup --config fleet.toml /backups/monday` : a copy, while it runs

- `xain-coordinator launch --workload sgd --data digits` : a coordinator and three workers here

- `xain-coordinator status --address fleet.example.org:50051 --tls me/tls` : how far is
  the training?

- `xain-coordinator certs init --host fleet.example.org` : let nobody in without a certificate, and
  `xain-coordinator tokens create --name ward-7 > ward-7.token` for each site
"""


@app.callback(invoke_without_command=True, help=_HELP, epilog=_EXAMPLES)
def _run(
    context: typer.Context,
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
    new_session: Annotated[
        bool, typer.Option("--new-session", help="Open a new session; the old one stays on disk.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the session that is there under its own rules, whatever else is set.",
        ),
    ] = False,
    from_model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|SESSION/ROUND",
            help="Begin a new session with this model: a file of `export` (.safetensors, .npz or "
            ".json), a flat vector (.npy), or that of a session in the same journal; "
            "SESSION/last and SESSION/best are its last and best one.",
        ),
    ] = None,
    version: Annotated[bool, version_option(PROGRAM)] = False,
) -> None:
    values = _values(data_dir, assignments, host, port, workload, rounds, passes, min_participants)
    values |= _insecurely(insecure)
    if context.invoked_subcommand is not None:
        given = (config, from_model, new_session, resume, *values.values())
        refuse_flags_before(PROGRAM, context.invoked_subcommand, given)
        return
    if resume and new_session:
        message = "command line: --resume goes on with a session, and --new-session does not"
        fail(PROGRAM, f"{message}; give one of them", EXIT_BAD_CONFIG)
    resolved = _resolve(config, values)

    from xain_coordinator.process.run import run

    show = None
    if resolved.config.logging.console is None and sys.stderr.isatty():
        from xain_coordinator.cli.live_view import on_terminal

        show = on_terminal
    status = run(
        resolved.config,
        resume=resume,
        new_session=new_session,
        from_model=from_model or "",
        live_view=show,
    )
    raise typer.Exit(status)


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
    values = _values(data_dir, assignments, host, port, workload, rounds, passes, min_participants)
    values |= _insecurely(insecure)
    resolved = _resolve(config, values)

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


def _with_port(address: str | None) -> str | None:
    from xain_foundation.settings.fields import join_host_port

    host, port = split_host_port(address or "")
    return address if not host or port else join_host_port(host.strip("[]"), DEFAULT_PORT)


@app.command("status")
def _status(
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help=f"Where the coordinator listens, at port {DEFAULT_PORT} unless another is given. "
            "By default on this machine: the one with these settings, or else at this port.",
            callback=_with_port,
        ),
    ] = None,
    tls: access.Tls = None,
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
    resolved = _resolve(config, _values(data_dir, assignments))
    with _explained("status", tls, address, insecure=insecure):
        address = _running(resolved.config, address) or _with_port("localhost")
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
    resolved = _resolve(config, _values(data_dir, assignments))

    from xain_coordinator.cli.repair import repair

    raise typer.Exit(repair(resolved.config, drop_update))


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
    resolved = _resolve(config, _values(data_dir, assignments))

    from xain_coordinator.cli import backup

    work = backup.back_up if context.info_name == "backup" else backup.restore
    raise typer.Exit(work(resolved.config, folder))


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
    resolved = _resolve(config, _values(data_dir, assignments))

    with _explained("extend"):
        from xain_coordinator.cli.extend import extend

        typer.echo(extend(resolved.config, rounds, passes))


Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST[:PORT]",
        help="Ask the coordinator that runs there, instead of reading files.",
        callback=_with_port,
    ),
]


_DESCRIBE_HELP = """Describe the data of a session: what its table one is, per site and together.

Missing values, mean, spread and quantiles of numbers, counts of categories and classes, from the
statistics that the participants have sent, in which is nothing of fewer than five rows at a site.

From the files of a stopped coordinator with the figures of each site; with --address from one that
runs, together only, and only figures of [schema] min_sites or more sites: with the figures of two
sites together, each of the two can compute those of the other.

Exit status: 0 if the data are described; 1 if there is no description yet.
"""


@app.command("describe", help=_DESCRIBE_HELP)
def _describe(
    config: Config = None,
    data_dir: DataDir = None,
    address: Address = None,
    tls: access.Tls = None,
    insecure: AskInsecure = False,
    assignments: Assignments = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Lines of figures, as CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All figures, as JSON.")] = False,
) -> None:
    resolved = _resolve(config, _values(data_dir, assignments))

    with _explained("describe", tls, address, insecure=insecure):
        from xain_coordinator.export.describing import table_one

        table = table_one(resolved.config, _running(resolved.config, address))
        if as_json:
            typer.echo(table.to_json())
        else:
            typer.echo(table.to_csv() if as_csv else table.to_text(), nl=not as_csv)


_IMPORTANCE_HELP = """List the columns of a table by how much the trained model needs them.

At the end of a training each site permutes one column after the other among its held-out rows, and
tells how much larger the loss of the model is then. The differences of all sites add up. A column
without which the model is no worse has an importance of about 0.

From the files of a stopped coordinator; with --address from one that runs.

Exit status: 0 if there are importances; 1 if there are none.
"""


@app.command("importance", help=_IMPORTANCE_HELP)
def _importance(
    config: Config = None,
    data_dir: DataDir = None,
    address: Address = None,
    tls: access.Tls = None,
    insecure: AskInsecure = False,
    assignments: Assignments = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="A line for each column, and for sites, as CSV.")
    ] = False,
) -> None:
    resolved = _resolve(config, _values(data_dir, assignments))

    with _explained("importance", tls, address, insecure=insecure):
        from rich.console import Console

        from xain_coordinator.cli import importance
        from xain_coordinator.cli.report.files import importance_of

        found = importance_of(resolved.config, _running(resolved.config, address))
        if as_csv:
            typer.echo(importance.to_csv(found), nl=False)
        else:
            importance.show(found, Console())


_GAINS_HELP = """List what each site gains by taking part: the global model beside its own.

At the end of a training each site trains a model of its own rows alone, and a coordinator with
evaluate.data one of its rows. Both models are measured on the same held-out rows. A difference
above 0 is a gain. The CSV has all figures with their 95 % intervals.

From the files of a stopped coordinator; with --address from one that runs.

Exit status: 0 if there are such models; 1 if there are none.
"""


@app.command("gains", help=_GAINS_HELP)
def _gains(
    config: Config = None,
    data_dir: DataDir = None,
    address: Address = None,
    tls: access.Tls = None,
    insecure: AskInsecure = False,
    assignments: Assignments = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="A line for each figure, as CSV.")] = False,
) -> None:
    resolved = _resolve(config, _values(data_dir, assignments))

    with _explained("gains", tls, address, insecure=insecure):
        from rich.console import Console

        from xain_coordinator.cli import gains
        from xain_coordinator.cli.report.files import gains_of

        found = gains_of(resolved.config, _running(resolved.config, address))
        if as_csv:
            typer.echo(gains.to_csv(found), nl=False)
        else:
            gains.show(found, Console())


@app.command("models")
def _models(
    config: Config = None,
    data_dir: DataDir = None,
    address: Address = None,
    tls: access.Tls = None,
    insecure: AskInsecure = False,
    assignments: Assignments = None,
    as_json: Annotated[bool, typer.Option("--json", help="All that is known, as JSON.")] = False,
) -> None:
    """List the global models of a session with what was measured of each.

    The coordinator must be stopped, or be asked with --address.
    """
    resolved = _resolve(config, _values(data_dir, assignments))

    with _explained("models", tls, address, insecure=insecure):
        from xain_coordinator.cli.models import models

        models(resolved.config, _running(resolved.config, address), as_json=as_json)


_EXPORT_HELP = """Write a global model to a file that can be used without this program.

The ending of the file's name chooses the format: .skops is a scikit-learn Pipeline with the
preprocessing, .onnx the same for ONNX, .npz and .safetensors have the tensors by name (the latter
is what load_state_dict() of PyTorch takes), .json is XGBoost's own format for its models. Every
file says which session and round it is from, and what was measured.

The coordinator must be stopped, or be asked with --address.

Exit status: 0 if the file is written; 1 if there is no such model or the format cannot hold it.
"""

_EXPORT_EXAMPLES = """**Examples**

- `xain-coordinator export --data-dir wards --best --to wards.skops` : the best evaluated model

- `xain-coordinator export --address localhost:50051 --round 12 --to wards.npz` : while it trains

- `xain-coordinator predict --model wards.skops --data new-patients.csv` : use it
"""


@app.command("export", help=_EXPORT_HELP, epilog=_EXPORT_EXAMPLES)
def _export(
    config: Config = None,
    data_dir: DataDir = None,
    address: Address = None,
    tls: access.Tls = None,
    insecure: AskInsecure = False,
    assignments: Assignments = None,
    which: Annotated[
        str, typer.Option("--round", metavar="N|last|best", help="Which model.")
    ] = "last",
    best: Annotated[bool, typer.Option("--best", help="The same as --round best.")] = False,
    to: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A name that ends in .skops, .onnx, .npz, ..."),
    ] = None,
    mlflow: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Register it under NAME at MLFLOW_TRACKING_URI."),
    ] = None,
    session: Annotated[
        str,
        typer.Option(
            metavar="ID", help="Of this session; by default the latest. Without --address."
        ),
    ] = "",
) -> None:
    if to is None and mlflow is None:
        fail(PROGRAM, "command line: " + hint("xain-coordinator", "--to model.skops"), 2)
    if session and address is not None:
        fail(PROGRAM, "command line: --session reads files; leave --address out", EXIT_BAD_CONFIG)
    resolved = _resolve(config, _values(data_dir, assignments))

    with _explained("export", tls, address, insecure=insecure):
        from xain_coordinator.cli.models import export

        export(
            resolved.config,
            address if session else _running(resolved.config, address),
            "best" if best else which,
            to,
            mlflow,
            session,
        )


_PREDICT_HELP = """Predict the rows of a table with a model, and write them as CSV.

With --model it is an exported model. With --address it is the last model of the coordinator that
runs there; with bagging whose fitted estimators stay at the participants, these are asked, and
standard error tells which of them answered, and why others did not. Those that stay after the end
of the training, with xain-participant --serve, answer as well.

Each line has the row's number (or its --id), the prediction, and the probability of each class.
Columns are matched by name. Standard error tells, by column, which values the model does not know:
categories that no site had in training, and missing values. If the table has the target, in some
rows or in all, the score of these is printed too.

Exit status: 0 if there are predictions; 1 if there are none, as when no participant answers; 2 if a
setting is wrong; 6 if there are predictions, but the model does not know the values of a column in
more rows than in training, by more than the share --max-unknown.
"""

_PREDICT_EXAMPLES = """**Examples**

- `xain-coordinator predict --model wards.skops --data new-patients.csv` : with an exported model

- `xain-coordinator predict --model wards.skops --data new.csv --id patient --to out.csv` : with the
  patients' numbers, into a file

- `xain-coordinator predict --address localhost:50051 --data new-patients.csv --max-retries 2` : ask
  a coordinator, which asks a participant that does not answer up to three times
"""


@app.command("predict", help=_PREDICT_HELP, epilog=_PREDICT_EXAMPLES)
def _predict(
    data: RowsFile,
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `export` wrote; not an .onnx file.")
    ] = None,
    address: Address = None,
    tls: access.Tls = None,
    insecure: AskInsecure = False,
    to: PredictionsFile = None,
    id_column: IdColumn = "",
    max_unknown: MaxUnknown = 0.2,
    timeout_s: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="For each participant. [predict.timeout_s]"),
    ] = None,
    max_retries: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Times that a silent participant is asked again. [predict.max_retries]",
        ),
    ] = None,
    allow_builder: Builders = None,
    assignments: RowAssignments = None,
) -> None:
    if (model is None) == (address is None):
        fail(
            PROGRAM,
            "command line: "
            + hint("xain-coordinator", "--model FILE")
            + ", or "
            + hint("xain-coordinator", "--address HOST:PORT"),
            EXIT_BAD_CONFIG,
        )
    if address is None and (timeout_s is not None or max_retries is not None):
        fail(
            PROGRAM,
            "command line: --timeout-s and --max-retries go with --address",
            EXIT_BAD_CONFIG,
        )
    with _explained("predict", tls, address, insecure=insecure):
        from xain_coordinator.cli import models
        from xain_workloads.exported.predicting import RowsSettings
        from xain_workloads.nets.neural_builders import allow_builders

        allow_builders(allow_builder or ())
        assigned = parse_assignments(PROGRAM, assignments, "data.decimal=,")
        dialect = _loaded(RowsSettings, None, "", assigned).config.data
        options = {
            "dialect": dialect,
            "id_column": id_column,
            "max_unknown": max_unknown,
            "note": note,
        }
        status = EXIT_OK
        if address is not None:
            status = models.ask_predictions(address, data, to, timeout_s, max_retries, **options)
        elif model is not None:
            status = models.predict(model, data, to, **options)
    raise typer.Exit(status)


@app.command("report")
def _report(
    html: Annotated[Path, typer.Option(metavar="FILE", help="Write the page here.")],
    config: Config = None,
    data_dir: DataDir = None,
    address: Address = None,
    tls: access.Tls = None,
    insecure: AskInsecure = False,
    assignments: Assignments = None,
) -> None:
    """Write one HTML page about a session: how good its model is, on what data, and who counted.

    The page needs nothing else and can be sent by mail. The coordinator must be stopped, or be
    asked with --address.
    """
    resolved = _resolve(config, _values(data_dir, assignments))

    with _explained("report", tls, address, insecure=insecure):
        from xain_coordinator.cli.report.files import report

        made = report(resolved.config, _running(resolved.config, address))
        if made.trouble:
            typer.echo(f"xain-coordinator report: {made.trouble}", err=True)
        html.write_text(made.html, encoding="utf-8")
        typer.echo(f"the report of session {made.session_id} is in {html}")


_STUDY_HELP = """Print the table of a study: of folds, left-out sites, sites by models, or a search.

[study] and [search] of the configuration say what a study is; the coordinator carries it out, one
session after the other. Figures of several sites are of the rows of all of them. --csv and --json
have every figure with its interval, also those of each site and fold.

From the files of a stopped coordinator, or with --address from one that runs.

Exit status: 0; 1 if the latest session is of no study.
"""

_STUDY_EXAMPLES = """**Examples**

- `xain-coordinator --workload sgd --min-participants 2 --set study.folds=5` : a study of five folds

- `xain-coordinator study --address localhost:50051` : its table, so far

- `xain-coordinator study --data-dir xain-data --csv` : all its figures, for other programs
"""


AsCsv = Annotated[bool, typer.Option("--csv", help="A line for each figure, as CSV.")]
AsJson = Annotated[bool, typer.Option("--json", help="All that is known, as JSON.")]


@app.command("study", help=_STUDY_HELP, epilog=_STUDY_EXAMPLES)
def _study(
    config: Config = None,
    data_dir: DataDir = None,
    address: Address = None,
    tls: access.Tls = None,
    insecure: AskInsecure = False,
    assignments: Assignments = None,
    as_csv: AsCsv = False,
    as_json: AsJson = False,
) -> None:
    resolved = _resolve(config, _values(data_dir, assignments))

    with _explained("study", tls, address, insecure=insecure):
        from xain_coordinator.cli.study import table_of

        _print_study(
            table_of(resolved.config, _running(resolved.config, address)),
            as_csv=as_csv,
            as_json=as_json,
        )


def _print_study(table: Mapping[str, Any], *, as_csv: bool, as_json: bool) -> None:
    import json

    from rich.console import Console

    from xain_coordinator.cli import study
    from xain_coordinator.export import studies

    if as_json:
        typer.echo(json.dumps(table))
    elif as_csv:
        typer.echo(studies.as_csv(table), nl=False)
    else:
        # Wide enough for any table, so that no line is broken in a pipe.
        study.show(table, Console(width=None if sys.stdout.isatty() else 10_000))


_EVALUATE_HELP = """Have the sites measure a model, train nothing, and print what came of it.

The model is a file, or that of a session in the same journal, as for --from-model. The command runs
a coordinator until the sites have measured; they join it as any other. Figures are over the rows of
all sites, with those of each site: the rows that sites hold out, or with --rows all every row of
theirs, for a model that none of them has trained on.

Started again after it was stopped or killed, it goes on.

Exit status: 0 when it is done; 1 if the journal, the weights store or the port cannot be used; 2 if
a setting is wrong.
"""

_EVALUATE_EXAMPLES = """**Examples**

- `xain-coordinator evaluate --model wards.safetensors --rows all --min-participants 2` : a model
  from elsewhere, at two sites

- `xain-coordinator evaluate --config fleet.toml --model 5d1c0a9be3f2/best --json` : a session's
  model, once more
"""


@app.command("evaluate", help=_EVALUATE_HELP, epilog=_EVALUATE_EXAMPLES)
def _evaluate(
    model: Annotated[
        str, typer.Option(metavar="FILE|SESSION/ROUND", help="The model. [study.model]")
    ],
    rows: Annotated[
        str | None,
        typer.Option(metavar="held_out|all", help="On which rows of the sites. [study.rows]"),
    ] = None,
    config: Config = None,
    host: Host = None,
    port: Port = None,
    insecure: Insecure = False,
    data_dir: DataDir = None,
    min_participants: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Sites to wait for, by default 1. [rounds.min_participants]"
        ),
    ] = None,
    assignments: Assignments = None,
    as_csv: AsCsv = False,
    as_json: AsJson = False,
) -> None:
    values = _values(data_dir, assignments, host, port, min_participants=min_participants)
    values |= {"study.model": model, "study.rows": rows, **_insecurely(insecure)}
    resolved = _resolve(config, values)

    with _explained("evaluate"):
        from xain_coordinator.cli.study import evaluate

        status = evaluate(
            resolved.config,
            lambda table: _print_study(table, as_csv=as_csv, as_json=as_json),
        )
    raise typer.Exit(status)


app.add_typer(access.certs, name="certs")
app.add_typer(access.tokens, name="tokens")
app.add_typer(access.audit, name="audit")
app.add_typer(access.participants, name="participants")
app.add_typer(access.session, name="session")


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
    with _explained("timings"):
        from xain_coordinator.cli.timings import show

        show(file, as_json=as_json)


@contextmanager
def _explained(
    command: str, tls: Path | None = None, address: str | None = None, *, insecure: bool = False
) -> Iterator[None]:
    """Report a command's error as one line and exit with status 1; with status 2 for an address on
    another machine that would be asked in the clear.

    tls: folder with certificates for the coordinator that is asked. insecure: ask in the clear.
    """
    from xain_coordinator.extensions.plugins import PluginFailed
    from xain_coordinator.ports import JournalError, StoreError
    from xain_foundation.logs import logs
    from xain_foundation.net import channels
    from xain_foundation.security.tls import Certificates, InvalidCertificates
    from xain_workloads.errors import WorkloadError

    logs.configure("warning", console=sys.stderr.isatty(), third_party=False)
    program = f"{PROGRAM} {command}"
    try:
        certificates = None if tls is None else Certificates(tls)
        if address is not None and "@" not in address:  # its message would show a password
            remedy = hint("xain-coordinator", "--tls FOLDER") + ", or --insecure"
            try:
                channels.require_private_way(
                    address, certificates, insecure=insecure, remedy=remedy
                )
            except ValueError as error:
                fail(program, f"--address: {error}", EXIT_BAD_CONFIG)
        if certificates is not None:
            from xain_coordinator.inspection import client as inspection_client

            inspection_client.TLS.set(certificates)
        yield
    except JournalError as error:
        may_ask = command != "extend"
        ask = "; to ask one that runs, " + hint("xain-coordinator", "--address HOST:PORT")
        fail(program, f"{error}{ask if may_ask else ''}", EXIT_FAILED)
    except InvalidCertificates as error:
        fail(program, f"--tls is {tls}: {error}", EXIT_FAILED)
    except PluginFailed as error:
        fail(program, str(error), EXIT_FAILED)
    except (CommandFailed, StoreError, WorkloadError, ModuleNotFoundError, OSError) as error:
        fail(program, why_failed(error), EXIT_FAILED)


def _running(config: "CoordinatorConfig", address: str | None) -> str | None:
    """The address at which a coordinator is to be asked: the given one, or the socket of the one
    that runs with these settings. None if none does, and files can be read."""
    if address is not None:
        return address
    from xain_coordinator.server.operators_socket import socket_that_answers

    running = socket_that_answers(config.journal.path)
    return None if running is None else f"unix:{running}"


@app.command(
    "demo",
    # `demo` parses its flags itself, --help among them.
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def _demo(context: typer.Context) -> None:
    """Watch four participants train one model on real data, on this machine."""
    from xain_coordinator.cli.demo import cli

    raise typer.Exit(cli.main(context.args))


@app.command(
    "launch",
    # `launch` parses its flags itself, --help among them.
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def _launch(context: typer.Context) -> None:
    """Start a coordinator and workers, as processes, containers or on a Ray cluster."""
    from xain_coordinator.cli.launch import cli

    raise typer.Exit(cli.main(context.args))


def _insecurely(insecure: bool) -> dict[str, Any]:
    return {"server.insecure": True} if insecure else {}


def _values(
    data_dir: Path | None,
    assignments: list[str] | None,
    host: str | None = None,
    port: str | None = None,
    workload: str | None = None,
    rounds: str | None = None,
    passes: str | None = None,
    min_participants: str | None = None,
) -> dict[str, Any]:
    """Settings that flags give, by dotted key; None for a flag that was not given."""
    values: dict[str, Any] = {
        "server.host": host,
        "server.port": port,
        "workload.name": workload,
        "rounds.rounds": rounds,
        "rounds.passes": passes,
        "rounds.min_participants": min_participants,
    }
    if data_dir is not None:
        values["storage.path"] = str(data_dir / "weights")
        values["journal.path"] = str(data_dir / "journal.sqlite")
        values["metrics.path"] = str(data_dir / "metrics.jsonl")
        values["parameters.path"] = str(data_dir / "parameters")
    return values | parse_assignments(PROGRAM, assignments, EXAMPLE)


def _resolve(config: Path | None, values: Mapping[str, Any]) -> "Resolved[CoordinatorConfig]":
    from xain_coordinator.config.coordinator import ENV_PREFIX, CoordinatorConfig

    return _loaded(CoordinatorConfig, config, ENV_PREFIX, values)


def _loaded(
    model: type[Settings], file: Path | None, prefix: str, values: Mapping[str, Any]
) -> "Resolved[Settings]":
    """The settings of a command. Ends the process with status 2 if one is wrong."""
    from xain_foundation.settings.settings import ConfigError, resolve

    try:
        return resolve(model, file, prefix, values)
    except ConfigError as error:
        fail(PROGRAM, str(error), EXIT_BAD_CONFIG)


def main() -> int:
    """The entry point. Returns the exit status of the process."""
    return run_app(app, PROGRAM)
