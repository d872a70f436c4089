"""The host of a server node in tests, without sockets and disk."""

from collections.abc import Callable

from xain_parameters.messages import Message
from xain_parameters.node.ports import Source
from xain_parameters.specs import RangeView, View
from xain_parameters.transport.sections import Sections


class Host:
    """See ports.Host."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.returned: list[tuple[int, dict[int, int], dict[int, int]]] = []
        self.saved: list[tuple[int, int]] = []  # range, checkpoint
        self.on_open_log: Callable[[], None] = lambda: None

    def emit(self, destination: Source | str, message: Message) -> None:
        if isinstance(destination, Source) and isinstance(destination.connection, Sections):
            destination.connection.send(message)
        else:
            self.sent.append(message)

    def open_log(self, range_: int) -> None:
        self.on_open_log()

    def load(self, range_: RangeView, view: View) -> None:
        pass

    def save(self, range_: int, view: View) -> None:
        self.saved.append((range_, view.cut.number))

    def report_returned(self, generation: int, has: dict[int, int], lacks: dict[int, int]) -> None:
        self.returned.append((generation, has, lacks))

    def report_whole(self, range_: int, epoch: int, server: str) -> None:
        pass

    def command(self, source: Source, head: int, text: str) -> str:
        return text
