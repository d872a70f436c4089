"""Words that an operator types: names of many sites, and lengths of time."""

import re
from dataclasses import dataclass

from xain_foundation.names import why_not

MAX_NAMES = 10_000
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token to be made. address: HOST:PORT that the site connects to; "" for the coordinator's
    own. bearer: for the HTTP face."""

    name: str
    role: str
    ttl_s: float
    reusable: bool = False
    bearer: bool = False
    address: str = ""


def expanded(name: str) -> list[str]:
    """Names of a pattern such as "site-{001..100}", as shells write it; others as they are. Raises
    ValueError with the reason."""
    found = _RANGE.search(name)
    if found is None:
        names = [name]
    else:
        first, last = int(found[1]), int(found[2])
        if last < first or last - first >= MAX_NAMES:
            raise ValueError(f"{found[0]} must be of 1 to {MAX_NAMES} numbers")
        width = len(found[1]) if found[1].startswith("0") else 0
        before, after = name[: found.start()], name[found.end() :]
        names = [f"{before}{number:0{width}d}{after}" for number in range(first, last + 1)]
    for each in names:
        if why := why_not(each):
            raise ValueError(f"{each!r} cannot be a name: {why}")
    return names


def seconds_of(text: str) -> float:
    """Seconds of "90", "30m", "24h" or "7d". Raises ValueError."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ValueError("it must be a time such as 30m, 24h or 7d")
    return float(found[1]) * _UNITS[found[2]]
