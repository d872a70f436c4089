"""Build wheels of all distributions: `python deploy/dist.py FOLDER`, or `make dist`.

    FOLDER/xain_participant-*.whl    the participant with the five libraries inside
    FOLDER/xain_coordinator-*.whl    the coordinator, which needs the participant's wheel
    FOLDER/xain_session-*.whl        xain.session() and xain.simulate(), which need both
    FOLDER/xain_messaging-*.whl      messages between programs, which needs the participant's wheel
    FOLDER/libraries/                protos, foundation, membership, parameters, workloads

docs/decisions/0026-wheels.md gives the reasons. Needs hatchling.
"""

# ruff: noqa: T201 - a script speaks by printing

import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LIBRARIES = {
    "xain-wire": "protos",
    "xain-foundation": "foundation",
    "xain-membership": "membership",
    "xain-parameters": "parameters",
    "xain-workloads": "workloads",
}
PROGRAMS = {"xain-participant", "xain-coordinator"}


def configuration(source: str) -> dict[str, Any]:
    """The pyproject.toml of a distribution."""
    return tomllib.loads((ROOT / source / "pyproject.toml").read_text(encoding="utf-8"))


def build(source: str, config: dict[str, Any], folder: Path) -> None:
    for wheel in WheelBuilder(str(ROOT / source), config=config).build(directory=str(folder)):
        print(wheel)


def without_libraries(requirements: Iterable[str]) -> Iterator[str]:
    """The requirements, with those of each of our libraries in the place of the library."""
    for text in requirements:
        requirement = Requirement(text)
        if requirement.name not in LIBRARIES:
            yield text
            continue
        library = configuration(LIBRARIES[requirement.name])["project"]
        yield from without_libraries(library.get("dependencies", ()))
        for extra in requirement.extras:
            yield from without_libraries(library["optional-dependencies"][extra])


def main(folder: Path) -> None:
    # Wheels of an earlier version would be installed beside the new ones.
    for old in [*folder.glob("xain_*.whl"), *folder.glob("libraries/xain_*.whl")]:
        old.unlink()
    for source in LIBRARIES.values():
        build(source, configuration(source), folder / "libraries")
    for source in ("participant", "coordinator", "session", "messaging"):
        config = configuration(source)
        project = config["project"]
        project["dependencies"] = sorted({*without_libraries(project["dependencies"])})
        extras = project.get("optional-dependencies", {})
        for extra, requirements in extras.items():
            extras[extra] = sorted({*without_libraries(requirements)})
        if source == "participant":
            config["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] = {
                f"../{library}/src/{name.replace('-', '_')}": name.replace("-", "_")
                for name, library in LIBRARIES.items()
            }
        elif source in ("coordinator", "messaging"):
            project["dependencies"].append("xain-participant")
        # Wheels of one version belong together.
        project["dependencies"] = [
            f"{text}=={project['version']}" if text in PROGRAMS else text
            for text in project["dependencies"]
        ]
        build(source, config, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
