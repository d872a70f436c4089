"""A process that makes tokens, joins, renews and revokes without end, until it is killed.

    python access_loop.py FOLDER KEYS ACKNOWLEDGED SEED [STEP NUMBER]

KEYS has the keys of sites. What was answered is appended to the file ACKNOWLEDGED. With STEP the
process kills itself (kill -9) at its n-th step of that kind: "before" the audit log is written, at
a "torn" line, half of which is written, "unsynced", or "after" the sync, when nobody has heard.
"""

import json
import os
import signal
import sys
from pathlib import Path
from random import Random
from typing import Any

from xain_coordinator.access.audit_log import AuditLog
from xain_coordinator.access.control import AccessControl
from xain_coordinator.access.errors import Refusal
from xain_foundation.security.callers import Caller, Callers
from xain_foundation.security.identity import IdentityRules
from xain_foundation.security.join_token import JoinToken
from xain_foundation.security.x509 import key_of_pem, make_request

NAMES = [f"ward-{number}" for number in range(8)]
DAY = 86_400.0


class Book:
    """Answers of all processes so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: list[dict[str, Any]] = []
        if path.exists():
            self.entries = [json.loads(line) for line in path.read_bytes().splitlines()]

    def write(self, **entry: Any) -> None:
        """Write a line by one call of the system: a kill leaves all of it, or nothing."""
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, json.dumps(entry).encode() + b"\n")
        os.close(fd)
        self.entries.append(entry)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["kind"] == kind]


def caller_of(certificate: str) -> Caller:
    return Callers(IdentityRules()).of_certificate(certificate.encode())


def requests_of(keys: Path) -> list[bytes]:
    return [make_request(key_of_pem(path.read_bytes()), "x") for path in sorted(keys.glob("*.key"))]


def step(control: AccessControl, requests: list[bytes], book: Book, chance: Random) -> None:
    """One call, whose answer is written into the book."""
    tokens, certificates = book.of_kind("token"), book.of_kind("certificate")
    name = chance.choice(NAMES)
    match chance.choices(("token", "join", "renew", "revoke", "bearer", "own"), (4, 8, 4, 1, 1, 1))[
        0
    ]:
        case "join" if tokens:
            token = chance.choice(tokens[-10:])
            exchange(control, "join", token, chance.randrange(len(requests)), requests, book)
        case "renew" if certificates:
            site = chance.choice(certificates[-10:])
            exchange(control, "renew", site, chance.randrange(len(requests)), requests, book)
        case "revoke" if tokens:
            which = chance.choice([name, chance.choice(tokens)["serial"]])
            if any(each.name == name for each in control.entries()) or which != name:
                book.write(kind="revoked", serials=control.revoke(which, by="operator").serials)
        case "bearer":
            text, serial, _ = control.create_bearer(name, "observer", DAY, by="operator")
            book.write(kind="bearer", serial=serial, text=text)
        case "own":
            control.renew_own([], control._folder / "tls")
        case _:
            reusable = chance.random() < 0.1
            text, serial, _ = control.create_token(
                name, "participant", DAY, "localhost:1", reusable=reusable, by="operator"
            )
            certificate = JoinToken.decode(text).certificate.decode()
            book.write(kind="token", serial=serial, certificate=certificate, reusable=reusable)
    book.write(kind="log", num_lines=control.num_lines, last_hash=control.last_hash)


def exchange(
    control: AccessControl,
    how: str,
    basis: dict[str, Any],
    number: int,
    requests: list[bytes],
    book: Book,
) -> None:
    caller = caller_of(basis["certificate"])
    try:
        if how == "join":
            certificate = control.join(caller, requests[number], "ipv4:10.0.0.1:5000")
        else:
            certificate = control.renew(caller, requests[number])
    except Refusal as refusal:
        if refusal.code not in ("TOKEN_USED", "UNAUTHENTICATED"):
            raise
        return
    book.write(
        kind="certificate",
        how=how,
        basis=caller.serial,
        basis_certificate=basis["certificate"],
        key=number,
        serial=caller_of(certificate.decode()).serial,
        certificate=certificate.decode(),
    )


def die_at(kind: str, number: int) -> None:
    """Let this process kill itself at a step of the audit log."""
    left = number
    append, write, fsync = AuditLog.append, os.write, os.fsync

    def dies(at: str) -> bool:
        nonlocal left
        left -= at == kind
        return left == 0

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def dying_append(log: AuditLog, lines: Any) -> None:
        if dies("before"):
            kill()
        os.write, os.fsync = dying_write, dying_fsync
        append(log, lines)
        os.write, os.fsync = write, fsync
        if dies("after"):
            kill()

    def dying_write(fd: int, data: Any) -> int:
        if dies("torn"):
            write(fd, bytes(data)[: len(data) // 2])
            kill()
        return write(fd, data)

    def dying_fsync(fd: int) -> None:
        if dies("unsynced"):
            kill()
        fsync(fd)

    AuditLog.append = dying_append


def main() -> None:
    folder, keys, acknowledged, seed, *death = sys.argv[1:]
    if death:
        die_at(death[0], int(death[1]))
    chance = Random(int(seed))
    book, requests = Book(Path(acknowledged)), requests_of(Path(keys))
    control = AccessControl.open(Path(folder))
    while True:
        step(control, requests, book, chance)


if __name__ == "__main__":
    main()
