"""Small Stata files, without a library that writes them."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

_MISSING = float.fromhex("0x1.0p1023")


def write_stata(
    path: Path,
    columns: Mapping[str, Sequence[float | None] | Sequence[str]],
    labels: Mapping[str, Mapping[int, str]],
    dates: Sequence[str] = (),
) -> None:
    """Write a file of Stata's version 8, whose text is cp1252.

    labels: of numbers, by column. dates: columns of days since 1960.
    Source: Stata's help on "dta_113".
    """
    is_text = {name: isinstance(values[0], str) for name, values in columns.items()}
    num_rows = len(next(iter(columns.values())))
    parts = [struct.pack("<4BHi", 113, 2, 1, 0, len(columns), num_rows), bytes(81 + 18)]
    parts.append(bytes(20 if is_text[name] else 255 for name in columns))
    parts += [_padded(name, 33) for name in columns]
    parts.append(bytes(2 * (len(columns) + 1)))
    for name in columns:
        form = "%20s" if is_text[name] else "%td" if name in dates else "%9.0g"
        parts.append(_padded(form, 12))
    parts += [_padded(name if name in labels else "", 33) for name in columns]
    parts.append(bytes(81 * len(columns) + 5))
    for row in zip(*columns.values(), strict=True):
        for value in row:
            known = _MISSING if value is None else value
            parts.append(_padded(known, 20) if isinstance(known, str) else struct.pack("<d", known))
    for name, texts in labels.items():
        joined, starts = b"", []
        for text in texts.values():
            starts.append(len(joined))
            joined += text.encode() + b"\0"
        table = struct.pack(f"<{2 + 2 * len(texts)}i", len(texts), len(joined), *starts, *texts)
        parts += [struct.pack("<i", len(table) + len(joined)), _padded(name, 33), bytes(3)]
        parts += [table, joined]
    path.write_bytes(b"".join(parts))


def _padded(text: str, size: int) -> bytes:
    return text.encode("cp1252").ljust(size, b"\0")
