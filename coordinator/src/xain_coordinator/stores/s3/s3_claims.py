"""Claims on an object that is written only once: the holder may publish it.

If-None-Match alone is not enough: some servers ignore it, and some look first and write later, with
room for somebody else in between. What every server does keep is that an object, once written, is
there for whoever reads or lists. So a writer first writes a claim, an empty object
".claims/NAME/DIGEST.ID", and then looks at all claims on the name:

- If one is for other content, the writer withdraws its own and does not publish.
- Otherwise it may. Its claim stays until the object is there.

Of two writers with different content, the one whose claim came second sees the first, so they never
both publish. Both may withdraw. A writer that died leaves its claim behind: whoever brings the same
content, such as the same coordinator after a restart, goes on, and everybody else is told.

The id belongs to one attempt: of two writers of the same content, one must not withdraw the claim
on which the other rests.
"""

import contextlib
import uuid
from collections.abc import Callable, Sequence

from xain_coordinator.ports import KeyClaimed, KeyExists, StoreError
from xain_coordinator.stores.s3.s3_bucket import Bucket

FOLDER = ".claims"


class Claims:
    """prefix: of all names, "" or with a slash at its end."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix

    def take(self, key: str, name: str, digest: str, is_taken: Callable[[], bool]) -> Sequence[str]:
        """Claim an object for some content; returns when the caller may publish it. The claims are
        to be dropped once the object is there, and not before, since a request may still arrive
        after an error.

        key: what errors call the object. name: with the prefix. digest: of its content, in hex.
        is_taken: whether the object is there.
        Raises KeyExists, KeyClaimed, StoreUnavailable, and StoreError if the server does not list
        what was written.
        """
        folder = f"{self._prefix}{FOLDER}/{name.removeprefix(self._prefix)}/"
        mine = f"{folder}{digest}.{uuid.uuid4().hex}"
        self._bucket.put(key, mine, b"")
        # A deeper name is a claim on another object.
        claims = [found for found in self._bucket.names(folder) if "/" not in found[len(folder) :]]
        others = [claim for claim in claims if not claim.startswith(f"{folder}{digest}.")]
        # After looking at the claims, not before: in between, a writer may have published and
        # dropped its claim.
        if is_taken():
            self.drop(key, [mine, *(claim for claim in claims if claim not in (mine, *others))])
            raise KeyExists(key)
        if others:
            self.drop(key, [mine])
            raise KeyClaimed(key, f"{self._bucket.name}/{others[0]}")
        if mine not in claims:
            raise StoreError(
                f"the S3 server at {self._bucket.host} does not list what was just written: two "
                "coordinators could publish different models on it"
            )
        return claims

    def drop(self, key: str, claims: Sequence[str]) -> None:
        """Drop claims. A claim that cannot be dropped stays, and only refuses other content."""
        for claim in claims:
            with contextlib.suppress(StoreError):
                self._bucket.delete(key, claim)
