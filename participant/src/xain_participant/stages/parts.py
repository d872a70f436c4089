"""Size of the parts in which weights travel through gRPC, by the speed of the line.

gRPC hands over whole messages, and a call has a time limit. So a slow line gets small calls: each
carries one part and is acknowledged by its answer, and a part has as many bytes as the line carries
in part_s. On a fast line that is the whole model.
"""


class PartSize:
    """Size of the next part in one direction. It grows with what the other side acknowledges, and
    shrinks when a call breaks off.

    num_bytes: of the next part.
    """

    part_s = 8.0
    # While the speed is not known: 22 s on a line of 3 KB/s, and one call more on a fast line.
    first_bytes = 64 << 10
    least_bytes = 4 << 10
    most_message_bytes = 256 << 10

    def __init__(self) -> None:
        self.num_bytes = self.first_bytes

    @property
    def message_bytes(self) -> int:
        """Most bytes of a message: a call that breaks off loses the message that is on its way."""
        return min(self.most_message_bytes, max(self.least_bytes, self.num_bytes // 4))

    def note_acknowledged(self, num_bytes: int, seconds: float) -> None:
        """Size the next part by one of so many bytes that was acknowledged after so many seconds:
        as large as the line carries in part_s."""
        carried = self._carried(num_bytes, seconds)
        # A part that is much shorter, the last one, takes most of its time for the answer.
        if 2 * num_bytes >= self.num_bytes or carried > self.num_bytes:
            self.num_bytes = max(self.least_bytes, carried)

    def note_broken_off(self, num_bytes: int, seconds: float) -> None:
        """Size the next part by one that broke off when the other side had so many bytes, after so
        many seconds: not larger, and a quarter if it had none."""
        carried = self._carried(num_bytes, seconds) or self.num_bytes // 4
        self.num_bytes = max(self.least_bytes, min(self.num_bytes, carried))

    def _carried(self, num_bytes: int, seconds: float) -> int:
        """Bytes that the line carries in part_s if it has carried so many in so many seconds."""
        return int(num_bytes * self.part_s / max(seconds, 0.001))
