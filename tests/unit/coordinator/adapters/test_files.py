"""FileStore beyond the contract: on disks that are full, shared, or left behind."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xain_coordinator.ports import KeyExists, StoreError, StoreUnavailable
from xain_coordinator.stores import files
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.reading import chunks

UPLOADER = """
import sys
from pathlib import Path
from xain_coordinator.stores.files import FileStore

upload = FileStore(Path(sys.argv[1])).upload("1/a")
upload.write(b"half")
print("written", flush=True)
sys.stdin.read()
"""


def put(store: FileStore, key: str, data: bytes) -> None:
    upload = store.upload(key)
    upload.write(data)
    upload.commit(overwrite=False)


def incoming(root: Path) -> list[Path]:
    return list((root / ".incoming").glob("*.part"))


def test_the_uploads_of_the_dead_are_swept_and_no_others(tmp_path):
    """A lock on its file, which the kernel frees, tells a live upload from an abandoned one."""
    with subprocess.Popen(
        [sys.executable, "-c", UPLOADER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout.readline() == b"written\n"
            store = FileStore(tmp_path)
            mine = store.upload("1/b")
            mine.write(b"whole")
            FileStore(tmp_path)
            assert len(incoming(tmp_path)) == 2
        finally:
            process.send_signal(signal.SIGKILL)
    FileStore(tmp_path)
    assert len(incoming(tmp_path)) == 1
    mine.commit(overwrite=False)
    assert incoming(tmp_path) == []
    assert list(store.keys()) == ["1/b"]


def test_looking_and_renaming_are_one_step(tmp_path, monkeypatch):
    """Across processes: a rename that must find its name free happens under a lock on the root."""
    held = []
    replace = Path.replace

    def watch(self, target):
        with (tmp_path / ".incoming" / "lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
            else:
                held.append(False)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watch)
    store = FileStore(tmp_path)
    store.upload("1/a").commit(overwrite=False)
    assert held == [True]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of all files and folders that are synced, in order."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("a file's name cannot be asked for")
    synced: list[str] = []
    fsync = os.fsync

    def record(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    return synced


def test_every_new_name_is_synced_with_its_folder(tmp_path, synced):
    """Contents first, then names from the top down; else a power cut takes what was acknowledged.

    Folders that were synced before are not synced again, but the object's own always is.
    """
    store = FileStore(tmp_path)
    synced.clear()
    put(store, "s/1/a", b"x")
    assert synced[0].endswith(".part")
    assert synced[1:] == [str(tmp_path), str(tmp_path / "s"), str(tmp_path / "s/1")]
    synced.clear()
    put(store, "s/1/b", b"x")
    assert synced[1:] == [str(tmp_path / "s/1")]
    synced.clear()
    with pytest.raises(KeyExists):
        put(store, "s/1/b", b"x")
    assert synced[1:] == [str(tmp_path / "s/1")]
    synced.clear()
    store.put({"s/1/c": b"x", "s/1/d": b"y"})
    assert [name.endswith(".part") for name in synced[:2]] == [True, True]
    assert synced[2:] == [str(tmp_path / "s/1")], "one sync for both names"


def test_settle_syncs_the_name_and_every_folder_above_it(tmp_path, synced):
    """The process that gave the object its name may have died before any of the syncs."""
    put(FileStore(tmp_path), "s/1/a", b"x")
    store = FileStore(tmp_path)
    synced.clear()
    store.settle("s/1/a")
    assert synced == [str(tmp_path), str(tmp_path / "s"), str(tmp_path / "s/1")]
    synced.clear()
    store.settle("s/1/a")
    assert synced == [str(tmp_path / "s/1")], "the folders above it are known to be on the disk"


def test_a_full_disk(tmp_path):
    """The error names file and reason, nothing stays, and the store goes on when there is room."""
    resource = pytest.importorskip("resource")
    store = FileStore(tmp_path)
    put(store, "1/a", b"x")
    upload = store.upload("1/b")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StoreUnavailable, match=r"cannot write .*b\.weights: File too large"):
            upload.write(bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(ValueError, match="over"):
        upload.commit(overwrite=False)
    upload.abort()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StoreUnavailable, match=r"cannot write .*b\.weights: File too large"):
            store.put({"1/b": bytes(2 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(store.keys()) == ["1/a"]
    assert incoming(tmp_path) == []
    put(store, "1/b", bytes(2 << 20))


def test_a_root_that_is_gone_is_not_an_empty_one(tmp_path):
    """An unmounted disk must not look as if the weights had never been there."""
    store = FileStore(tmp_path / "store")
    put(store, "1/a", b"x")
    (tmp_path / "store").rename(tmp_path / "away")
    with pytest.raises(StoreUnavailable):
        store.open("1/a")
    with pytest.raises(StoreUnavailable):
        store.upload("1/a")
    with pytest.raises(StoreUnavailable):
        list(store.keys())
    (tmp_path / "away").rename(tmp_path / "store")
    assert list(store.keys()) == ["1/a"]


def test_object_that_is_committed_meanwhile_is_no_unfinished_upload(tmp_path, monkeypatch):
    """An upload that goes on truncates its file first, which must not be an object by then."""
    store = FileStore(tmp_path)
    upload = store.upload("3/x", "label")
    upload.write(b"whole")
    flock = fcntl.flock

    def commit_first(fd, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        upload.commit(overwrite=False)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", commit_first)
    assert store.find_unfinished("3/x", "label") is None
    with store.open("3/x") as reader:
        assert reader.read(0, reader.size) == b"whole"


def test_a_start_keeps_the_latest_unfinished_uploads(tmp_path):
    """Old parts and parts without a label, which cannot be continued, are removed."""
    store = FileStore(tmp_path)
    ages = {"new": 1.0, "old": files.UNFINISHED_S + 60}
    for label in ("", *ages):
        upload = store.upload("3/x", label)
        upload.write(b"x")
        upload.suspend()
    for label, age in ages.items():
        (temp,) = (tmp_path / ".incoming").glob(f"{label}.*.part")
        os.utime(temp, (time.time() - age, time.time() - age))
    store = FileStore(tmp_path)
    (kept,) = (tmp_path / ".incoming").glob("*.part")
    assert kept.name.startswith("new.")
    store.sweep()
    assert list((tmp_path / ".incoming").glob("*.part")) == []


def test_file_that_another_program_cuts_while_it_is_read(tmp_path):
    store = FileStore(tmp_path)
    put(store, "0/global", bytes(100))
    with store.open("0/global") as reader:
        (path,) = tmp_path.rglob("global*")
        os.truncate(path, 60)
        pieces = chunks(reader)
        assert len(next(pieces)) == 60
        with pytest.raises(StoreError, match="byte 60 of 100"):
            next(pieces)
