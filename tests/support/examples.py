"""Keys of a configuration, and those that its examples in configs/ tell."""

import re
from collections.abc import Iterable
from pathlib import Path

from xain_foundation.settings.fields import Section


def keys_of(model: type[Section]) -> set[str]:
    return {
        f"{field.alias or section}.{key}" if key else section
        for section, field in model.model_fields.items()
        # A table, such as [train], has no keys of its own.
        for key in getattr(field.annotation, "model_fields", [""])
    }


def keys_in(files: Iterable[Path]) -> set[str]:
    """Keys and sections of examples, also those that are commented out."""
    section, keys = "", set()
    for line in (line for file in files for line in file.read_text().splitlines()):
        if line.removeprefix("# ").startswith("["):
            section = line.removeprefix("# ").strip("[]")
            keys.add(section)
        elif found := re.match(r"(?:# )?(\w+) =", line):
            keys.add(f"{section}.{found[1]}")
    return keys
