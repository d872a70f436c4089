"""numpy array <-> NDArray message."""

import io

import numpy as np
from numpy.typing import NDArray as Array

from xain_proto.np.ndarray_pb2 import NDArray


def ndarray_to_proto(array: Array[np.generic]) -> NDArray:
    """Encode an array of any shape. Raises ValueError for object arrays: they need pickle."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return NDArray(ndarray=buffer.getvalue())


def proto_to_ndarray(message: NDArray) -> Array[np.generic]:
    """Decode; an unset field is the empty vector, shape (0,). Raises ValueError on anything else
    than a plain .npy file."""
    if not message.ndarray:
        return np.empty((0,))
    array: Array[np.generic] = np.load(io.BytesIO(message.ndarray), allow_pickle=False)
    return array
