"""Process groups of torch.distributed: where rank 0 listens, and opening a group with time limits.

The port of rank 0 is reserved from the start of the participant: bound, so that the system gives it
to nobody else. The process that trains stages listens there once it is rank 0, to its end.

All waiting has a time limit: for the other members when the group opens, and in each operation. A
group is opened in a process that trains stages and does nothing else, which is killed when the
group breaks: see stage_trainer.py.
"""

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import finalize

from xain_foundation.settings.fields import is_loopback
from xain_participant.sdk.participant import GroupBroken
from xain_workloads.nets.neural_modules import import_torch
from xain_workloads.nets.pipeline import Members

# Parts of the messages of torch.distributed, whose exceptions are RuntimeErrors.
_OF_GROUPS = ("gloo", "nccl", "c10d", "socket", "store", "connection", "broken pipe", "timed out")

_listening: dict[str, Any] = {}  # stores that this process serves as rank 0, by address

_LISTENER_PAUSE_S = 0.1  # between two attempts to connect


class ListeningAddress:
    """HOST:PORT at which a participant listens as rank 0.

    wanted: HOST:PORT, or HOST with any free port; "" leaves the host to the coordinator.
    """

    def __init__(self, wanted: str) -> None:
        """Choose the address, and reserve a free port until the end if none is given."""
        _, separator, port = wanted.rpartition(":")
        if separator and port.isdecimal():
            self.text = wanted
            return
        reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # With it on both sides, torch may listen at a port that is bound and not listening.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        self.text = f"{wanted}:{reserved.getsockname()[1]}"
        finalize(self, os.close, reserved.detach())


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a process group that is to be opened.

    name: of the attempt; members with another name never meet. address: HOST:PORT of rank 0.
    wants_gpu: the member trains on a GPU if all members have one.
    """

    name: str
    rank: int
    size: int
    address: str
    timeout_s: float
    wants_gpu: bool


@contextmanager
def open_group(member: Member) -> Iterator[Members]:
    """Open a process group, and close it at the end; after an exception it is left as it is.

    NCCL moves the tensors if each member has a GPU of its own, else gloo, between CPUs. Raises
    GroupBroken if the group cannot be opened, or breaks while it is open.
    """
    torch = import_torch()
    dist = torch.distributed
    timeout = timedelta(seconds=member.timeout_s)
    try:
        store = _store(dist, member, timeout)
        gpus = _gpus_of_all(torch, store, member)
        has_gpus = all(gpus) and len({*gpus}) == len(gpus)
        uses_nccl = has_gpus and member.size > 1
        device = torch.device("cuda" if has_gpus else "cpu")
        dist.init_process_group(
            "nccl" if uses_nccl else "gloo",
            store=store,
            rank=member.rank,
            world_size=member.size,
            timeout=timeout,
        )
        yield Members(dist.group.WORLD, device)
        if member.size > 1:
            dist.barrier()  # what a member has sent last is read before it leaves
        dist.destroy_process_group()
    except (RuntimeError, OSError) as error:
        if not _is_of_group(error):
            raise
        raise GroupBroken(_short(error)) from error


def _store(dist: Any, member: Member, timeout: timedelta) -> Any:
    """Make the store at which the members of a group find each other; rank 0 serves it."""
    if member.size == 1:
        return dist.HashStore()
    host, _, port = member.address.rpartition(":")
    host = host.strip("[]")
    if member.rank > 0:
        _wait_for_listener(host, int(port), member.timeout_s)
        store = dist.TCPStore(host, int(port), timeout=timeout, wait_for_workers=False)
    else:
        # One for all groups of this process: torch keeps it longer than the group.
        store = _listening.get(member.address)
        if store is None:
            store = dist.TCPStore(
                host,
                int(port),
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=_listener(host, int(port)),
            )
            _listening[member.address] = store
    return dist.PrefixStore(member.name, store)


def _listener(host: str, port: int) -> int:
    """Listen at the host that the other members are told, and return the socket's descriptor; torch
    alone listens at every address of the machine. Raises GroupBroken."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if is_loopback(str(address[0])) and not is_loopback(host):
            # Debian's hosts file has only such an address for the machine's own name.
            address = ("", port)
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                # The others reach the host through a router: it is no address of this machine.
                listener.bind(("", port))
            listener.listen()
            return listener.detach()
    except OSError as error:
        raise GroupBroken(f"rank 0 cannot listen at {host}:{port}: {error}") from None


def _wait_for_listener(host: str, port: int, timeout_s: float) -> None:
    """Wait until rank 0 listens: torch alone waits for twice its time limit, and more. Raises
    GroupBroken."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), max(left_s, 0.1)).close()
        except OSError as error:
            if left_s <= 0:
                raise GroupBroken(
                    f"rank 0 does not listen at {host}:{port} within {timeout_s:g} s: {error}"
                ) from None
            time.sleep(min(_LISTENER_PAUSE_S, max(left_s, 0.0)))  # a poll of another machine
        else:
            return


def _gpus_of_all(torch: Any, store: Any, member: Member) -> list[str]:
    """The GPU of each member, "" for none. Waits for all members."""
    gpu = ""
    if member.wants_gpu and torch.cuda.is_available():
        gpu = str(torch.cuda.get_device_properties(0).uuid)
    store.set(f"gpu/{member.rank}", gpu)
    return [store.get(f"gpu/{rank}").decode() for rank in range(member.size)]


def _is_of_group(error: BaseException | None) -> bool:
    """Whether an exception, or what it came from, is one of torch.distributed."""
    while error is not None:
        text = str(error).lower()
        if type(error).__name__.startswith("Dist") or any(part in text for part in _OF_GROUPS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _short(error: BaseException) -> str:
    """The first line of a message, without the path of a source file."""
    line = (str(error).splitlines() or [type(error).__name__])[0].partition(". This is typically")[
        0
    ]
    return line.rpartition("] ")[2] if line.startswith("[/") else line
