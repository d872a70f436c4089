"""Arrays on the wire: the bytes of an .npy file, written and read without pickle."""

from xain_proto.np.codec import ndarray_to_proto, proto_to_ndarray

__all__ = ["ndarray_to_proto", "proto_to_ndarray"]
