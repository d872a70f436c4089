"""Commands that are typed: those of the coordinator in this process, others in their own."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from xain_coordinator.cli import main as cli

# Wide and without colours, so that lines are whole wherever the test runs.
TERMINAL = {"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}


async def called(*words: str, cwd: Path | None = None, **variables: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a program of Python. variables: of its
    environment, beside ours."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def command(*words: str) -> tuple[int, str, str]:
    """Run a command of the coordinator in this process: (exit status, standard output, standard
    error)."""
    result = await asyncio.to_thread(CliRunner().invoke, cli.app, words)
    return result.exit_code, result.stdout, result.stderr


async def printed(*words: str) -> str:
    """Standard output of a command of the coordinator that ends well, in wide lines."""
    result = await asyncio.to_thread(CliRunner(env=TERMINAL).invoke, cli.app, words)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


async def status(port: int, *flags: str) -> str:
    """The output of `xain-coordinator status` about a coordinator on this machine."""
    return await printed("status", f"--address=127.0.0.1:{port}", *flags)


async def status_json(port: int) -> dict[str, Any]:
    return json.loads(await status(port, "--json"))
