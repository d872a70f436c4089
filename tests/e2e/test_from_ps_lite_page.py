"""The programs of docs/from-ps-lite.md run."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.terminals import files_of
from xain_parameters import LocalGroup

pytestmark = pytest.mark.e2e

PAGE = (Path(__file__).parents[2] / "docs" / "from-ps-lite.md").read_text(encoding="utf-8")
ADDRESS = "127.0.0.1:50052"
LONG_S = 300.0
PROGRAMS = {"kv.py": "[1. 2. 3.]\n[2. 4. 6.]\n", "tables.py": "[0.9375 0.9375 0.9375]\n"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_the_page_run(tmp_path: Path, name: str) -> None:
    with LocalGroup(2) as group:
        text = files_of(PAGE)[name]
        assert ADDRESS in text
        (tmp_path / name).write_text(text.replace(ADDRESS, group.target))
        made = subprocess.run(
            [sys.executable, tmp_path / name],
            stdout=subprocess.PIPE,
            text=True,
            timeout=LONG_S,
            check=True,
        )
    assert made.stdout == PROGRAMS[name]


def test_every_program_of_the_page_is_run() -> None:
    assert set(files_of(PAGE)) == set(PROGRAMS)
