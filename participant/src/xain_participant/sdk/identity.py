"""Names of a participant that was not given one, and of its process."""

import re
import secrets
import socket
from random import Random


def default_participant_id() -> str:
    """The host's name and a random suffix, since many participants may share a host."""
    host = re.sub(r"[^A-Za-z0-9_.-]|\.(?=\.)", "-", socket.gethostname()[:64])
    return f"{host}-{secrets.token_hex(4)}"


def new_instance_id(chance: Random | None = None) -> str:
    """A random id, which tells this process from others with the same participant id.

    chance: where the id is drawn from; by default the operating system.
    """
    bits = secrets.randbits(64) if chance is None else chance.getrandbits(64)
    return f"{bits:016x}"
