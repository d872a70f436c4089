"""A real HDFS of one NameNode and one DataNode, from Hadoop's own jars."""

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import fsspec

from xain_foundation.net.sockets import free_ports

# `make test` puts Hadoop's jars there; Debian has the one that its DataNode needs besides.
JARS = Path(sys.prefix) / "hadoop"
DAEMON_JAR = Path("/usr/share/java/commons-daemon.jar")
READY_S = 240.0  # for what takes ten seconds, on a machine that has other things to do
BLOCK_BYTES = 1 << 20
NAME_NODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
DATA_NODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"


def missing() -> str | None:
    """The reason why HDFS cannot be started here; None if it can."""
    if shutil.which("java") is None:
        return "java is not installed (Debian's default-jre-headless)"
    if not DAEMON_JAR.exists():
        return f"{DAEMON_JAR} is missing (Debian's libcommons-daemon-java)"
    return None if JARS.exists() else f"{JARS} is missing, which `make test` unpacks"


class Hdfs:
    """A NameNode and a DataNode on loopback, whose files have blocks of BLOCK_BYTES.

    url: of its root, "hdfs://127.0.0.1:PORT".
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hdfs-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port, *others = free_ports(5)
        self.url = f"hdfs://127.0.0.1:{self.port}"
        names = (
            "dfs.namenode.http-address",
            "dfs.datanode.address",
            "dfs.datanode.http.address",
            "dfs.datanode.ipc.address",
        )
        settings = {
            "dfs.namenode.name.dir": f"file://{self._folder / 'name'}",
            "dfs.datanode.data.dir": f"file://{self._folder / 'data'}",
            **{name: f"127.0.0.1:{port}" for name, port in zip(names, others, strict=True)},
            "dfs.webhdfs.enabled": "false",  # needs jars that are not there
            "dfs.replication": "1",
            "dfs.permissions.enabled": "false",
            "dfs.namenode.fs-limits.min-block-size": "0",
            "dfs.blocksize": str(BLOCK_BYTES),
        }
        self._write("core-site.xml", {"fs.defaultFS": self.url})
        self._write("hdfs-site.xml", settings)
        (self._folder / "log4j.properties").write_text(
            "log4j.rootLogger=WARN,console\n"
            "log4j.appender.console=org.apache.log4j.ConsoleAppender\n"
            "log4j.appender.console.layout=org.apache.log4j.SimpleLayout\n"
        )
        for name in ("hdfs", "datanode"):  # the web pages, which Hadoop asks for
            pages = self._folder / "webapps" / name / "WEB-INF"
            pages.mkdir(parents=True)
            (pages / "web.xml").write_text("<web-app/>")

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:  # no process outlives a test that cannot begin
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        subprocess.run(
            [*self._java(NAME_NODE), "-format", "-nonInteractive"],
            check=True,
            capture_output=True,
            timeout=READY_S,
        )
        for node in (NAME_NODE, DATA_NODE):
            with (self._folder / "log").open("ab") as log:
                command = self._java(node)
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            self._processes.append(process)
        files = fsspec.filesystem("hdfs", host="127.0.0.1", port=self.port)
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError, RuntimeError):
                with socket.create_connection(("127.0.0.1", self.port)):
                    files.pipe_file("/ready", b"ready")  # needs both
                return
            text = (self._folder / "log").read_text(errors="replace")[-4_000:]
            assert time.monotonic() < deadline, f"HDFS is not ready:\n{text}"
            assert all(each.poll() is None for each in self._processes), f"HDFS has ended:\n{text}"
            time.sleep(0.2)  # a poll, not a race: it ends when the server takes a file

    def _java(self, main: str) -> list[str]:
        classes = f"{self._folder}:{JARS}/*:{DAEMON_JAR}"
        return ["java", "-Xmx256m", "-XX:+UseSerialGC", "-cp", classes, main]

    def _write(self, name: str, settings: dict[str, str]) -> None:
        properties = "".join(
            f"<property><name>{key}</name><value>{value}</value></property>\n"
            for key, value in settings.items()
        )
        (self._folder / name).write_text(f"<configuration>\n{properties}</configuration>\n")
