"""Every store of weights, and the plug-ins that are named to the contract suites."""

import errno
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from support.s3_servers import S3Server
from xain_coordinator.config.sections.storage import StorageSettings
from xain_coordinator.ports import WeightsStore
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.memory import MemoryStore
from xain_coordinator.stores.opening import open_plugin
from xain_coordinator.stores.prefixed import PrefixedStore
from xain_coordinator.stores.s3.s3 import open_s3

Factory = Callable[[Path, pytest.MonkeyPatch], WeightsStore]


def files_without_links(root: Path, monkeypatch: pytest.MonkeyPatch) -> WeightsStore:
    def link(*_: object) -> NoReturn:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", link)
    return FileStore(root)


FACTORIES: dict[str, Factory] = {
    "memory": lambda root, _: MemoryStore(),
    "files": lambda root, _: FileStore(root),
    "files-without-links": files_without_links,
    "prefixed": lambda root, _: PrefixedStore(FileStore(root), "session-1"),
}


# Names of fixtures.
S3_SERVERS = ("seaweedfs", "minio_gateway")


# Plug-ins that are installed, with options: {"stores": {NAME: {OPTION: VALUE}}}. "{folder}" in a
# text is a folder of the test. For "metrics" and "read" see test_metrics_store.py.
CONTRACT = json.loads(os.environ.get("XAIN_CONTRACT", "{}"))
PLUGINS = CONTRACT.get("stores", {})


def plugged_in(name: str) -> Factory:
    def make(root: Path, _: pytest.MonkeyPatch) -> WeightsStore:
        return open_plugin(name, in_folder(PLUGINS[name], root))

    return make


def in_folder(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Options with a folder in the place of "{folder}"."""
    return {
        key: value.replace("{folder}", str(folder)) if isinstance(value, str) else value
        for key, value in options.items()
    }


FACTORIES |= {f"plugin-{name}": plugged_in(name) for name in PLUGINS}


def opened(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WeightsStore]:
    """The store that the parameter of a fixture names."""
    if request.param in FACTORIES:
        yield FACTORIES[request.param](tmp_path / "store", monkeypatch)
        return
    server: S3Server = request.getfixturevalue(request.param)
    # One bucket for all, since making one takes longer than most tests.
    settings = server.settings(
        "contract", create_bucket=True, prefix=f"test/{uuid.uuid4().hex}", path=tmp_path / "spool"
    )
    s3 = open_s3(StorageSettings.model_validate(settings))
    yield s3
    s3.close()


def put(store: WeightsStore, key: str, data: bytes, *, overwrite: bool = False) -> None:
    upload = store.upload(key)
    try:
        upload.write(data)
        upload.commit(overwrite=overwrite)
    finally:
        upload.abort()


def get(store: WeightsStore, key: str) -> bytes:
    with store.open(key) as reader:
        return reader.read(0, reader.size)
