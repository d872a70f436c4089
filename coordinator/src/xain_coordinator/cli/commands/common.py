"""Options that commands have in common, the settings that they give, and errors as one line."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from xain_foundation.commands import (
    DEFAULT_PORT,
    fail,
    parse_assignments,
    set_option,
    split_host_port,
    why_failed,
)
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG, EXIT_FAILED, CommandFailed
from xain_foundation.settings.hints import hint

if TYPE_CHECKING:
    from pydantic import BaseModel

    from xain_coordinator.config.coordinator import CoordinatorConfig
    from xain_foundation.settings.settings import Resolved

Settings = TypeVar("Settings", bound="BaseModel")

PROGRAM = "xain-coordinator"
EXAMPLE = "rounds.epochs=3"

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


def with_port(address: str | None) -> str | None:
    """The address with the default port, if it names none; None for None."""
    from xain_foundation.settings.fields import join_host_port

    host, port = split_host_port(address or "")
    return address if not host or port else join_host_port(host.strip("[]"), DEFAULT_PORT)


Tls = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        metavar="DIR",
        help="Folder with the operator's own ca.crt, tls.crt and tls.key, as `xain-participant "
        "join` writes it for a token of the role operator.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST[:PORT]",
        help="Ask the coordinator that runs there, instead of reading files.",
        callback=with_port,
    ),
]


AsCsv = Annotated[bool, typer.Option("--csv", help="A line for each figure, as CSV.")]
AsJson = Annotated[bool, typer.Option("--json", help="All that is known, as JSON.")]


def given(
    data_dir: Path | None,
    assignments: list[str] | None,
    host: str | None = None,
    port: str | None = None,
    workload: str | None = None,
    rounds: str | None = None,
    passes: str | None = None,
    min_participants: str | None = None,
    *,
    insecure: bool = False,
) -> dict[str, Any]:
    """Settings that flags give, by dotted key; None for a flag that was not given."""
    values: dict[str, Any] = {
        "server.host": host,
        "server.port": port,
        "workload.name": workload,
        "rounds.rounds": rounds,
        "rounds.passes": passes,
        "rounds.min_participants": min_participants,
        "server.insecure": insecure or None,
    }
    if data_dir is not None:
        values["storage.path"] = str(data_dir / "weights")
        values["journal.path"] = str(data_dir / "journal.sqlite")
        values["metrics.path"] = str(data_dir / "metrics.jsonl")
        values["parameters.path"] = str(data_dir / "parameters")
    return values | parse_assignments(PROGRAM, assignments, EXAMPLE)


def settings_of(
    config: Path | None, data_dir: Path | None, assignments: list[str] | None
) -> "CoordinatorConfig":
    """The settings in force, without where each comes from. Ends the process with status 2 if one
    is wrong."""
    return resolve(config, given(data_dir, assignments)).config


def resolve(config: Path | None, values: Mapping[str, Any]) -> "Resolved[CoordinatorConfig]":
    """The settings in force, with the origin of each. values: as of given(). Ends the process with
    status 2 if one is wrong."""
    from xain_coordinator.config.coordinator import ENV_PREFIX, CoordinatorConfig

    return loaded(CoordinatorConfig, config, ENV_PREFIX, values)


def loaded(
    model: type[Settings], file: Path | None, prefix: str, values: Mapping[str, Any]
) -> "Resolved[Settings]":
    """The settings of a command, with the origin of each. model: their class. prefix: of
    environment variables. Ends the process with status 2 if one is wrong."""
    from xain_foundation.settings.settings import ConfigError, resolve

    try:
        return resolve(model, file, prefix, values)
    except ConfigError as error:
        fail(PROGRAM, str(error), EXIT_BAD_CONFIG)


@contextmanager
def explained(
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


def running(config: "CoordinatorConfig", address: str | None) -> str | None:
    """The address at which a coordinator is to be asked: the given one, or the socket of the one
    that runs with these settings. None if none does, and files can be read."""
    if address is not None:
        return address
    from xain_coordinator.server.operators_socket import socket_that_answers

    running = socket_that_answers(config.journal.path)
    return None if running is None else f"unix:{running}"
