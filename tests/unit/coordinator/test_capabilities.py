"""URLs of the weights port: what they allow, for whom, and how long."""

import stat
import sys

import pytest

from xain_coordinator.server.weights.capabilities import Capabilities, PortFile
from xain_coordinator.server.weights.http_messages import Answer

SECRET = bytes(range(32))
ALLOWED = ("PUT", "ward-7", 3, "3/ward-7", 1000)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def refused(capabilities: Capabilities, method: str, path: str) -> str:
    with pytest.raises(Answer) as caught:
        capabilities.check(method, path)  # type: ignore[arg-type]  # any text
    return str(caught.value)


def test_capability_comes_back_from_its_url():
    """Method, participant, round, key and size come back as they were given."""
    clock = Clock()
    capabilities = Capabilities(SECRET, "s1", 60, clock)
    allowed = capabilities.check("PUT", capabilities.path(*ALLOWED))
    assert (allowed.method, allowed.participant_id, allowed.round) == ALLOWED[:3]
    assert (allowed.key, allowed.size_bytes, allowed.expires_at) == (*ALLOWED[3:], 1060)


def test_url_ends_with_its_lifetime():
    """Nothing else about the URL changes."""
    clock = Clock()
    capabilities = Capabilities(SECRET, "s1", 60, clock)
    path = capabilities.path(*ALLOWED)
    clock.now += 60
    assert refused(capabilities, "PUT", path) == "the URL has expired"


def test_url_is_for_one_method():
    """An upload's URL shows nothing, and a model's URL takes nothing."""
    capabilities = Capabilities(SECRET, "s1", 60)
    assert refused(capabilities, "GET", capabilities.path(*ALLOWED)) == "the URL is for PUT only"


def test_url_of_another_session_or_secret_is_refused():
    """Each session has a secret, and its id is signed as well."""
    path = Capabilities(SECRET, "s1", 60).path(*ALLOWED)
    for other in (Capabilities(SECRET, "s2", 60), Capabilities(SECRET[::-1], "s1", 60)):
        assert refused(other, "PUT", path).endswith("none of this session's")


def test_changed_url_is_refused():
    """No byte of it may differ: not those of the payload, nor those of the signature."""
    capabilities = Capabilities(SECRET, "s1", 60)
    path = capabilities.path(*ALLOWED)
    other = capabilities.path("PUT", "ward-8", 3, "3/ward-8", 1000)
    payload, _, signature = path.rpartition(".")
    _, _, others = other.rpartition(".")
    changed = [f"{path[:at]}A{path[at + 1 :]}" for at in range(len(path)) if path[at] != "A"]
    changed += [f"{payload}.{others}", payload, f"{payload}.", signature, "", "/.weights/", "/é.é"]
    changed += [f"{path}=", f"{path}?x", path[:-1]]
    for one in changed:
        assert refused(capabilities, "PUT", one).endswith("none of this session's")


def test_secret_and_port_outlive_the_process(tmp_path):
    """Only the owner of the files can read them."""
    first = PortFile.of(tmp_path / "s1")
    first.port = 41000
    first.save()
    again = PortFile.of(tmp_path / "s1")
    assert (again.secret, again.port) == (first.secret, 41000)
    assert PortFile.of(tmp_path / "s2").secret != first.secret
    if sys.platform != "win32":
        assert stat.S_IMODE(first.path.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "{}", "null", '{"secret": "ab", "port": 1}', "\0"])
def test_unreadable_file_is_replaced(tmp_path, text):
    """URLs of before are lost, which costs a transfer through gRPC."""
    first = PortFile.of(tmp_path)
    first.path.write_text(text)
    assert len(PortFile.of(tmp_path).secret) == 32
