"""Each lock of an installation names what the distributions in it declare."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECTS = {
    project["name"]: project
    for file in ROOT.glob("*/pyproject.toml")
    for project in [tomllib.loads(file.read_text(encoding="utf-8"))["project"]]
}
# The commands of `make lock` that lock one distribution with some of its extras.
EXPORT = re.compile(r"uv export [^\n]*?--package (\S+)((?: --extra \S+)*)[^\n]*? -o (\S+)")
EXPORTS = EXPORT.findall((ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n\t\t", ""))


def declared(name: str, extras: set[str]) -> Iterator[str]:
    """The packages of others that a distribution of ours and those that it needs declare."""
    project = PROJECTS[name]
    optional = project.get("optional-dependencies", {})
    lines = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    for requirement in map(Requirement, lines):
        if requirement.name in PROJECTS:
            yield from declared(requirement.name, requirement.extras)
        else:
            yield canonicalize_name(requirement.name)


@pytest.mark.parametrize(("name", "extras", "lock"), EXPORTS)
def test_lock_names_each_declared_package(name, extras, lock):
    wanted = set(declared(name, set(extras.replace("--extra", "").split())))
    locked = re.findall(r"^([\w.-]+)==", (ROOT / lock).read_text(encoding="utf-8"), re.MULTILINE)
    assert wanted
    assert not wanted - {canonicalize_name(one) for one in locked}
