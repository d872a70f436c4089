"""Arrays on the wire: the bytes of an .npy file, written and read without pickle."""

from xain_wire.np.codec import (
    NpyHeader,
    ndarray_to_proto,
    npy_header,
    parse_npy_header,
    proto_to_ndarray,
)
from xain_wire.np.delta import DeltaCodec, can_encode

__all__ = [
    "DeltaCodec",
    "NpyHeader",
    "can_encode",
    "ndarray_to_proto",
    "npy_header",
    "parse_npy_header",
    "proto_to_ndarray",
]
