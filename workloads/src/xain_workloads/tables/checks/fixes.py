"""Settings of a site's participant that mend what a check has found, as hint() words them."""

from collections.abc import Mapping

from xain_foundation.settings.hints import hint, quoted


def dropped(column: str) -> str:
    """The setting that leaves the column out."""
    return hint("xain-participant", f"data.drop = [{quoted(column)}]")


def grouped(column: str) -> str:
    """The setting that keeps rows with the same value in the column together."""
    return hint("xain-participant", f'data.group = "{_inside(column)}"')


def multiplied(column: str, factor: float) -> str:
    """The setting that multiplies the column's numbers, or those of the target, by a factor."""
    return hint("xain-participant", f"data.factors.{quoted(column)} = {factor:.6g}")


def moved(column: str, offset: float) -> str:
    """The setting that adds an offset to the column's numbers, or to those of the target."""
    return hint("xain-participant", f"data.offsets.{quoted(column)} = {offset:.6g}")


def missing_in(column: str, text: str) -> str:
    """The setting that takes a text of the column for a missing value."""
    return hint("xain-participant", f"data.missing_in.{quoted(column)} = [{quoted(text)}]")


def as_numbers(column: str) -> str:
    """The setting that reads the column's texts as numbers, with their marks."""
    return hint("xain-participant", f'data.types.{quoted(column)} = "number"')


def replaced(column: str, names: Mapping[str, str]) -> str:
    """The setting that renames categories or classes of the column."""
    if len(names) == 1:
        ((old, new),) = names.items()
        return hint(
            "xain-participant",
            f'data.replace.{quoted(column)}.{quoted(old)} = "{_inside(new)}"',
        )
    pairs = ", ".join(f"{quoted(old)} = {quoted(new)}" for old, new in names.items())
    table = f"{{{pairs}}}"
    return hint("xain-participant", f'data.replace."{_inside(column)}" = {table}')


def _inside(text: str) -> str:
    """A text between double quotes."""
    return quoted(text)[1:-1]
