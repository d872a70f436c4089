"""Stopping with SIGTERM in the middle of a round costs no participant the work that is done."""

import asyncio
import signal

import pytest

from support.fault_proxy import FaultProxy
from support.process import Lines
from support.training import Scenario, close_gates, training, undisturbed

pytestmark = pytest.mark.timeout(600)

# An upload is a stream of several messages through the proxy.
SCENARIO = Scenario(
    ("a", "b", "c", "d"), rounds=3, size=300_000, settings={"server.weights_port": "off"}
)
SLOW_BYTES_PER_S = 20_000  # a minute for an upload


@pytest.mark.parametrize("drain_s", [0.5, 25.0], ids=["cut", "drained"])
async def test_a_coordinator_that_is_stopped_costs_no_participant_its_work(tmp_path, drain_s):
    """Two updates of the round are accepted, one participant trains, and one is in the middle of
    its upload, which is cut off, or has the time to end. No participant trains a round twice."""
    expected = await undisturbed(SCENARIO, tmp_path / "undisturbed")
    gates = tmp_path / "gates"
    close_gates(gates, "c-1", "d-1")
    scenario = SCENARIO.having({"server.drain_s": drain_s})
    with FaultProxy() as way:
        async with training(
            scenario,
            tmp_path / "stopped",
            flags=lambda _: (f"--gates={gates}",),
            ways={"d": way},
        ) as one:
            a, b, c, d = one.participants.values()
            await one.until(lambda: ("handed_in", 1) in a.book() and ("handed_in", 1) in b.book())
            await one.until(lambda: ("at_gate", 1) in c.book() and ("at_gate", 1) in d.book())
            way.throttle(SLOW_BYTES_PER_S)
            before = way.num_bytes_up
            (gates / "d-1").unlink()
            await one.until(lambda: way.num_bytes_up > before + 3 * SLOW_BYTES_PER_S)
            assert ("handed_in", 1) not in d.book()

            lines = Lines(one.coordinator.log_path)
            stopped = asyncio.create_task(one.coordinator.stop(signal.SIGTERM))
            await one.until(lambda: any('"stopping"' in line for line in lines.new()))
            if drain_s > 1:
                way.heal()
            assert await stopped == 0
            assert ("handed_in", 1) not in c.book()

            (gates / "c-1").unlink()  # it goes on to train while nobody is there to take it
            await one.until(lambda: ("trained", 1) in c.book())
            await one.coordinator.start()
            way.heal()
            assert await one.finish() == expected
            one.check_journal()
            one.check_books(kept=True)
            one.check_logs()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_stopped_participant_hands_in_its_result_after_a_restart(tmp_path, number):
    """A trained participant is stopped or killed while the coordinator is away. Started again with
    its state directory, it hands in without training."""
    expected = await undisturbed(SCENARIO, tmp_path / "undisturbed")
    gates, states = tmp_path / "gates", tmp_path / "states"
    close_gates(gates, "a-1")
    async with training(
        SCENARIO,
        tmp_path / "stopped",
        flags=lambda name: (f"--gates={gates}", f"--state-dir={states / name}"),
    ) as one:
        a, *_ = one.participants.values()
        await one.until(lambda: ("at_gate", 1) in a.book())
        assert await one.coordinator.stop() == 0
        (gates / "a-1").unlink()
        await one.until(lambda: ("trained", 1) in a.book())
        assert await a.stop(number) == (-9 if number == signal.SIGKILL else 128 + number)
        await one.coordinator.start()
        await a.start()
        assert await one.finish() == expected
        one.check_journal()
        one.check_books(kept=True)
        one.check_logs()
