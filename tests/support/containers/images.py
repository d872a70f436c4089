"""The images of this tree, made once; by itself this makes them all, before a test asks for one:

    python3 tests/support/containers/images.py

A second one waits for the first, and finds the images made. Needs a Docker engine, and of Python
the standard library alone.
"""

import fcntl
import functools
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]
COORDINATOR = "xain-coordinator:0.1.0"
PARTICIPANT = "xain-participant-sgd:0.1.0"
BAGGING = "xain-participant-bagging:0.1.0"
NEURAL = "xain-participant-neural:0.1.0"
SPARSE = "xain-participant-sparse:0.1.0"
BASE = "python:3.11-slim"

# Build argument of the image `neural`. Without it the image has no PyTorch, which takes minutes to
# install, and the tests mount that of their own environment.
TORCH_OPTIONS = "XAIN_TORCH_OPTIONS"

PATIENCE_S = 180.0
BUILD_S = 2400.0


def run(
    *command: object, timeout: float = PATIENCE_S, env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """(exit status, output, errors)"""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **_builder(), **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    return done.returncode, done.stdout, done.stderr


@functools.cache
def _builder() -> Mapping[str, str]:
    """The classic builder where the client has no other."""
    found = subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False)
    return {} if found.returncode == 0 else {"DOCKER_BUILDKIT": "0"}


def docker(*arguments: object, timeout: float = PATIENCE_S) -> str:
    """The output of a docker command. Raises AssertionError with its errors if it fails."""
    status, output, errors = run("docker", *arguments, timeout=timeout)
    assert status == 0, f"docker {' '.join(map(str, arguments))}: {errors or output}"
    return output.strip()


@functools.cache
def build(image: str) -> None:
    proxies = [name for name in os.environ if re.fullmatch("(https?|no)_proxy", name, re.I)]
    words = [f"--build-arg={name}" for name in proxies]
    if image == COORDINATOR:
        words += ["--file=coordinator/Dockerfile"]
    else:
        target = image.partition(":")[0].rpartition("-")[2]
        words += ["--file=participant/Dockerfile", f"--target={target}"]
    if image == NEURAL:
        words.append(f"--build-arg=TORCH_OPTIONS={os.environ.get(TORCH_OPTIONS, 'none')}")
    # The host's network, where a bridge may reach no package index.
    docker("build", "--network=host", f"--tag={image}", *words, ".", timeout=BUILD_S)


if __name__ == "__main__":
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([Path(__file__).with_name("stand_ins.sh"), "--base"], check=True)
        for each in (COORDINATOR, PARTICIPANT, BAGGING, NEURAL, SPARSE):
            build(each)
