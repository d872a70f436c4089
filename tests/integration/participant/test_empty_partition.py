"""A part without rows, from the file to the end of all training."""

from xain_coordinator.core.vocabulary.values import Phase
from xain_participant import WorkloadParticipant
from xain_workloads.tables.data import load


async def test_an_empty_part_does_not_keep_the_others_from_training(start, take_part, tmp_path):
    """A participant without rows does not join; round 0 opens after start_timeout_s."""
    parts = {"a": ["1,2,x", "2,1,y"] * 3, "b": ["1,1,y", "3,2,x"] * 3, "empty": []}
    participants = {}
    for name, rows in parts.items():
        file = tmp_path / f"{name}.csv"
        file.write_text("\n".join(["height,width,kind", *rows]) + "\n")
        participants[name] = WorkloadParticipant(load(file))
    empty = participants["empty"].profile()
    assert (empty.num_samples, empty.num_features) == (0, 2)
    coordinator = await start(
        rounds={
            "rounds": 2,
            "min_participants": 2,
            "start_participants": 3,
            "start_timeout_s": 0.2,
        },
        workload={"name": "sgd"},
    )
    assert await take_part(coordinator, participants) == {"a": 0, "b": 0, "empty": 5}
    session = coordinator.driver.session
    assert (session.phase, session.cause) == (Phase.FINISHED, "completed")
    assert set(session.members) <= {"a", "b"}
