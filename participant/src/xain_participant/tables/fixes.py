"""Settings that mend a table, as messages tell them, written into a configuration."""

from collections.abc import Iterable, MutableMapping
from typing import Any

import tomlkit
from tomlkit.items import InlineTable

from xain_foundation.settings.hints import setting_of


def with_fixes(text: str, fixes: Iterable[str]) -> str:
    """Add settings to a configuration in TOML. Comments and order stay.

    fixes: as hint() writes them; what does not set a key is left out.
    Lists grow by the new items, other values are replaced.
    """
    document = tomlkit.parse(text)
    for fix in fixes:
        _merge(document, tomlkit.parse(setting_of(fix)).unwrap())
    return tomlkit.dumps(document)


def _merge(table: MutableMapping[str, Any], further: dict[str, Any]) -> None:
    """Add further settings to a table of TOML: lists grow, tables are merged, other values are
    replaced."""
    for key, value in further.items():
        if isinstance(value, dict):
            if key not in table:
                is_inline = isinstance(table, InlineTable)  # which takes inline tables only
                table[key] = tomlkit.inline_table() if is_inline else tomlkit.table()
            _merge(table[key], value)
        elif isinstance(value, list):
            known = list(table.get(key, ()))
            table[key] = known + [item for item in value if item not in known]
        else:
            table[key] = value
