"""The address that a driver tells its peers."""

import ipaddress


def told_host(listens_on: str, advertise: str) -> str:
    """Return the host that peers connect to.

    Raises ValueError if the driver listens on all interfaces and `advertise` is empty.
    """
    if advertise:
        return advertise
    host = listens_on.strip("[]")
    try:
        is_wildcard = host in ("", "*") or ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        is_wildcard = False
    if is_wildcard:
        raise ValueError(
            f"it is to listen on {listens_on!r}, which is no address that others reach it at; pass "
            "theirs too, such as advertise='10.1.2.3'"
        )
    return listens_on
