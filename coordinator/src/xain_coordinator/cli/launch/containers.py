"""Programs of a launch as containers, through the Docker SDK (extra `xain-coordinator[docker]`).

Containers and network have labels, the name of the launch and its work folder, by which a later
launcher finds what a killed one left behind.
"""

import contextlib
import os
import platform
import re
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from xain_coordinator.cli.launch.logs import LogFile
from xain_coordinator.cli.launch.plan import (
    COORDINATE,
    KILLED,
    PARTICIPATE,
    SPARSE,
    STOP_TIMEOUT_S,
    Program,
)
from xain_coordinator.cli.launch.work_folder import is_held
from xain_coordinator.config.sections.launch import LaunchSettings
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.settings.fields import join_host_port
from xain_workloads.tables.data import BUNDLED

NAME_LABEL, WORK_LABEL = "org.xain.launch", "org.xain.launch.work"
GRPC_PORT, HTTP_PORT = 50051, 8080  # in the container whose ports are published
DATA_DIR = PurePosixPath("/var/lib/xain")
CONFIG_PATH = PurePosixPath("/etc/xain/coordinator.toml")
# Targets of participant/Dockerfile by workload.
TARGETS = {
    "bagging": "bagging",
    "glm": "sgd",
    "mlp": "sgd",
    "neural": "neural",
    "sgd": "sgd",
    SPARSE: "sparse",
}
_WILDCARD = re.compile(r"[*?\[]")


class DockerBackend:
    """Starts programs as containers; see ProcessBackend.

    workload: its name, which decides about the image of the workers.
    """

    def __init__(self, settings: LaunchSettings, workload: str) -> None:
        """Connect to the engine. Raises CommandFailed without the SDK or without an engine."""
        self.bind_host = "0.0.0.0"
        self._settings = settings
        self._workload = workload
        self._client = _connect()
        self._labels = {NAME_LABEL: settings.name}
        self._network: Any = None  # of ours; None if it was there before
        self._work = Path()
        self._config: Path | None = None
        self._ports: dict[str, tuple[str, int]] = {}

    def prepare(self, work: Path) -> None:
        """Check that the images are there; make the network, or take up the launch's own of that
        name."""
        import docker

        self._require_images()
        self._work = work
        self._labels[WORK_LABEL] = f"{platform.node()}:{work.absolute()}"
        name, subnet = self._settings.effective_network_name, self._settings.subnet
        pools = [docker.types.IPAMPool(subnet=subnet)] if subnet else []
        with self._explained(f"network {name}"):
            there = self._client.networks.list(names=[f"^{re.escape(name)}$"])
            if not there:
                self._network = self._client.networks.create(
                    name,
                    driver="bridge",
                    labels=self._labels,
                    ipam=docker.types.IPAMConfig(pool_configs=pools) if pools else None,
                )
            elif there[0].attrs["Labels"].get(NAME_LABEL) == self._settings.name:
                self._network = there[0]  # of a launcher that was killed before it used it

    def _require_images(self) -> None:
        """Check that the images of the workload are there. Raises CommandFailed that says how to
        build the missing ones."""
        import docker

        if self._workload not in TARGETS:
            raise CommandFailed(
                f"there is no image with the workload {self._workload}; --with docker has "
                f"{', '.join(sorted(TARGETS))}"
            )
        needed = {
            self._image(PARTICIPATE): f"participant/Dockerfile --target {TARGETS[self._workload]}"
        }
        if self._workload != SPARSE:
            needed[self._image(COORDINATE)] = "coordinator/Dockerfile"
        missing = []
        for image, file in needed.items():
            try:
                self._client.images.get(image)
            except docker.errors.ImageNotFound:
                build = f"docker build -f {file} -t {image} ."
                missing.append(f"{image} is missing; from a checkout of the repository: {build}")
        if missing:
            raise CommandFailed("\n".join(missing))

    def _image(self, command: str) -> str:
        """Name of the image that has a command."""
        part = "coordinator" if command == COORDINATE else f"participant-{TARGETS[self._workload]}"
        return f"xain-{part}:{version('xain-coordinator')}"

    def data_dir(self, work: Path) -> str:
        return str(DATA_DIR)

    def config_path(self, config: Path | None) -> str | None:
        self._config = config
        return None if config is None else str(CONFIG_PATH)

    def source(self, source: str, number: int = 0) -> str:
        return _mounted(source, number)[1]

    def ports(self, wanted: tuple[int, int], *, http: bool) -> tuple[int, int]:
        """Note that the program's container is published at these ports of this machine. Returns
        the ports at which the program listens in the container."""
        self._ports = {f"{GRPC_PORT}/tcp": (self._settings.host, wanted[0])}
        if http:
            self._ports[f"{HTTP_PORT}/tcp"] = (self._settings.host, wanted[1])
        return GRPC_PORT, HTTP_PORT

    def start(self, program: Program) -> "Container":
        """Create and start a container; ports that were free are kept for its next start. Raises
        CommandFailed."""
        with self._explained(program.name):
            made = self._client.containers.create(
                self._image(program.command),
                list(program.arguments),
                entrypoint=[program.command],
                name=self._container_name(program.name),
                environment=dict(program.environment),
                labels=self._labels,
                network=self._settings.effective_network_name,
                ports=self._ports if program.is_published else {},
                mounts=self._mounts(program),
                cpu_shares=program.cpu_shares,
                # The program may read the data, and owns what it writes.
                user=f"{os.getuid()}:{os.getgid()}",
                init=True,
                read_only=True,
                tmpfs={"/tmp": "mode=1777"},
                cap_drop=["ALL"],
                security_opt=["no-new-privileges:true"],
            )
            try:
                made.start()
                if program.is_published:  # the port that was found for 0 stays after a restart
                    made.reload()
                    self._ports = {
                        port: (self._settings.host, int(at[0]["HostPort"]))
                        for port, at in made.attrs["NetworkSettings"]["Ports"].items()
                        if at
                    }
            except Exception:  # as where the port is taken
                made.remove(force=True, v=True)
                raise
        return Container(program.name, made, self._work / "logs" / f"{program.name}.log")

    def _container_name(self, name: str) -> str:
        """Name of a program's container, in Docker's characters."""
        return f"xain-{self._settings.name}-{re.sub('[^A-Za-z0-9_.-]', '-', name)}"

    def _mounts(self, program: Program) -> list[Any]:
        """Folders of this machine that the program needs, and no others."""
        mounts = []
        if (folder := program.folder) is not None:
            mounts.append(_mount(self._work / folder, DATA_DIR / folder))
        if self._config is not None and program.command == COORDINATE:
            mounts.append(_mount(self._config, CONFIG_PATH, is_read_only=True))
        for number, source in enumerate(program.data):
            path, inside = _mounted(source, number)
            if path is not None:
                mounts.append(_mount(path, PurePosixPath(inside), is_read_only=True))
        return mounts

    def address(self, listens: int) -> str:
        host, port = self._ports[f"{listens}/tcp"]
        return join_host_port("127.0.0.1" if host in ("0.0.0.0", "::") else host, port)

    def host(self, name: str) -> str:
        return self._container_name(name)

    def close(self) -> None:
        """Remove the network that prepare() made."""
        if self._network is not None:
            with self._explained("network"):
                self._network.remove()
        self._client.close()

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn Docker's errors into CommandFailed. what: the subject of the message."""
        import docker
        import requests

        try:
            yield
        except docker.errors.APIError as error:
            raise CommandFailed(f"{what}: Docker says: {error.explanation or error}") from None
        except (docker.errors.DockerException, requests.RequestException) as error:
            raise CommandFailed(f"{what}: Docker does not answer: {error}") from None


class Container:
    """A program that was started, as a container; see Running. A thread copies its log to a
    file."""

    def __init__(self, name: str, container: Any, log: Path) -> None:
        """Begin to copy the container's log to a file, in a thread."""
        self.name = name
        self._container = container
        log.touch()
        self.new_lines = LogFile(log).new_lines
        self._log = log
        self._reader = threading.Thread(target=self._read, name=f"log of {name}", daemon=True)
        self._reader.start()
        self._status: int | None = None

    def _read(self) -> None:
        """Copy the container's log to the file until the container ends."""
        with (
            self._log.open("ab") as log,  # the lines before a restart stay
            contextlib.suppress(Exception),  # the engine or the container is gone
        ):
            for piece in self._container.logs(stream=True, follow=True):
                log.write(piece)
                log.flush()

    def status(self) -> int | None:
        """Exit status of the container; KILLED if it is gone, None while it runs."""
        import docker

        if self._status is None:
            try:
                self._container.reload()
            except docker.errors.NotFound:  # it was removed meanwhile
                self._status = KILLED
            else:
                if self._container.status in ("exited", "dead"):
                    self._status = int(self._container.attrs["State"]["ExitCode"])
        return self._status

    def terminate(self) -> None:
        _terminate(self._container)

    def remove(self, timeout_s: float) -> None:
        _remove(self._container, timeout_s)
        self._reader.join(1.0)


def _connect() -> Any:
    """A client of the engine. Raises CommandFailed."""
    try:
        import docker
    except ImportError:
        raise CommandFailed("--with docker needs the Docker SDK: pip install docker") from None
    try:
        client = docker.from_env()
        client.ping()
    except docker.errors.DockerException as error:
        raise CommandFailed(f"no Docker engine answers: {error}") from None
    return client


def _mounted(source: str, number: int) -> tuple[Path | None, str]:
    """(file or folder of this machine to mount, the source in a container); None for neither.

    A file keeps its name, whose ending tells its format. Of a pattern such as clicks/*.svm the
    folder before the first wildcard is mounted.
    """
    if source in BUNDLED or "://" in source:
        return None, source
    path, inside = Path(source), PurePosixPath("/data" if number == 0 else f"/data-{number}")
    if path.is_dir():
        return path, str(inside)
    names = [path.name]
    if not path.is_file():
        path = path.parent
        while _WILDCARD.search(str(path)):
            names.insert(0, path.name)
            path = path.parent
    return path, str(inside.joinpath(*names))


def _mount(source: Path, target: PurePosixPath, *, is_read_only: bool = False) -> Any:
    """A mount with source and target apart: "C:\\data:/data" would have a colon too many."""
    import docker

    path = str(source.absolute())
    return docker.types.Mount(str(target), path, type="bind", read_only=is_read_only)


# --- what an earlier launcher left behind ---------------------------------------------------------


def is_live(name: str) -> bool | None:
    """Whether the launcher of the launch with this name is alive; None if it has no containers.
    Raises CommandFailed.

    The launcher of another machine that shares the engine is not known to be dead.
    """
    with contextlib.closing(_connect()) as client:
        found = _labelled(client.containers, name, all=True)
        folders = [container.labels.get(WORK_LABEL, "").partition(":") for container in found]
    here = platform.node()
    is_any = any(host != here or is_held(Path(work)) for host, _, work in folders)
    return is_any if folders else None


def clean(name: str) -> tuple[str, ...]:
    """Stop and remove containers and network of the launch. Returns the containers' names."""
    with contextlib.closing(_connect()) as client:
        found = _labelled(client.containers, name, all=True)
        for container in found:
            _terminate(container)
        for container in found:
            _remove(container, STOP_TIMEOUT_S)
        for network in _labelled(client.networks, name):
            network.remove()
    return tuple(container.name for container in found)


def _labelled(collection: Any, name: str, **arguments: Any) -> list[Any]:
    """Containers or networks of the launch with this name."""
    found = collection.list(filters={"label": f"{NAME_LABEL}={name}"}, **arguments)
    assert isinstance(found, list)
    return found


def _terminate(container: Any) -> None:
    """Send SIGTERM to a container. No effect on one that has ended."""
    import docker

    with contextlib.suppress(docker.errors.APIError):  # it has ended
        container.kill("SIGTERM")


def _remove(container: Any, timeout_s: float) -> None:
    """Wait for the end of a container, then kill and remove it."""
    import docker
    import requests

    with contextlib.suppress(docker.errors.APIError, requests.RequestException):
        container.wait(timeout=max(timeout_s, 0.1))  # 0 is refused
    with contextlib.suppress(docker.errors.NotFound):
        container.remove(force=True, v=True)
