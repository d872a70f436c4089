"""Compare the session's global model with its digest, and rebuild it if it is damaged.

The same updates, or data profiles, always give the same model. So the work that made the model is
done again, and its result replaces the damaged object only if it has the digest that the journal
has. The damaged object is first copied to below DAMAGED, for whoever looks for the cause.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import xxhash

from xain_coordinator.aggregation.aggregator import RuleFailed
from xain_coordinator.core.machine.decider import effect_that_made
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.vocabulary.effects import Effect
from xain_coordinator.core.vocabulary.values import GlobalModel, WeightsRef
from xain_coordinator.extensions.plugins import PluginFailed
from xain_coordinator.ports import (
    Fenced,
    KeyExists,
    KeyNotFound,
    StoreError,
    StoreUnavailable,
    Upload,
    WeightsStore,
)
from xain_coordinator.stores.integrity import why_damaged
from xain_coordinator.stores.reading import chunks
from xain_foundation.logs.logger import get_logger
from xain_foundation.settings.hints import hint

log = get_logger(__name__)

DAMAGED = "damaged/"
LARGE_BYTES = 256 << 20  # reading so much takes long enough to be announced


def rebuild_damaged_model(
    store: WeightsStore,
    session: Session,
    models: Mapping[str, GlobalModel],
    make: Callable[[WeightsStore, Effect], object],
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> bool:
    """Read the session's model and its optimiser's state, and rebuild what is damaged. Blocks.

    models: all published models, by key. make: does the work of an effect in a store.
    on_read: see why_damaged. Returns whether anything was damaged.
    Raises StoreError, StoreUnavailable, Fenced, and what `make` raises when it is stopped.
    """
    model = session.model
    if model is None:
        return False
    refs = (model.ref, *model.state.values())
    began = time.monotonic()
    if sum(ref.size_bytes for ref in refs) >= LARGE_BYTES:
        log.info("verifying_model", round=model.round, size_bytes=model.ref.size_bytes)
    damaged = {ref.key: why for ref in refs if (why := why_damaged(store, ref, on_read))}
    seconds = round(time.monotonic() - began, 3)
    if not damaged:
        log.info("model_verified", round=model.round, key=model.ref.key, seconds=seconds)
        return False
    for key, why in damaged.items():
        log.warning("model_damaged", round=model.round, key=key, reason=why)
    effect = effect_that_made(session, models)
    try:
        if effect is None:
            raise StoreError("the session no longer knows what it was made of")
        make(cast(WeightsStore, _RebuildStore(store, refs, damaged)), effect)
    except (StoreUnavailable, Fenced):
        raise
    except (StoreError, RuleFailed, PluginFailed, ValueError) as error:
        raise StoreError(_way_out(session.session_id, refs, damaged, error)) from error
    log.warning("model_rebuilt", round=model.round, key=[*damaged], set_aside=DAMAGED)
    return True


def _way_out(
    session_id: str, refs: tuple[WeightsRef, ...], damaged: Mapping[str, str], error: Exception
) -> str:
    """The message of a damaged model that cannot be rebuilt: what is damaged, and what an operator
    can do."""
    objects = ", ".join(
        f"{session_id}/{ref.key} (digest {ref.digest})" for ref in refs if ref.key in damaged
    )
    return (
        f"the global model of the session {session_id} is damaged: {'; '.join(damaged.values())}. "
        f"It cannot be rebuilt: {error}. Restore {objects} from a backup or from an earlier "
        "version of the object and start again, or, to begin anew, "
        + hint("xain-coordinator", "--new-session")
    )


class _RebuildStore:
    """A store for the work that rebuilds a model: it replaces only damaged objects, and only with
    objects of the digest that they had."""

    def __init__(
        self, store: WeightsStore, refs: tuple[WeightsRef, ...], damaged: Mapping[str, str]
    ) -> None:
        self._store = store
        self._digests = {ref.key: ref.digest for ref in refs}
        self._damaged = damaged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)  # other methods are those of the store

    def upload(self, key: str, label: str = "", size_bytes: int = 0) -> Upload:
        """An upload that is committed only to a damaged object, with the digest that it had."""
        is_damaged = key in self._damaged
        upload = _RebuildUpload(self._store, key, self._digests.get(key, ""), is_damaged=is_damaged)
        return cast(Upload, upload)


class _RebuildUpload:
    def __init__(self, store: WeightsStore, key: str, digest: str, *, is_damaged: bool) -> None:
        self._store = store
        self._key = key
        self._expected = digest
        self._is_damaged = is_damaged
        self._digest = xxhash.xxh3_128()
        self._upload = store.upload(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upload, name)  # other methods are those of the upload

    def write(self, chunk: bytes | memoryview) -> None:
        """Append bytes to the rebuilt object and to its digest."""
        self._digest.update(chunk)
        self._upload.write(chunk)

    def commit(self, *, overwrite: bool) -> None:
        """Replace the object if it is damaged; an object that is sound is not written. overwrite:
        not heeded. Raises StoreError if the digest is another one."""
        digest = self._digest.hexdigest()
        if digest != self._expected:
            raise StoreError(
                f"its rebuilt copy has the digest {digest}, so the copy was made of other updates, "
                "or by another version of the program"
            )
        if self._is_damaged:
            self._upload.commit(overwrite=self._set_aside())
        self._upload.abort()

    def _set_aside(self) -> bool:
        """Copy the damaged object to a key below DAMAGED, unless one is there. Returns whether the
        object is to be overwritten; False if it is gone.

        Without `overwrite` a store first makes sure that no other coordinator has taken over, so
        one that was overtaken replaces nothing.
        """
        copy = self._store.upload(f"{DAMAGED}{self._key}")
        try:
            with self._store.open(self._key) as reader:
                for chunk in chunks(reader):
                    copy.write(chunk)
            copy.commit(overwrite=False)
        except KeyNotFound:
            return False
        except KeyExists:
            pass  # it was damaged before
        finally:
            copy.abort()
        return True
