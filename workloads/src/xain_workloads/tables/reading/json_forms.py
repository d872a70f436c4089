"""JSON that comes from the network, read into typed forms by msgspec."""

from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from xain_workloads.errors import DataError

Form = TypeVar("Form")

# The square of a value, times any number of rows, stays finite.
MAX_VALUE = 1e140

Count = Annotated[int, Meta(ge=0, lt=2**53)]
Number = Annotated[float, Meta(ge=-MAX_VALUE, le=MAX_VALUE)]
NotNegative = Annotated[float, Meta(ge=0, le=MAX_VALUE)]
Positive = Annotated[float, Meta(gt=0, le=MAX_VALUE)]


def read(
    text: str | bytes, form: type[Form], what: str, error: type[ValueError] = DataError
) -> Form:
    """Read JSON text. what: how messages call it. Raises an error that names the field."""
    try:
        return msgspec.json.decode(text, type=form)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as found:
        raise error(f"{what} cannot be read: {found!s:.200}") from None


def written(form: object) -> str:
    """JSON text; equal forms have equal texts. Scalars of numpy count as those of Python."""
    return msgspec.json.encode(form, enc_hook=np.generic.item).decode()
