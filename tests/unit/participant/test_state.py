"""Contents of a participant's folder after every fault."""

import errno
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.logs import capture_logs
from support.trainee import Trainee
from xain_participant.agent.agent import Agent
from xain_participant.keep.result import Result
from xain_participant.keep.state import StateDirectory, StateError

VECTOR = np.arange(1_000_000, dtype=np.float32)  # 4 MB
RESULT = Result("s1", 3, VECTOR, 5, '[{"loss": 0.5}]', {"loss": 0.5})
LIMIT_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def state(folder: Path) -> Iterator[StateDirectory]:
    with StateDirectory(folder, "ward-7") as state:
        yield state


def again(state: StateDirectory, folder: Path) -> StateDirectory:
    """The directory as the next process finds it."""
    state.close()
    return StateDirectory(folder, "ward-7")


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def assert_is(found: Result | None, expected: Result) -> None:
    assert found.vector.dtype == expected.vector.dtype
    assert found.vector.tobytes() == expected.vector.tobytes()
    assert found.vector.flags.aligned
    for name in ("session_id", "round", "num_samples", "metrics_json"):
        assert getattr(found, name) == getattr(expected, name)


@pytest.mark.parametrize("vector", [np.zeros(0), np.ones(1, np.float16), np.float64([1, np.pi])])
def test_vectors_of_every_size_and_dtype_come_back(state, folder, vector):
    result = Result("s1", 0, vector, 0, "[]")
    state.keep(result)
    with again(state, folder) as next_one:
        assert_is(next_one.load(), result)


def test_a_result_that_is_not_needed_is_gone(state, folder):
    state.keep(RESULT)
    state.forget()
    assert state.load() is None
    assert names(folder) == {"lock", "participant.json"}
    state.forget()  # harmless when there is none


def test_only_the_owner_can_read_kept_files(state, folder):
    """An update may tell something of the data."""
    state.keep(RESULT)
    assert folder.stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in folder.iterdir())


# --- crashes ---

# Called with the number of a step of keep(), before it is taken.
Step = Callable[[int], None]


class Killed(BaseException):
    """The process ends here."""


def step_by_step(monkeypatch: pytest.MonkeyPatch, at: Step) -> None:
    """Every change of a name and every sync is a step."""
    steps = iter(range(1000))

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            at(next(steps))
            return function(*arguments, **options)

        return call

    for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


def test_a_crash_at_any_step_leaves_the_whole_result_or_none(folder, monkeypatch):
    """No temporary file stays for ever."""
    outcomes = []
    for dies_at in range(100):
        with StateDirectory(folder, "ward-7") as state, monkeypatch.context() as patches:
            state.forget()

            def die(step, dies_at=dies_at):
                if step == dies_at:
                    raise Killed

            step_by_step(patches, die)
            try:
                state.keep(RESULT)
                is_through = True
            except Killed:
                is_through = False
        with capture_logs() as logs, StateDirectory(folder, "ward-7") as next_one:
            found = next_one.load()
        assert logs == []
        if found is not None:
            assert_is(found, RESULT)
        assert names(folder) <= {"lock", "participant.json", "result.bin"}
        outcomes.append(found is not None)
        if is_through:
            break
    # Synced, renamed, and its folder synced: the rename makes it a result.
    assert outcomes == [False, False, True, True]


def test_a_name_is_on_the_disk_before_it_is_used(folder, monkeypatch):
    """The participant would otherwise be another one after a power cut."""
    synced = []
    fsync = os.fsync

    def note(fd):
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to see what is synced")
    monkeypatch.setattr(os, "fsync", note)
    with StateDirectory(folder):
        assert synced == [str(folder.parent), f"{folder}/participant.json.part", str(folder)]


@pytest.mark.parametrize("fails_at", range(3))
def test_a_full_disk_leaves_no_rest(state, folder, monkeypatch, fails_at):
    """A rest would take the space that the participant's own code may need."""

    def fail(step):
        if step == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patches:
        step_by_step(patches, fail)
        with pytest.raises(OSError, match="No space left on device"):
            state.keep(RESULT)
    assert names(folder) == {"lock", "participant.json"}
    state.keep(RESULT)  # there is space again
    assert_is(state.load(), RESULT)


# --- what cannot be used ---


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def replaced(file: Path, old: bytes, new: bytes) -> None:
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda f: f.write_bytes(b""), "damaged, or of another version"),
    "newer": (lambda f: replaced(f, b"result 1\n", b"result 2\n"), "of another version"),
    "torn head": (lambda f: os.truncate(f, 60), "the file is damaged"),
    "torn": (lambda f: os.truncate(f, 1000), "the file is damaged"),
    "longer": (lambda f: os.truncate(f, 5_000_000), "the file is damaged"),
    "number": (
        lambda f: replaced(f, b'"num_samples": 5', b'"num_samples": 7'),
        "the file is damaged",
    ),
    "vector": (lambda f: flip(f, -1), "the file is damaged"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_unusable_files_are_set_aside(state, folder, damage, reason):
    """Never sent, never a crash, never removed, told once."""
    state.keep(RESULT)
    damage(folder / "result.bin")
    with capture_logs() as logs, again(state, folder) as next_one:
        assert next_one.load() is None
        assert next_one.load() is None
        assert "result.bin.damaged" in names(folder)
        (entry,) = logs
        assert (entry["event"], entry["log_level"]) == ("state_set_aside", "warning")
        assert reason in entry["reason"]
        assert entry["file"] == str(folder / "result.bin")
        next_one.keep(RESULT)
        assert_is(next_one.load(), RESULT)


def fails_to_open(monkeypatch: pytest.MonkeyPatch, pattern: str, error: Exception) -> None:
    """Fail to open files, as on a disk that is away, or without a free file descriptor."""
    opened = Path.open

    def open_(path: Path, *args: Any, **options: Any) -> Any:
        if path.match(pattern):
            raise error
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", open_)


def test_a_name_that_cannot_be_read_now_is_not_made_anew(folder, monkeypatch):
    """A new name would be another participant, which has no claim to the kept result."""
    with StateDirectory(folder) as state:
        name = state.participant_id
        state.keep(RESULT)
    with monkeypatch.context() as passing:
        fails_to_open(passing, "participant.json", OSError(errno.EMFILE, "Too many open files"))
        with pytest.raises(StateError, match="cannot be used: Too many open files"):
            StateDirectory(folder)
    with StateDirectory(folder) as state:
        assert state.participant_id == name
        assert_is(state.load(), RESULT)


def test_the_files_of_others_are_left_alone(state, folder):
    """The state directory may be a folder that is not empty."""
    theirs = {"result-1.npy", "results.bin", "model.npy", ".profile", "result.bin.part2"}
    for name in theirs:
        (folder / name).write_text("theirs")
    state.keep(RESULT)
    state.load()
    state.forget()
    assert theirs <= names(folder)


# --- who it is ---


def test_a_name_that_was_made_stays(folder):
    """A restart is the same participant, to the coordinator as well."""
    with StateDirectory(folder) as first:
        name = first.participant_id
    with StateDirectory(folder) as second:
        assert second.participant_id == name
    with StateDirectory(folder, name) as third:
        assert third.participant_id == name


def test_a_folder_of_another_participant_is_refused(state, folder):
    state.keep(RESULT)
    state.close()
    with pytest.raises(StateError, match="'ward-7', not of 'ward-8'"):
        StateDirectory(folder, "ward-8")
    with StateDirectory(folder) as state:
        assert state.participant_id == "ward-7"
        assert_is(state.load(), RESULT)


def test_explicit_instance_id_is_kept_and_another_one_is_refused(folder):
    """The id of the folder does not replace one that was given, in silence."""
    with StateDirectory(folder, "ward-7", "pod-3") as state:
        assert state.instance_id == "pod-3"
        with pytest.raises(ValueError, match="instance_id is 'pod-4', but the state is that of"):
            Agent(Trainee("ward-7", 3), "localhost:1", state=state, instance_id="pod-4")
    with StateDirectory(folder) as state:
        assert state.instance_id == "pod-3"
    with pytest.raises(StateError, match="instance 'pod-3', not of 'pod-4'; leave participant"):
        StateDirectory(folder, "ward-7", "pod-4")


def test_a_name_that_is_damaged_is_made_anew(state, folder):
    state.keep(RESULT)
    state.close()
    (folder / "participant.json").write_text("{}")
    with capture_logs() as logs, StateDirectory(folder) as another:
        assert another.participant_id != "ward-7"
        assert another.load() is None, "it is not this one's"
    assert [entry["event"] for entry in logs] == ["state_set_aside"] * 2


def test_a_name_that_is_given_survives_damage(state, folder):
    state.keep(RESULT)
    (folder / "participant.json").write_text("{}")
    with capture_logs(), again(state, folder) as next_one:
        assert_is(next_one.load(), RESULT)


def test_a_name_that_cannot_travel_is_refused(folder):
    with pytest.raises(ValueError, match="participant_id is 'a/b'"):
        StateDirectory(folder, "a/b")
    with StateDirectory(folder, "a"):
        pass
    replaced(folder / "participant.json", b'"participant_id": "a"', b'"participant_id": "a/b"')
    with capture_logs(), StateDirectory(folder, "a") as state:
        assert state.participant_id == "a"


# --- one process ---


def test_a_folder_in_use_is_refused(state, folder):
    with pytest.raises(StateError, match="another process uses it"):
        StateDirectory(folder, "ward-7")
    state.keep(RESULT)
    with again(state, folder) as next_one:
        assert_is(next_one.load(), RESULT)


HOLDER = textwrap.dedent(
    """
    import os, sys, time
    from pathlib import Path
    from xain_participant.keep.state import StateDirectory

    state = StateDirectory(Path(sys.argv[1]), "ward-7")
    if hasattr(os, "fork") and os.fork() == 0:
        print(os.getpid(), flush=True)  # as a data loader does: it outlives its parent
        sys.stdout.close()
        os.close(1)
        time.sleep(1000)  # until it is killed
    time.sleep(1000)  # until it is killed
    """
)


def test_a_lock_ends_with_its_process(folder):
    """A child of the participant's own code that is left behind does not hold the lock."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            child = int(process.stdout.readline())
            with pytest.raises(StateError, match="another process uses it"):
                StateDirectory(folder, "ward-7")
        finally:
            process.kill()
        process.wait(LIMIT_S)
        try:
            StateDirectory(folder, "ward-7").close()
        finally:
            os.kill(child, 9)


def test_close_waits_for_the_running_write(state, folder, monkeypatch):
    """A signal that comes at this moment does not cost the result."""
    writing, may_go_on = threading.Event(), threading.Event()

    def hold(step):
        if step == 0:
            writing.set()
            assert may_go_on.wait(LIMIT_S)

    with monkeypatch.context() as patches:
        step_by_step(patches, hold)
        keeping = threading.Thread(target=state.keep, args=(RESULT,))
        keeping.start()
        assert writing.wait(LIMIT_S)
        closing = threading.Thread(target=state.close)
        closing.start()
        with pytest.raises(StateError):
            StateDirectory(folder, "ward-7")
        may_go_on.set()
        keeping.join(LIMIT_S)
        closing.join(LIMIT_S)
    with StateDirectory(folder, "ward-7") as next_one:
        assert_is(next_one.load(), RESULT)


# --- folders that are none ---


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match=r"cannot be used: (Not a directory|File exists)"):
        StateDirectory(tmp_path / "file", "ward-7")
    with pytest.raises(StateError, match="it cannot be used: Not a directory"):
        StateDirectory(tmp_path / "file" / "state", "ward-7")
