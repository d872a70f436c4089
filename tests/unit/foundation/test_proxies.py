"""The rule about the proxies of the environment."""

import pytest

from xain_foundation.net.proxies import proxy_for

PROXY = "http://proxy.example:3128"


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({"http_proxy": PROXY}, "http_proxy"),
        ({"HTTP_PROXY": PROXY}, "HTTP_PROXY"),
        ({"https_proxy": PROXY, "http_proxy": "http://other:1"}, "https_proxy"),
        ({"HTTPS_PROXY": PROXY, "http_proxy": "http://other:1"}, "HTTPS_PROXY"),
        ({"grpc_proxy": PROXY, "https_proxy": "http://other:1"}, "grpc_proxy"),
        ({"http_proxy": "", "HTTP_PROXY": PROXY}, "HTTP_PROXY"),
        ({"http_proxy": "proxy.example:3128"}, "http_proxy"),
    ],
)
def test_first_variable_that_is_set_names_the_proxy(environ, variable):
    proxy = proxy_for("fleet.example", 50051, environ)
    assert str(proxy) == f"{PROXY} ({variable})"


def test_without_a_variable_there_is_no_proxy():
    assert proxy_for("fleet.example", 50051, {"no_proxy": "other"}) is None


@pytest.mark.parametrize("host", ["localhost", "LocalHost.", "127.0.0.1", "127.1.2.3", "::1"])
def test_this_machine_is_reached_without_a_proxy(host):
    assert proxy_for(host, 50051, {"http_proxy": PROXY}) is None


@pytest.mark.parametrize(
    ("host", "entries", "is_excepted"),
    [
        ("fleet.example", "*", True),
        ("fleet.example", "fleet.example", True),
        ("fleet.example", "FLEET.example", True),
        ("fleet.example.", "fleet.example", True),
        ("fleet.example", "a, fleet.example", True),
        ("fleet.example", "a fleet.example", True),
        ("fleet.example", "example", True),
        ("fleet.example", ".example", True),
        ("fleet.example", "*.example", True),
        ("fleet.example", "fleet.example:50051", True),
        ("fleet.example", "fleet.example:443", False),
        ("fleet.example", "leet.example", False),
        ("fleet.example", "a.fleet.example", False),
        ("fleet.example", ",, .", False),
        ("10.1.2.3", "10.0.0.0/8", True),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3", "11.0.0.0/8", False),
        ("10.1.2.3", "2.3", False),
        ("2001:db8::1", "2001:db8::/32", True),
        ("2001:db8::1", "[2001:DB8:0::1]", True),
        ("2001:db8::1", "[2001:db8::1]:50051", True),
        ("2001:db8::1", "[2001:db8::1]:443", False),
        ("2001:db8::1", "10.0.0.0/8", False),
    ],
)
@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY", "no_grpc_proxy"])
def test_hosts_of_no_proxy_are_reached_without_one(host, entries, variable, *, is_excepted):
    environ = {"http_proxy": PROXY, variable: entries}
    assert (proxy_for(host, 50051, environ) is None) == is_excepted


@pytest.mark.parametrize("url", ["socks5://u:secret@h", "https://h:1", "http://", "http://h:x"])
def test_proxy_of_another_kind_is_not_gone_around(url):
    proxy = proxy_for("fleet.example", 50051, {"https_proxy": url})
    assert not proxy.host
    assert str(proxy) == "https_proxy is not an http:// one"


def test_password_is_told_to_the_proxy_only():
    proxy = proxy_for("fleet.example", 1, {"http_proxy": "http://user:p%40ss@proxy.example"})
    assert "ss" not in f"{proxy} {proxy!r}"
    assert proxy.headers == {"Proxy-Authorization": "Basic dXNlcjpwQHNz"}
    assert proxy.url == "http://user:p%40ss@proxy.example:80"
