"""Peers, messages, sessions, collectives and conditional events.

Every name that programs use can be imported from here. A module is loaded when one of its names is
used first, so a program pays for no driver or discovery that it does not use.
"""

from typing import TYPE_CHECKING

from xain_foundation.on_use import loaded_on_use

if TYPE_CHECKING:
    from xain_foundation.conditional_events import EventTable as EventTable
    from xain_foundation.conditional_events import EventTableFull as EventTableFull
    from xain_foundation.net.errors import MessagingError as MessagingError
    from xain_foundation.security.identity import IdentityRules as IdentityRules
    from xain_foundation.security.tls import Certificates as Certificates
    from xain_membership.coordinator import CoordinatorDiscovery as CoordinatorDiscovery
    from xain_membership.errors import Closed as Closed
    from xain_membership.errors import DiscoveryUnavailable as DiscoveryUnavailable
    from xain_membership.errors import MembershipLost as MembershipLost
    from xain_membership.errors import NameTaken as NameTaken
    from xain_membership.errors import TimedOut as TimedOut
    from xain_membership.in_process import InProcessDiscovery as InProcessDiscovery
    from xain_membership.server import MembershipServer as MembershipServer
    from xain_messaging.collectives import Group as Group
    from xain_messaging.discovery.redis import RedisDiscovery as RedisDiscovery
    from xain_messaging.distributed import dist as dist
    from xain_messaging.drivers.grpc_streams import GrpcDriver as GrpcDriver
    from xain_messaging.drivers.in_process import InProcessDriver as InProcessDriver
    from xain_messaging.drivers.in_process import Switchboard as Switchboard
    from xain_messaging.drivers.zeromq import ZmqDriver as ZmqDriver
    from xain_messaging.errors import CollectiveFailed as CollectiveFailed
    from xain_messaging.errors import InvalidMessage as InvalidMessage
    from xain_messaging.errors import MalformedMessage as MalformedMessage
    from xain_messaging.errors import OutboxFull as OutboxFull
    from xain_messaging.errors import PeersMissing as PeersMissing
    from xain_messaging.format.messages import Message as Message
    from xain_messaging.format.messages import NotificationSessionStage as NotificationSessionStage
    from xain_messaging.format.messages import SessionMessage as SessionMessage
    from xain_messaging.format.messages import SessionType as SessionType
    from xain_messaging.format.messages import TaskSessionStage as TaskSessionStage
    from xain_messaging.links import Bounds as Bounds
    from xain_messaging.proxy import PeersChanged as PeersChanged
    from xain_messaging.proxy import Proxy as Proxy
    from xain_messaging.proxy import Replies as Replies

__getattr__, __dir__ = loaded_on_use(
    __name__,
    {
        "xain_foundation.conditional_events": "EventTable EventTableFull",
        "xain_foundation.net.errors": "MessagingError",
        "xain_foundation.security.identity": "IdentityRules",
        "xain_foundation.security.tls": "Certificates",
        "xain_membership.coordinator": "CoordinatorDiscovery",
        "xain_membership.errors": "Closed DiscoveryUnavailable MembershipLost NameTaken TimedOut",
        "xain_membership.in_process": "InProcessDiscovery",
        "xain_membership.server": "MembershipServer",
        "collectives": "Group",
        "discovery.redis": "RedisDiscovery",
        "distributed": "dist",
        "drivers.grpc_streams": "GrpcDriver",
        "drivers.in_process": "InProcessDriver Switchboard",
        "drivers.zeromq": "ZmqDriver",
        "errors": "CollectiveFailed InvalidMessage MalformedMessage OutboxFull PeersMissing",
        "links": "Bounds",
        "format.messages": (
            "Message NotificationSessionStage SessionMessage SessionType TaskSessionStage"
        ),
        "proxy": "PeersChanged Proxy Replies",
    },
)

__all__ = __dir__()
