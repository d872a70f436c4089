"""Options from a configuration, for a class that names them as parameters of its constructor."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from xain_coordinator.core.vocabulary.values import Option
from xain_coordinator.extensions.plugins import PluginFailed
from xain_foundation.settings.hints import hint

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
    """Make an instance of a class with these options.

    Values are held against the annotations of the parameters. Text from the environment is read as
    their type, and a number that flags have read becomes text for a parameter that is text. A value
    of a parameter without an annotation is taken as it is.
    what: for messages, such as "rule 'krum'". Raises WrongOption, and PluginFailed if the class is
    not one that can be made in this way, whatever the options.
    """
    try:
        key: Any = kind  # to mypy no type variable is hashable
        parameters, hints = _parameters(key)
        adapters = {name: _adapter(key, name) for name in options if name in hints}
    except Exception as error:  # another's annotations are evaluated, and may raise anything
        raise _cannot_be_made(what, error) from error
    values: dict[str, object] = {}
    for name, value in options.items():
        if name not in parameters:
            have = f"it has: {', '.join(parameters)}" if parameters else "it has none"
            raise WrongOption(name, f"{what} has no such option; {have}")
        if name in adapters:
            value = _read(name, value, adapters[name], is_text=hints[name] is str)
        values[name] = value
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:  # of what a constructor says of them together
        raise WrongOption("", f"{what}: {error}") from error
    except Exception as error:  # it can be another's constructor, which may raise anything
        raise _cannot_be_made(what, error) from error


def make_named(
    kind: Any, what: str, name: str, options: Mapping[str, object], parts: Iterable[str]
) -> Any:
    """Make an instance of a class that was found by its name, perhaps a plug-in. parts: attributes
    that it must have. what: such as "rule". Raises WrongOption, and PluginFailed if a part is
    missing."""
    if not isinstance(kind, type):
        raise PluginFailed(f"the plug-in {name!r} is no {what}: it is not a class")
    made: Any = make(kind, f"{what} {name!r}", options)
    if missing := [part for part in parts if not hasattr(made, part)]:
        raise PluginFailed(f"the plug-in {name!r} is no {what}: it has no {', '.join(missing)}")
    return made


def made_again(
    make_one: Callable[[str, Mapping[str, Option]], T],
    what: str,
    name: str,
    options: Mapping[str, Option],
) -> T:
    """Make what a session was opened with. Raises PluginFailed if it is not there any more, or is
    not what it was: that can be put right, so it does not end the session."""
    try:
        return make_one(name, options)
    except KeyError:
        why = "it is not installed"
    except ValueError as error:
        why = str(error)
    raise PluginFailed(
        f"the session's {what} is {name!r}, and it cannot be had: {why}; install what the "
        "session was opened with, or, to open another one, "
        + hint("xain-coordinator", "--new-session")
    )


# Every aggregation makes its rule anew, and a type adapter takes longer than a small aggregation.


@lru_cache(64)
def _parameters(kind: Any) -> tuple[Mapping[str, inspect.Parameter], Mapping[str, Any]]:
    """Parameters of a class's constructor, and the types that their annotations name."""
    annotated: Any = kind if is_dataclass(kind) else kind.__init__
    hints = get_type_hints(annotated, include_extras=True)
    return inspect.signature(kind).parameters, hints


@lru_cache(256)
def _adapter(kind: Any, name: str) -> TypeAdapter[object]:
    """The pydantic adapter that reads values as the type of a class's parameter."""
    return TypeAdapter(_parameters(kind)[1][name])


def _cannot_be_made(what: str, error: Exception) -> PluginFailed:
    """The error for a class that cannot be instantiated, whatever the options."""
    return PluginFailed(f"{what} cannot be made: {type(error).__name__}: {error}")


def _read(name: str, value: object, adapter: TypeAdapter[object], *, is_text: bool) -> object:
    """An option's value as its parameter's type. Texts are parsed; is_text: the parameter is text,
    and numbers become text. Raises WrongOption."""
    try:
        if isinstance(value, str):
            return adapter.validate_strings(value)
        if is_text and type(value) in (int, float):
            return str(value)
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        # "Input should be a valid integer, unable to parse …" becomes "it must be a valid integer".
        must = error.errors(include_url=False)[0]["msg"].partition(", unable ")[0]
        raise WrongOption(name, must.replace("Input should be", "it must be")) from None


def options_of(made: object, given: Mapping[str, object]) -> Mapping[str, Option]:
    """Options that an instance was made with, defaults included, so that a later version with other
    defaults makes the same one. For a class that is no dataclass, only the given options.

    One whose type a journal cannot keep, such as a path, is kept as it was given; a default of such
    a type is left out.
    Raises WrongOption if one was not given as a journal can keep it.
    """
    values: dict[str, Option] = {}
    for name, value in given.items():
        if not isinstance(value, bool | int | float | str):
            raise WrongOption(name, "it must be text, a number or true/false")
        values[name] = value
    if not is_dataclass(made) or isinstance(made, type):
        return values
    for name in (field.name for field in fields(made) if field.init):
        value = getattr(made, name)
        if type(value) in (bool, int, float, str):  # a member of an enumeration is none of them
            values[name] = value
    return values
