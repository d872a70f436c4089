"""Errors of messages. All of them are MessagingErrors, and none ends the process."""

from collections.abc import Collection

from xain_foundation.net.errors import MessagingError


class InvalidMessage(MessagingError, ValueError):
    """A message that may not be sent: its body cannot travel, and the text shows the path to what
    is wrong; its stage does not follow on what the session has come to; or nobody of the name that
    it goes to has been in the group, where waiting and sending again helps nothing."""


class MalformedMessage(MessagingError):
    """A packet or message that no peer of ours sends."""


class OutboxFull(MessagingError):
    """No room for a message: as much is kept for its peer, or for all together, as may be, and
    nothing of it has been taken in time.

    sent: the messages of the same call that are on their way, as names and sessions.
    """

    def __init__(self, message: str, sent: Collection[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.sent = tuple(sent)


class PeersMissing(MessagingError):
    """Peers that are awaited are not there.

    missing: their names; or, where any of a role will do, "role (2 of 3 are here)".
    """

    def __init__(self, message: str, missing: Collection[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class CollectiveFailed(MessagingError):
    """A collective operation that did not come to its end, here or at another peer.

    missing: those who are gone, or whose part has not come in time; such a one may itself have
        waited for another.
    """

    def __init__(self, message: str, missing: Collection[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
