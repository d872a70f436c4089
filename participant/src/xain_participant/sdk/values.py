"""Values of events and actions."""

from enum import Enum, auto


class State(Enum):
    """State that the coordinator advertises to this participant."""

    STANDBY = auto()
    ROUND = auto()
    FINISHED = auto()


class Call(Enum):
    """Call that the coordinator refused."""

    RENDEZVOUS = auto()
    HEARTBEAT = auto()
    BEGIN_ROUND = auto()
    TRAIN = auto()  # the download of the global model, before it
    HAND_IN = auto()
    REPORT = auto()  # that a process group broke


class Timer(Enum):
    """CONTACT: the next rendezvous or heartbeat is due. WORK: so is another attempt at the work."""

    CONTACT = auto()
    WORK = auto()
