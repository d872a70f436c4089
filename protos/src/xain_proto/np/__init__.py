"""Arrays on the wire: the bytes of an .npy file, written and read without pickle."""

from xain_proto.np.codec import (
    NpyHeader,
    ndarray_to_proto,
    npy_header,
    parse_npy_header,
    proto_to_ndarray,
)

__all__ = [
    "NpyHeader",
    "ndarray_to_proto",
    "npy_header",
    "parse_npy_header",
    "proto_to_ndarray",
]
