"""Keys of weights in a store."""

import re

from xain_foundation.names import GLOBAL

INCOMING = "incoming/"
OPTIMIZER = "optimizer/"
PREPROCESSING = "preprocessing.json"  # of the columns, for people
TABLE_ONE = "table_one.json"  # what the data of all participants are

MAX_KEY_BYTES = 1024  # that of S3, so that a key that fits one store fits all
# A byte becomes three where a store escapes it. The rest of the longest key takes 445 bytes then.
MAX_PREFIX_BYTES = 140

_MODEL = re.compile(rf"(?:0|[1-9][0-9]{{0,18}})/{GLOBAL}")
_ATTEMPT = re.compile(r"\.[0-9a-f]{32}(?:/journal)?\Z")
_JOURNALLED = re.compile(r"\.[0-9a-f]{32}/journal\Z")


def check_key(key: str) -> None:
    """Refuse what cannot be a key in every store: parts that are empty, "." or "..", text that is
    not Unicode, and more than MAX_KEY_BYTES. Raises ValueError."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{key[:64]!r} cannot be a key: {error.reason}") from None
    if size > MAX_KEY_BYTES:
        raise ValueError(
            f"{key[:64]!r}... cannot be a key: it has {size} bytes, the limit is {MAX_KEY_BYTES}"
        )
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise ValueError(f"{key!r} cannot be a key: a part of it is empty, '.' or '..'")


def model_key(round_: int) -> str:
    """Key of the model that `round_` starts from."""
    return f"{round_}/{GLOBAL}"


def is_model(key: str) -> bool:
    """Whether a global model lies under this key."""
    return _MODEL.fullmatch(key) is not None


def state_key(round_: int, name: str) -> str:
    """Key of a vector of the optimiser's state, beside the model that `round_` starts from. No
    update has such a key: those begin with a number."""
    return f"{OPTIMIZER}{round_}/{name}"


def update_key(round_: int, name: str) -> str:
    """Base key of a local update of `round_`, without an attempt."""
    return f"{round_}/{name}"


def attempt_key(base_key: str, attempt: str) -> str:
    """Key of one attempt to store an update. attempt: 32 hex digits, used only once: a request that
    was given up may still reach the store, and must not overwrite the object of another one."""
    return f"{base_key}.{attempt}"


def is_attempt(key: str) -> bool:
    """Whether an update lies under this key, with or without a prefix before it."""
    return _ATTEMPT.search(key) is not None


def base_key_of(key: str) -> str:
    """Base key of an update, from the key of one of its attempts."""
    return _ATTEMPT.sub("", key)


def journalled_key(base_key: str, attempt: str) -> str:
    """Key of a small update in the journal. No object of a store has such a key, since no name has
    a slash. attempt: as in attempt_key."""
    return f"{attempt_key(base_key, attempt)}/journal"


def is_journalled(key: str) -> bool:
    """Whether this is the key of an object in the journal."""
    return _JOURNALLED.search(key) is not None


def round_of(base_key: str) -> int:
    """Round of the model or update with this key."""
    return int(base_key.partition("/")[0])


def incoming_key(round_: int, participant_id: str) -> str:
    """Key to which a participant may put its update itself, many times; the accepted update is a
    copy."""
    return f"{INCOMING}{round_}/{participant_id}"
