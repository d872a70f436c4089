"""The health check of the coordinator's image: is the coordinator in this container serving?

    health.py [--alive] [FOLDER]

It asks the Unix socket beside the journal, in FOLDER or where the image and the files of deploy/
have it. Exit status 0 if the coordinator is serving; 1, with the reason in one line, if it is not,
also while it starts and while it drains.

--alive: is it one that need not be started again? Exit status 0 if it answers at all. The socket
    is there from when it serves to the beginning of its drain.
"""

# ruff: noqa: T201 - a script speaks by printing

import sys

# Not `socket`: with what that imports a check would take twice the time of Python's own start.
from _socket import AF_UNIX, SOCK_STREAM, socket

FOLDERS = ("/var/lib/xain", "/var/lib/xain/xain-data")
TIMEOUT_S = 5.0


def ask(path: str) -> str:
    """The answer at a socket. Raises OSError."""
    connection = socket(AF_UNIX, SOCK_STREAM)
    connection.settimeout(TIMEOUT_S)
    connection.connect(path)
    return connection.recv(64).decode("ascii", "replace").strip()


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
