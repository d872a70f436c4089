"""The commands about what a session has made: its data described, its models, its figures.

What a command needs is imported within it, so that --help does not wait for numpy and gRPC.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from xain_coordinator.cli.commands.common import (
    PROGRAM,
    Address,
    AsCsv,
    AsJson,
    AskInsecure,
    Assignments,
    DataDir,
    Host,
    Insecure,
    Port,
    Tls,
    explained,
    given,
    loaded,
    resolve,
    running,
    settings_of,
)
from xain_foundation.commands import (
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
)
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG, EXIT_OK
from xain_foundation.settings.hints import hint

app = make_app()

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
    tls: Tls = None,
    insecure: AskInsecure = False,
    assignments: Assignments = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Lines of figures, as CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All figures, as JSON.")] = False,
) -> None:
    """The command `describe`: print the description of all data as text, CSV or JSON."""
    settings = settings_of(config, data_dir, assignments)

    with explained("describe", tls, address, insecure=insecure):
        from xain_coordinator.export.describing import table_one

        table = table_one(settings, running(settings, address))
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
    tls: Tls = None,
    insecure: AskInsecure = False,
    assignments: Assignments = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="A line for each column, and for sites, as CSV.")
    ] = False,
) -> None:
    """The command `importance`: print the importance of the columns as a table or CSV."""
    settings = settings_of(config, data_dir, assignments)

    with explained("importance", tls, address, insecure=insecure):
        from rich.console import Console

        from xain_coordinator.cli import importance
        from xain_coordinator.cli.report.files import importance_of

        found = importance_of(settings, running(settings, address))
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
    tls: Tls = None,
    insecure: AskInsecure = False,
    assignments: Assignments = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="A line for each figure, as CSV.")] = False,
) -> None:
    """The command `gains`: print what each site gains as a table or CSV."""
    settings = settings_of(config, data_dir, assignments)

    with explained("gains", tls, address, insecure=insecure):
        from rich.console import Console

        from xain_coordinator.cli import gains
        from xain_coordinator.cli.report.files import gains_of

        found = gains_of(settings, running(settings, address))
        if as_csv:
            typer.echo(gains.to_csv(found), nl=False)
        else:
            gains.show(found, Console())


@app.command("models")
def _models(
    config: Config = None,
    data_dir: DataDir = None,
    address: Address = None,
    tls: Tls = None,
    insecure: AskInsecure = False,
    assignments: Assignments = None,
    as_json: Annotated[bool, typer.Option("--json", help="All that is known, as JSON.")] = False,
) -> None:
    """List the global models of a session with what was measured of each.

    The coordinator must be stopped, or be asked with --address.
    """
    settings = settings_of(config, data_dir, assignments)

    with explained("models", tls, address, insecure=insecure):
        from xain_coordinator.cli.models import models

        models(settings, running(settings, address), as_json=as_json)


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
    tls: Tls = None,
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
    """The command `export`: write a model to a file, or register it with MLflow."""
    if to is None and mlflow is None:
        fail(PROGRAM, "command line: " + hint("xain-coordinator", "--to model.skops"), 2)
    if session and address is not None:
        fail(PROGRAM, "command line: --session reads files; leave --address out", EXIT_BAD_CONFIG)
    settings = settings_of(config, data_dir, assignments)

    with explained("export", tls, address, insecure=insecure):
        from xain_coordinator.cli.models import export

        export(
            settings,
            address if session else running(settings, address),
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
    tls: Tls = None,
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
    """The command `predict`: predict the rows of a file with a model or through a coordinator."""
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
    with explained("predict", tls, address, insecure=insecure):
        from xain_coordinator.cli import models
        from xain_workloads.exported.predicting import RowsSettings
        from xain_workloads.nets.neural_builders import allow_builders

        allow_builders(allow_builder or ())
        assigned = parse_assignments(PROGRAM, assignments, "data.decimal=,")
        dialect = loaded(RowsSettings, None, "", assigned).config.data
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
    tls: Tls = None,
    insecure: AskInsecure = False,
    assignments: Assignments = None,
) -> None:
    """Write one HTML page about a session: how good its model is, on what data, and who counted.

    The page needs nothing else and can be sent by mail. The coordinator must be stopped, or be
    asked with --address.
    """
    settings = settings_of(config, data_dir, assignments)

    with explained("report", tls, address, insecure=insecure):
        from xain_coordinator.cli.report.files import report

        made = report(settings, running(settings, address))
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


@app.command("study", help=_STUDY_HELP, epilog=_STUDY_EXAMPLES)
def _study(
    config: Config = None,
    data_dir: DataDir = None,
    address: Address = None,
    tls: Tls = None,
    insecure: AskInsecure = False,
    assignments: Assignments = None,
    as_csv: AsCsv = False,
    as_json: AsJson = False,
) -> None:
    """The command `study`: print the table of a study."""
    settings = settings_of(config, data_dir, assignments)

    with explained("study", tls, address, insecure=insecure):
        from xain_coordinator.cli.study import table_of

        _print_study(
            table_of(settings, running(settings, address)),
            as_csv=as_csv,
            as_json=as_json,
        )


def _print_study(table: Mapping[str, Any], *, as_csv: bool, as_json: bool) -> None:
    """Print the table of a study as JSON, as CSV, or for people."""
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
    """The command `evaluate`: have a model measured at the sites, and print the table."""
    values = given(
        data_dir, assignments, host, port, min_participants=min_participants, insecure=insecure
    )
    values |= {"study.model": model, "study.rows": rows}
    resolved = resolve(config, values)

    with explained("evaluate"):
        from xain_coordinator.cli.study import evaluate

        status = evaluate(
            resolved.config,
            lambda table: _print_study(table, as_csv=as_csv, as_json=as_json),
        )
    raise typer.Exit(status)
