"""What a driver tells the others of itself: where it is, and how much it takes at once.

10.1.2.3:40123                  as much as any message has
10.1.2.3:40123?max=1000000      so many bytes
"""

import ipaddress

_MAX = "?max="


def told_host(listens_on: str, advertise: str) -> str:
    """The host that others are told. Raises ValueError for one that stands for all of this machine,
    which nobody else can reach it by."""
    if advertise:
        return advertise
    if _is_wildcard(listens_on.strip("[]")):
        raise ValueError(
            f"it is to listen on {listens_on!r}, which is no address that others reach it at; pass "
            "theirs too, such as advertise='10.1.2.3'"
        )
    return listens_on


def _is_wildcard(host: str) -> bool:
    if host in ("", "*"):
        return True
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def with_limit(address: str, max_bytes: int | None) -> str:
    """max_bytes: None for no limit."""
    return address if max_bytes is None else f"{address}{_MAX}{max_bytes}"


def split_limit(address: str) -> tuple[str, int | None]:
    """An address, and how many bytes are taken there at once. Raises ValueError for a limit that is
    none."""
    plain, mark, limit = address.partition(_MAX)
    if not mark:
        return address, None
    if not (limit.isascii() and limit.isdecimal()):
        raise ValueError(f"{address!r} ends in a limit that is no number of bytes")
    return plain, int(limit[:20])
