"""The section [launch]: what `xain-coordinator launch` starts on this machine.

A running coordinator does not read the section.
"""

from typing import Annotated

from pydantic import Field, PlainValidator

from xain_coordinator.config.fields import MAX_PREDICT_RETRIES, MAX_PREDICT_TIMEOUT_S
from xain_foundation.names import shortened, why_not
from xain_foundation.settings.fields import (
    Allowed,
    Check,
    Conflicts,
    Host,
    Section,
    Texts,
    WrongSetting,
    parse_json,
)

MAX_WORKERS = 1000
MAX_RESTARTS = 1000
MIN_CPU_SHARES = 2  # Docker's least
MAX_RESOURCES = 1000  # of a worker on Ray
COORDINATOR = "coordinator"  # name of the one program that is no worker

LaunchName = Annotated[
    str,
    Field(pattern=r"\A[a-z0-9][a-z0-9_.-]{0,39}\z"),
    Allowed(
        'a name of at most 40 characters, of a to z, 0 to 9, "_", "." and "-", that begins with a '
        "letter or a digit"
    ),
]


def _parse_numbers(value: object) -> tuple[int, ...]:
    """A whole number, a list of them, or the text of either; as text "2,3" and "[2, 3]" are one."""
    if isinstance(value, str):
        text = value.strip()
        value = parse_json(text if text.startswith("[") else f"[{text}]")
    numbers = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise ValueError("an item is no whole number")
    return tuple(numbers)


Numbers = Annotated[
    tuple[int, ...],
    PlainValidator(_parse_numbers),
    Allowed("a whole number, or a list of whole numbers such as [2, 3]"),
]


class LaunchSettings(Section):
    """[launch]"""

    name: LaunchName = "xain"
    workers: int | None = Field(default=None, ge=1, le=MAX_WORKERS)
    servers: int = Field(default=2, ge=1, le=MAX_WORKERS)
    names: Texts = ()
    host: Host = "127.0.0.1"
    ports: Numbers = (0, 0)
    network_name: str = ""
    subnet: str = ""
    cpu_shares: Numbers = ()
    ray_address: str = "auto"
    num_cpus: float = Field(default=1.0, ge=0, le=MAX_RESOURCES)
    num_gpus: float = Field(default=0.0, ge=0, le=MAX_RESOURCES)
    max_restarts: int = Field(default=5, ge=0, le=MAX_RESTARTS)
    max_retries: int = Field(default=0, ge=0, le=MAX_PREDICT_RETRIES)
    timeout_s: float = Field(default=100.0, gt=0, le=MAX_PREDICT_TIMEOUT_S)

    @property
    def effective_network_name(self) -> str:
        """The Docker network of this launch."""
        return self.network_name or f"xain-{self.name}"

    @Check
    def _names_can_be_given(self) -> Conflicts:
        """Check that the names of workers are valid, differ, and are as many as the workers."""
        if len(set(self.names)) < len(self.names):
            yield WrongSetting("names", "two workers have the same name")
        for name in self.names:
            if name == COORDINATOR or (why := why_not(name)) is not None:
                said = "it is the coordinator's name" if name == COORDINATOR else why
                yield WrongSetting(
                    "names", f"{shortened(repr(name))} cannot be the name of a worker: {said}"
                )
                break
        if self.workers is not None and self.names and self.workers != len(self.names):
            yield WrongSetting("workers", f"launch.names has {len(self.names)} names")

    @Check
    def _are_two_ports(self) -> Conflicts:
        """Check that launch.ports has two ports, which differ unless they are 0."""
        if len(self.ports) != 2 or not all(0 <= port <= 65535 for port in self.ports):
            yield WrongSetting(
                "ports",
                "it must be two numbers from 0 to 65535: the port of gRPC, and the port of HTTP; 0 "
                "takes a free one",
            )
        elif self.ports[0] and self.ports[0] == self.ports[1]:
            yield WrongSetting("ports", "gRPC and HTTP need different ports")

    @Check
    def _shares_are_dockers(self) -> Conflicts:
        """Check that Docker takes launch.cpu_shares."""
        if any(shares < MIN_CPU_SHARES for shares in self.cpu_shares):
            yield WrongSetting("cpu_shares", f"all must be at least {MIN_CPU_SHARES}")

    @Check
    def _gpus_are_rays(self) -> Conflicts:
        """Check that Ray takes launch.num_gpus."""
        if self.num_gpus > 1 and not self.num_gpus.is_integer():
            yield WrongSetting("num_gpus", "above 1 it must be a whole number")
