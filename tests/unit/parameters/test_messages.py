import msgspec
import pytest

from xain_parameters.messages import AnyHead, Entry, Head, Push, decode_head, encode_head


def test_every_head_survives_the_wire():
    push = Push(1, (2, 3), 4, 5, 6, 7, 8, True)
    entry = Entry(1, 2, 3, "open", ended={"w1": 4})
    assert decode_head(encode_head(push)) == push
    assert decode_head(encode_head(entry)) == entry
    kinds = set(AnyHead.__args__)
    assert kinds == set(Head.__subclasses__())


@pytest.mark.parametrize("data", [b"", b"\x91\x63", b"\xff\xff", msgspec.msgpack.encode([3, "x"])])
def test_malformed_heads_are_refused(data):
    with pytest.raises(msgspec.MsgspecError):
        decode_head(data)
