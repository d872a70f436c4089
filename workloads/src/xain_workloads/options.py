"""Options of a workload: from a plain mapping, as TOML or JSON give it, to a checked dataclass."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from json import dumps
from math import isfinite
from typing import Any, TypeVar, get_origin, get_type_hints

from xain_foundation.settings.hints import hint

Options = TypeVar("Options")


def from_mapping(cls: type[Options], options: Mapping[str, object], *, workload: str) -> Options:
    """Build the options dataclass `cls`, whose fields are of type str, bool, int, float,
    tuple[int, ...], dict[str, Any], str | dict[str, Any] or tuple[dict[str, Any], ...].

    A whole number is accepted for a float, since TOML writes 1 where 1.0 is meant.
    Raises ValueError that names the key if it is unknown or its value is of another type; the
    dataclass's own checks come after.
    """
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]  # any dataclass
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known:
            raise ValueError(
                f"unknown option {key!r} of workload {workload!r};"
                f" known: {', '.join(sorted(known))}"
            )
        values[key] = _convert(key, value, hints[key])
    return cls(**values)


def to_text(options: Any, later: Collection[str]) -> str:
    """Options as JSON, for the metadata of a model.

    options: a dataclass. later: options that participants of earlier versions do not know, and
        refuse. They are left out at their defaults, which are what those participants do.
    """
    defaults = {field.name: field.default for field in fields(options) if field.name in later}
    values = {k: v for k, v in asdict(options).items() if k not in later or v != defaults[k]}
    return dumps(values, sort_keys=True)


def require_choice(key: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError that names the key unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{key} is {value!r}; choose one of: {', '.join(sorted(choices))}")


def require_range(
    key: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> None:
    """Raise ValueError that names the key unless the value is finite and within the bounds."""
    if not isfinite(value):
        raise ValueError(f"{key} is {value}; it must be finite")
    if above is not None and value <= above:
        raise ValueError(f"{key} is {value}; it must be above {above}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{key} is {value}; it must be at least {at_least}")
    if at_most is not None and value > at_most:
        raise ValueError(f"{key} is {value}; it must be at most {at_most}")


def require_no_local_steps(options: Any, names: Collection[str]) -> None:
    """Raise ValueError for the first of the named options that is not its default, since mode
    "gradient" takes no local steps. options: a dataclass."""
    for field in fields(options):
        if field.name in names and getattr(options, field.name) != field.default:
            raise ValueError(
                f"{field.name} is {getattr(options, field.name)!r}; in mode 'gradient' the"
                " coordinator takes the steps: "
                + hint("xain-coordinator", "aggregation.options.eta0 = 0.1")
                + " and aggregation.optimizer"
            )


def _convert(key: str, value: object, expected: type) -> object:
    """Convert an option's value to the type of its field. Raises ValueError that names it."""
    # bool is a subclass of int: without this check, `eta0 = true` would train with eta0 = 1.
    if isinstance(value, bool) and expected is not bool:
        matches = False
    elif expected is float and isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{key} is too large a number") from None
    elif expected == tuple[int, ...]:
        if isinstance(value, list | tuple) and all(type(item) is int for item in value):
            return tuple(value)
        raise ValueError(
            f"{key} is {value!r}; it must be a list of whole numbers, such as [64, 32]"
        )
    elif expected == str | dict[str, Any]:
        if isinstance(value, str | dict):
            return value
        raise ValueError(f"{key} is {value!r}; it must be text or a table")
    elif expected == tuple[dict[str, Any], ...]:
        if isinstance(value, list | tuple) and all(isinstance(item, dict) for item in value):
            return tuple(value)
        raise ValueError(f"{key} is {value!r}; it must be a list of tables")
    else:
        matches = isinstance(value, get_origin(expected) or expected)
    if not matches and expected is str and isinstance(value, int | float):
        raise ValueError(f'{key} is {dumps(value)}; write it as text: {key} = "{dumps(value)}"')
    if not matches:
        raise ValueError(f"{key} is {value!r}; it must be of type {expected.__name__}")
    return value
