"""Fixtures of several tests of the coordinator."""

from collections.abc import AsyncIterator

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
