"""Training data in a real S3 server, by s3fs."""

import contextlib

import numpy as np
import pytest

from support.s3_servers import S3Server
from xain_workloads.errors import DataError
from xain_workloads.sparse.libsvm import LibsvmFiles


def test_each_line_in_s3_is_read_exactly_once(s3fs_bucket: str, seaweedfs: S3Server) -> None:
    """Two objects, three workers, blocks that divide lines; hidden objects are left out."""
    lines = [f"{i} {i % 97}:1 {i + 1_000}:0.5\n" for i in range(1_000)]
    with contextlib.closing(seaweedfs.client()) as client:
        for name, part in (("a.svm", lines[:400]), ("b.svm", lines[400:]), ("_SUCCESS", [])):
            body = "".join(part).encode()
            client.put_object(Bucket=s3fs_bucket, Key=f"clicks/{name}", Body=body)
    for url in (f"s3://{s3fs_bucket}/clicks", f"s3://{s3fs_bucket}/clicks/*.svm"):
        source = LibsvmFiles(url)
        parts = [
            np.concatenate([rows.targets for rows in source.read(source.part(i, 3), 3_000)])
            for i in range(3)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), np.arange(1_000))


def test_missing_object_and_missing_bucket_are_data_errors(s3fs_bucket: str) -> None:
    for url in (f"s3://{s3fs_bucket}/nowhere/*.svm", "s3://no-bucket-of-that-name/x.svm"):
        with pytest.raises(DataError, match="there is no file"):
            LibsvmFiles(url)
