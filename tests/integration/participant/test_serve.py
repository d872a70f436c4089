"""Participants that stay after the end of a session, against real coordinators."""

from support.process import CoordinatorProcess, Process
from support.waiting import until


async def test_serving_process_outlives_the_session(keep, tmp_path):
    """With --serve, of a coordinator that is not in serve mode too. SIGTERM ends it."""
    coordinator = keep(
        CoordinatorProcess(
            tmp_path, {"rounds.rounds": 1, "workload.name": "sgd", "server.heartbeat_time_s": 0.5}
        )
    )
    site = Process(tmp_path, "site")
    await coordinator.start()
    flags = ["-m", "xain_participant", "--data=iris", "--id=site", "--serve"]
    site._process = await site.run([*flags, f"--coordinator=127.0.0.1:{coordinator.port}"])
    await site.until_logged("session_finished")
    await coordinator.stop()
    await coordinator.start("--new-session")
    await until(lambda: site.log().count("session_finished") == 2)
    assert await site.stop() == 143
