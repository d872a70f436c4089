"""Rights of XAIN's participants with credentials under the policy of docs/xain-0.6.md."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from support.s3_servers import SeaweedFS

GUIDE = Path(__file__).parents[3] / "docs" / "xain-0.6.md"
BUCKET = "xain-fl"
SESSION = "5e5510485e55"


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedFS]:
    if (missing := SeaweedFS.missing()) is not None:
        pytest.skip(missing)  # says what is not installed
    policy = re.search(r"```json\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    with SeaweedFS(policy[1]) as running:
        with contextlib.closing(running.client()) as client:
            client.create_bucket(Bucket=BUCKET)
            for key in ("0/global", "7/other", f"{SESSION}/7/other", f"{SESSION}/8/global"):
                client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
        yield running


@pytest.fixture
def participant(server: SeaweedFS) -> Iterator[Any]:
    with contextlib.closing(server.client(server.guest)) as client:
        yield client


def assert_denied(caught: pytest.ExceptionInfo[ClientError]) -> None:
    assert caught.value.response["Error"]["Code"] == "AccessDenied"


def test_a_participant_reads_models_and_hands_in(participant):
    """In every round there may be."""
    assert participant.get_object(Bucket=BUCKET, Key="0/global")["Body"].read() == b"x"
    for round_ in (0, 12, 345):
        participant.put_object(Bucket=BUCKET, Key=f"{round_}/a-uuid", Body=b"x")


@pytest.mark.parametrize("key", ["0/global", "8/global", "345/global"])
def test_a_participant_writes_no_model(participant, key):
    """No kind of PUT replaces an existing model or takes the key of the next one."""
    target = {"Bucket": BUCKET, "Key": key}
    source = {"Bucket": BUCKET, "Key": "7/other"}
    for write in (
        lambda: participant.put_object(**target, Body=b"mine"),
        lambda: participant.create_multipart_upload(**target),
        lambda: participant.copy_object(**target, CopySource=source),
        lambda: participant.delete_object(**target),
    ):
        with pytest.raises(ClientError) as caught:
            write()
        assert_denied(caught)


@pytest.mark.parametrize("key", ["7/other", "8/global", ".claims/8/global/x"])
def test_a_participant_does_not_reach_accepted_updates(participant, key):
    """The session's own objects, which models are made from; nor what guards their publication."""
    key = key if key.startswith(".") else f"{SESSION}/{key}"
    for use in (
        lambda: participant.get_object(Bucket=BUCKET, Key=key),
        lambda: participant.put_object(Bucket=BUCKET, Key=key, Body=b"mine"),
        lambda: participant.delete_object(Bucket=BUCKET, Key=key),
    ):
        with pytest.raises(ClientError) as caught:
            use()
        assert_denied(caught)
