"""Logs of programs: read from their files, and shown in one stream, each line with the name of its
program before it."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from xain_foundation.logs.logs import line_for_people

COLORS = ("36", "33", "35", "32", "34", "96", "93", "95", "92", "94")


class LogFile:
    """A log that a program appends to, from where it ends now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size
        self._rest = b""  # the beginning of a line that is not whole yet

    def new_lines(self) -> list[str]:
        """Whole lines of the program's log since the last call."""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            data = log.read()
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]


class LogView:
    """names: of the programs. colors: whether each name has a color of its own."""

    def __init__(self, names: Iterable[str], *, colors: bool, is_quiet: bool = False) -> None:
        names = list(names)
        self._width = max(map(len, names))
        self._colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
        self._is_colored = colors
        self._is_quiet = is_quiet

    def show(self, name: str, lines: Iterable[str]) -> None:
        """Print lines of a program's log. JSON lines are shown as lines for people."""
        if self._is_quiet:
            return
        for line in lines:
            for part in self._rendered(line).splitlines():
                sys.stdout.write(f"{self._prefix(name)} {part}\n")
        sys.stdout.flush()

    def _prefix(self, name: str) -> str:
        """Name of a program before a line of its log, in its color."""
        prefix = f"{name:<{self._width}} |"
        return f"\x1b[{self._colors[name]}m{prefix}\x1b[0m" if self._is_colored else prefix

    def _rendered(self, line: str) -> str:
        """A line for people: JSON of our logs is laid out, all else stays as it is."""
        if line.startswith("{"):
            try:
                return line_for_people(json.loads(line), colors=self._is_colored)
            except (ValueError, KeyError, TypeError):  # no line of ours
                return line
        return line
