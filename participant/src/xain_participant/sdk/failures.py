"""Reports to the coordinator of an exception in the participant's own code.

An exception may quote the data, so its message stays at the participant unless the settings allow
it to travel. Messages of our own errors travel when the agent raises them: they name columns
and settings. In a script they may come from loading a file, and quote a cell of it.
"""

import traceback
from dataclasses import dataclass
from pathlib import PurePath

from xain_workloads.errors import WorkloadError

MAX_FRAMES = 12  # the innermost ones; the coordinator cuts what is longer than 2000 characters


@dataclass(frozen=True, slots=True)
class Failure:
    """kind: type of the exception. message: empty if it stays here. traceback: one frame a line,
    with the file's name, the line's number and the function, and without source text."""

    kind: str
    message: str = ""
    traceback: str = ""


def describe(error: BaseException, *, tells_messages: bool, is_of_script: bool = False) -> Failure:
    """Describe an exception for the coordinator.

    tells_messages: whether the text of any exception may travel.
    is_of_script: whether the body of a script's loop raised it.
    """
    tells = tells_messages or (isinstance(error, WorkloadError) and not is_of_script)
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    return Failure(
        type(error).__name__,
        str(error) if tells else "",
        "\n".join(f"{PurePath(f.filename).name}:{f.lineno} in {f.name}" for f in frames),
    )
