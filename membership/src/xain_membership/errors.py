"""Errors of groups and their members. All of them are MessagingErrors."""

from xain_foundation.net.errors import MessagingError


class Closed(MessagingError):
    """The proxy, driver or discovery has been closed."""


class TimedOut(MessagingError, TimeoutError):
    """A wait that is over without its result."""


class NameTaken(MessagingError):
    """The name belongs to another process of the group, which is alive."""


class MembershipLost(MessagingError):
    """We have been taken for dead, and another one has our name now."""


class DiscoveryUnavailable(MessagingError):
    """The coordinator or the Redis that knows the peers cannot be reached, or takes no more."""
