"""The common answer to the sections of a request for several ranges."""

import threading
from collections.abc import Callable

from xain_parameters.messages import Done, Message, Refused, Rows, Several

_ANSWERS = (Done, Rows, Refused)


class Sections:
    """Collects the answers to the sections of one request, and sends one answer when all of them
    are there. Safe for any thread.

    send_together: sends the one answer.
    """

    def __init__(self, send_together: Callable[[Message], object], several: Several) -> None:
        self._send_together = send_together
        self.several = several
        self._lock = threading.Lock()
        self._num_open = len(several.sections)
        self._answers: dict[int, Message] = {}  # those that say more than Done, by section

    def send(self, message: Message) -> bool:
        """Take the answer to the section `message.head.request`; answer all after the last."""
        head = message.head
        assert isinstance(head, _ANSWERS)
        with self._lock:
            if not isinstance(head, Done):
                self._answers[head.request] = message
            self._num_open -= 1
            if self._num_open:
                return True
        self._send_together(self._join_answers())
        return True

    def done(self, num_sections: int) -> None:
        """Take Done as the answer to so many sections; answer all after the last."""
        if num_sections:
            with self._lock:
                self._num_open -= num_sections
                if self._num_open:
                    return
            self._send_together(self._join_answers())

    def _join_answers(self) -> Message:
        """Make the answer of all sections: Done, the first error, or their rows."""
        request = self.several.request
        answers, self._answers = self._answers, {}  # the channel keeps this object for a while
        if not answers:
            return Message(Done(request))
        refused = [each.head for each in answers.values() if isinstance(each.head, Refused)]
        if refused:
            # An error of the caller comes first: asking again cannot mend it.
            first = min(refused, key=lambda each: each.why not in ("invalid", "evicted"))
            return Message(Refused(request, first.why, first.text, first.view))
        return Message(
            Rows(request), bodies=[(None, answers[number].values) for number in sorted(answers)]
        )
