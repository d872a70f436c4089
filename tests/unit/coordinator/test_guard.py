"""Log events of a closed coordinator about its certificates."""

from itertools import repeat
from pathlib import Path

import pytest

from support.certificates import make_authority, write_folder
from support.logs import capture_logs
from xain_coordinator.access.control import initialise
from xain_coordinator.server.guard import Guard
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import Certificates
from xain_foundation.security.tls_settings import TlsSettings


def events_of_look(guard: Guard) -> list[str]:
    assert guard.certificates is not None
    with capture_logs() as logs:
        guard._look(guard.certificates, guard.require_access())
    return [each["event"] for each in logs]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    initialise(tmp_path / "access", ["127.0.0.1"])
    return tmp_path / "access"


def test_change_that_a_connection_has_noticed_is_logged_once(folder):
    guard = Guard.open(TlsSettings(), folder / "tls", folder)
    certificates = guard.certificates
    certificates.look_s = 0.0
    guard.require_access().renew_own((), folder / "tls")
    assert certificates.look() == 1  # as each connection does
    assert events_of_look(guard) == ["certificates_changed"]
    assert events_of_look(guard) == []
    guard.close()


def test_end_of_a_certificate_is_logged_where_it_is_not_renewed_by_itself(folder):
    own = Guard.open(TlsSettings(), folder / "tls", folder)
    access = own.require_access()
    foreign = write_folder(folder / "foreign", make_authority(), Role.COORDINATOR, "c")
    for of, renews_own, event in (
        (folder / "tls", True, "own_certificate_renewed"),
        (foreign, False, "certificate_expires"),
    ):
        end = Certificates(of).own.not_after - 1
        late = Certificates(of, repeat(end).__next__)
        guard = Guard(late, late.callers, access, renews_own=renews_own)
        assert events_of_look(guard) == [event]
    own.close()
