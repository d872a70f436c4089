"""Where weights lie in a store."""

from xain_messaging.names import GLOBAL


def model_key(round_: int) -> str:
    """The model that `round_` starts from."""
    return f"{round_}/{GLOBAL}"


def update_key(round_: int, upload_name: str) -> str:
    """A local update of `round_`."""
    return f"{round_}/{upload_name}"


def incoming_key(round_: int, participant_id: str) -> str:
    """Where a participant may put its update itself, as often as it likes; what is accepted is a
    copy."""
    return f"incoming/{round_}/{participant_id}"
