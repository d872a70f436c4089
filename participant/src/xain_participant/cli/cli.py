"""The command line: take part in a training with a data set of one's own.

Commands import what they need, so that --help does not wait for it.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG, EXIT_FAILED
from xain_foundation.logs import streams
from xain_foundation.settings.hints import hint
from xain_foundation.wheels import pip_install
from xain_participant.agent.signals import stop_on_signals
from xain_participant.enrolment import commands as enrolment
from xain_participant.sparse import sparse_cli

if TYPE_CHECKING:
    from xain_participant.config import ParticipantConfig
    from xain_participant.enrolment.enrolled import Enrolled
    from xain_participant.keep.state import StateDirectory
    from xain_participant.tables.workload_participant import WorkloadParticipant
    from xain_workloads.tables.division import Division
    from xain_workloads.tables.table import Table

PROGRAM = "xain-participant"

# Modules of the extra `tables`. Training needs scikit-learn even where reading the file does not.
_TABLE_MODULES = {"pyarrow": "pyarrow", "sklearn": "scikit-learn", "tomlkit": "tomlkit"}

app = make_app()

CoordinatorFlag = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST[:PORT]",
        help=f"The coordinator, by default localhost:{DEFAULT_PORT}. "
        "[coordinator.host, coordinator.port]",
    ),
]
InsecureFlag = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Without certificates: connect to another machine all the same, unencrypted. "
        "[coordinator.insecure]",
    ),
]
StateDirectoryFlag = Annotated[
    str | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        help="Folder that keeps this participant's name, what `join` has brought, each result "
        "until it is handed in, and estimators that do not travel. [participant.state_dir]",
    ),
]
Assignments = Annotated[list[str] | None, set_option("data.scale=0.0625")]

_HELP = """Train on local data for a coordinator, until its training has ended.

The rows stay here; only weights, their number and what was measured travel, and before the training
the names, types and statistics of the columns, which `inspect` shows. If the coordinator goes away,
the participant waits for it and goes on; a finished result is not trained again. With --state-dir
that holds even if the participant itself is killed and started again.

Settings come from --config, over it from the environment (XAIN_PARTICIPANT_DATA__SOURCE=x.csv is
data.source), over that from flags.

Exit status: 0 at the end of the training; 1 if data or training failed, the coordinator refuses
this participant or its updates, or the training has ended without a result; 2 if a setting is
wrong; 4 if the training has ended with a model that is no better than always predicting the
commonest class or the mean; 5 if it has ended and nothing of this participant counted in it, or
there are no rows to train on; 143 if SIGTERM, 130 if SIGINT stopped it before the end.
"""

_EXAMPLES = """**Examples**

- `xain-participant --data patients.csv --target outcome` : for a coordinator on this machine

- `xain-participant join ward-7.token` : get a certificate, and then
  `xain-participant --state-dir ward-7 --data patients.csv`

- `xain-participant inspect --data patients.csv` : what would a coordinator be told?

- `xain-participant --coordinator fleet.example.org:50051 --data patients.parquet --id ward-7`

- `xain-participant --data digits --partition iid --num-parts 4 --index 0` : the first quarter of a
  data set that scikit-learn brings along; start three more with --index 1, 2 and 3

- `xain-participant --data patients.csv --id ward-7 --serve` : for one training after the other

- `xain-participant --config ward-7.toml --set training.seed=3` : settings from a file, one changed

- `xain-participant new --template sklearn study` : a small project to begin with
"""

_INSPECT_HELP = """Show what a coordinator would be told about these data, without one.

Columns with their types and missing values, what travels of their values, target, classes and the
number of rows; and what is wrong with the file, with column and row. No row ever travels, and no
category that has fewer rows than data.min_category_count.

Takes the settings of a participant: --config, the environment and flags. With --fix the settings
that mend the file are written into --config, or shown without one.

Exit status: 0 if a coordinator can use the data, provided that they fit those of the others; 1 if
not; 2 if a setting is wrong.
"""

_INSPECT_EXAMPLES = """**Examples**

- `xain-participant inspect --data patients.csv --target outcome`

- `xain-participant inspect --data patients.csv --drop name,phone --type ward=category` : without
  two columns, and with one of codes

- `xain-participant inspect --config ward-7.toml` : as the participant itself reads them

- `xain-participant inspect --config ward-7.toml --fix` : and write what mends them into that file
"""

_NEW_HELP = """Write a small project that trains a model over two sites as it is.

It has a README with three commands, the configuration of a coordinator, and either that of the
participants or a script. Change it step by step into your own. Nothing is overwritten.

- `sklearn` : a linear model on tables; needs the extra `xain-participant[tables]`

- `xgboost` : gradient-boosted trees on tables; needs the extra `xain-participant[xgboost]`

- `torch` : a script with PyTorch and a loop over `xain.rounds()`

Exit status: 0 if the project is there; 1 if it cannot be written, or something is there already; 2
if there is no such template.
"""

_NEW_EXAMPLES = """**Examples**

- `xain-participant new --template sklearn study` : then `cd study`, and follow its README.md

- `xain-participant new --template torch study`
"""

_FETCH_HELP = """Take a model home: write a global model of the coordinator to a file at this site.

The coordinator must run; its session may go on, or have ended. The ending of the file's name
chooses the format: .skops is a scikit-learn Pipeline with the preprocessing, .onnx the same for
ONNX, .npz and .safetensors have the tensors by name, .json is XGBoost's own format for its models.
.skops, .onnx and .safetensors need the extra `xain-participant[export]`.

With the site's --config, or the flags that the training has, the file also keeps how this site
writes its tables: other names of columns, marks of missing values. `predict` then reads new rows as
the training has read them.

Exit status: 0 if the file is written; 1 if the coordinator does not answer, there is no such model,
or the format cannot hold it; 2 if a setting is wrong.
"""

_FETCH_EXAMPLES = """**Examples**

- `xain-participant fetch --round best --to wards.skops` : from a coordinator on this machine

- `xain-participant fetch --config ward-7.toml --round best --to wards.skops` : with the settings of
  this site

- `xain-participant predict --model wards.skops --data new-patients.csv` : use it
"""

_PREDICT_HELP = """Predict the rows of a table with a model that `fetch` or the coordinator wrote.

Each line of CSV has the row's number (or its --id), the prediction, and the probability of each
class. Columns are matched by name. Standard error tells, by column, which values the model does not
know: categories that no site had in training, and missing values. If the table has the target, in
some rows or in all, the score of these is printed too. Nothing leaves this machine.

Exit status: 0 if there are predictions; 1 if there are none; 2 if a setting is wrong; 6 if there
are predictions, but the model does not know the values of a column in more rows than in training,
by more than the share --max-unknown.
"""

_PREDICT_EXAMPLES = """**Examples**

- `xain-participant predict --model wards.skops --data new-patients.csv`

- `xain-participant predict --model wards.skops --data new.csv --id patient --to out.csv` : with the
  patients' numbers, into a file
"""


def _data_values(
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="CSV, Parquet, Excel, SAS, SPSS, Stata, LIBSVM or .npz; a folder with X_train.csv "
            "and y_train.csv; or iris, wine, digits, diabetes, breast_cancer. [data.source]",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Predict it; by default the last. [data.target]"),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task", metavar="TASK", help="classification, the default, or regression. [data.task]"
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Use these columns only. [data.columns]"),
    ] = None,
    drop: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Leave these columns out. [data.drop]")
    ] = None,
    renames: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="COLUMN=NAME",
            help="What the session calls a column. Repeatable. [data.rename]",
        ),
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            metavar="COLUMN=TYPE",
            help="number or category, where the values do not tell. Repeatable. [data.types]",
        ),
    ] = None,
    test_fraction: Annotated[
        str | None,
        typer.Option(
            "--test-fraction",
            metavar="SHARE",
            help="Share of the rows that is not trained on but measures each model, by default "
            "0.2. [data.test_fraction]",
        ),
    ] = None,
    missing_target: Annotated[
        str | None,
        typer.Option(metavar="drop", help="Leave rows without a target out. [data.missing_target]"),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            "--partition",
            metavar="KIND",
            help="How the sites divide a data set that all of them have: iid, dirichlet, or none, "
            "the default. [partition.kind]",
        ),
    ] = None,
    num_parts: Annotated[
        str | None, typer.Option(metavar="N", help="Number of parts. [partition.num_parts]")
    ] = None,
    index: Annotated[
        str | None, typer.Option(metavar="I", help="Part of this site, from 0. [partition.index]")
    ] = None,
) -> dict[str, Any]:
    """Values of the flags that describe the data, by key. None: the flag was not given.

    Numbers are text here: a wrong one is refused in the same words as one in the file.
    """
    values: dict[str, Any] = {
        "data.source": data,
        "data.target": target,
        "data.task": task,
        "data.columns": columns,
        "data.drop": drop,
        "data.test_fraction": test_fraction,
        "data.missing_target": missing_target,
        "partition.kind": partition,
        "partition.num_parts": num_parts,
        "partition.index": index,
    }
    if renames:
        values["data.rename"] = parse_assignments(PROGRAM, renames, "Alter=age", flag="--rename")
    if types:
        values["data.types"] = parse_assignments(PROGRAM, types, "ward=category", flag="--type")
    return values


def _coordinator_values(coordinator: str | None, insecure: bool) -> dict[str, Any]:
    """Values of the flags that name the coordinator, by key. None: the flag was not given."""
    host, port = (None, None) if coordinator is None else split_host_port(coordinator)
    return {
        "coordinator.host": host,
        "coordinator.port": port,
        "coordinator.insecure": True if insecure else None,
    }


def _with_data_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags of _data_values() to a command, in the place of its **data, before --set."""
    own = [p for p in signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    at = [p.name for p in own].index("assignments")
    flags = signature(_data_values).parameters.values()
    command.__signature__ = Signature([*own[:at], *flags, *own[at:]])  # type: ignore[attr-defined]  # read by typer
    return command


@app.callback(invoke_without_command=True, help=_HELP, epilog=_EXAMPLES)
@_with_data_flags
def _run(
    context: typer.Context,
    config: Config = None,
    coordinator: CoordinatorFlag = None,
    insecure: InsecureFlag = False,
    participant_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="NAME",
            help="Name of this participant, also after a restart; by default the name in "
            "--state-dir, or the host's name and a random suffix. [participant.id]",
        ),
    ] = None,
    state_dir: StateDirectoryFlag = None,
    tags: Annotated[
        list[str] | None,
        typer.Option(
            "--tag",
            metavar="KEY=VALUE",
            help="The coordinator may select participants by it, such as site=north. Repeatable. "
            "[participant.tags]",
        ),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve",
            help="Stay after the end of the training, and take part in the coordinator's next one. "
            "[participant.serve]",
        ),
    ] = False,
    assignments: Assignments = None,
    version: Annotated[bool, version_option(PROGRAM)] = False,
    **data: Any,
) -> None:
    """Take part with the settings of flags and file, and exit with the agent's status."""
    values: dict[str, Any] = {
        **_coordinator_values(coordinator, insecure),
        "participant.id": participant_id,
        "participant.state_dir": state_dir,
        "participant.serve": True if serve else None,
        **_data_values(**data),
    }
    values |= parse_assignments(PROGRAM, assignments, "training.seed=3")
    if tags:
        # As a table: text of an item on its own would be read as TOML, where 7 is a number.
        values["participant.tags"] = parse_assignments(PROGRAM, tags, "site=north", flag="--tag")
    if context.invoked_subcommand is not None:
        refuse_flags_before(PROGRAM, context.invoked_subcommand, (config, *values.values()))
        return
    settings = _load_settings(config, values)

    streams.unblock()
    settings.logging.configure()
    from xain_participant.agent.alive import Alive
    from xain_participant.keep.state import StateDirectory, StateError

    ours, there = settings.participant, _enrolled(settings)
    alive = state = None
    try:
        if ours.alive_file is not None:
            alive = Alive(ours.alive_file)
        if ours.state_dir is not None:
            state = StateDirectory(
                ours.state_dir, there.participant_id or None, ours.instance_id or None
            )
    except OSError as error:
        why = f"participant.alive_file is {ours.alive_file}: it cannot be written: {error.strerror}"
        fail(PROGRAM, why, EXIT_BAD_CONFIG)
    except StateError as error:
        fail(PROGRAM, f"participant.state_dir is {ours.state_dir}: {error.why}", EXIT_BAD_CONFIG)
    with state or nullcontext():
        participant = _load_participant(settings, state, config)

        from xain_participant.agent.agent import Agent

        agent = Agent(
            participant,
            there.address,
            there.participant_id or None,
            tags=ours.tags,
            direct=settings.coordinator.direct,
            alive=alive,
            state=state,
            instance_id=ours.instance_id or None,
            tells_messages=ours.report_failures == "full",
            serve=ours.serve,
            tls=there.tls,
            insecure=settings.coordinator.insecure,
            upkeep=there.upkeep(),
        )
        stop_on_signals(agent)
        status = agent.run()
    raise typer.Exit(status)


@app.command("inspect", help=_INSPECT_HELP, epilog=_INSPECT_EXAMPLES)
@_with_data_flags
def _inspect(
    config: Config = None,
    fixes: Annotated[
        bool, typer.Option("--fix", help="Write the settings that mend the file.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print exactly what would be sent, as JSON.")
    ] = False,
    approve: Annotated[
        bool,
        typer.Option(
            "--approve",
            help="Ask a person whether this may leave the site, and record a yes, which "
            "participant.require_approval asks for.",
        ),
    ] = False,
    assignments: Assignments = None,
    **data: Any,
) -> None:
    """Print what would be sent of the data, mend settings, and record an approval, as flags ask."""
    values = _data_values(**data)
    values |= parse_assignments(PROGRAM, assignments, "data.scale=0.0625")
    settings = _load_settings(config, values)
    if fixes:
        settings = _write_fixes(config, values)
    train, test = _load_data(settings)

    from xain_participant.cli import approval
    from xain_participant.cli.inspection import inspect, profile_of
    from xain_workloads.errors import DataError

    try:
        least = settings.data.min_category_count
        profile = profile_of(train, least, settings.data.min_known)
    except DataError as error:
        fail(PROGRAM, f"a coordinator would refuse the data: {error}", EXIT_FAILED)
    if as_json:
        entry = asdict(profile)
        typer.echo(json.dumps({**entry, "statistics": json.loads(profile.statistics or "{}")}))
    else:
        typer.echo(inspect(train, test, profile, least))
    if approve:
        if not typer.confirm("May this leave the site?", default=False, err=True):
            fail(PROGRAM, "not approved", EXIT_FAILED)
        file = approval.approval_file(settings.participant.state_dir, config)
        try:
            approval.record(file, profile)
        except OSError as error:
            fail(PROGRAM, f"no approval is recorded: {why_failed(error)}", EXIT_BAD_CONFIG)
        typer.echo(f"approved: {file}", err=True)


@app.command("new", help=_NEW_HELP, epilog=_NEW_EXAMPLES)
def _new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder, or an empty one.")],
    template: Annotated[
        str, typer.Option(metavar="NAME", help="sklearn, torch or xgboost.", show_default=False)
    ],
) -> None:
    """Write the files of a template into a folder, and print their names."""
    from xain_participant.cli.projects import known_templates, new_project

    if template not in known_templates():
        known = ", ".join(known_templates())
        fail(PROGRAM, f"there is no template {template!r}; there are: {known}", EXIT_BAD_CONFIG)
    try:
        files = new_project(template, folder)
    except FileExistsError:
        fail(PROGRAM, f"{folder} is there already, and is no empty folder", EXIT_FAILED)
    except OSError as error:
        fail(PROGRAM, f"{folder} cannot be written: {error.strerror}", EXIT_FAILED)
    for file in files:
        typer.echo(file)
    typer.echo(f"Now: cd {folder}, and follow README.md")


@app.command("predict", help=_PREDICT_HELP, epilog=_PREDICT_EXAMPLES)
def _predict(
    model: Annotated[
        Path, typer.Option(metavar="FILE", help="What `fetch` wrote; not an .onnx file.")
    ],
    data: RowsFile,
    to: PredictionsFile = None,
    id_column: IdColumn = "",
    max_unknown: MaxUnknown = 0.2,
    allow_builder: Builders = None,
    config: Config = None,
    assignments: RowAssignments = None,
) -> None:
    """Predict the rows of a file by an exported model, and exit with predict_file()'s status."""
    _require_table_modules()
    assigned = parse_assignments(PROGRAM, assignments, "data.decimal=,")
    settings = _load_settings(config, assigned, needs_source=False)
    from xain_workloads.errors import WorkloadError
    from xain_workloads.exported.formats import read
    from xain_workloads.exported.predicting import predict_file, predict_with
    from xain_workloads.nets.neural_builders import allow_builders

    allow_builders(allow_builder or ())
    try:
        exported = read(model)
        status = predict_file(
            exported.about,
            predict_with(exported),
            data,
            to,
            id_column=id_column,
            max_unknown=max_unknown,
            dialect=settings.data,
            note=note,
        )
    except (WorkloadError, OSError) as error:
        fail(f"{PROGRAM} predict", why_failed(error), EXIT_FAILED)
    raise typer.Exit(status)


@app.command("fetch", help=_FETCH_HELP, epilog=_FETCH_EXAMPLES)
@_with_data_flags
def _fetch(
    to: Annotated[
        Path, typer.Option(metavar="FILE", help="A name that ends in .skops, .onnx, .npz, ...")
    ],
    which: Annotated[
        str, typer.Option("--round", metavar="N|last|best", help="Which model.")
    ] = "last",
    config: Config = None,
    coordinator: CoordinatorFlag = None,
    insecure: InsecureFlag = False,
    state_dir: StateDirectoryFlag = None,
    assignments: Assignments = None,
    **data: Any,
) -> None:
    """Write a model of the coordinator to a file, and print what it is."""
    values = {**_coordinator_values(coordinator, insecure), "participant.state_dir": state_dir}
    values |= _data_values(**data) | parse_assignments(PROGRAM, assignments, "data.scale=0.0625")
    settings = _load_settings(config, values, needs_source=False)
    from xain_participant.agent.fetch import fetch
    from xain_workloads.errors import WorkloadError
    from xain_workloads.tables.reading.dialect import Dialect

    ours, there = settings.participant, _enrolled(settings)
    try:
        told = fetch(
            there.address,
            which,
            to,
            participant_id=there.participant_id or "fetch",
            dialect=Dialect.of(settings.data).meaning(),
            rows=(lambda: _load_data(settings)[0]) if settings.data.source else None,
            state_dir=ours.state_dir,
            tls=there.tls,
        )
    except (WorkloadError, OSError) as error:
        fail(f"{PROGRAM} fetch", why_failed(error), EXIT_FAILED)
    typer.echo(told)


app.command("join", help=enrolment.JOIN_HELP, epilog=enrolment.JOIN_EXAMPLES)(enrolment.join)
app.command("renew", help=enrolment.RENEW_HELP, epilog=enrolment.RENEW_EXAMPLES)(enrolment.renew)
app.command("tunnel", help=enrolment.TUNNEL_HELP, epilog=enrolment.TUNNEL_EXAMPLES)(
    enrolment.tunnel
)
app.command("sparse", help=sparse_cli.SPARSE_HELP, epilog=sparse_cli.SPARSE_EXAMPLES)(
    sparse_cli.sparse
)
app.command("sparse-data", help=sparse_cli.DATA_HELP, epilog=sparse_cli.DATA_EXAMPLES)(
    sparse_cli.sparse_data
)


def _load_settings(
    file: Path | None, values: dict[str, Any], *, needs_source: bool = True
) -> "ParticipantConfig":
    """The settings in force. Ends the process with status 2 if one is wrong, or needs_source and
    there is no data.source."""
    from xain_foundation.settings.settings import ConfigError, load
    from xain_participant.config import ENV_PREFIX, ParticipantConfig

    try:
        settings = load(ParticipantConfig, file, ENV_PREFIX, values)
    except ConfigError as error:
        fail(PROGRAM, str(error), EXIT_BAD_CONFIG)
    if needs_source and not settings.data.source:
        fail(
            PROGRAM,
            "data.source is not set; "
            + hint("xain-participant", "--data FILE")
            + ", or one of the data sets that scikit-learn brings along, such as iris",
            EXIT_BAD_CONFIG,
        )
    return settings


def _enrolled(settings: "ParticipantConfig") -> "Enrolled":
    """Read address, name and certificates. Ends the process if the certificates cannot be used."""
    from xain_foundation.settings.settings import ConfigError
    from xain_participant.enrolment.enrolled import enrolled

    try:
        return enrolled(settings)
    except ConfigError as error:
        fail(PROGRAM, str(error), EXIT_BAD_CONFIG)


def _require_table_modules() -> None:
    """End the process if packages to read and train tables are missing."""
    if missing := [name for module, name in _TABLE_MODULES.items() if find_spec(module) is None]:
        message = f"tables need {' and '.join(missing)}: {pip_install(PROGRAM, 'tables')}"
        fail(PROGRAM, message, EXIT_FAILED)


_MAX_FIXES = 10  # of one file, one after the other: a message may hide another one


def _write_fixes(config: Path | None, values: dict[str, Any]) -> "ParticipantConfig":
    """Find the settings that mend the file, and write them into the configuration, or print them
    without one. Returns the settings with them."""
    from tempfile import TemporaryDirectory

    from xain_participant.tables.fixes import with_fixes
    from xain_workloads.errors import DataError
    from xain_workloads.tables.reading.errors import DoesNotFit

    text = config.read_text(encoding="utf-8") if config else ""
    told: list[str] = []
    with TemporaryDirectory() as folder:
        file = Path(folder) / "settings.toml"
        file.write_text(text, encoding="utf-8")
        for _ in range(_MAX_FIXES):
            settings = _load_settings(file, values)
            _require_table_modules()
            try:
                settings.data.load()
            except DoesNotFit as error:
                new = [fix for fix in error.fixes if fix not in told]
                if not new:
                    break
                told += new
                file.write_text(with_fixes(file.read_text(encoding="utf-8"), new), encoding="utf-8")
            except DataError:
                break
            else:
                break
        text = file.read_text(encoding="utf-8")
    if not told:
        return settings
    if config:
        try:
            config.write_text(text, encoding="utf-8")
        except OSError as error:
            fail(PROGRAM, f"the settings are not written: {why_failed(error)}", EXIT_BAD_CONFIG)
        typer.echo(f"written into {config}:")
    else:
        typer.echo("for a configuration file:")
    typer.echo(with_fixes("", told))
    return settings


def _load_data(
    settings: "ParticipantConfig", division: "Division | None" = None
) -> "tuple[Table, Table]":
    """Read the table, and divide it into rows to train on and rows to test with.

    division: of a session of a study, for which the table is read again: an earlier part would have
    to be in memory beside it.

    Ends the process if the table cannot be loaded, or if packages to read and train it are missing.
    """
    from xain_workloads.errors import DataError

    _require_table_modules()
    from xain_workloads.tables.partition import divided

    try:
        everything = settings.data.load()
    except DataError as error:
        fixes = getattr(error, "fixes", ())
        also = hint("xain-participant", "xain-participant inspect --fix")
        fail(PROGRAM, f"{error}{f'; {also} to write the settings' if fixes else ''}", EXIT_FAILED)
    ours = settings.partition.partition().apply(everything)
    # Metrics on so few rows tell of each of them, and travel.
    least = settings.data.min_known
    fraction, seed = settings.data.test_fraction, settings.training.seed
    return divided(ours, division, fraction, seed, least=least)


def _import_workload(settings: "ParticipantConfig") -> None:
    """Import what the workload of [training] needs. What is missing, its first training tells."""
    from xain_foundation.logs.logger import get_logger
    from xain_workloads.workload import import_needed

    name, log = settings.training.workload, get_logger(__name__)
    if not name:
        return
    try:
        import_needed(name, settings.training.options)
    except (ValueError, ImportError) as error:
        log.warning("workload_not_imported", workload=name, reason=str(error))
    else:
        log.info("workload_imported", workload=name)


def _load_participant(
    settings: "ParticipantConfig", state: "StateDirectory | None", config: Path | None
) -> "WorkloadParticipant":
    """Make the participant that trains workloads on the configured data. Ends the process if the
    data cannot be used, or were not approved."""
    from xain_foundation.logs.logger import get_logger
    from xain_participant.cli.inspection import cells_held_out
    from xain_participant.keep.variates import KeptVariates
    from xain_participant.sdk.estimators import KeptEstimators
    from xain_participant.stages.stage_trainer import StageTrainer
    from xain_participant.tables.personal import PersonalTensors
    from xain_participant.tables.workload_participant import WorkloadParticipant
    from xain_workloads.errors import DataError
    from xain_workloads.nets.neural_builders import allow_builders
    from xain_workloads.nets.threads import use_threads
    from xain_workloads.tables.profile import check_profile
    from xain_workloads.tables.schema import MAX_COLUMNS

    log = get_logger(__name__)
    allow_builders(settings.training.builders)
    use_threads(settings.training.threads)
    _import_workload(settings)
    log.info("loading_data", source=settings.data.source)
    train, test = _load_data(settings)
    log.info(
        "data_loaded",
        rows=train.num_samples,
        held_out=test.num_samples,
        without_target=train.without_target,
    )
    if len(train.columns) > MAX_COLUMNS:
        log.warning("columns_not_described", columns=len(train.columns), most=MAX_COLUMNS)
    if settings.data.test_fraction and train.num_samples and not test.num_samples:
        log.warning(
            "nothing_held_out",
            rows=train.num_samples,
            test_fraction=settings.data.test_fraction,
            least=settings.data.min_known,
        )
    personal = estimators = variates = None
    if state is not None:
        variates = KeptVariates(settings.participant.state_dir, state.participant_id)
        personal = PersonalTensors(settings.participant.state_dir, state.participant_id)
        estimators = KeptEstimators(settings.participant.state_dir, state.participant_id)
    participant = WorkloadParticipant(
        train,
        settings.training.seed,
        test,
        min_category_count=settings.data.min_category_count,
        min_known=settings.data.min_known,
        personal=personal,
        estimators=estimators,
        variates=variates,
        stages=StageTrainer(
            settings.training.process_group_address,
            insecure=settings.training.process_group_insecure,
        ),
        # The statistics of all rows were approved, and not those of a part.
        divide=None if settings.participant.require_approval else partial(_load_data, settings),
    )
    try:
        check_profile(participant.profile())
    except DataError as error:
        fail(PROGRAM, f"a coordinator would refuse the data: {error}", EXIT_FAILED)
    held_out = test.profile(settings.data.min_category_count, settings.data.min_known)
    for finding in cells_held_out(participant.profile(), held_out):
        log.warning("data_finding", message=str(finding))
    if settings.participant.require_approval:
        from xain_participant.cli.approval import approval_file, why_not_approved

        file = approval_file(settings.participant.state_dir, config)
        if why := why_not_approved(file, participant.profile()):
            fail(PROGRAM, why, EXIT_FAILED)
    return participant


def main() -> int:
    """The entry point. Returns the exit status of the process."""
    return run_app(app, PROGRAM)
