"""An update with an encoding has the same values, however and whenever it travels."""

import asyncio
from pathlib import Path

import pytest

from support.process import PATIENCE_S
from support.training import Scenario, Training, close_gates, digests, training, undisturbed

pytestmark = pytest.mark.e2e


async def trained_while_the_coordinator_is_away(one: Training, gates: Path) -> None:
    """Round 1 of every participant, whose coordinator stays killed."""
    participants = one.participants.values()
    await one.until(lambda: all(("at_gate", 1) in p.book() for p in participants))
    await one.coordinator.kill()
    for name in one.participants:
        (gates / f"{name}-1").unlink()
    async with asyncio.timeout(PATIENCE_S):
        # Other processes have no event.
        while not all(("trained", 1) in p.book() for p in participants):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # a poll, not a race: it ends when both are there


async def test_a_result_from_the_state_directory_is_the_encoded_one(tmp_path: Path) -> None:
    """A participant is killed after its training, another one is not. What both hand in is byte for
    byte that of a session in which nothing is killed, and neither trains again."""
    one = Scenario(("a", "b"), rounds=2, size=300_000, encoding="float16")
    expected = await undisturbed(one, tmp_path / "undisturbed")
    gates = tmp_path / "gates"
    close_gates(gates, "a-1", "b-1")

    def flags(name: str) -> tuple[str, ...]:
        return (f"--gates={gates}", f"--state-dir={tmp_path / 'states' / name}")

    async with training(one, tmp_path / "killed", flags=flags) as under_way:
        await trained_while_the_coordinator_is_away(under_way, gates)
        await under_way.participants["a"].kill()
        await under_way.coordinator.start()
        await under_way.participants["a"].start()
        got = await under_way.finish()
        under_way.check_journal()
        under_way.check_books(kept=True)
    journals = [tmp_path / folder / "journal.sqlite" for folder in ("killed", "undisturbed")]
    assert digests(journals[0]) == digests(journals[1])
    assert got == expected
