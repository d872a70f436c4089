"""Base of all refusals, those of the core and those of access control."""

from typing import ClassVar

from xain_wire.fl.refusals_pb2 import RefusalReason


class Refusal(Exception):
    """A command that was not carried out. It changed nothing.

    code: name of the reason, which says what its sender should do.
    retry_after_s: when the sender is asked to come again; None leaves that to it.
    waits: the command is decided again after each change, for a while, before its sender hears.
    """

    code: str

    def __init__(
        self,
        reason: "RefusalReason.ValueType",
        message: str,
        *,
        retry_after_s: float | None = None,
        waits: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = RefusalReason.Name(reason)
        self.retry_after_s = retry_after_s
        self.waits = waits


class CaughtRefusal(Refusal):
    """A refusal that is caught apart from the others: a class for one reason."""

    reason: ClassVar["RefusalReason.ValueType"]

    def __init_subclass__(cls, reason: "RefusalReason.ValueType | None" = None) -> None:
        if reason is not None:
            cls.reason, cls.code = reason, RefusalReason.Name(reason)

    def __init__(self, message: str) -> None:
        super().__init__(self.reason, message)
