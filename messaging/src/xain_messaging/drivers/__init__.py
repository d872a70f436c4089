"""Ways for frames to go: see ports.Driver."""

from xain_messaging.links import DEFAULT_BOUNDS, Bounds
from xain_messaging.ports import Driver

DRIVERS = ("grpc", "zmq")


def open_driver(name: str, bounds: Bounds = DEFAULT_BOUNDS) -> Driver:
    """One with its defaults, by name: "grpc" or "zmq". bounds: those of the peers that send to it.
    Raises ValueError for another name, and ImportError if the extra that it needs is not
    installed."""
    # Imported when asked for: neither needs what the other does.
    match name:
        case "grpc":
            from xain_messaging.drivers.grpc_streams import GrpcDriver

            return GrpcDriver(bounds=bounds)
        case "zmq":
            from xain_messaging.drivers.zeromq import ZmqDriver

            return ZmqDriver(bounds=bounds)
    raise ValueError(f"there is no driver {name!r}; there are {', '.join(DRIVERS)}")
