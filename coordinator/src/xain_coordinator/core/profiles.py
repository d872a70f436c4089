"""Which data profiles a session takes.

They decide how large the initial model is, before anybody has trained anything, so what they come
to together is bounded. The largest model allowed takes 400 MB in float32.
"""

from collections.abc import Iterable

from xain_coordinator.core.errors import ProfileMismatch
from xain_coordinator.core.values import DataProfile

MAX_FEATURES = 1_000_000
MAX_CLASSES = 10_000
# All class names together travel with every assignment, in one message.
MAX_CLASS_NAMES_BYTES = 256 * 1024
MAX_WEIGHTS = 100_000_000  # features times classes


def check_profile(profile: DataProfile, others: Iterable[DataProfile], *, needs_rows: bool) -> None:
    """Refuse a profile that does not fit the session, or that no honest data have.

    others: of those who came before.
    needs_rows: the session's model is made from profiles, and one without rows says nothing.
    Raises ProfileMismatch.
    """
    samples, features = profile.num_samples, profile.num_features
    if len(profile.classes) > MAX_CLASSES:  # a set of them could be small, and they are kept
        raise ProfileMismatch(
            f"a list of {len(profile.classes)} classes; at most {MAX_CLASSES} are taken. Is it "
            "rather a regression?"
        )
    width: int | None = None
    # The model is made for the classes of all of them, so it is their union that counts.
    classes = set(profile.classes)
    for other in others:
        if other.num_samples:
            if samples > 0 and (other.num_features, other.classes) == (features, profile.classes):
                return  # one like it was taken, and is among the others still
            if width is None:
                width = other.num_features
            classes.update(other.classes)
    if samples < 0 or features < 0:
        raise ProfileMismatch("the numbers of samples and features must not be negative")
    if needs_rows and samples == 0:
        raise ProfileMismatch("the data have no rows, so there is nothing to train on")
    if features > MAX_FEATURES or len(classes) > MAX_CLASSES:
        raise ProfileMismatch(
            f"{features} features and, with those of the others, {len(classes)} classes; at most "
            f"{MAX_FEATURES} and {MAX_CLASSES} are taken. Is it rather a regression?"
        )
    if features * len(classes) > MAX_WEIGHTS:
        raise ProfileMismatch(
            f"{features} features times {len(classes)} classes need a model of more than "
            f"{MAX_WEIGHTS} weights"
        )
    if sum(len(name.encode(errors="replace")) for name in classes) > MAX_CLASS_NAMES_BYTES:
        raise ProfileMismatch(
            f"the names of all classes take more than {MAX_CLASS_NAMES_BYTES} bytes"
        )
    if not all(name.isprintable() for name in profile.classes):
        raise ProfileMismatch("a class name contains characters that cannot be printed")
    if samples and width is not None and features != width:
        raise ProfileMismatch(
            f"the data have {features} features, those of the session {width}; check the columns"
        )
