"""Where weights lie in a store."""

import re

from xain_messaging.names import GLOBAL

_ATTEMPT = re.compile(r"\.[0-9a-f]{32}\Z")


def model_key(round_: int) -> str:
    """The model that `round_` starts from."""
    return f"{round_}/{GLOBAL}"


def state_key(round_: int, name: str) -> str:
    """A vector of the optimiser's, beside the model that `round_` starts from. No participant's
    update can lie there: those are below a number."""
    return f"optimizer/{round_}/{name}"


def update_key(round_: int, upload_name: str) -> str:
    """The place of a local update of `round_`."""
    return f"{round_}/{upload_name}"


def attempt_key(place: str, attempt: str) -> str:
    """One attempt at bringing an update to its place. attempt: 32 hex digits, used only once: a
    request that was given up may still reach the store, and must not meet another one's object."""
    return f"{place}.{attempt}"


def place_of(key: str) -> str:
    """The place of an update, out of the key of one of its attempts."""
    return _ATTEMPT.sub("", key)


def round_of(place: str) -> int:
    """The round whose model or update lies there."""
    return int(place.partition("/")[0])


def incoming_key(round_: int, participant_id: str) -> str:
    """Where a participant may put its update itself, as often as it likes; what is accepted is a
    copy."""
    return f"incoming/{round_}/{participant_id}"
