import json

from xain_foundation.logs.logger import get_logger
from xain_session import session_log


def test_log_of_a_long_session_stays_small(tmp_path, capsys):
    with session_log.logged_in(tmp_path, max_bytes=2000):
        log = get_logger("xain_coordinator.round")
        for round_ in range(100):
            log.info("round_opened", round=round_, share="100%")
        log.warning("round_paused", round=100)
    files = sorted(one.name for one in tmp_path.iterdir())
    assert files == ["coordinator.log", "coordinator.log.1"]
    assert sum((tmp_path / one).stat().st_size for one in files) < 4000
    lines = (tmp_path / "coordinator.log").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["round"] for line in lines][-2:] == [99, 100]
    assert capsys.readouterr().err == "coordinator: round_paused round=100\n"
