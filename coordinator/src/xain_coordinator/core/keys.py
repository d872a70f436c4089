"""Where weights lie in a store."""

from xain_messaging.names import GLOBAL


def model_key(round_: int) -> str:
    """The model that `round_` starts from."""
    return f"{round_}/{GLOBAL}"


def update_key(round_: int, upload_name: str) -> str:
    """A local update of `round_`."""
    return f"{round_}/{upload_name}"
