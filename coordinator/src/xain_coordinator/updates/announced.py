"""Checks of an update by what is told of it before its bytes come."""

import math

import numpy as np

from xain_coordinator.core.vocabulary.errors import InvalidUpdate, Reason
from xain_coordinator.core.vocabulary.values import BYTES, GlobalModel
from xain_wire.np.codec import MAX_HEADER_BYTES
from xain_workloads.linear.glm.options import NAME as GLM

MIN_HEADER_BYTES = 64  # what an .npy header is padded to


def check_announced_size(model: GlobalModel, size_bytes: int, *, is_slice: bool = False) -> None:
    """Refuse what cannot be an update of this model before its bytes come. is_slice: updates are
    slices of the model's vector. Raises InvalidUpdate, and TOO_LARGE for bytes."""
    if model.dtype == BYTES:
        from xain_workloads.trees.trees import MAX_UPDATE_BYTES

        if size_bytes > MAX_UPDATE_BYTES:
            raise InvalidUpdate(
                f"an upload of {size_bytes} bytes; at most {MAX_UPDATE_BYTES} are taken as "
                "an update of bytes",
                Reason.TOO_LARGE,
            )
        return
    data_bytes = math.prod(model.shape) * np.dtype(model.dtype).itemsize
    if is_slice and size_bytes <= data_bytes + MAX_HEADER_BYTES:
        return
    if not data_bytes + MIN_HEADER_BYTES <= size_bytes <= data_bytes + MAX_HEADER_BYTES:
        raise InvalidUpdate(
            f"an upload of {size_bytes} bytes cannot be {model.dtype} weights of shape "
            f"{model.shape}, which have {data_bytes} and a header"
        )


def has_content(model: GlobalModel) -> bool:
    """Whether updates of a model are more than any vector of its shape."""
    return model.dtype == BYTES or model.metadata.get("workload") == GLM
