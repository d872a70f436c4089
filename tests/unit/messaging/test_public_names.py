"""Names that programs import from xain_messaging."""

import builtins
import inspect
import re
from pathlib import Path

import pytest

import xain_messaging
from xain_messaging import MessagingError, errors

GUIDE = Path(__file__).parents[3] / "docs/messaging.md"

# Classes in the guide that belong to the reader's program or to msgpack.
OTHERS = {"Model", "Server", "ExtType", "Timestamp", "Extra", *dir(builtins)}


def names_of_the_guide() -> set[str]:
    """Names of classes in the code blocks and in the inline code of the guide."""
    text = GUIDE.read_text()
    code = [*re.findall(r"`([^`]+)`", text), *re.findall(r"^    .*$", text, re.MULTILINE)]
    found = {name for piece in code for name in re.findall(r"\b[A-Z][a-z]+[A-Za-z]*\b", piece)}
    return found - OTHERS


def test_names_of_the_guide_can_be_imported_from_the_package():
    names = names_of_the_guide()
    assert {"Proxy", "GrpcDriver", "Certificates", "EventTableFull"} <= names
    assert [name for name in sorted(names) if not hasattr(xain_messaging, name)] == []


def test_every_error_is_a_messaging_error():
    """Programs can catch all of them by one class, and import all of them from the package."""
    classes = inspect.getmembers(errors, inspect.isclass)
    defined = {name for name, found in classes if found.__module__ == errors.__name__}
    assert defined <= set(xain_messaging.__all__)
    for name in xain_messaging.__all__:
        value = getattr(xain_messaging, name)
        if isinstance(value, type) and issubclass(value, BaseException):
            assert issubclass(value, MessagingError), name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Nothing"):
        _ = xain_messaging.Nothing
