"""Problems of a user's file, as sentences of ours with the settings that mend them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike

from xain_workloads.errors import DataError

SHOWN_VALUES = 3
_SHOWN_PROBLEMS = 50


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that does not fit in a table, such as the values of a column.

    text: the sentence with column, rows, values and the ways out.
    fixes: the settings that mend it, made by hint(); all of them are needed. Empty if only the
        owner of the file can mend it.
    """

    text: str
    fixes: tuple[str, ...] = ()


class DoesNotFit(DataError):
    """Raised if a table cannot be used as it is, with all its problems."""

    def __init__(self, problems: Sequence[Problem], origin: str = "") -> None:
        """Make the message of the problems, one a line, of which the first ones are shown."""
        self.problems = tuple(problems)
        start = f"{origin}: " if origin else ""
        if len(problems) == 1:
            super().__init__(start + problems[0].text)
            return
        lines = [f"  {problem.text}" for problem in problems[:_SHOWN_PROBLEMS]]
        if len(problems) > _SHOWN_PROBLEMS:
            lines.append(f"  and {len(problems) - _SHOWN_PROBLEMS} more")
        super().__init__("\n".join([f"{start}{len(problems)} problems:", *lines]))

    @property
    def fixes(self) -> tuple[str, ...]:
        """The settings that mend all problems that settings can mend."""
        return tuple(fix for problem in self.problems for fix in problem.fixes)


def cells(name: str, values: Mapping[str, int]) -> str:
    """Begin a sentence: a column, the rows of its first values, and these. values: their rows."""
    first = sorted(values.items(), key=lambda one: one[1])[:SHOWN_VALUES]
    rows = ", ".join(str(row + 1) for _, row in first)
    texts = ", ".join(f"{value[:40]!r}" for value, _ in first)
    return f"column {name!r}, row{'s' if len(first) > 1 else ''} {rows}: {texts}"


@contextmanager
def reading(path: str | PathLike[str], form: str) -> Iterator[None]:
    """Turn errors of a library that reads a file, of whatever class, into DataError.

    Libraries name options that users of ours do not have. Their error is kept as the cause.
    form: what the file should be, as in "is no Parquet file".
    """
    try:
        yield
    except (DataError, ModuleNotFoundError):
        raise
    except MemoryError as error:
        raise DataError(f"{path}: there is too little memory to read it") from error
    except Exception as error:  # of whatever class: damaged files raise all of them
        number = error.errno if isinstance(error, OSError) else None
        if number:
            raise DataError(f"{path}: cannot be read: {os.strerror(number)}") from error
        raise DataError(f"{path}: the file is no {form}, or it is damaged") from error
