"""Errors of a session that a script drives, in words that its writer can act on."""

from collections.abc import Mapping
from typing import Final

from xain_foundation.settings.hints import hint

_ELSEWHERE: Final = "give another data_dir=FOLDER"

# Hints for a user of the program, and what a script says instead. Longer ones come first.
_ARGUMENTS: Final[Mapping[str, str]] = {
    hint("xain-coordinator", "--new-session")
    + " or "
    + hint("xain-coordinator", 'journal.path = "FILE"'): _ELSEWHERE,
    hint("xain-coordinator", 'journal.path = "FILE"'): _ELSEWHERE,
    hint("xain-coordinator", "--new-session"): _ELSEWHERE,
    hint("xain-coordinator", "--data-dir FOLDER")
    + ", with the folder of its data": "give the path of its socket, journal.sock beside the "
    "journal",
    hint("xain-coordinator", "--data-dir FOLDER"): "give its data_dir=FOLDER",
    hint("xain-coordinator", "--tls FOLDER"): "give tls=FOLDER",
    hint("xain-coordinator", "--insecure"): 'give settings={"server.insecure": True}',
    hint("xain-coordinator", "--address HOST:PORT"): "give another address",
}


def for_script(text: str) -> str:
    """Replace flags in a text of the coordinator by the arguments of the script."""
    for typed, said in _ARGUMENTS.items():
        text = text.replace(typed, said)
    return text
