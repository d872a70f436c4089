"""The Docker engine, our images on it, and containers that do not outlive a test."""

import contextlib
import functools
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.containers import images
from support.containers.images import (
    BAGGING,
    BASE,
    BUILD_S,
    COORDINATOR,
    NEURAL,
    PARTICIPANT,
    PATIENCE_S,
    ROOT,
    SPARSE,
    TORCH_OPTIONS,
    docker,
    run,
)

__all__ = [
    "BAGGING",
    "COORDINATOR",
    "NEURAL",
    "PARTICIPANT",
    "ROOT",
    "SPARSE",
    "TORCH_OPTIONS",
    "docker",
    "run",
]

# Where this is set a missing engine is a failure, not a reason to skip.
REQUIRED = "XAIN_REQUIRE_DOCKER"


@functools.cache
def _missing() -> str:
    """The reason why there is no engine to test on; "" if there is one."""
    if shutil.which("docker") is None:
        return "there is no program called docker"
    status, _, errors = run("docker", "info")
    if status != 0:
        return f"no Docker engine answers: {errors.strip().splitlines()[-1]}"
    return ""


@functools.cache
def _no_compose() -> str:
    status, _, errors = run("docker", "compose", "version", "--short")
    return "" if status == 0 else f"docker has no compose: {errors.strip().splitlines()[0]}"


@functools.cache
def _no_image(image: str) -> str:
    if run("docker", "image", "inspect", image)[0] == 0:
        return ""
    status, _, errors = run("docker", "pull", "--quiet", image, timeout=BUILD_S)
    if status == 0:
        return ""
    return (
        f"{image} cannot be pulled, and tests/support/containers/stand_ins.sh has made no "
        f"stand-in: {errors.strip().splitlines()[-1]}"
    )


def require(*, images: tuple[str, ...] = (BASE,), compose: bool = False) -> None:
    """Skips the test, or fails it where REQUIRED is set, if something is missing."""
    reason = _missing()
    if not reason and compose:
        reason = _no_compose()
    for image in images:
        reason = reason or _no_image(image)
    if reason and os.environ.get(REQUIRED):
        pytest.fail(f"{reason} ({REQUIRED} is set)", pytrace=False)
    if reason:
        pytest.skip(reason)  # says what is missing


def build(*participants: str) -> None:
    """The image of the coordinator and those of participants, by default `sgd`; once for all
    tests. Sparse workers alone need no coordinator."""
    coordinator = () if participants == (SPARSE,) else (COORDINATOR,)
    for image in (*coordinator, *(participants or (PARTICIPANT,))):
        images.build(image)


def inspect(name: str) -> dict[str, Any]:
    """Inspect a container, an image, a volume or a network."""
    (found,) = json.loads(docker("inspect", name))
    assert isinstance(found, dict)
    return found


def health(container: str) -> str:
    return str(inspect(container)["State"]["Health"]["Status"])


def wait_until(what: str, condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """A poll, not a race: it ends when the condition holds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"after {patience_s:g} s still not: {what}"
        time.sleep(0.2)  # between two looks


def wait_healthy(container: str) -> None:
    def is_healthy() -> bool:
        state = inspect(container)["State"]
        assert state["Running"], docker("logs", container)
        return bool(state["Health"]["Status"] == "healthy")

    wait_until(f"{container} is healthy", is_healthy)


def logs(container: str) -> str:
    _, output, errors = run("docker", "logs", container)
    return output + errors


class Containers:
    """Containers, volumes and networks of one test, which end with it."""

    def __init__(self) -> None:
        self._label = f"xain.test={uuid.uuid4().hex}"
        self.network = docker("network", "create", "--label", self._label, self._name())

    def _name(self) -> str:
        return f"xain-test-{uuid.uuid4().hex[:12]}"

    def volume(self) -> str:
        return docker("volume", "create", "--label", self._label, self._name())

    def start(self, image: str, *arguments: str, options: tuple[str, ...] = ()) -> str:
        """Start a container as locked up as the stacks run ours. Returns its name."""
        name = self._name()
        docker(
            "run",
            "--detach",
            f"--name={name}",
            f"--label={self._label}",
            f"--network={self.network}",
            "--read-only",
            "--tmpfs=/tmp",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges:true",
            *options,
            image,
            *arguments,
        )
        return name

    def run(self, image: str, *arguments: str, options: tuple[str, ...] = ()) -> str:
        """Run a container to its end, which must be a good one. Returns what it printed."""
        name = self.start(image, *arguments, options=options)
        assert self.wait(name) == 0, logs(name)
        return logs(name)

    def wait(self, name: str) -> int:
        """The exit status."""
        return int(docker("wait", name))

    def end(self) -> None:
        mine = f"label={self._label}"
        for kind, remove in (
            ("ps --all --quiet", "rm --force --volumes"),
            ("volume ls --quiet", "volume rm"),
            ("network ls --quiet", "network rm"),
        ):
            if names := docker(*kind.split(), "--filter", mine).split():
                docker(*remove.split(), *names)


@contextlib.contextmanager
def containers() -> Iterator[Containers]:
    mine = Containers()
    try:
        yield mine
    finally:
        mine.end()
