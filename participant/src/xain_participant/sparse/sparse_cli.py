"""The commands `sparse` and `sparse-data` of the command line.

Commands import what they need, so that --help does not wait for it.
"""

import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from xain_foundation.commands import fail, split_host_port
from xain_foundation.exit_statuses import (
    EXIT_BAD_CONFIG,
    EXIT_FAILED,
    EXIT_NOTHING_COUNTED,
    EXIT_ROWS_MISSED,
)
from xain_foundation.logs import streams
from xain_foundation.settings.hints import hint
from xain_foundation.wheels import pip_install

if TYPE_CHECKING:
    from xain_parameters import Certificates
    from xain_participant.sparse.sparse_worker import Job, Outcome, Progress, Score
    from xain_workloads.sparse.rows import Source

PROGRAM: Final = "xain-participant"
DEFAULT_PORT: Final = 50052  # of the scheduler of a parameter server
CONNECT_S: Final = 60.0

# Modules of the extra `sparse`.
_MODULES = {
    "fsspec": "fsspec",
    "pyarrow": "pyarrow",
    "scipy": "scipy",
    "xain_parameters": "xain-parameters",
}
_MODELS = ("logistic", "fm")

SPARSE_HELP = """Train a sparse model on a parameter server, as one of its workers.

The model is a table of one row for each column of the data: logistic regression, or a factorisation
machine. It may be too large for any one machine. The workers divide the rows, anew in each epoch.
Each reads one batch of its part in each clock: pulls the rows of the columns that occur in the
batch, computes their gradient, and pushes it; the servers take the step, by Adagrad.

The rows are in libsvm, CSV or Parquet files, the same for all workers: on this machine, or at
s3://, hdfs://, http:// or https:// URLs. In each epoch each line, or each row group of Parquet, is
read by exactly one worker, whoever comes and goes.

A worker that is killed and started again under its name goes on with the batch that it was at; the
others read what one leaves that is not back within its lease. The end comes for all at once, when
all epochs are read. With --epochs 0 nothing is trained, and --test scores the model as it is.

Exit status: 0 when all epochs are read; 1 if the data cannot be read, or servers or scheduler do
not answer, or another worker has the name; 2 if a flag is wrong; 5 if no row was left for this
worker, so that it trained nothing; 7 if rows were read twice or not at all, as where files change
meanwhile; 130 if Ctrl-C, 143 if SIGTERM stopped it before the end.
"""

SPARSE_EXAMPLES = """**Examples**

- `xain-participant sparse --data clicks/train --test clicks/test --epochs 2` : one worker, with a
  scheduler on this machine

- `xain-participant sparse --data clicks/train --workers 3` : one of three workers; start two more
  with the same command

- `xain-participant sparse --server ps.example.org --data s3://bucket/clicks/*.svm --workers 3
  --worker w0 --model fm --factors 16 --staleness 4`

- `xain-participant sparse --data 'https://data.example.org/clicks/2026-*.parquet' --target clicked
  --categories campaign,zip`

- `xain-participant sparse --epochs 0 --test clicks/test` : how good is the model now?
"""

DATA_HELP = """Write made-up libsvm files of the shape of a well-known data set, at any scale.

FOLDER/train gets --parts files, and FOLDER/test one more of the same size. The same shape, scale,
parts and seed give the same bytes. Parts of an earlier run with more of them are removed.

- `kdd12` : 150 million rows of 11 ones in 55 million columns

- `webspam` : 350,000 rows of 3,728 values in 17 million columns

Exit status: 0 if the files are there; 1 if they cannot be written; 2 if a flag is wrong.
"""

DATA_EXAMPLES = """**Examples**

- `xain-participant sparse-data clicks` : 15,000 rows in 5,469 columns

- `xain-participant sparse-data --shape webspam --scale 0.01 --parts 8 --seed 7 pages`
"""


def sparse(
    server: Annotated[
        str,
        typer.Option(
            "--server", metavar="HOST[:PORT]", help=f"The scheduler, by default at {DEFAULT_PORT}."
        ),
    ] = "localhost",
    tls: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="With ca.crt, tls.crt and tls.key, for the connections to scheduler and servers. "
            "XAIN_PARAMETERS_TLS__FOLDER may name it too.",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Without certificates: connect to another machine all the same, unencrypted.",
        ),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="PATH-OR-URL",
            help="File, folder, or pattern with *; local, or at s3://, hdfs://, http(s)://.",
        ),
    ] = None,
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="libsvm, csv or parquet; by default as the names end, else libsvm.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="COLUMN",
            help="0 and 1, or -1 and 1; by default the last. Not for libsvm.",
        ),
    ] = None,
    categories: Annotated[
        str,
        typer.Option(
            "--categories",
            metavar="COLUMNS",
            help="Columns of numbers that are categories too, as a,b. Not for libsvm.",
        ),
    ] = "",
    test: Annotated[
        str | None,
        typer.Option(
            metavar="PATH-OR-URL", help="Rows to score the model with; rank 0 does, at the end."
        ),
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="No other living worker has it. By default worker-I, without --index HOST-PID, "
            "and with --epochs 0 scorer-PID.",
        ),
    ] = None,
    index: Annotated[
        int | None,
        typer.Option(
            metavar="I",
            help="Rank to ask for, from 0; by default any, and with one worker 0.",
            min=0,
            envvar="XAIN_PARTICIPANT_PARTITION__INDEX",
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="That divide the data; the first clock waits for as many, without end.",
            min=1,
            envvar="XAIN_PARTICIPANT_PARTITION__NUM_PARTS",
        ),
    ] = 1,
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="logistic, or fm: a factorisation machine."),
    ] = "logistic",
    factors: Annotated[
        int, typer.Option(metavar="K", help="Factors of each column, with fm.", min=1)
    ] = 8,
    table: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the model at the servers; by default as --model."),
    ] = None,
    training: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="NAME",
            help="Job at the servers; by default the job that has --table.",
        ),
    ] = None,
    staleness: Annotated[
        str,
        typer.Option(
            metavar="S",
            help="Clocks that a worker may be ahead of the slowest; 0: BSP, S: SSP, none: ASP.",
        ),
    ] = "0",
    batch: Annotated[int, typer.Option(metavar="ROWS", help="Rows of a clock.", min=1)] = 1_000,
    epochs: Annotated[
        int, typer.Option(metavar="E", help="Passes over the data; 0: only --test.", min=0)
    ] = 1,
    learning_rate: Annotated[float, typer.Option(metavar="RATE", help="Of Adagrad.")] = 0.1,
    l2: Annotated[
        float,
        typer.Option("--l2", metavar="PENALTY", help="On the rows of a batch, each time.", min=0.0),
    ] = 0.0,
    bound: Annotated[
        int | None,
        typer.Option(
            metavar="COLUMNS",
            help="Columns are below; servers find their rows faster. By default up to 2^53.",
            min=1,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="SEED", help="Of the first factors.", min=0)] = 0,
) -> None:
    """Train a sparse model at a parameter server, and score it; SPARSE_HELP says more."""
    address = _target(server)
    if index is None and workers == 1:
        index = 0
    if index is not None and index >= workers:
        _refuse(f"--index is {index}; with --workers {workers} it is at most {workers - 1}")
    if model not in _MODELS:
        _refuse(f"--model is {model!r}; there are: {', '.join(_MODELS)}")
    if staleness != "none" and not (staleness.isdecimal() and staleness.isascii()):
        _refuse(f"--staleness is {staleness!r}; it must be a whole number, or none")
    if not 0 < learning_rate < float("inf"):
        _refuse(f"--learning-rate is {learning_rate}; it must be above 0")
    if epochs and data is None:
        _refuse(
            "--data is not set; "
            + hint("xain-participant", "xain-participant sparse-data clicks")
            + " to make data to try it with"
        )
    if not epochs and test is None:
        _refuse("--epochs is 0, and --test is not set: there is nothing to do")
    _need_modules()

    from xain_foundation.logs.logs import LoggingSettings
    from xain_foundation.net.channels import require_private_way
    from xain_foundation.security.tls import InvalidCertificates
    from xain_foundation.settings.settings import ConfigError
    from xain_parameters.config import certificates_of
    from xain_parameters.errors import Invalid
    from xain_parameters.specs import check_job_name
    from xain_participant.sparse.sparse_worker import Job
    from xain_workloads.sources.parts import FORMATS
    from xain_workloads.sparse.models import FactorisationMachine, LogisticRegression
    from xain_workloads.sparse.rows import Source

    if file_format is not None and file_format not in FORMATS:
        _refuse(f"--format is {file_format!r}; there are: {', '.join(FORMATS)}")
    try:
        if training is not None:
            check_job_name(training)
        certificates = certificates_of(tls)
    except (ConfigError, Invalid, InvalidCertificates) as error:
        _refuse(str(error))
    remedy = hint("xain-participant", "--tls FOLDER") + ", or --insecure"
    try:
        require_private_way(address, certificates, insecure=insecure, remedy=remedy)
    except ValueError as error:
        _refuse(f"--server: {error}")
    streams.unblock()
    LoggingSettings().configure()
    job = Job(
        table or model,
        LogisticRegression(l2) if model == "logistic" else FactorisationMachine(factors, l2),
        None if staleness == "none" else int(staleness),
        batch,
        epochs,
        learning_rate,
        bound,
        seed,
    )
    open_source = partial(
        Source,
        file_format=file_format or "",
        target=target or "",
        categories=[each.strip() for each in categories.split(",") if each.strip()],
        bound=bound,
    )
    # SIGTERM ends the work as Ctrl-C does, and leaves the group on its way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        group = (workers, index) if epochs else (None, None)
        name = worker or _name(index, is_scorer=not epochs)
        outcome, score = _work(
            address, certificates, name, training, group, job, open_source, data, test
        )
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    if score is not None:
        typer.echo(
            f"{score.num_rows:,} rows: log loss {score.loss:.4f}, accuracy {score.accuracy:.4f}, "
            f"AUC {score.auc:.4f}"
        )
    if outcome is not None and not outcome.is_whole:
        raise typer.Exit(EXIT_ROWS_MISSED)
    if outcome is not None and not outcome.num_batches and not outcome.was_over:
        raise typer.Exit(EXIT_NOTHING_COUNTED)


def _work(
    target: str,
    certificates: "Certificates | None",
    name: str,
    training: str | None,
    group: tuple[int | None, int | None],
    job: "Job",
    open_source: "Callable[[str], Source]",
    data: str | None,
    test: str | None,
) -> "tuple[Outcome | None, Score | None]":
    """Train and score. Ends the process with one line if that is impossible.

    group: the number of workers, and the rank to ask for.
    """
    from xain_foundation.logs.logger import get_logger
    from xain_parameters import ParameterError, connect_sync
    from xain_participant.sparse.sparse_worker import score, train
    from xain_workloads.errors import DataError

    log = get_logger(__name__)
    workers, rank = group

    def show(progress: "Progress") -> None:
        log.info(
            "progress",
            worker=name,
            clock=progress.clock,
            loss=round(progress.loss, 4),
            accuracy=round(progress.accuracy, 4),
            rows_per_s=round(progress.num_rows / progress.seconds),
            keys_per_s=round(progress.num_keys / progress.seconds),
        )

    try:
        # Wrong paths are found before the others wait for this worker. A driver says nothing while
        # it tries to reach its servers.
        log.info("looking_for_data", worker=name, data=data, test=test)
        rows = open_source(data) if data and job.num_epochs else None
        held_out = open_source(test) if test else None
        # Another machine was refused by now, where that is not meant.
        with connect_sync(
            target,
            worker=name,
            job=training,
            workers=workers,
            rank=rank,
            timeout_s=CONNECT_S,
            tls=certificates,
            insecure=True,
        ) as server:
            log.info("server_connected", worker=name, server=target)
            outcome = None
            if rows is not None:
                outcome = train(server, job, rows, show)
                log.info("epochs_are_over", worker=name, batches=outcome.num_batches)
            is_scorer = rows is None or server.rank == 0
            return outcome, score(server, job, held_out) if held_out and is_scorer else None
    except DataError as error:
        fail(PROGRAM, str(error), EXIT_FAILED)
    except ParameterError as error:
        fail(PROGRAM, f"parameter server at {target}: {error}", EXIT_FAILED)


def sparse_data(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="It may be there already.")],
    shape: Annotated[str, typer.Option(metavar="SHAPE", help="kdd12 or webspam.")] = "kdd12",
    scale: Annotated[
        float, typer.Option(metavar="SCALE", help="Of rows and columns; 1: as large as the model.")
    ] = 1e-4,
    parts: Annotated[int, typer.Option(metavar="P", help="Files to train on.", min=1)] = 4,
    seed: Annotated[int, typer.Option(metavar="SEED", min=0)] = 0,
) -> None:
    """Write data to try sparse models with; DATA_HELP says more."""
    _need_modules()

    from xain_workloads.sparse.generator import SHAPES, write

    if shape not in SHAPES:
        _refuse(f"--shape is {shape!r}; there are: {', '.join(sorted(SHAPES))}")
    if not 0 < scale <= 1:
        _refuse(f"--scale is {scale}; it must be above 0 and at most 1")
    scaled = SHAPES[shape].scaled(scale)
    try:
        for part in range(parts + 1):
            name = f"train/part-{part:04}.svm" if part < parts else "test/part-0000.svm"
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file, scaled, seed, part, parts + 1)
            typer.echo(file)
        for old in folder.glob("train/part-????.svm"):
            if int(old.stem.removeprefix("part-")) >= parts:
                old.unlink()
    except OSError as error:
        fail(PROGRAM, f"{folder} cannot be written: {error.strerror}", EXIT_FAILED)
    typer.echo(f"{scaled.num_rows:,} rows in {scaled.num_columns:,} columns")


def _name(index: int | None, *, is_scorer: bool) -> str:
    """The name of a worker that was given none. A scorer may come while all others train."""
    if is_scorer:
        return f"scorer-{os.getpid()}"
    return f"{socket.gethostname()}-{os.getpid()}" if index is None else f"worker-{index}"


def _target(server: str) -> str:
    """HOST:PORT of the scheduler, by default at its usual port. Ends the process with status 2 for
    anything else."""
    host, port = split_host_port(server)
    number = str(DEFAULT_PORT) if port is None else port
    if not host or not number.isdecimal() or not 0 < int(number) < 65536:
        _refuse(f"--server is {server!r}; write HOST or HOST:PORT")
    return f"{host}:{number}"


def _need_modules() -> None:
    """End the process if packages of sparse models are missing."""
    if missing := [name for module, name in _MODULES.items() if find_spec(module) is None]:
        text = f"sparse models need {' and '.join(missing)}: {pip_install(PROGRAM, 'sparse')}"
        fail(PROGRAM, text, EXIT_FAILED)


def _refuse(why: str) -> NoReturn:
    """Print what is wrong with the command line, and end the process with status 2."""
    fail(PROGRAM, f"command line: {why}", EXIT_BAD_CONFIG)
