"""JSON that comes from the network, read into typed forms by msgspec."""

import json
from collections.abc import Sequence
from typing import Annotated, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from xain_workloads.errors import DataError

Form = TypeVar("Form")


class Named(Protocol):
    @property
    def name(self) -> str: ...


# The square of a value, times any number of rows, stays finite.
MAX_VALUE = 1e140

Count = Annotated[int, Meta(ge=0, lt=2**53)]
Number = Annotated[float, Meta(ge=-MAX_VALUE, le=MAX_VALUE)]
NotNegative = Annotated[float, Meta(ge=0, le=MAX_VALUE)]
Positive = Annotated[float, Meta(gt=0, le=MAX_VALUE)]


class _Versioned(Struct):
    version: int


def read(
    text: str | bytes,
    form: type[Form],
    what: str,
    error: type[ValueError] = DataError,
    version: int | None = None,
) -> Form:
    """Decode JSON text to a form. what: its name in messages. version: needed, or None for any.
    Raises `error`, DataError by default, that names the field."""
    try:
        if version is not None:
            found = msgspec.json.decode(text, type=_Versioned).version
            if found != version:
                raise error(f"{what}: version {found}, where this program reads {version}")
        return msgspec.json.decode(text, type=form)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as wrong:
        raise error(f"{what} cannot be read: {wrong!s:.200}") from None


def written(form: object) -> str:
    """Encode a form as JSON text; equal forms have equal texts. Scalars of numpy count as Python's.
    Raises ValueError if a number is not finite, which msgspec itself would write as null."""
    plain = msgspec.to_builtins(form, enc_hook=np.generic.item)
    return json.dumps(plain, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def twice(columns: Sequence[Named]) -> str:
    """The first name that two columns have."""
    names = [column.name for column in columns]
    return next(name for name in names if names.count(name) > 1)
