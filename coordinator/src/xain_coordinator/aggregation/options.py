"""Options from a configuration, for a class that names them as parameters of its constructor."""

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from xain_coordinator.core.values import Option

T = TypeVar("T")


class WrongOption(ValueError):
    """An option is unknown or has a wrong value.

    option: its name; "" where it is not known which is wrong. text: how "`option` is `value`; ..."
    goes on.
    """

    def __init__(self, option: str, text: str) -> None:
        super().__init__(f"{option}: {text}" if option else text)
        self.option = option
        self.text = text


def make(kind: type[T], what: str, options: Mapping[str, object]) -> T:
    """An instance with these options.

    Values are held against the annotations of the parameters: text, which is all that flags and the
    environment have, is read as their type. What has none is taken as it is.
    what: for messages, such as "rule 'krum'". Raises WrongOption.
    """
    parameters = inspect.signature(kind).parameters
    hints = get_type_hints(kind if is_dataclass(kind) else kind.__init__, include_extras=True)
    values: dict[str, object] = {}
    for name, value in options.items():
        if name not in parameters:
            have = f"it has: {', '.join(parameters)}" if parameters else "it has none"
            raise WrongOption(name, f"{what} has no such option; {have}")
        values[name] = _read(name, value, hints[name]) if name in hints else value
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:  # of what a constructor says of them together
        raise WrongOption("", f"{what}: {error}") from error


def _read(name: str, value: object, hint: Any) -> object:
    adapter: TypeAdapter[object] = TypeAdapter(hint)
    try:
        if isinstance(value, str):
            return adapter.validate_strings(value)
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        # "Input should be a valid integer, unable to parse …" becomes "it must be a valid integer".
        must = error.errors(include_url=False)[0]["msg"].partition(",")[0]
        raise WrongOption(name, must.replace("Input should be", "it must be")) from None


def options_of(made: object, given: Mapping[str, object]) -> Mapping[str, Option]:
    """All options that something was made with, defaults among them, so that it can be made again
    whatever a later version's defaults are. Of what is no dataclass only those that were given."""
    values = given
    if is_dataclass(made):
        values = {field.name: getattr(made, field.name) for field in fields(made) if field.init}
    return {
        name: value for name, value in values.items() if isinstance(value, bool | int | float | str)
    }
