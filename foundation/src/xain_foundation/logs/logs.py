"""Logs of a process: an event name plus fields, one JSON object a line, on standard error.

A program calls streams.unblock() first, so that no line waits for a reader.

What the standard library logs, ours and other people's, takes the same way out, so that a reader
of the stream needs one parser.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache, partial
from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from xain_foundation.logs import streams
from xain_foundation.logs.logger import Fields
from xain_foundation.settings.fields import Section
from xain_foundation.settings.schema import MASK

Level = Literal["notset", "debug", "info", "warning", "error", "critical"]

# Loggers below these names are ours; all others are third parties.
_OURS = (
    "xain_coordinator",
    "xain_membership",
    "xain_messaging",
    "xain_parameters",
    "xain_participant",
    "xain_session",
    "xain_workloads",
)
_FIRST = ("timestamp", "level", "logger", "event")
_FOLLOWING = ("stack", "exception")  # fields of several lines

CONSOLE_COLUMNS = 100
EVENT_COLUMNS = 18
_COLORS = {"warning": "33", "error": "31", "critical": "31;1"}

# Narrower than for settings, where "key" counts too: here it is the name of a model in the store.
_SECRET_NAME = re.compile(
    "password|passwd|secret|token|credential|authorization|(access|api|private)_?key",
    re.IGNORECASE,
)

# Secrets of signed URLs and of the headers of S3 and InfluxDB. No message of ours has them;
# tracebacks and debug logs of libraries may.
_SIGNED = re.compile(
    r"""((?:X-Amz-(?:Credential|Signature|Security-Token)|AWSAccessKeyId|Signature|Credential"""
    r"""|(?<=[?&])(?:sig|token|access_token))"""
    r"""(?:=|%3D|['"]?\s*:\s*b?['"]?)|Authorization\W+(?:b?['"]?)(?:Token|Bearer)\s+)"""
    r"""[^&,;\s"'\\]+""",
    re.IGNORECASE,
)
# User and password of a URL: a proxy of the environment, or an endpoint in a library's message.
_USERINFO = re.compile(r"""://[^/?#\s"']+@""")
# Nothing matches the pattern without one of these, and they are found in a twentieth of its time.
_SIGNS = (
    *("signature", "credential", "security-token", "awsaccesskeyid", "authorization"),
    *("sig=", "token="),
)


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class LoggingSettings(Section):
    """[logging] of every process.

    level: the least severe that is shown; case does not matter.
    console: lines for people instead of JSON; by default if standard error is a terminal.
    third_party: show what libraries log at this level; otherwise only their warnings and errors.
    """

    level: Annotated[Level, BeforeValidator(_lower)] = "info"
    console: bool | None = None
    third_party: bool = False

    @property
    def use_console(self) -> bool:
        """`console`, or what fits standard error."""
        return sys.stderr.isatty() if self.console is None else self.console

    def configure(self) -> None:
        """See configure() below."""
        configure(self.level, self.use_console, self.third_party)


def configure(level: str, console: bool, third_party: bool) -> None:
    """Send all logs of the process to standard error. A second call replaces the first.

    For programs only: a library that is imported by other programs must not call it.

    level: a Level, in any case. third_party: see LoggingSettings.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    handler = _Handler(sys.stderr)
    handler.setLevel(threshold)  # a logger with a copy elsewhere may have a lower one
    colors = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    handler.setFormatter(_Formatter(partial(line_for_people, colors=colors) if console else _dumps))
    streams.set_notice(sys.stderr, partial(_lines_lost, handler))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(threshold if third_party else max(threshold, logging.WARNING))
    for name in _OURS:
        # DEBUG also for "notset": on a logger it would mean "as the root says".
        logging.getLogger(name).setLevel(max(threshold, logging.DEBUG))
    logging.captureWarnings(True)
    # No line of ours says where in which file it was written, or by which thread. To find that out
    # for each would take a third of its time.
    logging._srcfile = None  # as the manual of logging has it, "Optimization"
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


@contextmanager
def copied(name: str, write: Callable[[str], None], level: str) -> Iterator[None]:
    """Give the lines of a logger, from level info on, to `write` too, as JSON without line ends.

    level: of configure(), which is called before; what the other lines show stays as it is.
    """
    logger = logging.getLogger(name)
    handler = _Copy(write)
    handler.setFormatter(_Formatter(_dumps))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, max(logging.getLevelName(level.upper()), logging.DEBUG)))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _lines_lost(handler: logging.Handler, num_lost: int) -> str:
    """The line for lines that nobody has read, in the form of the others."""
    fields = Fields(event="log_lines_lost", lines=num_lost, error="nobody read them in time")
    return handler.format(
        logging.makeLogRecord(
            {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": fields}
        )
    )


def write_to(stream: Any) -> None:
    """Send the lines of configure() to another stream, as one that prints above a live view."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            handler.setStream(stream)


class _Handler(logging.StreamHandler[Any]):
    """Handler of this module, a type of its own so that configure() finds it again."""

    def format(self, record: logging.LogRecord) -> str:
        return _without_secrets(super().format(record))


class _Copy(logging.Handler):
    """Handler that passes lines to a function."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(_without_secrets(self.format(record)))


def _without_secrets(line: str) -> str:
    if "@" in line:
        line = _USERINFO.sub(f"://{MASK}@", line)
    folded = line.lower()
    if any(sign in folded for sign in _SIGNS):
        return _SIGNED.sub(rf"\1{MASK}", line)
    return line


class _Formatter(logging.Formatter):
    """Formatter of records. render: makes a line from the fields, as a reader of JSON gets them."""

    def __init__(self, render: Callable[[Mapping[str, Any]], str]) -> None:
        super().__init__()
        self._render = render

    def format(self, record: logging.LogRecord) -> str:
        return self._render(self._fields(record))

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """The fields of a line: first those that every line has, then its own without secrets."""
        own: Mapping[str, Any] = (
            record.msg
            if isinstance(record.msg, Fields)
            else {"event": record.getMessage(), **_extra(record)}
        )
        time = datetime.fromtimestamp(record.created, UTC).replace(tzinfo=None)
        fields: dict[str, Any] = {
            "timestamp": f"{time.isoformat(timespec='microseconds')}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": own.get("event"),
        }
        for name, value in own.items():
            fields[name] = _masked(name, value)
        fields.pop("exc_info", None)  # also in the record
        if record.stack_info:
            fields["stack"] = record.stack_info
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return fields


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that another program's call of `logging` has added."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def line_for_people(event: Mapping[str, Any], *, colors: bool = False) -> str:
    """A line of at most CONSOLE_COLUMNS: date, time, event, then fields as they were given.

    event: an entry of the log, as a line of JSON holds it. Warnings and errors are never cut. A
    traceback follows on lines of its own.
    """
    level = str(event.get("level", ""))
    is_urgent = level in _COLORS
    time = datetime.fromisoformat(event["timestamp"]).astimezone().strftime("%m-%d %H:%M:%S")
    fields = " ".join(
        f"{name}={_shown(value)}"
        for name, value in event.items()
        if name not in _FIRST and name not in _FOLLOWING
    )
    text = f"{event.get('event', ''):<{EVENT_COLUMNS}} {fields}".rstrip()
    if is_urgent:
        text = f"{level}: {text}"
    room = CONSOLE_COLUMNS - len(time) - 1
    if not is_urgent and len(text) > room:
        text = f"{text[: room - 3]}..."
    if colors:
        text = f"\x1b[{_COLORS.get(level, '0')}m{text}\x1b[0m"
    following = [str(event[name]) for name in _FOLLOWING if event.get(name)]
    return "\n".join([f"{time} {text}", *following])


def _shown(value: object) -> str:
    """A value whose blanks are in quotes, and without characters that move the cursor."""
    match value:
        case float():
            text = f"{value:.4g}"
        case Mapping():
            text = ",".join(f"{name}:{_shown(item)}" for name, item in value.items())
        case list() | tuple():
            text = ",".join(map(_shown, value))
        case _:
            text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


@lru_cache(1024)  # names of fields come again with every line
def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def _masked(name: str, value: object) -> object:
    """Return the value of a field with secrets masked, also within tables and lists."""
    if _is_secret(name):
        return MASK
    if type(value) in (str, int, float):  # most are
        return value
    if isinstance(value, Mapping):
        return {str(inner): _masked(str(inner), item) for inner, item in value.items()}
    if type(value) in (list, tuple):
        return [_masked("", item) for item in value]  # type: ignore[attr-defined]  # not narrowed
    return value


def _dumps(fields: Mapping[str, Any]) -> str:
    # ASCII only, whatever the encoding of standard error is.
    try:
        return _ENCODER.encode(fields)
    except ValueError:  # JSON has no NaN
        return _ENCODER.encode(_finite(fields))


_ENCODER = json.JSONEncoder(default=str, allow_nan=False)


def _finite(value: object) -> object:
    """Return the value with text for each float that is not finite, also in tables and lists."""
    match value:
        case float() if not isfinite(value):
            return str(value)
        case dict():
            return {name: _finite(item) for name, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value
