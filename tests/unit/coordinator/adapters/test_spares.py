"""Files of removed objects that later uploads are written over."""

import errno
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.stores import files, spares
from xain_coordinator.stores.files import FileStore

MIB = 1 << 20
OLD, NEW = b"o" * 3 * MIB, b"n" * 3 * MIB
LABEL = "abc"

HEX = "0" * 32  # of an attempt: only updates are written over
KEY, SECOND, THIRD = f"1/a.{HEX}", f"1/b.{HEX}", f"1/c.{HEX}"

KILLED = """
import os, sys
from pathlib import Path
from xain_coordinator.stores.files import FileStore

store = FileStore(Path(sys.argv[1]))
upload = store.upload(sys.argv[2], "", 1)
upload.write(b"o" * (3 << 20))
upload.commit(overwrite=False)
store.delete(sys.argv[2])
upload = store.upload("2/a", sys.argv[3], 3 << 20)
for size in map(int, sys.argv[4:]):
    upload.write(b"n" * size)
os._exit(9)
"""


def put(store: FileStore, key: str, data: bytes, *, size_bytes: int | None = None) -> None:
    upload = store.upload(key, size_bytes=len(data) if size_bytes is None else size_bytes)
    upload.write(data)
    upload.commit(overwrite=False)


def get(store: FileStore, key: str) -> bytes:
    with store.open(key) as reader:
        return reader.read(0, reader.size)


def spare_files(root: Path) -> list[Path]:
    return list((root / ".incoming").glob(f"*{spares.SUFFIX}"))


def inode(root: Path, key: str) -> int:
    return (root / f"{key}.weights").stat().st_ino


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path)


@pytest.mark.parametrize("size", [2 * MIB, 3 * MIB, 3 * MIB - 5, 4 * MIB])
def test_removed_file_is_written_over(tmp_path, size, store):
    """The new object has its own bytes and length, whatever the old one had."""
    put(store, KEY, OLD)
    old = inode(tmp_path, KEY)
    store.delete(KEY)
    assert list(store.keys()) == []
    put(store, "2/a", b"n" * size)
    assert inode(tmp_path, "2/a") == old
    assert get(store, "2/a") == b"n" * size
    assert spare_files(tmp_path) == []


def test_file_of_another_size_is_not_written_over(tmp_path, store):
    """A small object would waste the pages of a large one; without a size nothing is known."""
    put(store, KEY, OLD)
    store.delete(KEY)
    put(store, "2/a", b"n" * MIB)
    put(store, "2/b", NEW, size_bytes=0)
    assert len(spare_files(tmp_path)) == 1


def test_upload_shorter_than_announced_shows_no_old_bytes(store):
    """An object has only the bytes that were written to it."""
    put(store, KEY, OLD)
    store.delete(KEY)
    put(store, "2/a", b"short", size_bytes=len(OLD))
    assert get(store, "2/a") == b"short"


def test_file_that_is_read_is_not_written_over(tmp_path):
    """A reader goes on with the object that it has opened, in this process or in another."""
    store, other = FileStore(tmp_path), FileStore(tmp_path)
    put(store, KEY, OLD)
    with other.open(KEY) as reader:
        store.delete(KEY)
        put(store, "2/a", NEW)
        assert reader.read(0, reader.size) == OLD
    assert spare_files(tmp_path) == []


def test_model_that_a_program_maps_is_not_written_over(tmp_path, store):
    """Users load models from the folder with memory maps, which take no lock."""
    for key in ("1/global", "session/1/global", "optimizer/1/momentum"):
        put(store, key, OLD)
        path = tmp_path / f"{key}.weights"
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            store.delete(key)
            assert not path.exists()
            put(store, f"2/{len(key)}", NEW)
            assert mapped[:] == OLD


def test_symbolic_link_is_removed_and_its_target_stays(tmp_path):
    """Operators move large objects to another disk and leave a link."""
    store = FileStore(tmp_path / "store")
    put(store, KEY, OLD)
    path, target = tmp_path / "store" / f"{KEY}.weights", tmp_path / "other disk"
    path.rename(target)
    path.symlink_to(target)
    store.delete(KEY)
    assert not path.is_symlink()
    put(store, "2/a", NEW)
    assert target.read_bytes() == OLD


def test_hard_link_of_a_backup_keeps_its_bytes(tmp_path):
    """`cp -al` may link a file before it is removed, and also when it is spare."""
    store = FileStore(tmp_path / "store")
    put(store, KEY, OLD)
    os.link(tmp_path / "store" / f"{KEY}.weights", tmp_path / "early")
    store.delete(KEY)
    assert spare_files(tmp_path / "store") == []
    put(store, KEY, OLD)
    store.delete(KEY)
    os.link(spare_files(tmp_path / "store")[0], tmp_path / "late")
    put(store, "2/a", NEW)
    assert (tmp_path / "early").read_bytes() == (tmp_path / "late").read_bytes() == OLD


@pytest.mark.skipif(sys.platform != "linux", reason="others let a running program be written to")
def test_file_that_cannot_be_opened_for_writing_is_removed(tmp_path, store):
    """The system refuses to write to a running program, to root too, as it refuses others a
    file of another owner; removing a name needs only the folder's permission."""
    put(store, KEY, Path(shutil.which("sleep")).read_bytes() + bytes(MIB))
    path = tmp_path / f"{KEY}.weights"
    path.chmod(0o755)
    with subprocess.Popen(["sleep", "60"], executable=path) as process:
        try:
            store.delete(KEY)
            assert not path.exists()
        finally:
            process.kill()


def test_spare_files_of_a_failed_sync_are_removed(tmp_path, monkeypatch, store):
    """Such files may not be written over, and must not count against the bound for ever."""
    store.spares.max_files = 1
    put(store, KEY, OLD)
    put(store, SECOND, OLD)
    with monkeypatch.context() as failing:
        failing.setattr(files, "sync_directory", fail)
        with pytest.raises(StoreUnavailable):
            store.delete(KEY)
    assert spare_files(tmp_path) == []
    store.delete(SECOND)
    assert len(spare_files(tmp_path)) == 1


def fail(folder: Path) -> None:
    raise OSError(errno.EIO, "input/output error")


def test_spare_files_are_bounded(tmp_path, store):
    """In number and in bytes; what is beyond is removed."""
    store.spares.max_files = 2
    for key in (KEY, SECOND, THIRD):
        put(store, key, OLD)
    store.delete(KEY, SECOND, THIRD)
    assert len(spare_files(tmp_path)) == 2
    store.spares.max_bytes = 8 * MIB
    put(store, f"2/a.{HEX}", b"n" * 5 * MIB)
    store.delete(f"2/a.{HEX}")
    assert sum(file.stat().st_size for file in spare_files(tmp_path)) <= 8 * MIB


def test_spare_files_go_with_the_store_and_with_the_next_start(tmp_path, store):
    """After a kill the next start removes them."""
    for key in (KEY, SECOND):
        put(store, key, OLD)
    store.delete(KEY)
    FileStore(tmp_path)
    assert spare_files(tmp_path) == []
    put(store, "2/a", NEW)  # its spare file is gone
    store.delete(SECOND)
    store.close()
    assert spare_files(tmp_path) == []
    assert list(store.keys()) == ["2/a"]


def test_spare_files_give_way_to_a_full_disk(tmp_path, monkeypatch, store):
    """Before an upload fails for want of room, the spare files are removed."""
    put(store, KEY, OLD)
    store.delete(KEY)
    write = os.write

    def full(fd, data):
        if spare_files(tmp_path):
            raise OSError(errno.ENOSPC, "no space left")
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    put(store, "2/a", b"new")
    assert get(store, "2/a") == b"new"
    monkeypatch.setattr(os, "write", lambda fd, data: full(-1, data))
    with pytest.raises(StoreUnavailable):
        put(store, "2/b", b"new")


def killed(root: Path, label: str, *sizes: int) -> None:
    """A process that dies while it writes pieces of these sizes over a removed file."""
    status = subprocess.run(
        [sys.executable, "-c", KILLED, str(root), KEY, label, *map(str, sizes)], check=False
    ).returncode
    assert status == 9


@pytest.mark.parametrize(
    "sizes", [(), (MIB, 5), (3 * MIB - 10,), (3 * MIB,), (3 * MIB - 24, 24), (4 * MIB,)]
)
def test_upload_killed_over_an_old_file_goes_on_after_its_own_bytes(tmp_path, sizes):
    """The next process finds what was written, and not what the old object had behind it."""
    killed(tmp_path, LABEL, *sizes)
    store = FileStore(tmp_path)
    unfinished = store.find_unfinished("2/a", LABEL)
    assert unfinished.size == sum(sizes)
    assert unfinished.read(0, 8 * MIB)[: sum(sizes)] == b"n" * sum(sizes)
    upload = unfinished.resume(unfinished.size)
    upload.write(b"end")
    upload.commit(overwrite=False)
    assert get(store, "2/a") == b"n" * sum(sizes) + b"end"


def test_upload_killed_without_a_label_leaves_nothing(tmp_path):
    """The old object counts no more, and the new one does not count."""
    killed(tmp_path, "", MIB)
    store = FileStore(tmp_path)
    assert list(store.keys()) == []
    assert [file.name for file in (tmp_path / ".incoming").iterdir()] == ["lock"]
