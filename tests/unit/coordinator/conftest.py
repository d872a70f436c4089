"""Fixtures of several tests of the coordinator."""

import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from support.driver import Bench


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.journal.may_save.set()  # nothing may hang on a test that has failed
    for _ in range(100):
        bench.journal.let_go()
    await bench.driver.close()


Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """A function that installs a distribution with one module and one entry point, as pip lays it
    out, and returns its folder on the path."""

    def lay_out(
        source: str, group: str, name: str, value: str = "Rule", module: str = "acme_rules"
    ) -> Path:
        # A folder for each: what is installed is looked for once for a path.
        folder = tmp_path / f"site-{uuid.uuid4().hex}"
        info = folder / f"{module}-1.2.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source, encoding="utf-8")
        entry = f"{module}:{value}" if value else module
        title = module.replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {entry}\n")
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield lay_out
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]
