"""Where the coordinator of a session runs: in the script's own process, or elsewhere."""

import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

from xain.result import SessionError
from xain_coordinator.assembly.changed_rules import differences
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.vocabulary.values import Phase
from xain_coordinator.export.trained import ask, open_files
from xain_coordinator.inspection.client import TLS
from xain_coordinator.journal.restore import restore
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import JournalError, StoreError
from xain_coordinator.process.embedding import Coordinator
from xain_coordinator.process.run import STARTING_ERRORS, SWITCH_INTERVAL_S
from xain_coordinator.server.operators_socket import socket_of
from xain_coordinator.telemetry.trackers import Position
from xain_foundation.durable import replace_file
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.logs.logger import get_logger
from xain_foundation.net import channels
from xain_foundation.security.tls import Certificates, InvalidCertificates
from xain_foundation.settings.fields import WrongSetting, is_loopback
from xain_foundation.settings.settings import ConfigError, load
from xain_participant.wire.client import channel_options
from xain_session.errors import for_script
from xain_session.given import SETTINGS, SOURCE
from xain_session.session_log import COORDINATOR, LOG, logged_in
from xain_session.stopping import stop
from xain_session.transports import InProcess, Remote, Transport
from xain_workloads.errors import NoModel
from xain_workloads.exported import formats
from xain_workloads.model import PERSONAL, Model
from xain_workloads.remedies import SCAFFOLD

if TYPE_CHECKING:
    from xain.weights import Declared

log = get_logger(f"{COORDINATOR}.session")

MARK: Final = "script.json"  # in the data folder: which session a script has come to the end of
DOWNLOAD_S: Final = 60.0  # how long the server of a first model may be silent
PIECE_BYTES: Final = 1 << 20
FIRST_MODEL: Final = "first-model.npz"
_LONGEST_LINGER_S: Final = 15.0
_LOOK_S: Final = 0.05
_PORT: Final = re.compile(r":\d+$")
_OPTIONS: Final = [*channel_options(), ("grpc.max_receive_message_length", -1)]


class Pool(Protocol):
    """Simulated participants that run."""

    @property
    def is_over(self) -> bool:
        """Whether the code of each has come to its end."""

    def check(self, timeout_s: float) -> None:
        """Wait so long for some to end. Raises SessionError if one has failed."""


class Workplace(Protocol):
    """Where participants can run. host: at which the coordinator has to listen for them."""

    host: str

    def run(self, target: str) -> Pool:
        """Run them against the coordinator at HOST:PORT."""


class Participants(Protocol):
    """Participants that a session starts itself, see xain.simulated()."""

    @property
    def settings(self) -> Mapping[str, object]:
        """Settings of the coordinator that they need, unless the script says others."""

    @property
    def insecure(self) -> bool:
        """Whether those of other machines may call it in the clear."""

    def started(self) -> AbstractContextManager[Workplace]:
        """Make ready to run them, and stop those that run at the end."""


class Deployment(Protocol):
    """address: HOST:PORT of the coordinator, for sites."""

    @property
    def address(self) -> str: ...

    def opened(self, tell: Callable[[str], None]) -> AbstractContextManager[Transport]:
        """Calls to the coordinator, which runs until the end. Raises SessionError.

        tell: prints a line for the user.
        """

    def start_participants(self) -> None:
        """Start the session's own participants, which opened() stops at its end."""

    def check(self) -> None:
        """Check that the session can go on. Raises what keeps it from that."""

    def linger(self) -> None:
        """Go on for a moment after the end, so that sites hear of it; with participants of the
        session's own until their code has come to its end."""

    def forget(self) -> None:
        """Have the next start begin another session."""

    def export(self, path: Path, which: str, *, is_running: bool) -> None:
        """Write a model to a file. which: "last", "best" or a number. Raises SessionError and
        OSError."""

    def position_of(self, tracker: str) -> Position:
        """How far the tracker of this name has come."""


class Embedded:
    """A coordinator in the script's own process.

    settings: by dotted key. first: the model that a new session begins with: declared tensors,
        "SESSION/ROUND", the path or the URL of a file, or None.
    linger_s: how long the coordinator answers when all participants have left.
    may_change: whether a session goes on under its own rules where the script gives others.
    always_new: whether each start begins a session.
    Raises SessionError for a wrong setting.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        first: "Declared | str | None",
        *,
        participants: Participants | None = None,
        linger_s: float = 0.0,
        may_change: bool = False,
        always_new: bool = False,
    ) -> None:
        """Complete the settings, and check them. Raises SessionError."""
        self._folder = folder
        self._settings = {**settings_in(folder), **settings}
        self._first = first
        self._participants = participants
        self._linger_s = linger_s
        self._may_change = may_change
        self._coordinator: Coordinator | None = None
        self._always_new = always_new
        self._workplace: Workplace | None = None
        self._pool: Pool | None = None
        self._config = _config_of(self._settings)

    @property
    def address(self) -> str:
        assert self._coordinator is not None, "the session is used in its `with`"
        return self._coordinator.address

    @contextmanager
    def opened(self, tell: Callable[[str], None]) -> Iterator[Transport]:
        """Start the coordinator in this process, after what the session's own participants need.
        Gives the calls to it; stops all at the end. Raises SessionError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(logged_in(self._folder))
            if self._participants is not None:
                self._workplace = stack.enter_context(self._participants.started())
                if not is_loopback(self._workplace.host):
                    self._settings["server.host"] = self._workplace.host
                    self._settings["server.insecure"] = self._participants.insecure
                    self._config = _config_of(self._settings)
            self._coordinator = stack.enter_context(self._started(tell))
            stack.enter_context(_prompt_threads())
            yield InProcess(self._coordinator)

    @contextmanager
    def _started(self, tell: Callable[[str], None]) -> Iterator[Coordinator]:
        """Start the coordinator, and stop it at the end. Raises SessionError."""
        try:
            is_new = self._begins_new()
            coordinator = Coordinator(
                self._settings,
                resume=self._may_change,
                new_session=is_new,
                from_model=self._first_model() if is_new else "",
            )
            coordinator.start()
        except (WrongSetting, ConfigError) as error:
            raise SessionError(for_script(str(error))) from None
        except (*STARTING_ERRORS, InvalidCertificates) as error:
            why = for_script(str(error))
            raise SessionError(f"the session in {self._folder} cannot go on: {why}") from None
        is_interrupted = False
        try:
            yield coordinator
        except KeyboardInterrupt:
            is_interrupted = True
            raise
        finally:
            stop(coordinator, self._own, tell, is_interrupted=is_interrupted)

    @property
    def _own(self) -> list[str]:
        """Name the script's objects that the coordinator calls, for a user to read."""
        return [
            f"the {what} {self._settings[name_key]}"
            for what, (name_key, options_key) in SETTINGS.items()
            if SOURCE in self._settings.get(options_key, {})
        ]

    def _begins_new(self) -> bool:
        """Whether this start begins a session: each does with always_new, the first, and the one
        after the script has ended the last session.

        If the values of the script have changed, may_change logs that the session goes on under its
        own. Without it raises SessionError.
        """
        if self._always_new or not self._config.journal.path.exists():
            return True
        with closing(SqliteJournal(self._config.journal.path)) as journal:
            restored = restore(journal)
        if restored is None:  # a start has failed before the session was there
            return True
        session = restored[0].session
        if session.phase is Phase.FINISHED and session.session_id == self._marked():
            return True
        kept = list(differences(session, self._config))
        replaced = [told for text in kept if (told := self._replaced(text))]
        kept = [text for text in kept if not self._replaced(text)]
        if not (kept or replaced):
            return False
        if not self._may_change:
            then = [
                *(["with the settings that it was begun with"] if kept else []),
                *(["with the code and values of now"] if replaced else []),
            ]
            raise SessionError(
                f"the session in {self._folder} was begun with {', '.join([*kept, *replaced])}; "
                "start the script with the same values, or with another data_dir; with "
                f'resume="changed" the session goes on {" and ".join(then)}'
            )
        # Instead of the coordinator's rules_differ, which speaks to users of the program.
        if kept:
            log.warning("settings_kept", kept=kept, hint="with another data_dir they are taken")
        if replaced:
            log.warning("code_replaced", replaced=replaced)
        return False

    def _replaced(self, different: str) -> str:
        """Name the script's object whose code or values have changed, by a difference; or ""."""
        for what, (name_key, options_key) in SETTINGS.items():
            found = re.fullmatch(
                rf'{re.escape(options_key)}\.{SOURCE} = "(\w+)" \(configured: "(\w+)"\)', different
            )
            if found is not None:
                name = self._settings.get(name_key)
                return f"the {what} {name} as its code was then ({found[1]}, now {found[2]})"
        return ""

    def _marked(self) -> str:
        """Read the id of the session that the script has ended; "" if there is none."""
        with suppress(OSError, ValueError):
            return str(json.loads((self._folder / MARK).read_text(encoding="utf-8"))["ended"])
        return ""

    def _first_model(self) -> str:
        """The model that a new session begins with, as --from-model takes it; "" for none. Declared
        weights are written to a file, and the file of a URL is downloaded. Raises SessionError."""
        if isinstance(self._first, str) and "://" in self._first:
            return str(_download(self._first, self._folder))
        if self._first is None or isinstance(self._first, str):
            return self._first or ""
        personal = self._config.model.personal
        try:
            first = self._first.without(personal)  # the sites declare theirs in the same way
        except ValueError as error:
            raise SessionError(str(error)) from None
        metadata = {PERSONAL: json.dumps(personal)} if personal else {}
        path = self._folder / FIRST_MODEL
        if first.has_control:  # files have no control variate, which begins with zeros
            metadata["options"] = json.dumps({"remedy": SCAFFOLD})
        formats.write(path, Model(first.vector(), first.layout, metadata), {})
        return str(path)

    def start_participants(self) -> None:
        if self._workplace is not None:
            self._pool = self._workplace.run(self.address)

    def check(self) -> None:
        """Check that participants and coordinator can go on. Raises SessionError."""
        assert self._coordinator is not None, "opened() comes first"
        if self._pool is not None:
            self._pool.check(0.0)
            session = self._coordinator.session
            waits = not session.is_trained and session.phase is not Phase.AGGREGATING
            if self._pool.is_over and waits and not self._coordinator.num_connected:
                why = "all simulated participants have left their loops, and rounds are left"
                goes_on = "" if self._always_new else "; the session goes on at the next start"
                raise SessionError(f"{why}{goes_on}")
        if self._coordinator.has_ended:
            failure = self._coordinator.failure
            why = "" if failure is None else f": {type(failure).__name__}: {failure}"
            raise SessionError(
                f"the coordinator has stopped{why}; its log, {self._folder / LOG}, says more"
            )

    def linger(self) -> None:
        """Wait for the code after the participants' loops, until sites have said goodbye, and for
        linger_s."""
        coordinator = self._coordinator
        assert coordinator is not None, "opened() comes first"
        # As long as their code takes after its loop, as a training does. One that has died raises.
        while self._pool is not None and not self._pool.is_over:
            self._pool.check(_LOOK_S)
        longest_s = min(coordinator.session.rules.heartbeat_time_s + 1.0, _LONGEST_LINGER_S)
        give_up_at = time.monotonic() + longest_s
        while coordinator.num_connected and time.monotonic() < give_up_at:
            time.sleep(_LOOK_S)  # a poll: a goodbye sends no notification
        if self._pool is None:
            time.sleep(self._linger_s)  # sites ask for the model after their loops

    def forget(self) -> None:
        """Note that the script has ended this session, so that the next start begins another."""
        assert self._coordinator is not None, "opened() comes first"
        mark = json.dumps({"ended": self._coordinator.session.session_id})
        replace_file(self._folder / MARK, [mark.encode()])

    def position_of(self, tracker: str) -> Position:
        return tracked_in(self._folder, tracker)

    def export(self, path: Path, which: str, *, is_running: bool) -> None:
        socket = socket_of(self._config.journal.path)
        _export(ask(f"unix:{socket}") if is_running else open_files(self._config), path, which)


class Elsewhere:
    """A coordinator that runs elsewhere, which the script drives as an operator.

    address: HOST:PORT, or the path of the Unix socket beside its journal. tls: a folder with the
        operator's certificate. folder: for what the trackers have taken.
    """

    def __init__(self, address: str, tls: str | os.PathLike[str] | None, folder: Path) -> None:
        """Tell a path from HOST:PORT. Raises SessionError for an address without a port."""
        self.address = address
        self._folder = folder
        is_path = "/" in address or address.endswith(".sock")
        if not is_path and _PORT.search(address) is None:
            raise SessionError(
                f"{address!r} has no port; give HOST:PORT, or the path of its socket, "
                "journal.sock beside its journal"
            )
        self._target = f"unix:{address.removeprefix('unix:')}" if is_path else address
        self._tls = tls
        self._certificates: Certificates | None = None

    @contextmanager
    def opened(self, tell: Callable[[str], None]) -> Iterator[Transport]:
        """Connect to the coordinator. Gives the calls to it. Raises SessionError."""
        try:
            if self._tls is not None:
                self._certificates = Certificates(Path(self._tls))
            channels.require_private_way(self._target, self._certificates, insecure=False)
        except InvalidCertificates as error:
            raise SessionError(str(error)) from None
        except ValueError:
            raise SessionError(
                f"{self.address} is another machine, and without certificates everything would go "
                "there in the clear: give tls=FOLDER, the folder of an operator's certificate"
            ) from None
        credentials = None if self._certificates is None else self._certificates.of_channel()
        with channels.open_channel(self._target, _OPTIONS, credentials) as channel:
            yield Remote(channel, self.address)

    def start_participants(self) -> None:
        """Participants are others' here."""

    def check(self) -> None:
        """A coordinator that is away is waited for."""

    def linger(self) -> None:
        """The coordinator goes on without the script."""

    def forget(self) -> None:
        """A coordinator elsewhere has a session of its own."""

    def position_of(self, tracker: str) -> Position:
        return tracked_in(self._folder, tracker)

    def export(self, path: Path, which: str, *, is_running: bool) -> None:
        """Write a model of the coordinator to a file, by the operator's certificates."""
        token = TLS.set(self._certificates)
        try:
            _export(ask(self._target), path, which)
        finally:
            TLS.reset(token)


@contextmanager
def _prompt_threads() -> Iterator[None]:
    """Lower Python's switch interval, so that threads of coordinator and script wait less for each
    other than the default 5 ms: a whole small round takes but four times that."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def tracked_in(folder: Path, tracker: str) -> Position:
    """The position of a tracker of this name, in a file of its own."""
    return Position(folder / f"tracked-{tracker}.json")


def settings_in(folder: Path) -> dict[str, object]:
    """Settings, by dotted key, of a coordinator that keeps all it has in a folder."""
    return {
        "storage.path": str(folder / "weights"),
        "journal.path": str(folder / "journal.sqlite"),
        "metrics.path": str(folder / "metrics.jsonl"),
        "parameters.path": str(folder / "parameters"),
    }


def _config_of(settings: Mapping[str, object]) -> CoordinatorConfig:
    """The coordinator's configuration from these settings alone. Raises SessionError."""
    try:
        return load(CoordinatorConfig, overrides=dict(settings), reads_text=False)
    except ConfigError as error:
        raise SessionError(for_script(str(error).replace("command line: ", ""))) from None


def _download(url: str, folder: Path) -> Path:
    """Download the file of a model into a folder. Raises SessionError."""
    name = Path(urlsplit(url).path).name
    path = folder / f"from-{name}"
    try:
        if urlsplit(url).scheme not in ("http", "https", "file"):
            raise ValueError("only http, https and file are known")
        with urllib.request.urlopen(url, timeout=DOWNLOAD_S) as answer:
            replace_file(path, iter(partial(answer.read, PIECE_BYTES), b""))
    except (OSError, ValueError, HTTPException) as error:
        raise SessionError(f"the first model cannot be fetched from {url}: {error}") from None
    return path


def _export(opened: AbstractContextManager[Any], path: Path, which: str) -> None:
    """Write a model of an opened session to a file. Raises SessionError and OSError."""
    try:
        with opened as trained:
            entry = trained.choose(which)
            formats.write(path, trained.load(entry.model), trained.described(entry))
    except (NoModel, CommandFailed, JournalError, StoreError) as error:
        why = for_script(str(error))
        raise SessionError(f"model {which!r} cannot be written to {path}: {why}") from None
