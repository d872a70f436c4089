"""The command line: without a command it runs a coordinator.

What a command needs is imported within it, so that --help does not wait for numpy and gRPC.
"""

import sys
from typing import Annotated

import typer

from xain_coordinator.cli.access import certificates, tokens
from xain_coordinator.cli.access import commands as access
from xain_coordinator.cli.commands import results, running
from xain_coordinator.cli.commands.common import (
    PROGRAM,
    Assignments,
    DataDir,
    Host,
    Insecure,
    MinParticipants,
    Passes,
    Port,
    Rounds,
    WorkloadName,
    given,
    resolve,
)
from xain_foundation.commands import (
    Config,
    fail,
    make_app,
    refuse_flags_before,
    run_app,
    version_option,
)
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG

app = make_app()
app.add_typer(running.app)
app.add_typer(results.app)

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
    """Run a coordinator with these flags, unless a command follows."""
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
    if context.invoked_subcommand is not None:
        flags = (config, from_model, new_session, resume, *values.values())
        refuse_flags_before(PROGRAM, context.invoked_subcommand, flags)
        return
    if resume and new_session:
        message = "command line: --resume goes on with a session, and --new-session does not"
        fail(PROGRAM, f"{message}; give one of them", EXIT_BAD_CONFIG)
    resolved = resolve(config, values)

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


app.add_typer(certificates.app, name="certs")
app.add_typer(tokens.app, name="tokens")
app.add_typer(access.audit, name="audit")
app.add_typer(access.participants, name="participants")
app.add_typer(access.session, name="session")


def main() -> int:
    """The entry point. Returns the exit status of the process."""
    return run_app(app, PROGRAM)
