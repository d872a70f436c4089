"""Hints of error messages: what a user may type so that the error does not come again."""

import json
import re
from typing import Final, Literal

Program = Literal["xain-coordinator", "xain-participant", "xain-parameter-server"]

# Words in capitals stand for what only the user knows.
PLACEHOLDERS: Final = ("FILE", "FOLDER", "HOST", "KEY", "N", "NAME", "PORT", "VALUE")

# A setting that can be typed behind --set in every shell as it is, without the blanks.
_PLAIN = re.compile(r'[\w.]+ = (?:[\w.:%/+-]*|"[\w.:%/+-]*")')
# Characters that a shell of Unix or Windows changes between double quotes, and single quotes.
_CHANGED = re.compile(r"[$`\\%!'\n]")


def hint(program: Program, typed: str) -> str:
    """Words that tell a user of a program what to type; a test types each of them.

    typed: a setting as in TOML, "rounds.epochs = 3", with the dotted key; flags, "--port 0"; or a
        whole command, "xain-participant sparse-data clicks". It must be literal but for values, and
        may have PLACEHOLDERS. What installs a package is made by wheels.pip_install().
    program: whose setting or flags they are; where the message is seen does not matter.
    """
    if typed.startswith("--"):
        return f"add {typed}"
    if typed.startswith("xain-"):
        return f"run `{typed}`"
    if _PLAIN.fullmatch(typed) or _CHANGED.search(typed):
        return f"set {typed}"
    # Also read by setting_of().
    flag = typed.replace(" = ", "=", 1).replace('"', "'")
    return f'set {typed} (--set "{flag}")'


def quoted(text: str) -> str:
    """A text, or the name of a key, as TOML has it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def setting_of(words: str) -> str:
    """The setting, as in TOML, of words that hint() has made; "" if they are of no setting."""
    if not words.startswith("set "):
        return ""
    return re.sub(r' \(--set "[^"]*"\)$', "", words.removeprefix("set "))
