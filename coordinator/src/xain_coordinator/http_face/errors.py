"""Errors of the HTTP face: a table of codes, and one envelope for all of them."""

from collections.abc import Mapping
from typing import NoReturn

from xain_coordinator.assembly.sessions import NoParticipants
from xain_coordinator.core.vocabulary.errors import Refusal
from xain_coordinator.ports import JournalError, StoreError
from xain_foundation.wheels import pip_install
from xain_workloads.errors import DataError, NoModel


class HttpError(Exception):
    """A request that is not carried out. code: stable, one of STATUSES."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def status(self) -> int:
        """The HTTP status of the answer."""
        return STATUSES[self.code]


STATUSES: Mapping[str, int] = {
    "INVALID_REQUEST": 422,
    "INVALID_SETTING": 422,
    "INVALID_DATA": 422,
    "TRAINING_FAILED": 422,
    "UNKNOWN_COLUMN": 422,
    "MISSING_COLUMN": 422,
    "NO_PROBABILITIES": 422,
    "NOT_FITTED": 409,
    "ALREADY_FITTING": 409,
    "NOT_FITTING": 409,
    "OTHER_WORKLOAD": 409,
    "FIT_FAILED": 409,
    "NO_MODEL": 404,
    "NO_SUCH_PATH": 404,
    "NO_SUCH_METHOD": 405,
    "UNAUTHENTICATED": 401,
    "NOT_PERMITTED": 403,
    "FOREIGN_SITE": 403,
    "TOO_LARGE": 413,
    "NO_PARTICIPANTS": 503,
    "NOBODY_ANSWERED": 503,
    "TOO_BUSY": 503,
    "UNAVAILABLE": 503,
    "INTERNAL": 500,
    "MISSING_PACKAGE": 501,
}

_CODES: Mapping[type[Exception], str] = {
    ModuleNotFoundError: "MISSING_PACKAGE",
    NoParticipants: "NO_PARTICIPANTS",
    NoModel: "NO_MODEL",
    DataError: "INVALID_DATA",
    Refusal: "UNAVAILABLE",
    StoreError: "UNAVAILABLE",
    JournalError: "UNAVAILABLE",
}

KNOWN = tuple(_CODES)


def refuse(error: Exception) -> NoReturn:
    """Raise the HttpError for one of the KNOWN errors."""
    code = next(code for kind, code in _CODES.items() if isinstance(error, kind))
    if isinstance(error, Refusal):
        code = "TOO_BUSY" if error.code == "TOO_MANY_CALLS" else error.code
        code = code if code in STATUSES else "INTERNAL"
    text = str(error)
    if isinstance(error, ModuleNotFoundError):
        text = f"the coordinator lacks {error.name}: {pip_install('xain-coordinator', 'export')}"
    raise HttpError(code, text) from None
