"""Which data profiles a session takes.

They decide how large the initial model is, before anybody has trained anything, so their numbers
are bounded. The model of the largest profile allowed takes 400 MB in float32.
"""

from xain_coordinator.core.errors import ProfileMismatch
from xain_coordinator.core.values import DataProfile

MAX_FEATURES = 1_000_000
MAX_CLASSES = 10_000
MAX_CLASS_NAME_BYTES = 256
MAX_WEIGHTS = 100_000_000  # features times classes


def check_profile(profile: DataProfile, width: int | None, *, needs_rows: bool) -> None:
    """Refuse a profile that does not fit the session, or that no honest data have.

    width: features of those who came before; None if nobody has told yet.
    needs_rows: the session's model is made from profiles, and one without rows says nothing.
    Raises ProfileMismatch.
    """
    samples, features, classes = profile.num_samples, profile.num_features, profile.classes
    if samples < 0 or features < 0:
        raise ProfileMismatch("the numbers of samples and features must not be negative")
    if needs_rows and samples == 0:
        raise ProfileMismatch("the data have no rows, so there is nothing to train on")
    if features > MAX_FEATURES or len(classes) > MAX_CLASSES:
        raise ProfileMismatch(
            f"{features} features and {len(classes)} classes; at most {MAX_FEATURES} and "
            f"{MAX_CLASSES} are taken. Is the target a number, and the task regression?"
        )
    if features * len(classes) > MAX_WEIGHTS:
        raise ProfileMismatch(
            f"{features} features times {len(classes)} classes need a model of more than "
            f"{MAX_WEIGHTS} weights"
        )
    if any(len(name.encode()) > MAX_CLASS_NAME_BYTES for name in classes):
        raise ProfileMismatch(f"a class name is longer than {MAX_CLASS_NAME_BYTES} bytes")
    if samples and width is not None and features != width:
        raise ProfileMismatch(
            f"the data have {features} features, those of the session {width}; check the columns"
        )
