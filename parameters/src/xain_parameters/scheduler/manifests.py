"""Files of checkpoints, below an fsspec URL.

A checkpoint is a folder with a part for each range and a manifest, which is written last. A folder
without one is no checkpoint.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import msgspec
from fsspec.implementations.local import LocalFileSystem

from xain_foundation.durable import make_directory, replace_file
from xain_parameters.scheduler.state import Cut, Job

MANIFEST = "manifest.json"


def write_manifest(url: str, cut: Cut) -> None:
    """Make a checkpoint whole, whose parts are written. Raises OSError."""
    write_file(url, cut.folder, MANIFEST, [msgspec.json.format(msgspec.json.encode(cut))])


def write_file(url: str, folder: str, name: str, content: Iterable[bytes | memoryview]) -> None:
    """Write a file of a checkpoint, and force it to disk where the folder is local. Raises OSError,
    and what `content` raises; then there is no such file in a local folder.

    Elsewhere an error may leave a part that is cut short. No manifest names it, and no later
    checkpoint has its number.
    """
    files, path = open_folder(url, folder)
    if isinstance(files, LocalFileSystem):
        make_directory(Path(path))
        replace_file(Path(path) / name, content)
        return
    with _driver_errors(url):
        file = files.open(f"{path}/{name}", "wb")
    try:
        for data in content:
            with _driver_errors(url):
                file.write(data)
    finally:
        with _driver_errors(url):
            file.close()


def read_manifest(url: str, folder: str = "") -> Cut:
    """Read the manifest of a checkpoint. Raises OSError, and msgspec.MsgspecError if damaged."""
    files, path = open_folder(url, folder)
    with _driver_errors(url):
        content = files.cat_file(f"{path}/{MANIFEST}")
    return msgspec.json.decode(content, type=Cut)


def delete_cut(url: str, folder: str) -> None:
    """Remove a checkpoint, its manifest first. Raises OSError."""
    files, path = open_folder(url, folder)
    with _driver_errors(url):
        if files.exists(path):
            if files.exists(f"{path}/{MANIFEST}"):
                files.rm_file(f"{path}/{MANIFEST}")
            files.rm(path, recursive=True)


def delete_unfinished(url: str, job: Job) -> None:
    """Remove the parts of checkpoints that were given up: folders of a job without a manifest,
    older than its last whole checkpoint. Raises OSError."""
    files, root = open_folder(url, "")
    first_generation = job.generation - job.num_rollbacks
    last = job.cuts[-1].number if job.cuts else 0
    files.invalidate_cache()  # servers write beside this process
    with _driver_errors(url):
        paths = files.ls(root, detail=False)
    for path in paths:
        folder = path.rstrip("/").rpartition("/")[2]
        made = re.fullmatch(r"cut-(\d+)-(\d+)(?:-(\d+))?", folder)  # see specs.cut_folder
        if made is None:
            continue
        generation, number, owner = (int(text or 0) for text in made.groups())
        is_of_group = first_generation <= generation <= job.generation
        if not is_of_group or owner != job.job or number >= last:
            continue
        with _driver_errors(url):
            is_whole = files.exists(f"{path}/{MANIFEST}")
        if not is_whole:
            delete_cut(url, folder)


@contextmanager
def _driver_errors(url: str) -> Iterator[None]:
    """Turn what a driver of fsspec raises, which may be of any class, into an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # a driver may raise any class
        raise OSError(f"{url} cannot be used; its file system says: {error}") from error


def open_folder(url: str, folder: str) -> tuple[Any, str]:
    """The file system of a URL, and the path of a folder below it. Raises OSError."""
    with _driver_errors(url):
        files, root = fsspec.core.url_to_fs(url)
    return files, f"{root.rstrip('/')}/{folder}".rstrip("/")
