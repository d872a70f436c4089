"""Peers, messages, sessions, collectives and conditional events.

What programs need is here by name; it is imported when it is asked for, since most of those who
need a part of this package need no driver.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xain_messaging.collectives import Group as Group
    from xain_messaging.conditional_events import EventTable as EventTable
    from xain_messaging.discovery.server import MembershipServer as MembershipServer
    from xain_messaging.distributed import dist as dist
    from xain_messaging.errors import CollectiveFailed as CollectiveFailed
    from xain_messaging.errors import MessagingError as MessagingError
    from xain_messaging.errors import PeersMissing as PeersMissing
    from xain_messaging.errors import TooFewPeers as TooFewPeers
    from xain_messaging.links import Bounds as Bounds
    from xain_messaging.messages import Message as Message
    from xain_messaging.messages import NotificationSessionStage as NotificationSessionStage
    from xain_messaging.messages import SessionMessage as SessionMessage
    from xain_messaging.messages import SessionType as SessionType
    from xain_messaging.messages import TaskSessionStage as TaskSessionStage
    from xain_messaging.proxy import Proxy as Proxy
    from xain_messaging.proxy import Replies as Replies

_HOMES = {
    "Bounds": "links",
    "CollectiveFailed": "errors",
    "EventTable": "conditional_events",
    "Group": "collectives",
    "MembershipServer": "discovery.server",
    "Message": "messages",
    "MessagingError": "errors",
    "NotificationSessionStage": "messages",
    "PeersMissing": "errors",
    "Proxy": "proxy",
    "Replies": "proxy",
    "SessionMessage": "messages",
    "SessionType": "messages",
    "TaskSessionStage": "messages",
    "TooFewPeers": "errors",
    "dist": "distributed",
}

__all__ = sorted(_HOMES)  # of a table, so that it cannot be another list


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
