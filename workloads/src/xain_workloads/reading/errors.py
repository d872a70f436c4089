"""Reading of a user's file by a library: what the library raises becomes a sentence of ours."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

from xain_workloads.errors import DataError


@contextmanager
def reading(path: str | PathLike[str], form: str) -> Iterator[None]:
    """Turn errors of a library that reads a file, of whatever class, into DataError.

    Libraries name options that users of ours do not have. Their error is kept as the cause.
    form: what the file should be, as in "is no Parquet file".
    """
    try:
        yield
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(f"{path}: there is too little memory to read it") from error
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        if number:
            raise DataError(f"{path}: cannot be read: {os.strerror(number)}") from error
        raise DataError(f"{path}: the file is no {form}, or it is damaged") from error
