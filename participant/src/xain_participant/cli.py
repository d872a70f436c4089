"""The command line: take part in a training with a data set of one's own.

What a run needs is imported within it, so that --help does not wait for it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from xain_participant.config import ParticipantConfig
    from xain_participant.workload_participant import WorkloadParticipant

PROGRAM = "xain-participant"
EXIT_BAD_DATA = 1
EXIT_BAD_CONFIG = 2

app = typer.Typer(
    add_completion=False,
    # Typer's own tracebacks may show local variables, and with them any secret.
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_HELP = """Train on local data for a coordinator, until its training has ended.

The rows stay here; only weights, their number and what was measured travel. If the coordinator goes
away, the participant waits for it and goes on; a finished result is not trained again.

Settings come from --config, over it from the environment (XAIN_PARTICIPANT_DATA__SOURCE=x.csv is
data.source), over that from flags.

Exit status: 0 at the end of the training, or on SIGTERM; 1 if data or training failed, or the
coordinator refuses this participant; 2 if a setting is wrong.
"""

_EXAMPLES = """**Examples**

- `xain-participant --data patients.csv --target outcome` : for a coordinator on this machine

- `xain-participant --coordinator fleet.example.org:50051 --data patients.parquet --id ward-7`

- `xain-participant --data digits --partition iid --num-parts 4 --index 0` : the first quarter of a
  data set that scikit-learn brings along; start three more with --index 1, 2 and 3

- `xain-participant --config ward-7.toml --set training.seed=3` : settings from a file, one changed
"""


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"{PROGRAM} {version('xain-participant')}")
        raise typer.Exit


@app.command(help=_HELP, epilog=_EXAMPLES)
def _run(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="TOML file; without it, the defaults."),
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="[coordinator.host, coordinator.port]"),
    ] = None,
    participant_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="NAME",
            help="Under which we are known, also after a restart; by default the host's name and a "
            "random suffix. [participant.id]",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="CSV, Parquet, LIBSVM or .npz; or iris, wine, digits, diabetes, breast_cancer. "
            "[data.source]",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="By default the last. [data.target]"),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="TASK", help="classification or regression. [data.task]"),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="none, iid or dirichlet: which rows of a data set that all have are ours. "
            "[partition.kind]",
        ),
    ] = None,
    num_parts: Annotated[
        int | None, typer.Option(metavar="N", help="Into how many. [partition.num_parts]")
    ] = None,
    index: Annotated[
        int | None, typer.Option(metavar="I", help="Our part, from 0. [partition.index]")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any key of the file, e.g. data.scale=0.0625. Repeatable.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="And exit."),
    ] = False,
) -> None:
    host, port = (None, None) if coordinator is None else _split_address(coordinator)
    values: dict[str, Any] = {
        "coordinator.host": host,
        "coordinator.port": port,
        "participant.id": participant_id,
        "data.source": data,
        "data.target": target,
        "data.task": task,
        "partition.kind": partition,
        "partition.num_parts": num_parts,
        "partition.index": index,
    }
    for assignment in assignments or ():
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            # Without the text, which may be the value of a secret that lost its key.
            _fail("command line: --set takes KEY=VALUE, such as training.seed=3", EXIT_BAD_CONFIG)
        values[key.strip()] = value
    settings = _load_settings(config, values)

    from xain_messaging.process.logs import configure

    logging = settings.logging
    configure(logging.level, logging.use_console, logging.third_party)
    participant = _load_participant(settings)

    from xain_participant.agent import run

    raise typer.Exit(
        run(participant, settings.coordinator.address, settings.participant.id or None)
    )


def _split_address(address: str) -> tuple[str, str | None]:
    """HOST:PORT, HOST, or an IPv6 address, with brackets if a port follows."""
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]") or (":" in host and not host.endswith("]")):
        return address, None
    return host, port


def _load_settings(file: Path | None, values: dict[str, Any]) -> "ParticipantConfig":
    from xain_messaging.process.settings import ConfigError, load
    from xain_participant.config import ENV_PREFIX, ParticipantConfig

    try:
        settings = load(ParticipantConfig, file, ENV_PREFIX, values)
    except ConfigError as error:
        _fail(str(error), EXIT_BAD_CONFIG)
    if not settings.data.source:
        _fail(
            "data.source is not set; name a file with --data, or a data set that scikit-learn "
            "brings along, such as --data iris",
            EXIT_BAD_CONFIG,
        )
    return settings


def _load_participant(settings: "ParticipantConfig") -> "WorkloadParticipant":
    from xain_participant.workload_participant import WorkloadParticipant
    from xain_workloads.data import load
    from xain_workloads.errors import DataError
    from xain_workloads.partition import split_train_test

    data, seed = settings.data, settings.training.seed
    try:
        everything = load(
            data.source,
            target=data.target,
            task=data.task,
            scale=data.scale,
            num_features=data.num_features,
            zero_based=data.zero_based,
        )
    except DataError as error:
        _fail(str(error), EXIT_BAD_DATA)
    ours = settings.partition.partition().apply(everything)
    train, test = split_train_test(ours, data.test_fraction, seed)
    return WorkloadParticipant(train, seed, test)


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"{PROGRAM}: {message}", err=True)
    raise typer.Exit(status)


def main() -> int:
    """The entry point. Ends the process with the command's exit status."""
    app(prog_name=PROGRAM)
    return 0
