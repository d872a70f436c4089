"""Ways for frames to go: see ports.Driver."""

from xain_messaging.ports import Driver

DRIVERS = ("grpc", "zmq")


def open_driver(name: str) -> Driver:
    """Make a driver with its defaults, by name: "grpc" or "zmq".

    Raises ValueError for another name, and ImportError if the extra that it needs is not installed.
    """
    # Imported when asked for: neither needs what the other does.
    match name:
        case "grpc":
            from xain_messaging.drivers.grpc_streams import GrpcDriver

            return GrpcDriver()
        case "zmq":
            from xain_messaging.drivers.zeromq import ZmqDriver

            return ZmqDriver()
    raise ValueError(f"there is no driver {name!r}; there are {', '.join(DRIVERS)}")
