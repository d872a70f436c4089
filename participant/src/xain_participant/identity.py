"""The name of a participant that was not given one."""

import re
import secrets
import socket


def default_participant_id() -> str:
    """The host's name and a random suffix, since many participants may share a host."""
    host = re.sub(r"[^A-Za-z0-9_.-]|\.(?=\.)", "-", socket.gethostname()[:64])
    return f"{host}-{secrets.token_hex(4)}"
