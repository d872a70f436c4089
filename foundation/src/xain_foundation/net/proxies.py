"""One rule about the HTTP proxies of the environment, for all that goes to another machine.

The first of PROXIES that is set names the proxy, each in lower case before upper case. It is asked
to CONNECT, whatever goes through it: calls over gRPC, weights by URL. This machine is reached
without it, and so is what `no_proxy` names: hosts with all below them, addresses, networks, each
with a port or without, or `*`.
"""

import os
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Final
from urllib.parse import unquote, urlsplit

from xain_foundation.settings.fields import is_loopback, join_host_port

PROXIES: Final = ("grpc_proxy", "https_proxy", "http_proxy")  # in gRPC's own order
WITHOUT: Final = ("no_grpc_proxy", "no_proxy")


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy of the environment. As text without user and password.

    variable: that names it. host: empty if the variable has no http:// URL: such a proxy cannot be
        used, and is not gone around either.
    """

    variable: str
    host: str = ""
    port: int = 80
    userinfo: str = field(default="", repr=False)

    def __str__(self) -> str:
        if not self.host:
            return f"{self.variable} is not an http:// one"
        return f"http://{join_host_port(self.host, self.port)} ({self.variable})"

    @property
    def url(self) -> str:
        """For gRPC; with user and password."""
        user = f"{self.userinfo}@" if self.userinfo else ""
        return f"http://{user}{join_host_port(self.host or 'unusable-proxy.invalid', self.port)}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a CONNECT, with user and password."""
        if not self.userinfo:
            return {}
        credentials = b64encode(unquote(self.userinfo).encode()).decode()
        return {"Proxy-Authorization": f"Basic {credentials}"}


def proxy_for(host: str, port: int, environ: Mapping[str, str] = os.environ) -> Proxy | None:
    """Return the proxy on the way to a host; None: there is none. A wrong URL gives no `host`."""
    variable, url = _first(PROXIES, environ)
    if not url or is_loopback(host) or _is_excepted(host, port, _first(WITHOUT, environ)[1]):
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            return Proxy(variable)
        userinfo = parts.netloc.rpartition("@")[0]
        return Proxy(variable, parts.hostname, parts.port or 80, userinfo)
    except ValueError:
        return Proxy(variable)


def _first(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, str]:
    """The first of these variables that is set, and its value; without one empty texts."""
    for name in names:
        for spelling in (name, name.upper()):
            if value := environ.get(spelling, "").strip():
                return spelling, value
    return "", ""


def _is_excepted(host: str, port: int, entries: str) -> bool:
    name = host.strip("[]").rstrip(".").lower()
    return any(_fits(entry.lower(), name, port) for entry in re.split(r"[\s,]+", entries) if entry)


def _fits(entry: str, name: str, port: int) -> bool:
    """Whether an entry of NO_PROXY covers a host, by name, domain or network, and port."""
    if entry == "*":
        return True
    if with_port := re.fullmatch(r"(\[[^\]]*\]|[^:]*):(\d+)", entry):
        entry = with_port[1]
        if int(with_port[2]) != port:
            return False
    entry = entry.strip("[]")
    try:
        address = ip_address(name)
    except ValueError:
        entry = entry.removeprefix("*").strip(".")
        return bool(entry) and (name == entry or name.endswith(f".{entry}"))
    try:
        return address in ip_network(entry, strict=False)
    except ValueError:  # a name
        return False
