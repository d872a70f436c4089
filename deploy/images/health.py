"""The health check of the coordinator's image: is the coordinator in this container serving?

    health.py [--alive] [FOLDER]

It asks the Unix socket beside the journal, in FOLDER or where the image and the files of deploy/
have it, by grpc.health.v1. Exit status 0 if the coordinator is serving; 1, with the reason in one
line, if it is not, also while it starts and while it drains.

--alive: is it one that need not be started again? Exit status 0 if it answers at all. The socket
    is there from when it serves to the beginning of its drain.
"""

# ruff: noqa: T201 - a script speaks by printing

import sys

# Not `socket`: with what that imports a check would take twice the time of Python's own start.
from _socket import AF_UNIX, SOCK_STREAM, socket

FOLDERS = ("/var/lib/xain", "/var/lib/xain/xain-data")
TIMEOUT_S = 5.0

# HTTP/2 (RFC 9113) and its headers (RFC 7541), as few of both as gRPC needs.
DATA, HEADERS, SETTINGS = 0x0, 0x1, 0x4
RST_STREAM, GOAWAY = 0x3, 0x7
END_STREAM, END_HEADERS = 0x1, 0x4
STREAM = 1


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


def text(name: bytes, value: str) -> bytes:
    """A header that is not indexed. name: its index, or zero and the name itself."""
    return name + bytes((len(value),)) + value.encode()


REQUEST = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + frame(SETTINGS, 0, 0, b"")
    + frame(
        HEADERS,
        END_HEADERS,
        STREAM,
        b"\x83\x86"  # :method POST, :scheme http
        + text(b"\x04", "/grpc.health.v1.Health/Check")
        + text(b"\x01", "localhost")
        + text(b"\x0f\x10", "application/grpc")
        + text(b"\x00\x02te", "trailers"),
    )
    # A message that is not compressed and has no byte: the health of the whole server.
    + frame(DATA, END_STREAM, STREAM, bytes(5))
)
SERVING = b"\x08\x01"  # HealthCheckResponse(status=SERVING)


def ask(path: str) -> str:
    """The answer at a socket. Raises OSError."""
    connection = socket(AF_UNIX, SOCK_STREAM)
    connection.settimeout(TIMEOUT_S)
    connection.connect(path)
    connection.sendall(REQUEST)
    received = b""
    while True:
        while len(received) >= 9 and len(received) >= 9 + int.from_bytes(received[:3], "big"):
            end = 9 + int.from_bytes(received[:3], "big")
            kind, flags = received[3], received[4]
            payload, received = received[9:end], received[end:]
            if kind == DATA:
                return "SERVING" if payload[5:] == SERVING else "NOT_SERVING"
            if kind in (RST_STREAM, GOAWAY) or (kind == HEADERS and flags & END_STREAM):
                raise OSError("the coordinator refuses the check")
        more = connection.recv(4096)
        if not more:
            raise OSError("the coordinator has hung up")
        received += more


def main(arguments: list[str]) -> int:
    enough = ("SERVING", "NOT_SERVING") if "--alive" in arguments else ("SERVING",)
    folders = [word for word in arguments if word != "--alive"] or FOLDERS
    why = ""
    for folder in folders:
        path = f"{folder}/journal.sock"
        try:
            answer = ask(path)
        except OSError as error:
            why = why or f"{path}: {error.strerror or error}"
            continue
        print(answer)
        return 0 if answer in enough else 1
    print(why)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
