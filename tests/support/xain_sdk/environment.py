"""The environment that XAIN's SDK runs in, made once for a checkout."""

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).with_name("requirements.lock")
FOLDER = Path(__file__).parents[3] / ".venv" / "xain-sdk"
INSTALL_S = 500.0


class NotInstalled(Exception):
    """The packages could not be had. The message says why."""


def sdk_python() -> Path:
    """The interpreter of the environment.

    Several test runs may ask at once: one makes it, the others wait. Raises NotInstalled.
    """
    python = FOLDER / "bin" / "python"
    wanted = f"{sys.version}\n{hashlib.sha256(LOCK.read_bytes()).hexdigest()}\n"
    ready = FOLDER / "ready"
    FOLDER.parent.mkdir(exist_ok=True)
    with FOLDER.with_suffix(".busy").open("w") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        if not ready.exists() or ready.read_text() != wanted:
            _run("-m", "venv", "--clear", "--without-pip", str(FOLDER))
            _run(
                *("-m", "pip", f"--python={python}", "install", "--quiet"),
                *("--require-hashes", "--no-deps", "--only-binary=:all:", f"--requirement={LOCK}"),
            )
            ready.write_text(wanted)
    return python


def _run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=INSTALL_S
    )
    if done.returncode != 0:
        raise NotInstalled(f"XAIN's SDK cannot be installed:\n{done.stderr.strip()[-1000:]}")
