"""The first training of a new user: the commands of the README, with no setting beside them."""

import asyncio
import sys

import pytest

from support.commands import status_json
from support.process import CoordinatorProcess, SiteProcess
from support.tables import write_rows

pytestmark = pytest.mark.real_exec


@pytest.mark.parametrize("workload", ["sgd", "xgboost"])
async def test_first_training_is_measured_without_a_further_flag(keep, tmp_path, workload):
    """The workload alone chooses the rule. Each site holds out a fifth of its rows, but for one
    whose fifth is fewer than five rows: nothing that is measured on these leaves it."""
    sizes = {"north": 100, "south": 60, "tiny": 12}
    settings = {"workload.name": workload, "rounds.min_participants": 3, "rounds.rounds": 3}
    coordinator = keep(CoordinatorProcess(tmp_path / "data", settings))
    sites = [keep(SiteProcess(tmp_path, name)) for name in sizes]
    await coordinator.start()
    for i, (site, size) in enumerate(zip(sites, sizes.values(), strict=True)):
        table = tmp_path / f"{site.log_path.stem}.csv"
        write_rows(table, i, size)
        await site.start(coordinator.port, f"--data={table}", "--target=outcome")
    assert await asyncio.gather(*(site.died() for site in sites)) == [0, 0, 0]
    status = await status_json(coordinator.port)
    measured = [one["evaluation"] for one in status["rounds"] if one["evaluation"]]
    assert all(one["num_samples"] == 20 + 12 for one in measured)
    assert measured[-1]["metrics"]["accuracy"] > 0.5
    assert '"nothing_held_out"' in sites[2].log()
    assert not any("nothing_held_out" in site.log() for site in sites[:2])


@pytest.mark.parametrize(
    "typed",
    ["'data.decimal=\",\"'", "\"data.decimal=','\"", "'data.decimal = \",\"'", "data.decimal=,"],
)
async def test_setting_of_a_message_can_be_typed_into_a_shell(tmp_path, typed):
    """The message about numbers that may be thousands or fractions shows data.decimal = ",";
    however it is quoted, 1,234 is read as a fraction then."""
    rows = "".join(f"1,{234 + i};{'yes' if i % 3 else 'no'}\n" for i in range(40))
    (tmp_path / "a.csv").write_text(f"dose;outcome\n{rows}")
    inspect = f"{sys.executable} -m xain_participant inspect --data {tmp_path / 'a.csv'}"

    async def output(line: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_shell(
            line, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await process.communicate()
        return process.returncode, out.decode()

    status, told = await output(inspect)
    assert status == 1
    assert 'set data.decimal = "," (--set "data.decimal=\',\'")' in told
    status, shown = await output(f"{inspect} --set {typed}")
    assert status == 0, shown
    assert "decimal mark ','" in shown
