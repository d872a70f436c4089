"""Checkpoints of a parameter server in a real S3 server, by s3fs."""

import contextlib

import numpy as np
import pytest
import s3fs

from support.parameter_servers import Servers
from support.waiting import wait_until
from xain_parameters.export import export, read_table
from xain_parameters.scheduler.manifests import MANIFEST

SHAPE = (1_000, 3)


def test_checkpoint_in_s3_is_exported_and_rolled_back_to(s3fs_bucket, seaweedfs, tmp_path):
    with contextlib.ExitStack() as stack:
        group = Servers(tmp_path, stack, checkpoints=f"s3://{s3fs_bucket}/parameters")
        first, worker = group.start("s0"), group.worker("w0")
        w = worker.dense("w", SHAPE)
        rows = worker.table("rows", 2)
        ids = np.arange(0, 1 << 40, 1 << 30)
        w.push(np.ones(SHAPE, np.float32))
        rows.push(ids, np.ones((len(ids), 2), np.float32))
        assert worker.checkpoint() == 1
        with contextlib.closing(seaweedfs.client()) as client:
            listed = client.list_objects_v2(Bucket=s3fs_bucket)["Contents"]
        written = {each["Key"].rpartition("/")[2]: each["LastModified"] for each in listed}
        assert set(written) == {MANIFEST, *(f"range-{number}.cut" for number in range(1, 5))}
        assert written[MANIFEST] == max(written.values())
        folder = listed[0]["Key"].rpartition("/")[0]
        checkpoint = f"s3://{s3fs_bucket}/{folder}"
        assert (read_table(checkpoint, "w")["values"] == 1).all()
        assert export(checkpoint, "rows", tmp_path / "rows.npz") == 2 * len(ids)
        w.push(np.ones(SHAPE, np.float32))
        first.close()
        group.start("s1")
        assert (w.pull() == 1).all()
        assert (rows.pull(ids) == 1).all()
        for number in (2, 3):
            assert worker.checkpoint() == number
        # The last two are kept; the first is removed a moment after the third is whole.
        with contextlib.closing(seaweedfs.client()) as client:
            there = {"Bucket": s3fs_bucket, "Prefix": folder}
            wait_until(lambda: "Contents" not in client.list_objects_v2(**there))


def test_checkpoint_without_credentials_is_refused_in_one_line(monkeypatch):
    """The driver raises an error of its library, which is no OSError."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(
        OSError, match=r"s3://nowhere cannot be used; its file system says: .*redential"
    ):
        read_table("s3://nowhere/cut-1-1", "w")
