"""The command line of `xain-coordinator launch`."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from xain_coordinator.cli.launch import containers, plan
from xain_coordinator.cli.launch.actors import ActorBackend
from xain_coordinator.cli.launch.interrupts import Interrupts
from xain_coordinator.cli.launch.logs import LogView
from xain_coordinator.cli.launch.processes import ProcessBackend
from xain_coordinator.cli.launch.rounds import Request, RoundsLaunch
from xain_coordinator.cli.launch.supervisor import Backend, Launch, Launcher
from xain_coordinator.config.coordinator import ENV_PREFIX, CoordinatorConfig
from xain_coordinator.config.sections.launch import LaunchSettings
from xain_foundation.commands import (
    Config,
    fail,
    make_app,
    parse_assignments,
    run_app,
    set_option,
)
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_SIGNAL, CommandFailed
from xain_foundation.logs import streams
from xain_foundation.settings.hints import hint
from xain_foundation.settings.settings import ConfigError, resolve
from xain_foundation.wheels import pip_install

PROGRAM = "xain-coordinator launch"
EXAMPLE = "rounds.epochs=3"
WORKER_EXAMPLE = "training.threads=2"
BACKENDS = ("process", "docker", "ray")

app = make_app()

_HELP = """Start a coordinator and workers on this machine, train, and stop them again.

With `--workload sparse` these are a parameter server and its workers: DATA is libsvm files, which
the workers divide, and the model is written to model.npz.

A worker is a participant, in a process or a container of its own, here or on a node of a Ray
cluster. DATA is either a folder with a folder for each worker, NAME/X_train.csv and
NAME/y_train.csv, or one data set that the workers divide at random: a file, or one that
scikit-learn brings along.

The launch waits until all workers have joined, shows their logs, starts killed workers and a killed
coordinator again, and tells at the end what was measured of the last model. Models, journal and
logs stay in xain-launch/NAME, or in the folder of --work. At the end, after Ctrl-C and after
SIGTERM everything is stopped and removed. Processes, also those on Ray, end with a killed launcher;
its containers are stopped by the next launch of the same name, or with --clean NAME.

Settings come from --config, over it from the environment, over that from flags. The section
[launch] has name, workers, host, ports, network, CPU shares, Ray's address, CPUs and GPUs; all
other sections are those of any coordinator, and for `sparse` [scheduler] and [server] of
`xain-parameter-server`. The rule that the workload needs is set unless you set it.

Exit status: 0 at the end of the training, and with --serve after Ctrl-C; 1 if it could not come to
its end; 2 if a setting is wrong; 4 if the model is no better than always predicting the commonest
class or the mean; 5 if no worker of sparse had a row; 130 after Ctrl-C, 143 after SIGTERM.
"""

_EXAMPLES = """**Examples**

- `xain-coordinator launch --workload sgd --data digits` : three workers divide a bundled data set

- `xain-coordinator launch --workload bagging --data wards --with process` : a worker for each
  folder of `wards`

- `xain-coordinator launch --workers 2 --workload sgd --data patients.csv --with docker` : in
  containers; needs `pip install docker` and the images

- `xain-coordinator launch --workload sgd --data digits --with ray --set launch.num_gpus=0.5` : on
  the nodes of a Ray cluster; needs the extra `ray`

- `xain-coordinator launch --workload sgd --data digits --serve` : stay for requests over HTTP

- `xain-coordinator launch --workload sgd --data digits --set workload.options.mode=gradient
  --set aggregation.options.eta0=0.5 --passes 100` : any key of a coordinator

- `xain-coordinator launch --workload sparse --servers 2 --workers 4 --data clicks/train
  --test clicks/test --worker-set epochs=3` : a parameter server

- `xain-coordinator launch --clean study` : stop containers that a killed launch left behind
"""


@app.command(help=_HELP, epilog=_EXAMPLES)
def _launch(
    data: Annotated[
        str | None, typer.Option(metavar="DIR|FILE|SET|URL", help="Data of the workers.")
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What is trained; or sparse. [workload.name]"),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help=f"How many; by default a worker for each folder, or {plan.DEFAULT_WORKERS} that "
            "divide one data set. [launch.workers]",
        ),
    ] = None,
    servers: Annotated[
        str | None,
        typer.Option(metavar="N", help="Parameter servers of sparse. [launch.servers]"),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(metavar="R", help="Backups of each key of sparse. [scheduler.replicas]"),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option(metavar="PATH|URL", help="Rows to score the model of sparse with."),
    ] = None,
    with_: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="process|docker|ray",
            help="Processes, containers, or workers on a Ray cluster.",
        ),
    ] = "process",
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The launch's name; launches with two names run side by side. [launch.name]",
        ),
    ] = None,
    rounds: Annotated[
        str | None,
        typer.Option(metavar="N", help="Rounds to train, instead of passes. [rounds.rounds]"),
    ] = None,
    passes: Annotated[
        str | None, typer.Option(metavar="N", help="Passes over all rows. [rounds.passes]")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Predict it; by default the last column of a file."),
    ] = None,
    config: Config = None,
    work: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep models, journal and logs here."),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Train when asked over HTTP, and stay until Ctrl-C."),
    ] = False,
    assignments: Annotated[list[str] | None, set_option(EXAMPLE)] = None,
    worker_assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--worker-set",
            metavar="KEY=VALUE",
            help=f"Any key of a participant's file, for all workers, e.g. {WORKER_EXAMPLE}. "
            "Repeatable.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Leave the logs in their files.")] = False,
    clean: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Stop the containers of the launch NAME; no other flags."
        ),
    ] = None,
) -> None:
    """The command `launch`: run a coordinator or parameter server with its workers to the end."""
    try:
        if clean is not None:
            _clean(clean)
            return
        if with_ not in BACKENDS:
            _refuse(f"--with takes {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}")
        if data is None:
            _refuse(
                "the workers have no data; "
                + hint("xain-coordinator", "--data digits")
                + ", for example"
            )
        values: dict[str, object] = {"launch.name": name, "launch.workers": workers}
        own = parse_assignments(PROGRAM, assignments, EXAMPLE)
        of_workers = parse_assignments(
            PROGRAM, worker_assignments, WORKER_EXAMPLE, flag="--worker-set"
        )
        if workload == plan.SPARSE:
            if with_ == "ray":
                _refuse("--with ray is not for --workload sparse")
            _refuse_flags(
                workload,
                {"--rounds": rounds, "--passes": passes, "--target": target, "--serve": serve},
            )
            values |= {"launch.servers": servers, "scheduler.replicas": replicas, **own}
            status = _launch_sparse(
                config, (data, test or ""), values, of_workers, work, with_, is_quiet=quiet
            )
        else:
            _refuse_flags(workload, {"--servers": servers, "--replicas": replicas, "--test": test})
            values |= {
                "workload.name": workload,
                "rounds.rounds": rounds,
                "rounds.passes": passes,
                **own,
            }
            settings, found, values = _resolve(config, data, values, with_, serve=serve)
            request = Request(
                found,
                work or _work_of(settings.launch),
                config,
                (settings.launch.ports[0], settings.launch.ports[1] or settings.http.port or 0),
                values,
                {"data.target": target, **of_workers},
                settings.workload,
                os.environ,
                serve or settings.http.is_on,
                settings.server.insecure,
            )
            status = run(
                with_,
                settings.launch,
                settings.workload.name,
                request.names,
                partial(RoundsLaunch, request),
                is_quiet=quiet,
                is_serving=request.serve,
                is_insecure=request.is_insecure,
            )
    except CommandFailed as error:
        fail(PROGRAM, str(error), EXIT_FAILED)
    raise typer.Exit(status)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    return run_app(app, PROGRAM, arguments)


def _refuse(message: str) -> NoReturn:
    """Print what is wrong with the command line, and end the process with status 2."""
    fail(PROGRAM, f"command line: {message}", EXIT_BAD_CONFIG)


def _refuse_flags(workload: str | None, flags: Mapping[str, object]) -> None:
    """End the process with an error if a flag was given that is for another workload."""
    for flag, value in flags.items():
        if value:
            _refuse(f"{flag} is not for --workload {workload or 'NAME'}")


def _work_of(settings: LaunchSettings) -> Path:
    """The work folder of a launch that was given none."""
    return Path("xain-launch") / settings.name


def _launch_sparse(
    config: Path | None,
    data: tuple[str, str],
    values: Mapping[str, object],
    of_workers: Mapping[str, str],
    work: Path | None,
    kind: str,
    *,
    is_quiet: bool,
) -> int:
    """Launch a parameter server and its workers. Returns the exit status.

    data: rows to train on, and rows to score the model with or "". of_workers: settings of the
        workers. kind: of the backend. Raises CommandFailed.
    """
    if find_spec("xain_parameters") is None:
        raise CommandFailed(
            "--workload sparse needs xain-parameters: "
            + pip_install("xain-coordinator", "parameters")
        )
    from xain_coordinator.cli.launch import sparse
    from xain_parameters import config as parameters

    def weakest(given: Mapping[str, object]) -> dict[str, object]:
        return plan.chimera_defaults(os.environ)

    try:
        resolved = resolve(sparse.SparseConfig, config, parameters.ENV_PREFIX, values, weakest)
        settings = resolved.config.launch
        request = sparse.plan(resolved, *data, work or _work_of(settings), of_workers)
    except (ConfigError, CommandFailed) as error:
        fail(PROGRAM, str(error), EXIT_BAD_CONFIG)
    make = partial(sparse.SparseLaunch, request)
    return run(kind, settings, plan.SPARSE, request.names, make, is_quiet=is_quiet)


def _resolve(
    config: Path | None, data: str, values: Mapping[str, object], kind: str, *, serve: bool
) -> tuple[CoordinatorConfig, tuple[plan.Worker, ...], dict[str, object]]:
    """The settings in force, the workers, and the settings that the coordinator's flags give. A
    wrong one ends the process with status 2."""
    needed: dict[str, object] = {}

    def weakest(given: Mapping[str, object]) -> dict[str, object]:
        """Settings that count where nothing else sets them."""
        # The coordinator's image has no scikit-learn: participants are asked for predictions.
        is_asking = kind == "docker" and (serve or given.get("http.port") is not None)
        needed.update(plan.workload_defaults(given, can_publish=not is_asking))
        return {**plan.chimera_defaults(os.environ), **needed}

    try:
        first = resolve(CoordinatorConfig, config, ENV_PREFIX, values, weakest)
        if not first.config.workload.name:
            _refuse("there is nothing to train; " + hint("xain-coordinator", "--workload sgd"))
        mode = first.config.workload.options.get("mode")
        workers = plan.find_workers(data, first.config.launch, divided=mode != "pipeline")
        given = {".".join(key) for key in first.given}
        is_on = serve or first.config.http.is_on
        is_asked = is_on and first.config.rounds.start != "participants"
        names = [worker.name for worker in workers]
        fleet = plan.fleet_defaults(names, first.config.launch, serve=is_asked)
        added = {key: value for key, value in fleet.items() if key not in given}
        last = resolve(CoordinatorConfig, config, ENV_PREFIX, {**added, **values}, weakest)
    except (ConfigError, CommandFailed) as error:
        fail(PROGRAM, str(error), EXIT_BAD_CONFIG)
    # The coordinator itself reads the file and the environment.
    own = {key: value for key, value in values.items() if not key.startswith("launch.")}
    return last.config, workers, {**needed, **added, **own}


def _say(text: str) -> None:
    """Print a line of the launcher's own."""
    typer.echo(f"launch: {text}")


def run(
    kind: str,
    settings: LaunchSettings,
    workload: str,
    names: Sequence[str],
    make: Callable[[Launcher], Launch],
    *,
    is_quiet: bool,
    is_serving: bool = False,
    is_insecure: bool = False,
    say: Callable[[str], None] = _say,
) -> int:
    """Run a launch as processes, containers or Ray actors to its end or a signal, and stop its
    programs. Returns the exit status. names: of its programs. is_serving: Ctrl-C is the usual end.
    is_insecure: Ray's workers may call in the clear. Raises CommandFailed."""
    streams.unblock()
    interrupts = Interrupts()
    colors = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    view = LogView(names, colors=colors, is_quiet=is_quiet)
    backend: Backend
    match kind:
        case "process":
            backend = ProcessBackend(settings.host)
        case "ray":
            backend = ActorBackend(settings, is_insecure=is_insecure)
        case _:
            backend = containers.DockerBackend(settings, workload)
            _stop_leftovers(settings.name)
    restarts = settings.max_restarts
    launch = make(Launcher(backend, view, say, interrupts.pause, max_restarts=restarts))
    with interrupts.installed():
        try:
            return launch.follow()
        except KeyboardInterrupt:
            say("stopping ...")
            is_usual_end = is_serving and interrupts.number == signal.SIGINT
            return 0 if is_usual_end else EXIT_SIGNAL + interrupts.number
        finally:
            launch.stop()


# --- what an earlier launcher left behind ---------------------------------------------------------


def _stop_leftovers(name: str) -> None:
    """Stop containers of a killed launcher. Raises CommandFailed if the launch is running."""
    is_live = containers.is_live(name)
    if is_live is None:
        return
    if is_live:
        raise CommandFailed(
            f"a launch called {name} is running; end it with Ctrl-C there or with {PROGRAM} "
            f"--clean {name}, or give this one another --name"
        )
    _say(
        f"an earlier launch called {name} was killed; stopping {', '.join(containers.clean(name))}"
    )


def _clean(name: str) -> None:
    """Stop containers of a launch, whether or not its launcher is alive."""
    stopped = ""
    with suppress(CommandFailed):  # without an engine there are no containers
        stopped = ", ".join(containers.clean(name))
    _say(f"stopped {stopped}" if stopped else f"nothing is there of a launch called {name}")
