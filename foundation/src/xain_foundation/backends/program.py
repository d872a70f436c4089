"""A program as the call of a worker of Ray: a process that ends with the worker."""

import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from xain_foundation import child


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """`python -m MODULE ARGUMENT...`, with the Python of the node.

    environment, without: see child.environment().
    output: a queue that takes (name, bytes): what the program prints.
    """

    name: str
    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    without: Sequence[str]
    output: Any

    def run(self) -> str:
        """Run the program to its end. Returns its exit status, above 128 after a signal."""
        self._put(f"started on {platform.node()}\n".encode())
        with child.start(
            self.module,
            *self.arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=child.environment(self.environment, self.without),
        ) as process:
            assert process.stdout is not None
            while data := process.stdout.read1():  # type: ignore[attr-defined]  # it is buffered
                self._put(data)
        return str(child.exit_status(process.returncode))

    def _put(self, data: bytes) -> None:
        from ray.exceptions import RayError

        with suppress(RayError):  # the program goes on when its output reaches nobody
            self.output.put((self.name, data))
