"""The common answer to the sections of a request for several ranges."""

import threading
from collections.abc import Callable

from xain_parameters.messages import Done, Message, Refused, Rows, Several


class Sections:
    """Collects the answers to the sections of one request, and sends one answer when all of them
    are there. Safe for any thread.

    send_together: Channel.send.
    """

    def __init__(self, send_together: Callable[[Message], bool], several: Several) -> None:
        self._send_together = send_together
        self.several = several
        self._lock = threading.Lock()
        self._answers: dict[int, Message] = {}  # by section

    def send(self, message: Message) -> bool:
        """Take the answer to a section; `message.head.request` is the number of the section."""
        assert isinstance(message.head, Done | Rows | Refused)
        with self._lock:
            self._answers[message.head.request] = message
            if len(self._answers) < len(self.several.sections):
                return True
        return self._send_together(self._together())

    def _together(self) -> Message:
        request = self.several.request
        answers = [self._answers[number] for number in range(len(self._answers))]
        self._answers = {}  # the channel keeps this object until the next request
        refused = [each.head for each in answers if isinstance(each.head, Refused)]
        if refused:
            # An error of the caller comes first: asking again cannot mend it.
            first = min(refused, key=lambda each: each.why not in ("invalid", "evicted"))
            return Message(Refused(request, first.why, first.text, first.view))
        if isinstance(answers[0].head, Rows):
            return Message(Rows(request), bodies=[(None, each.values) for each in answers])
        return Message(Done(request))
