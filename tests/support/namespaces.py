"""Two machines on one wire: network namespaces of their own, which need no rights of an
administrator where the system lets users have them."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

PROGRAMS = ("ip", "nsenter", "unshare")
ADDRESSES = ("10.99.0.1", "10.99.0.2")
# The process that keeps the namespaces, and tells that they are there.
KEEPER = ("sh", "-c", "echo ready; exec sleep infinity")


class NoNamespaces(Exception):
    """Namespaces are not allowed to this user. The message says why."""


class Machine:
    """address: by which the other one reaches it."""

    def __init__(self, keeper: subprocess.Popen[str], address: str) -> None:
        self.address = address
        self._pid = keeper.pid

    def command(self, *words: str) -> list[str]:
        """The command that runs this one there."""
        flags = ("--user", "--preserve-credentials", "--net")
        return ["nsenter", f"--target={self._pid}", *flags, *words]

    def run(self, *words: str) -> None:
        """Raises NoNamespaces."""
        _done(self.command(*words))


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Raises NoNamespaces."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise NoNamespaces(f"needs {', '.join(missing)}")
    with ExitStack() as stack:
        one = _keeper(stack, ["unshare", "--user", "--map-root-user", "--net", *KEEPER])
        first = Machine(one, ADDRESSES[0])
        other = _keeper(stack, first.command("unshare", "--net", *KEEPER))
        second = Machine(other, ADDRESSES[1])
        wire = ("ip", "link", "add", "name", "wire-1", "type", "veth", "peer", "name", "wire-2")
        first.run(*wire, "netns", str(other.pid))
        for machine, end in ((first, "wire-1"), (second, "wire-2")):
            machine.run("ip", "address", "add", f"{machine.address}/24", "dev", end)
            machine.run("ip", "link", "set", end, "up")
            machine.run("ip", "link", "set", "lo", "up")
        yield first, second


def _keeper(stack: ExitStack, command: Sequence[str]) -> subprocess.Popen[str]:
    keeper = stack.enter_context(
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    )
    stack.callback(keeper.kill)
    if keeper.stdout.readline() != "ready\n":
        raise NoNamespaces(keeper.stderr.read().strip())
    return keeper


def _done(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoNamespaces(done.stderr.strip())
