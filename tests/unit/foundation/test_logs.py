import json
import logging
import re
import warnings
from typing import Any

import pytest
from pydantic import SecretStr

from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.logs import LoggingSettings, configure, copied
from xain_foundation.settings.settings import ConfigError, load


def begin() -> None:
    configure("info", console=False, third_party=False)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


@pytest.mark.parametrize("name", ["xain_coordinator", "xain_messaging.x"])
def test_one_json_object_a_line(capsys, name):
    """With what a reader of logs needs first, and the event's own fields after it."""
    begin()
    get_logger(name).info("round_opened", round=3, text="a\nb")
    (line,) = lines(capsys)
    assert list(line) == ["timestamp", "level", "logger", "event", "round", "text"]
    assert line["timestamp"].endswith("Z")
    assert (line["level"], line["logger"]) == ("info", name)
    assert (line["event"], line["round"], line["text"]) == ("round_opened", 3, "a\nb")


def test_loggers_made_before_the_settings_are_read_follow_them(capsys):
    """Modules make their loggers on import."""
    log = get_logger("xain_coordinator.early")
    configure("warning", console=False, third_party=False)
    log.info("hidden")
    log.warning("shown")
    begin()
    log.info("now_shown")
    assert [line["event"] for line in lines(capsys)] == ["shown", "now_shown"]


def test_library_loggers_use_the_standard_library(capsys, caplog):
    """Where nothing is configured: fields as text, the file of the caller, the traceback."""
    log = get_logger("xain_messaging.x").bind(participant="p")
    with caplog.at_level(logging.INFO):
        log.debug("hidden")
        log.info("handed_in", round=3)
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            log.exception("failed")
    first, second = caplog.records
    assert first.getMessage() == "handed_in participant='p' round=3"
    assert (first.levelname, first.name) == ("INFO", "xain_messaging.x")
    assert first.pathname == second.pathname == __file__
    assert second.exc_info is not None
    assert capsys.readouterr().out == ""


def test_third_parties_are_silent_below_warning(capsys):
    """Unless they are asked for; then they come out in the same form."""
    begin()
    logging.getLogger("some_library").info("hidden")
    logging.getLogger("some_library").warning("shown %s", 1)
    configure("info", console=False, third_party=True)
    logging.getLogger("some_library").info("also shown", extra={"round": 1})
    logging.getLogger("some_library").debug("hidden")
    told = lines(capsys)
    assert [line["event"] for line in told] == ["shown 1", "also shown"]
    assert {line["logger"] for line in told} == {"some_library"}
    assert told[1]["round"] == 1


def test_warnings_are_lines_too(capsys):
    """A reader of standard error meets nothing but JSON."""
    begin()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)  # catch_warnings() has just put the old printer back
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    (line,) = lines(capsys)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")


@pytest.mark.parametrize("console", [False, True])
def test_no_secrets(capsys, console):
    """Secrets are removed by name, by type, in nested values, in records of the standard library,
    and in tracebacks."""
    configure("info", console=console, third_party=True)
    log = get_logger("xain_coordinator")
    log.info("a", password="hunter2", auth_token="hunter2", other=SecretStr("hunter2"))
    log.info("b", section={"deep": [{"secret": "hunter2"}], "access_key_id": "hunter2"})
    logging.getLogger("lib").warning("c", extra={"credentials": "hunter2"})
    local = "".join(["hunt", "er2"])
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        log.exception("d", length=len(local))
    told = capsys.readouterr().err
    assert "boom" in told
    assert "hunter2" not in told


@pytest.mark.parametrize("console", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "GET /b/3/global?X-Amz-Credential=hunter2%2F2026&X-Amz-Signature=hunter2 failed",
        "Authorization: AWS4-HMAC-SHA256 Credential=hunter2/s3, Signature=hunter2",
        "cannot reach http://user:hunter2@h:9000/b",
        "{'Authorization': 'Token hunter2'}",
        "x-amz-security-token%3Dhunter2",
        "{'X-Amz-Security-Token': b'hunter2'}",
        "GET https://store/clicks.csv?sv=2026&sig=hunter2%3D failed",
        "GET https://store/clicks.csv?access_token=hunter2&part=1 failed",
        "x-amz-date:20261120\nx-amz-security-token:hunter2\n",
    ],
)
def test_signed_urls_and_headers_are_masked(capsys, text, console):
    """Wherever they come from: tracebacks and libraries that log what they send."""
    configure("debug", console=console, third_party=True)
    logging.getLogger("some_library").debug(text)
    try:
        raise RuntimeError(text)
    except RuntimeError:
        get_logger("xain_coordinator").exception("failed")
    told = capsys.readouterr().err
    assert told.count("********") >= 2
    assert "hunter2" not in told


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("error", "the token is refused (401)", "the token is refused (401)"),
        ("key", "3/global", "3/global"),  # what a model is stored under
        ("loss", float("nan"), "nan"),
        ("deep", [{"x": float("inf")}], [{"x": "inf"}]),
        ("text", "ä\u2028", "ä\u2028"),
    ],
)
def test_everything_that_is_no_secret_can_be_written(capsys, key, value, shown):
    """A log line never fails, and is JSON whatever it says."""
    begin()
    get_logger("xain_coordinator").info("odd", **{key: value}, thing=object())
    assert lines(capsys)[0][key] == shown


def test_console_is_for_people(capsys):
    """The console form has no escape sequences where standard error is no terminal."""
    configure("info", console=True, third_party=False)
    get_logger("xain_coordinator").info("round_opened", round=3)
    told = capsys.readouterr().err
    assert "round_opened" in told
    assert "round=3" in told
    assert "\x1b" not in told


def test_console_lines_fit_100_columns(capsys):
    """Date, time to the second, the event, then fields in their order. A line that is too long is
    cut, but not a warning."""
    configure("info", console=True, third_party=False)
    log = get_logger("xain_coordinator")
    log.info("model_published", round=12, evaluation={"loss": 0.123456, "accuracy": 0.9})
    log.info("round_opened", round=3, participant=[f"ward-{i}" for i in range(40)])
    log.warning("update_refused", reason="a b", participant="x" * 200)
    short, long, warning = capsys.readouterr().err.splitlines()
    fields = "model_published    round=12 evaluation=loss:0.1235,accuracy:0.9"
    assert re.fullmatch(rf"\d\d-\d\d \d\d:\d\d:\d\d {fields}", short)
    assert len(long) == 100
    assert long.endswith("...")
    assert warning.endswith(f"warning: update_refused     reason='a b' participant={'x' * 200}")


def test_console_shows_tracebacks(capsys):
    configure("info", console=True, third_party=False)
    try:
        raise KeyError("gone")
    except KeyError:
        get_logger("xain_coordinator").exception("work_failed", round=1)
    first, *traceback = capsys.readouterr().err.splitlines()
    assert first.endswith("error: work_failed        round=1")
    assert traceback[-1] == "KeyError: 'gone'"


def test_settings():
    """The level in any case, no others; console decided by standard error unless it is given."""
    assert LoggingSettings.model_validate({"level": "INFO"}).level == "info"
    assert LoggingSettings(console=True).use_console is True
    assert LoggingSettings(console=False).use_console is False
    with pytest.raises(ConfigError) as caught:
        load(LoggingSettings, overrides={"level": "loud"})
    assert re.search('level is "loud"; .*notset, debug', str(caught.value))


@pytest.mark.parametrize("level", ["notset", "debug", "info", "error"])
def test_copied_lines_are_those_from_info_on_whatever_the_level_is(capsys, level):
    """The level decides what standard error shows, with a copy and without one."""
    configure(level, console=False, third_party=False)
    log = get_logger("xain_coordinator.telemetry.log_lines")
    copies = []

    def write():
        log.debug("detail")
        log.info("round_opened", token="hunter2", where="http://user:hunter2@host")
        log.error("failed")
        return [line["event"] for line in lines(capsys)]

    shown = write()
    with copied("xain_coordinator.telemetry.log_lines", copies.append, level):
        assert write() == shown
    assert write() == shown
    assert [json.loads(line)["event"] for line in copies] == ["round_opened", "failed"]
    assert "hunter2" not in "".join(copies)
