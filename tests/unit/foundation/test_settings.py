import errno
import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field, SecretStr

from xain_foundation.settings.fields import (
    Check,
    Conflicts,
    FilePath,
    Host,
    Section,
    Texts,
    WrongSetting,
    join_host_port,
    parse_host,
)
from xain_foundation.settings.settings import ConfigError, load, resolve

PREFIX = "FLEET_"


class Server(Section):
    host: Host = "localhost"
    port: int = Field(default=50051, ge=0, le=65535)
    timeout_s: float = Field(default=5.0, gt=0)
    verbose: bool = False
    limit: int | None = Field(default=None, ge=1)
    keep: Annotated[int, Field(ge=1)] | Literal["all"] = "all"
    kind: Literal["files", "memory"] = "files"
    path: FilePath = Path("data")
    options: dict[str, int | str] = Field(default_factory=dict)

    @Check
    def _fits(self) -> Conflicts:
        if self.limit is not None and self.port == 7:
            yield WrongSetting("limit", "it must not be set with port 7")
        if self.kind == "memory" and self.keep == 3:
            yield WrongSetting("keep", "there is no third one")

    @Check
    def _is_kept(self) -> None:
        if self.path == Path("data") and self.keep == 3:
            raise WrongSetting("path", "it must be given too")


class Store(Section):
    login: SecretStr = SecretStr("")
    api_key: str = ""
    extra: dict[str, Any] = Field(default_factory=dict)
    names: dict[str, dict[str, str]] = Field(default_factory=dict)


class Fleet(Section):
    server: Server = Server()
    store: Store = Store()

    moved: ClassVar = {"old": "is gone", "old.port": "is called server.port now"}


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("fleet.toml")


def refusal(*given: Any, **more: Any) -> str:
    """The lines that a load is refused with."""
    with pytest.raises(ConfigError) as caught:
        load(*given, **more)
    return str(caught.value)


def error_of(toml: Path, text: str) -> str:
    toml.write_text(text)
    return refusal(Fleet, toml)


def test_environment_prevails_over_file_and_flags_over_both(toml, monkeypatch):
    """Precedence, key by key: a section is not replaced as a whole."""
    toml.write_text("[server]\nport = 1\ntimeout_s = 1\nverbose = true\n")
    monkeypatch.setenv("FLEET_SERVER__PORT", "2")
    monkeypatch.setenv("FLEET_SERVER__TIMEOUT_S", "2")
    config = load(Fleet, toml, PREFIX, {"server.port": 3})
    assert config.server == Server(port=3, timeout_s=2.0, verbose=True)


def test_environment_names_the_file_where_no_flag_does(toml, monkeypatch):
    toml.write_text("[server]\nport = 7\n")
    monkeypatch.setenv("FLEET_CONFIG", str(toml))
    assert load(Fleet, None, PREFIX).server.port == 7
    other = toml.with_name("other.toml")
    other.write_text("[server]\nport = 8\n")
    assert load(Fleet, other, PREFIX).server.port == 8
    monkeypatch.setenv("FLEET_CONFIG", "gone.toml")
    with pytest.raises(ConfigError, match=r"gone\.toml"):
        load(Fleet, None, PREFIX)


def test_tables_of_all_sources_are_joined(toml, monkeypatch):
    """One more option in the environment does not drop those of the file."""
    toml.write_text('[server.options]\n"grpc.a" = 1\nb = "file"\n')
    monkeypatch.setenv("FLEET_SERVER__OPTIONS", '{"b": "environment", "c": 2}')
    config = load(Fleet, toml, PREFIX, {"server.options.grpc.d": "3"})
    assert config.server.options == {"grpc.a": 1, "b": "environment", "c": 2, "grpc.d": 3}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("port", "7", 7),
        ("timeout_s", "0.5", 0.5),
        ("timeout_s", "2", 2.0),
        ("verbose", "yes", True),
        ("verbose", "Off", False),
        ("limit", "3", 3),
        ("limit", "", None),
        ("kind", "memory", "memory"),
        ("path", "a/b", Path("a/b")),
        ("host", "[::1]", "::1"),
    ],
)
def test_text_is_read_as_the_type_of_its_key(monkeypatch, key, text, value):
    """Environment and --set have only text."""
    assert getattr(load(Fleet, overrides={f"server.{key}": text}).server, key) == value
    monkeypatch.setenv(f"FLEET_SERVER__{key.upper()}", text)
    assert getattr(load(Fleet, env_prefix=PREFIX).server, key) == value


@pytest.mark.parametrize(
    ("text", "value"), [("3", 3), ("0.5", 0.5), ("true", True), ("hinge", "hinge"), ("1\nx=2", ...)]
)
def test_items_of_open_tables_are_read_as_toml(text, value):
    """Options of a workload have no declared type."""
    expected = text if value is ... else value
    assert load(Fleet, overrides={"store.extra.item": text}).store.extra == {"item": expected}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nport = true", "server.port is true; it must be a whole number, at least 0 and"),
        ("[server]\nport = '1'", 'server.port is "1"; it must be a whole number, at least 0 and'),
        ("[server]\nport = 1.0", "server.port is 1.0; it must be a whole number, at least 0 and"),
        ("[server]\nport = 65536", "server.port is 65536; it must be a whole number, at least 0"),
        ("[server]\nport = [1]", "server.port is a list; it must be a whole number, at least 0"),
        ("[server]\nport.x = 1", "server.port is a table; it must be a whole number, at least 0"),
        ("[server]\ntimeout_s = 0", "server.timeout_s is 0; it must be a number, above 0"),
        ("[server]\ntimeout_s = inf", "server.timeout_s is inf; it must be finite"),
        ("[server]\ntimeout_s = false", "server.timeout_s is false; it must be a number, above 0"),
        ("[server]\nverbose = 'false'", 'server.verbose is "false"; it must be true or false'),
        ("[server]\nverbose = 'no'", 'server.verbose is "no"; it must be true or false'),
        ("[server]\nverbose = 1", "server.verbose is 1; it must be true or false"),
        ("[server]\nlimit = 0", "server.limit is 0; it must be a whole number, at least 1"),
        ("[server]\nkeep = 0", "server.keep is 0; it must be a whole number, at least 1, or one"),
        ("[server]\nkind = 's3'", 'server.kind is "s3"; it must be one of: files, memory'),
        ("[server]\npath = ''", 'server.path is ""; it must be a path, not empty'),
        ("[server]\noptions = 1", "server.options is 1; it must be a table"),
        ("[server]\noptions.a = true", "server.options.a is true; it must be a whole number or te"),
        ('[server]\noptions."b.c" = 1.5', 'server.options."b.c" is 1.5; it must be a whole number'),
        ("server = 3", "server is 3; it must be a section, [server]"),
        ('[server]\nhost = "a\\nb"', 'server.host is "a\\nb"; it must be a host name, an IPv4'),
        ("[server]\nprot = 1", "unknown key server.prot; did you mean server.port?"),
        ("[server]\nPORT = 1", "unknown key server.PORT; did you mean server.port?"),
        ("[serve]\nport = 1", "unknown key serve; did you mean [server]?"),
        ("port = 1", "unknown key port; did you mean server.port?"),
        ("[store]\nport = 1", "unknown key store.port; did you mean server.port?"),
        ("[store]\nzzz = 1", "unknown key store.zzz; [store] has: login, api_key, extra"),
        ("[zzz]", "unknown key zzz; there are: [server], [store]"),
        ("[old]\nport = 1", "old.port is called server.port now"),
        ("[old]\nother = 1", "old.other is gone"),
        ("[server]\nport = 7\nlimit = 2", "server.limit is 2; it must not be set with port 7"),
    ],
)
def test_a_wrong_setting_of_a_file_is_told_in_one_line(toml, text, message):
    """The line names the file, the key, its value and what is allowed."""
    told = error_of(toml, text)
    assert told.startswith(f"fleet.toml: {message}")
    assert "\n" not in told
    assert " more)" not in told


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("FLEET_SERVER__PORT", "x", 'server.port is "x"; it must be a whole number, at least 0 an'),
        ("FLEET_SERVER__PORT", "", 'server.port is ""; it must be a whole number, at least 0 and'),
        ("FLEET_SERVER__VERBOSE", "maybe", 'server.verbose is "maybe"; it must be true or false'),
        ("FLEET_SERVER__OPTIONS", "{", 'server.options is "{"; it must be a table'),
        ("FLEET_SERVER__PROT", "1", "unknown key server.prot; did you mean FLEET_SERVER__PORT?"),
        ("FLEET_SERVER_PORT", "1", "unknown key server_port; did you mean FLEET_SERVER__PORT?"),
        ("FLEET_STORE", "1", "store is a section; set one of its keys: FLEET_STORE__LOGIN, FLEET"),
        ("fleet_server__prot", "1", "unknown key server.prot; did you mean FLEET_SERVER__PORT?"),
    ],
)
def test_a_wrong_setting_of_the_environment_is_told_in_one_line(
    monkeypatch, variable, text, message
):
    """The line names the variable, and what is meant as a variable."""
    monkeypatch.setenv(variable, text)
    told = refusal(Fleet, env_prefix=PREFIX)
    assert told.startswith(f"environment variable {variable}: {message}")


def test_two_spellings_of_one_variable_are_refused(monkeypatch):
    """An operator could not tell which of them prevails."""
    monkeypatch.setenv("FLEET_SERVER__PORT", "1")
    monkeypatch.setenv("fleet_server__port", "2")
    told = refusal(Fleet, env_prefix=PREFIX)
    assert "fleet_server__port: FLEET_SERVER__PORT is the same key" in told


@pytest.mark.parametrize(
    "variable",
    [
        "FLEET_PORT",
        "FLEET_PORT_50051_TCP",
        "FLEET_PORT_50051_TCP_ADDR",
        "FLEET_SERVICE_HOST",
        "FLEET_SERVICE_PORT",
        "FLEET_SERVICE_PORT_GRPC",
    ],
)
def test_variables_of_a_kubernetes_service_are_no_settings(monkeypatch, variable):
    """A Service called like the program must not keep the program from starting."""
    monkeypatch.setenv(variable, "tcp://10.0.0.1:50051")
    assert load(Fleet, env_prefix=PREFIX) == Fleet()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("server.port", "x", 'server.port is "x"; it must be a whole number, at least 0 and at mo'),
        ("server.port", 99999, "server.port is 99999; it must be a whole number, at least 0 and"),
        ("server.prot", "1", "unknown key server.prot; did you mean server.port?"),
        ("server", "1", "server is a section; set one of its keys: server.host, server.port"),
        ("server.port.x", "1", "unknown key server.port.x; did you mean server.port?"),
        ("old.port", 1, "old.port is called server.port now"),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(key, value, message):
    """The line says that the command line is wrong, not the file."""
    assert refusal(Fleet, overrides={key: value}).startswith(f"command line: {message}")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"a, b"', "a, b"),
        ("'a'", "a"),
        (r'"\t"', "\t"),
        ("a", "a"),
        ('"', '"'),
        ("[a]", "[a]"),
        ("[1]", "[1]"),
    ],
)
def test_text_of_a_flag_may_be_in_quotes_as_in_a_file(text, value):
    """The line of a file can be typed as it is, and text is text without quotes."""
    assert load(Fleet, overrides={"store.api_key": text}).store.api_key == value


@pytest.mark.parametrize("text", ['{"a": 1, "b": "x"}', "{a = 1, b = 'x'}", '{"a" = 1, b = "x"}'])
def test_table_of_a_flag_is_json_or_toml(text):
    assert load(Fleet, overrides={"server.options": text}).server.options == {"a": 1, "b": "x"}


def test_keys_of_flags_may_be_in_quotes_as_in_a_file(toml):
    """Names with dots and blanks, and names in names."""
    flags = {
        "store.names.'of a'.b": "'c'",
        'store.names."of a"."d.e"': "f",
        "store.names.g.h": "7",
        "server.options.grpc.limit": "3",
        "server.options.'with blank'": "4",
    }
    toml.write_text('store.names."of a" = { b = "x", z = "y" }')
    fleet = load(Fleet, toml, overrides={**flags, "store.names.g.h": "'7'"})
    assert fleet.store.names == {"of a": {"b": "c", "z": "y", "d.e": "f"}, "g": {"h": "7"}}
    assert fleet.server.options == {"grpc.limit": 3, "with blank": 4}


def test_all_mistakes_are_told_at_once(toml):
    """One line for each, unknown keys and wrong values alike."""
    told = error_of(toml, "[server]\nport = -1\nverbose = 3\n[stor]\n").splitlines()
    assert len(told) == 3
    assert all(line.startswith("fleet.toml: ") for line in told)
    assert "unknown key stor;" in told[0]
    assert "server.port is -1; it must be" in told[1]
    assert "server.verbose is 3; it must be" in told[2]


def test_mistakes_without_number_are_counted(toml):
    told = error_of(toml, "[server]\n" + "".join(f"x{i} = 1\n" for i in range(70))).splitlines()
    assert len(told) == 51
    assert told[-1] == "further mistakes: 20"


def test_all_conflicts_of_a_section_are_told(toml):
    """One check may find several, and several checks do; also beside mistakes of other kinds."""
    conflicts = "port = 7\nlimit = 1\nkind = 'memory'\nkeep = 3\n"
    told = [
        "fleet.toml: server.limit is 1; it must not be set with port 7",
        "fleet.toml: server.keep is 3; there is no third one",
        "fleet.toml: server.path: it must be given too",
    ]
    assert error_of(toml, f"[server]\n{conflicts}").splitlines() == told
    others = error_of(toml, f"[zzz]\n[server]\n{conflicts}\nzzz = 1\nverbose = 3").splitlines()
    assert others[3:] == told
    assert [line.split(";")[0].removeprefix("fleet.toml: ") for line in others[:3]] == [
        "unknown key zzz",
        "unknown key server.zzz",
        "server.verbose is 3",
    ]


@pytest.mark.parametrize(
    "mistake", ["path = ''", "pth = 'x'", "paths = ['x']", "path = 3", "path = '~nosuchuser/x'"]
)
def test_conflict_with_the_default_of_a_mistaken_key_is_not_told(toml, mistake):
    """A key with a wrong value or a misspelt name is not known; conflicts of others are told."""
    text = f"[server]\nport = 7\nlimit = 1\nkeep = 3\n{mistake}"
    told = error_of(toml, text).splitlines()
    assert len(told) == 2
    assert "server.p" in told[0]
    assert "server.limit is 1; it must not be set with port 7" in told[1]


def test_keys_of_a_conflict_within_a_section_are_read_by_no_check_of_the_whole(toml):
    """Such a check may rely on what those within the sections have found to be right."""

    class Whole(Fleet):
        @Check
        def _fit(self) -> Conflicts:
            if self.server.keep == 3:
                yield WrongSetting("store.api_key", "it cannot be kept")
            if self.server.limit is not None:
                yield WrongSetting("server.limit", "there is none")

        @Check
        def _is_stored(self) -> Conflicts:
            if not self.store.api_key:
                yield WrongSetting("store.api_key", "it must be given")

    toml.write_text("[server]\nlimit = 1\nkeep = 3\nport = 7\npath = 'x'\n[store]\nlogn = 'x'")
    assert refusal(Whole, toml).splitlines() == [
        "fleet.toml: unknown key store.logn; did you mean store.login?",
        "fleet.toml: server.limit is 1; it must not be set with port 7",
        "settings: store.api_key: it cannot be kept",
        "settings: store.api_key: it must be given",
    ]
    assert Fleet().store == Store(), "the default is as it was"


def test_long_values_are_cut(toml):
    assert len(error_of(toml, f"[server]\nkind = '{'x' * 5000}'")) < 200


SECRET = "hunter2"


@pytest.mark.parametrize(
    "text",
    [
        f"[store]\nlogin = ['{SECRET}']",
        f"[store]\nlogin = {{a = '{SECRET}'}}",
        f"[store]\napi_key = ['{SECRET}']",
        f"[store]\napi_key = {{value = '{SECRET}'}}",
        f"[store]\npassword = '{SECRET}'",
        f"[store]\nlogni = '{SECRET}'",
        f"[server]\nport = {{password = '{SECRET}'}}",
        f"[server]\noptions = ['{SECRET}']",
        f"[server.options]\nauth_token = {{a = '{SECRET}'}}",
        f"server = [{{password = '{SECRET}'}}]",
        f"store = '{SECRET}'\npassword = '{SECRET}'\n[store]",
    ],
)
def test_secrets_are_never_told(toml, text):
    """A secret is shown neither as a wrong value nor in the dump of a section, as by XAIN."""
    assert SECRET not in error_of(toml, text)


@pytest.mark.parametrize(
    "key", ["store.login", "store.api_key", "store.extra.password", "server.options.secret"]
)
def test_secrets_from_anywhere_are_masked_in_force(monkeypatch, key):
    """check-config is pasted into tickets."""
    resolved = resolve(Fleet, overrides={key: SECRET})
    assert {s.key: s.value for s in resolved.settings()}[key] == "********"
    assert SECRET not in repr(resolved.settings())
    monkeypatch.setenv("FLEET_SERVER__OPTIONS", f'{{"token": ["{SECRET}"]}}')
    told = refusal(Fleet, env_prefix=PREFIX)
    assert "FLEET_SERVER__OPTIONS: server.options.token is ********" in told
    assert SECRET not in told


def test_a_value_in_force_tells_where_it_came_from(toml, monkeypatch):
    """An operator finds the line to change."""
    toml.write_text("[server]\nkind = 'memory'\n[server.options]\na = 1\n")
    monkeypatch.setenv("FLEET_SERVER__TIMEOUT_S", "2")
    resolved = resolve(Fleet, toml, PREFIX, {"server.port": "3"})
    told = {s.key: (s.value, s.origin, s.where) for s in resolved.settings()}
    assert told == {
        "server.host": ('"localhost"', "default", ""),
        "server.port": ("3", "flag", ""),
        "server.timeout_s": ("2.0", "environment", "FLEET_SERVER__TIMEOUT_S"),
        "server.verbose": ("false", "default", ""),
        "server.limit": ("", "default", ""),
        "server.keep": ('"all"', "default", ""),
        "server.kind": ('"memory"', "file", "fleet.toml"),
        "server.path": ('"data"', "default", ""),
        "server.options.a": ("1", "file", "fleet.toml"),
        "store.login": ("", "default", ""),
        "store.api_key": ("", "default", ""),
        "store.extra": ("{}", "default", ""),
        "store.names": ("{}", "default", ""),
    }


def test_files_that_cannot_be_read_are_told(toml, monkeypatch):
    """Every way in which a file can fail to be a configuration."""
    for make, message in [
        (lambda: None, "fleet.toml: there is no such file"),
        (toml.mkdir, "fleet.toml: cannot be read: Is a directory"),
        (toml.rmdir, "fleet.toml: there is no such file"),
        (lambda: toml.write_bytes(b"\xff"), "fleet.toml: this is no TOML: 'utf-8' codec"),
        (lambda: toml.write_text("a = 1\nb ="), "fleet.toml: this is no TOML: Invalid value (at"),
        (lambda: toml.write_text("a = 1\nb 2\n"), "fleet.toml: this is no TOML: Expected '=' after"
         " a key in a key/value pair (at line 2, column 3)"),
    ]:  # fmt: skip
        make()
        assert refusal(Fleet, toml).startswith(message)

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # Not chmod: the tests may run as root, who may read everything.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"^fleet\.toml: cannot be read: Permission denied$"):
        load(Fleet, toml)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("localhost", "localhost"),
        ("fleet.example.org.", "fleet.example.org."),
        ("xain_coordinator", "xain_coordinator"),
        ("127.0.0.1", "127.0.0.1"),
        ("::", "::"),
        ("[::]", "::"),
        ("[fe80::1]", "fe80::1"),
        ("2001:db8::1", "2001:db8::1"),
    ],
)
def test_hosts(text, host):
    """Names and addresses; brackets around IPv6 are accepted and taken off."""
    assert parse_host(text) == host


@pytest.mark.parametrize(
    "text",
    ["", "a b", "a:1", "http://a", "256.1.1.1", "1.2.3", "[a]", "[1.2.3.4]", "[::", ":::", "-a",
     "a..b", "x" * 64, ".".join(["x" * 50] * 6), 3],
)  # fmt: skip
def test_text_that_is_no_host_is_refused(text):
    """A mistake is found at the start, not when no participant connects."""
    with pytest.raises(ValueError, match=r"neither|not text"):
        parse_host(text)


def test_an_ipv6_address_has_brackets_before_its_port():
    """XAIN bound to "::1:50051"."""
    assert join_host_port("::1", 1) == "[::1]:1"
    assert join_host_port("localhost", 1) == "localhost:1"


class Listing(Section):
    names: Texts = ()


class Model(Section):
    section: Listing = Listing()


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ("a, b", ("a", "b")),
        ("", ()),
        ('["a,b", 1]', ("a,b", "1")),
        (["a", 1, 0.5], ("a", "1", "0.5")),
    ],
)
def test_list_of_texts_may_be_one_text(value, texts):
    """The environment and flags have text only; a comma separates the items."""
    assert load(Model, overrides={"section.names": value}).section.names == texts


@pytest.mark.parametrize("value", ['["a"', [["a"]], {"a": 1}, 7, "[{}]"])
def test_list_of_texts_is_checked(value):
    with pytest.raises(ConfigError, match=re.escape('it must be a list of texts such as ["age"')):
        load(Model, overrides={"section.names": value})
