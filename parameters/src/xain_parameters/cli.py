"""The command line of the parameter server.

Commands import what they need, so that --help does not wait for it.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from xain_foundation.commands import (
    Config,
    fail,
    make_app,
    parse_assignments,
    run_app,
    set_option,
    split_host_port,
    version_option,
)
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG, EXIT_FAILED
from xain_foundation.logs import streams
from xain_foundation.net.sockets import raise_file_limit
from xain_foundation.settings.hints import hint

if TYPE_CHECKING:
    from pydantic import BaseModel

    from xain_foundation.security.tls import Certificates
    from xain_parameters.handlers import Handler
    from xain_parameters.scheduler.client import SchedulerCalls

PROGRAM = "xain-parameter-server"
POLL_S = 0.2
SILENT_S = 2.0
ANSWERS_WITHIN_S = 5.0
DEFAULT_PORT = 50052
# A pull of a few rows waits no longer than this for the thread that applies a large push; with
# Python's own 5 ms the slowest pulls take a fifth longer.
SWITCH_S = 0.0005

Model = TypeVar("Model", bound="BaseModel")

app = make_app()
jobs = make_app()

app.add_typer(jobs, name="jobs", help="Trainings that share the servers of a group.")

_HELP = """A parameter server: workers pull rows of tables, push gradients, and tick their clocks.

One `scheduler` knows which server has which key range; any number of `serve` hold them. Workers
connect to the scheduler: `xain-participant sparse`, or a program of your own with
`parameters.connect("HOST:50052", worker="w1")`.
"""

_SCHEDULER_HELP = """Decide which server has which key range; keep tables, clocks and checkpoints.

Killed and started again on its folder it goes on where it was; servers and workers wait for it.
Two schedulers never use one folder. With --replicas 1 the death of a server loses nothing; with
--log nothing that was acknowledged is lost even with the only server. With neither, all tables go
back to the last checkpoint, or to the beginning.

Settings come from --config, over it from the environment (XAIN_PARAMETERS_SCHEDULER__REPLICAS=1 is
scheduler.replicas), over that from flags.

Exit status: 0 when it was stopped, by Ctrl-C or SIGTERM; 1 if journal or port cannot be used; 2 if
a setting is wrong.
"""

_SCHEDULER_EXAMPLES = """**Examples**

- `xain-parameter-server scheduler` : on this machine only, without replicas

- `xain-parameter-server scheduler --listen 0.0.0.0:50052 --replicas 1 --checkpoint-interval 100
  --checkpoints s3://models/parameters`
"""

_SERVE_HELP = """Hold key ranges of a group, and answer its workers.

Ctrl-C or SIGTERM moves the ranges to other servers first, for as long as server.leave_s, and waits
for up to 5 seconds until the scheduler lists the server no more; a second one ends it at once. In a
group with a log, start it again under its name on its folder: it has its ranges again. Several
servers on one machine need a --name each.

Settings come from --config, over it from the environment (XAIN_PARAMETERS_SERVER__NAME=s1 is
server.name), over that from flags.

Exit status: 0 when it was stopped; 1 if it failed, the scheduler is not there or another server has
the name; 2 if a setting is wrong.
"""

_SERVE_EXAMPLES = """**Examples**

- `xain-parameter-server serve --name s1` : for a scheduler on this machine

- `xain-parameter-server serve --scheduler fleet.example.org:50052 --listen 0.0.0.0:50060
  --set server.advertised=node7 --name s1 --data /var/lib/parameters`
"""

_STATUS_HELP = """Show servers, key ranges, replicas, keys per second, clocks and checkpoints.

A scheduler within a coordinator answers too, at the port of its [parameters]; `xain-coordinator
status` shows the same.

Exit status: 0 if the scheduler answered; 1 if not; 2 if a setting is wrong.
"""

_CHECKPOINT_HELP = """Make a checkpoint of each job now, and wait until it is whole.

Exit status: 0 if there is one; 1 if not; 2 if a setting is wrong.
"""

_REMOVE_HELP = """Remove a job that is over, and its tables; its checkpoints stay.

Refused while workers are in its loop.

Exit status: 0 if it is removed; 1 if not; 2 if a setting is wrong.
"""

_ROLL_BACK_HELP = """Give up servers that have key ranges in their logs and do not come back.

The jobs of these ranges go back to their last checkpoints. Does nothing while all ranges have a
server.

Exit status: 0 if the scheduler answered; 1 if not; 2 if a setting is wrong.
"""

_EXPORT_HELP = """Write a table of a checkpoint to an .npz or .parquet file.

The file has `values` and the state of the update rule, in the shape of a dense array; of another
table also `keys`, and a row for each in the others. A .parquet file has a column for each, and
takes the extra `xain-parameters[parquet]`.

Exit status: 0 if it is written; 1 if the checkpoint cannot be read or has no such table; 2 if an
argument is wrong.
"""

_EXPORT_EXAMPLES = """**Examples**

- `xain-parameter-server export checkpoints/cut-1795390830-4 --table user --to user.npz`
"""

TlsFolder = Annotated[
    str | None,
    typer.Option("--tls", metavar="DIR", help="With ca.crt, tls.crt and tls.key. [tls.folder]"),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Reach other machines, and be reached, without certificates, in a network that you "
        "trust. "
        "[scheduler.insecure, server.insecure]",
    ),
]
AskedTlsFolder = Annotated[
    str | None,
    typer.Option(
        "--tls",
        metavar="DIR",
        help="With ca.crt, tls.crt and tls.key. XAIN_PARAMETERS_TLS__FOLDER may name it too.",
    ),
]
HandlerPath = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="Function that answers requests of workers, in an installed module or one in the "
        "working directory. [scheduler.handler, server.handler]",
    ),
]
Scheduler = Annotated[
    str,
    typer.Option(
        "--scheduler", metavar="HOST[:PORT]", help=f"At port {DEFAULT_PORT} unless one is given."
    ),
]
AskedInsecurely = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Ask a scheduler on another machine without certificates, unencrypted.",
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.1)]


@app.callback(help=_HELP)
def _program(version: Annotated[bool, version_option(PROGRAM, "xain-parameters")] = False) -> None:
    pass


@app.command("scheduler", help=_SCHEDULER_HELP, epilog=_SCHEDULER_EXAMPLES)
def _scheduler(
    config: Config = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"Listen here, by default 127.0.0.1:{DEFAULT_PORT}. [scheduler.listen]",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder of the journal, by default parameters. [scheduler.data]"
        ),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="R", help="Backups of each key range, by default 0. [scheduler.replicas]"
        ),
    ] = None,
    log: Annotated[
        bool, typer.Option("--log", help="Servers write pushes to disk. [scheduler.log]")
    ] = False,
    checkpoint_interval: Annotated[
        str | None,
        typer.Option(
            metavar="CLOCKS",
            help="A checkpoint every so many clocks, by default 0: on demand. "
            "[scheduler.checkpoint_interval]",
        ),
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Folder that all servers see, or s3:// URL. [scheduler.checkpoints]",
        ),
    ] = None,
    handler: HandlerPath = None,
    tls: TlsFolder = None,
    insecure: Insecure = False,
    assignments: Annotated[list[str] | None, set_option("scheduler.num_ranges=12")] = None,
) -> None:
    values: dict[str, Any] = {
        "scheduler.listen": listen,
        "scheduler.data": data,
        "scheduler.replicas": replicas,
        "scheduler.log": True if log else None,
        "scheduler.checkpoint_interval": checkpoint_interval,
        "scheduler.checkpoints": checkpoints,
        "scheduler.handler": handler,
        "tls.folder": tls,
        "scheduler.insecure": True if insecure else None,
        **parse_assignments(PROGRAM, assignments, "scheduler.num_ranges=12"),
    }
    from xain_foundation.security.certificate_watch import CertificateWatch
    from xain_parameters.config import SchedulerConfig
    from xain_parameters.scheduler.journal import Journal
    from xain_parameters.scheduler.service import SchedulerServer

    settings = _load_settings(SchedulerConfig, config, values)
    ours = settings.scheduler
    address = _parse_address(ours.listen)
    answer = _load_handler("scheduler.handler", ours.handler)
    certificates = _load_certificates(settings.tls.certificates)
    streams.unblock()
    settings.logging.configure()
    raise_file_limit()
    stopped = _handle_signals()
    try:
        journal = Journal(ours.data / "scheduler.db")
        server = SchedulerServer(
            journal,
            ours.settings(),
            address,
            certificates,
            insecure=ours.insecure,
            handler=answer,
            worker_lease_s=ours.worker_lease_s,
        )
        with server:
            typer.echo(f"{PROGRAM}: serving on {server.target}", err=True)
            watch = CertificateWatch(certificates)
            # Python would not run the handler of a signal that comes just before an untimed wait.
            while not stopped.is_set():
                watch.look()
                time.sleep(POLL_S)
    except OSError as error:
        fail(PROGRAM, str(error), EXIT_FAILED)


@app.command("serve", help=_SERVE_HELP, epilog=_SERVE_EXAMPLES)
def _serve(
    config: Config = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help=f"The scheduler, by default 127.0.0.1:{DEFAULT_PORT}. [server.scheduler]",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Listen here, by default 127.0.0.1 and any free port. [server.listen]",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The log is in DIR/NAME; DIR is by default parameters. [server.data]",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of this server, also after a restart; by default the host's. [server.name]",
        ),
    ] = None,
    handler: HandlerPath = None,
    tls: TlsFolder = None,
    insecure: Insecure = False,
    assignments: Annotated[list[str] | None, set_option("server.leave_s=60")] = None,
) -> None:
    values: dict[str, Any] = {
        "server.scheduler": scheduler,
        "server.listen": listen,
        "server.data": data,
        "server.name": name,
        "server.handler": handler,
        "tls.folder": tls,
        "server.insecure": True if insecure else None,
        **parse_assignments(PROGRAM, assignments, "server.leave_s=60"),
    }
    import socket

    from xain_foundation.security.certificate_watch import CertificateWatch
    from xain_parameters.config import ServerConfig
    from xain_parameters.node.server import ParameterServer

    settings = _load_settings(ServerConfig, config, values)
    ours = settings.server
    at, address = _parse_address(ours.scheduler), _parse_address(ours.listen)
    if not ours.advertised and address.rpartition(":")[0] in ("0.0.0.0", "[::]", "::"):
        text = f"others cannot connect to {address}: " + hint(
            "xain-parameter-server", 'server.advertised = "HOST"'
        )
        fail(PROGRAM, text, EXIT_BAD_CONFIG)
    answer = _load_handler("server.handler", ours.handler)
    certificates = _load_certificates(settings.tls.certificates)
    streams.unblock()
    settings.logging.configure()
    raise_file_limit()
    sys.setswitchinterval(SWITCH_S)
    called = ours.name or socket.gethostname().split(".")[0]
    if Path(called).name != called:
        fail(PROGRAM, f"server.name {called!r} is no name of a folder", EXIT_BAD_CONFIG)
    # Until the server has joined, a signal interrupts the wait.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    waits = threading.Timer(
        SILENT_S, typer.echo, (f"{PROGRAM}: waits for the scheduler at {at}",), {"err": True}
    )
    waits.start()
    try:
        server = ParameterServer(
            at,
            called,
            address,
            advertised=ours.advertised or None,
            folder=ours.data / called,
            tls=certificates,
            insecure=ours.insecure,
            handler=answer,
        )
        waits.cancel()
        with server:
            stopped = _handle_signals()
            typer.echo(f"{PROGRAM}: {called} serving on {server.address}", err=True)
            watch = CertificateWatch(certificates)
            while not stopped.is_set() and not server.wait(POLL_S):
                watch.look()
            stopped.clear()
            ended = threading.Thread(target=server.leave, args=(ours.leave_s,), daemon=True)
            ended.start()
            while ended.is_alive() and not stopped.is_set():
                ended.join(POLL_S)
    except KeyboardInterrupt:
        return
    except Exception as error:  # log, network or scheduler: one line says which
        fail(PROGRAM, str(error), EXIT_FAILED)
    finally:
        waits.cancel()


@app.command("status", help=_STATUS_HELP)
def _status(
    scheduler: Scheduler = "127.0.0.1",
    timeout: Timeout = 5.0,
    tls: AskedTlsFolder = None,
    insecure: AskedInsecurely = False,
    as_json: Annotated[bool, typer.Option("--json", help="All, as one JSON object.")] = False,
) -> None:
    from xain_parameters.scheduler import reports

    status = _ask_scheduler(scheduler, tls, insecure, lambda calls: calls.status(timeout))
    typer.echo(reports.as_json(status) if as_json else "\n".join(reports.lines_of(status)))


@app.command("checkpoint", help=_CHECKPOINT_HELP)
def _checkpoint(
    scheduler: Scheduler = "127.0.0.1",
    timeout: Timeout = 600.0,
    tls: AskedTlsFolder = None,
    insecure: AskedInsecurely = False,
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="NAME", help="Make a checkpoint of this job only."),
    ] = None,
) -> None:
    def ask(calls: "SchedulerCalls") -> str:
        # A checkpoint may take long; that nobody is there is told at once.
        status = calls.status(min(timeout, ANSWERS_WITHIN_S))
        names = [name for name, each in status.jobs.items() if each.view.tables]
        if job is not None or len(names) < 2:
            return f"checkpoint {calls.checkpoint(timeout, job)}"
        made = ((name, calls.checkpoint(timeout, name)) for name in names)
        return "\n".join(f"job {shown(name)}: checkpoint {number}" for name, number in made)

    from xain_parameters.scheduler.reports import shown

    typer.echo(_ask_scheduler(scheduler, tls, insecure, ask))


@jobs.command("list", help="List the jobs of a group, one a line, with the ranks of workers.")
def _jobs(
    scheduler: Scheduler = "127.0.0.1",
    timeout: Timeout = 5.0,
    tls: AskedTlsFolder = None,
    insecure: AskedInsecurely = False,
) -> None:
    from xain_parameters.scheduler.reports import job_line

    status = _ask_scheduler(scheduler, tls, insecure, lambda calls: calls.status(timeout))
    for name, job in status.jobs.items():
        typer.echo(job_line(name, job))


@jobs.command("remove", help=_REMOVE_HELP)
def _remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `jobs list` prints it.")],
    scheduler: Scheduler = "127.0.0.1",
    timeout: Timeout = 5.0,
    tls: AskedTlsFolder = None,
    insecure: AskedInsecurely = False,
) -> None:
    from xain_parameters.scheduler.reports import shown

    job = "" if name == shown("") else name
    _ask_scheduler(scheduler, tls, insecure, lambda calls: calls.remove_job(job, timeout))


@app.command("roll-back", help=_ROLL_BACK_HELP)
def _roll_back(
    scheduler: Scheduler = "127.0.0.1",
    timeout: Timeout = 5.0,
    tls: AskedTlsFolder = None,
    insecure: AskedInsecurely = False,
) -> None:
    _ask_scheduler(scheduler, tls, insecure, lambda calls: calls.roll_back(timeout))


@app.command("export", help=_EXPORT_HELP, epilog=_EXPORT_EXAMPLES)
def _export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Its folder, or s3:// URL.")
    ],
    table: Annotated[str, typer.Option("--table", metavar="NAME")],
    to: Annotated[
        Path, typer.Option("--to", metavar="FILE", help="Its name ends in .npz or .parquet.")
    ],
) -> None:
    from xain_parameters.export import SUFFIXES, export

    if to.suffix not in SUFFIXES:
        fail(PROGRAM, f"{str(to)!r} ends neither in {' nor in '.join(SUFFIXES)}", EXIT_BAD_CONFIG)
    try:
        num_values = export(checkpoint, table, to)
    except Exception as error:  # a file system may raise anything
        fail(PROGRAM, str(error), EXIT_FAILED)
    typer.echo(f"{to}: {num_values} values")


def _load_settings(model: type[Model], file: Path | None, values: dict[str, Any]) -> Model:
    from xain_foundation.settings.settings import ConfigError, load
    from xain_parameters.config import ENV_PREFIX

    try:
        return load(model, file, ENV_PREFIX, values)
    except ConfigError as error:
        fail(PROGRAM, str(error), EXIT_BAD_CONFIG)


def _handle_signals() -> threading.Event:
    """Handle SIGTERM and SIGINT; returns the event that they set."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    return stopped


def _load_handler(key: str, path: str) -> "Handler":
    """Load the handler at an import path; for "" one that answers nothing."""
    from xain_parameters.handlers import answer_nothing, load_handler

    if not path:
        return answer_nothing
    sys.path.append("")  # the working directory, behind what is installed
    try:
        return load_handler(path)
    except ValueError as error:
        fail(PROGRAM, f"{key}: {error}", EXIT_BAD_CONFIG)


def _load_certificates(make: "Callable[[], Certificates | None]") -> "Certificates | None":
    from xain_foundation.security.tls import InvalidCertificates
    from xain_foundation.settings.settings import ConfigError

    try:
        return make()
    except InvalidCertificates as error:
        fail(PROGRAM, f"tls.folder: {error}", EXIT_BAD_CONFIG)
    except ConfigError as error:
        fail(PROGRAM, str(error), EXIT_BAD_CONFIG)


def _ask_scheduler(
    scheduler: str, tls: str | None, insecure: bool, ask: "Callable[[SchedulerCalls], Any]"
) -> Any:
    """Connect to a scheduler and return what `ask` does; end the program after an error."""
    from xain_foundation.net.channels import require_private_way
    from xain_parameters.config import certificates_of
    from xain_parameters.errors import ParameterError
    from xain_parameters.scheduler.client import SchedulerCalls

    certificates = _load_certificates(lambda: certificates_of(tls))
    address = _parse_address(scheduler)
    remedy = hint("xain-parameter-server", "--tls FOLDER") + ", or --insecure"
    try:
        require_private_way(address, certificates, insecure=insecure, remedy=remedy)
    except ValueError as error:
        fail(PROGRAM, f"--scheduler: {error}", EXIT_BAD_CONFIG)
    with SchedulerCalls(address, certificates, insecure=insecure) as calls:
        try:
            return ask(calls)
        except ParameterError as error:
            fail(PROGRAM, str(error), EXIT_FAILED)


def _parse_address(text: str) -> str:
    host, port = split_host_port(text)
    number = str(DEFAULT_PORT) if port is None else port
    if not host or host.isdecimal() or not number.isdecimal() or int(number) > 65535:
        fail(PROGRAM, f"{text!r} is no address; write HOST:PORT", EXIT_BAD_CONFIG)
    return f"{host}:{number}"


def main() -> int:
    """The entry point. Returns the exit status of the process."""
    return run_app(app, PROGRAM)
