"""The health check of the coordinator's image: is the coordinator in this container serving?

    health.py [FOLDER]

It asks the Unix socket beside the journal, in FOLDER or where the image and the files of deploy/
have it. Exit status 0 if the coordinator is serving; 1, with the reason in one line, if it is not,
also while it starts and while it drains.
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


def main(folders: tuple[str, ...]) -> int:
    why = ""
    for folder in folders:
        path = f"{folder}/journal.sock"
        try:
            answer = ask(path)
        except OSError as error:
            why = why or f"{path}: {error.strerror or error}"
            continue
        print(answer)
        return 0 if answer == "SERVING" else 1
    print(why)
    return 1


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or FOLDERS))
