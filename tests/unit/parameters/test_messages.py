import msgspec
import pytest

from xain_parameters.keys import even, is_cover
from xain_parameters.messages import AnyHead, Entry, Head, Push, decode_head, encode_head
from xain_parameters.specs import RangeView, View, decode_view, encoded


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


def test_view_of_the_whole_key_space_survives_the_wire():
    """The last range ends with the last 64-bit position."""
    ranges = tuple(
        RangeView(number, start, stop - 1, 1, ("s1",))
        for number, (start, stop) in enumerate(even(3), 1)
    )
    view = decode_view(encoded(View(1, 2, (), ranges, {"s1": "host:1"})))
    assert view.ranges == ranges
    assert is_cover([each.range for each in view.ranges])
