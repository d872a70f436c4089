"""Build wheels of all distributions: `python deploy/dist.py FOLDER`, or `make dist`.

    FOLDER/xain_participant-*.whl    the participant with the three libraries inside
    FOLDER/xain_coordinator-*.whl    the coordinator, which needs the participant's wheel
    FOLDER/libraries/                protos, messaging and workloads on their own

docs/decisions/0026-wheels.md tells why. Needs hatchling.
"""

# ruff: noqa: T201 - a script speaks by printing

import base64
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LIBRARIES = {"xain-proto": "protos", "xain-messaging": "messaging", "xain-workloads": "workloads"}
PROGRAMS = {"xain-participant": "participant", "xain-coordinator": "coordinator"}


class Wheel:
    """A built wheel, in memory."""

    def __init__(self, path: Path) -> None:
        self.file_name = path.name
        with ZipFile(path) as archive:
            self.files = {info.filename: (info, archive.read(info)) for info in archive.infolist()}
        self.info_dir = next(name for name in self.files if name.endswith("/RECORD"))[
            : -len("RECORD")
        ]
        self.metadata: Message = message_from_bytes(self.files[f"{self.info_dir}METADATA"][1])

    @property
    def requirements(self) -> list[Requirement]:
        return [Requirement(text) for text in self.metadata.get_all("Requires-Dist", [])]

    def require(self, requirements: Iterable[Requirement]) -> None:
        """Replace the requirements; each is written once."""
        del self.metadata["Requires-Dist"]
        for text in sorted({str(requirement) for requirement in requirements}):
            self.metadata["Requires-Dist"] = text

    def add_packages_of(self, other: "Wheel") -> None:
        """Add all files of a library but its metadata."""
        for name, file in other.files.items():
            if not name.startswith(other.info_dir):
                assert name not in self.files, name
                self.files[name] = file

    def write(self, folder: Path) -> Path:
        path = folder / self.file_name
        record = f"{self.info_dir}RECORD"
        lines = []
        with ZipFile(path, "w", ZIP_DEFLATED) as archive:
            for name, (info, data) in self.files.items():
                if name == record:
                    continue
                if name == f"{self.info_dir}METADATA":
                    data = self.metadata.as_bytes()
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
                lines.append(f"{name},sha256={digest.decode()},{len(data)}\n")
                archive.writestr(_entry(info), data, ZIP_DEFLATED)
            archive.writestr(
                _entry(self.files[record][0]), "".join([*lines, f"{record},,\n"]), ZIP_DEFLATED
            )
        return path


def _entry(info: ZipInfo) -> ZipInfo:
    """The name, time and permissions of a file, without its place in the archive it came from."""
    entry = ZipInfo(info.filename, info.date_time)
    entry.external_attr = info.external_attr
    return entry


def without_libraries(
    requirement: Requirement, libraries: Mapping[str, Wheel]
) -> Iterator[Requirement]:
    """The requirement, or if it is one of the libraries, what that library requires."""
    if requirement.name not in libraries:
        yield requirement
        return
    for inner in libraries[requirement.name].requirements:
        if inner.marker is None or any(
            inner.marker.evaluate({"extra": extra}) for extra in requirement.extras
        ):
            inner.marker = requirement.marker
            yield from without_libraries(inner, libraries)


def build(source: str, folder: Path) -> Wheel:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT / source, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return Wheel(path)


def main(folder: Path) -> None:
    # What an earlier version left here would be installed beside the new wheels.
    for old in [*folder.glob("xain_*.whl"), *folder.glob("libraries/xain_*.whl")]:
        old.unlink()
    (folder / "libraries").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        libraries = {
            name: build(source, Path(scratch, source)) for name, source in LIBRARIES.items()
        }
        programs = {name: build(source, Path(scratch, source)) for name, source in PROGRAMS.items()}
        for file in [f for source in LIBRARIES.values() for f in Path(scratch, source).iterdir()]:
            shutil.copy(file, folder / "libraries")
    for program in programs.values():
        program.require(
            third_party
            for requirement in program.requirements
            for third_party in without_libraries(requirement, libraries)
        )
    participant, coordinator = programs["xain-participant"], programs["xain-coordinator"]
    for library in libraries.values():
        participant.add_packages_of(library)
    same_version = Requirement(f"xain-participant=={participant.metadata['Version']}")
    coordinator.require([*coordinator.requirements, same_version])
    for program in programs.values():
        print(program.write(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
