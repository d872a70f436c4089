"""Train stages of a network in a process of their own.

The process imports torch once and goes on from round to round. When a process group breaks it is
killed: no thread of ours waits in an operation of the group, whatever state that is in. The others
notice at once, since their connections to it are closed. It ends with its participant, also when
that is killed.
"""

import os
import signal
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from xain_foundation import child
from xain_foundation.settings.fields import is_loopback
from xain_foundation.settings.hints import hint
from xain_participant.sdk.participant import Assignment, GroupBroken
from xain_participant.stages.process_groups import ListeningAddress, Member
from xain_workloads.errors import WorkloadError
from xain_workloads.model import Model
from xain_workloads.nets import neural_builders
from xain_workloads.nets.neural import NeuralWorkload
from xain_workloads.nets.pipeline import StageResult
from xain_workloads.nets.threads import threads_in_use
from xain_workloads.tables.dataset import Dataset
from xain_workloads.workload import from_metadata

DEFAULT_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0


def _require_loopback(address: str) -> None:
    """Check that the members of a group meet on this machine. Raises WorkloadError."""
    host = address.rpartition(":")[0]
    if not is_loopback(host):
        raise WorkloadError(
            f"the participants of this pipeline would meet at {address}, where other machines "
            "reach them; torch.distributed encrypts nothing, and whoever reaches it can read and "
            "change activations and gradients; in a network that you trust, "
            + hint("xain-participant", "training.process_group_insecure = true")
            + " at every participant"
        )


@dataclass(frozen=True, slots=True)
class Job:
    """Input of the training of a stage. data: None for the rows of the job before."""

    member: Member
    model: Model
    data: Dataset | None
    epochs: int
    epoch_base: int


class StageTrainer:
    """Trains stages, one at a time.

    address: HOST:PORT or HOST at which this participant listens as rank 0; see ListeningAddress.
    timeout_s: for the other members, when a group opens and in each of its operations.
    insecure: also in groups that other machines reach. torch.distributed encrypts nothing, and who
        reaches rank 0 can read and write what the members tell each other.
    """

    def __init__(
        self, address: str = "", timeout_s: float = DEFAULT_TIMEOUT_S, *, insecure: bool = False
    ) -> None:
        self._insecure = insecure
        self._wanted = address
        self._timeout_s = timeout_s
        self._address: ListeningAddress | None = None
        self._process: _Process | None = None
        self._data: Dataset | None = None  # that the process has
        self._lock = Lock()  # of what end() uses from another thread: the process, and these
        self._latest = (-1, 0)  # round, and its attempt that end() has told
        self._session_id = ""

    @property
    def address(self) -> str:
        """HOST:PORT, or :PORT, of which a free port is reserved at first; "" without torch."""
        if find_spec("torch") is None:
            return ""
        if self._address is None:
            self._address = ListeningAddress(self._wanted)
        return self._address.text

    def train(
        self, assignment: Assignment, model: Model, data: Dataset, *, epochs: int, epoch_base: int
    ) -> StageResult:
        """Train the stage of this participant.

        Raises GroupBroken, also if end() is called meanwhile or the process dies; WorkloadError for
        a group that other machines reach, if that is not asked for; TypeError if the model is no
        neural network; and what training raises.
        """
        group = assignment.process_group
        assert group is not None, "a round without a process group"
        workload = from_metadata(model.metadata)
        if not isinstance(workload, NeuralWorkload):
            raise TypeError(f"the workload {workload.name!r} cannot be trained in stages")
        if not group.address:
            raise GroupBroken("the attempt is over")
        if group.world_size > 1 and not self._insecure:
            _require_loopback(group.address)
        member = Member(
            f"{assignment.session_id}/{assignment.round}/{group.attempt}",
            group.rank,
            group.world_size,
            group.address,
            self._timeout_s,
            workload.options.device != "cpu",
        )
        with self._lock:
            if self._session_id not in ("", assignment.session_id):
                self._latest = (-1, 0)  # of a session that is over
            self._session_id = assignment.session_id
            if self._latest[0] == assignment.round and group.attempt < self._latest[1]:
                raise GroupBroken("the attempt is over")
            if self._process is None:
                self._process, self._data = _Process(), None
            process = self._process
        sent = None if data is self._data else data
        self._data = data
        try:
            return process.train(Job(member, model, sent, epochs, epoch_base))
        except BaseException:  # raised again
            self._kill()
            raise

    def end(self, round_: int = -1, attempt: int = 0) -> None:
        """Kill the process, since this attempt takes the place of the one before; without
        arguments, at the end. From any thread; train() then raises GroupBroken."""
        with self._lock:
            self._latest = max(self._latest, (round_, attempt))
            if self._process is not None:
                self._process.kill()

    def _kill(self) -> None:
        """End the process, so that the next training begins a new one."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()


class _Process:
    """A process that runs stage_process.py."""

    def __init__(self) -> None:
        """Start the process, and send it paths, allowed builders and threads."""
        ours, theirs = socket.socketpair()
        try:
            self._process = child.start(
                "xain_participant.stages.stage_process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ},
            )
        finally:
            theirs.close()
        self._connection = Connection(ours.detach())
        # Builders are found and allowed as in this process.
        self._send((sys.path, sorted(neural_builders.allowed()), threads_in_use()))

    def train(self, job: Job) -> StageResult:
        """Train a stage in the process. Raises GroupBroken if it ends meanwhile, and what training
        raises."""
        self._send(job)
        try:
            result = self._connection.recv()
        except (EOFError, OSError):
            raise GroupBroken(f"the process that trains the stage {self._end()}") from None
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, StageResult)
        return result

    def _send(self, value: Any) -> None:
        """Send a value to the process. Raises GroupBroken if it has ended."""
        try:
            self._connection.send(value)
        except OSError:
            raise GroupBroken(f"the process that trains the stage {self._end()}") from None

    def _end(self) -> str:
        """Wait for the end of the process, and describe it."""
        status = self._process.wait(_END_TIMEOUT_S)
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"has ended with {name}"

    def kill(self) -> None:
        """Kill the process and wait for its end. From any thread."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the process and close the connection to it."""
        self.kill()
        self._connection.close()


def portable(error: Exception) -> Exception:
    """Convert an exception to one that another process can raise: our own, or any other's text."""
    if isinstance(error, WorkloadError | GroupBroken):
        return type(error)(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")
