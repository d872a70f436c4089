"""Base of all refusals, those of the core and those of access control."""

from typing import ClassVar

from xain_wire.fl.refusals_pb2 import RefusalReason


class Refusal(Exception):
    """A command that was not carried out. It changed nothing.

    retry_after_s: when the sender is asked to come again; None leaves that to it.
    waits: the command is decided again after each change, for a while, before its sender hears.
    """

    code: ClassVar[str]  # name of the reason
    retry_after_s: float | None = None
    waits: bool = False

    def __init_subclass__(cls, reason: "RefusalReason.ValueType | None" = None) -> None:
        if reason is not None:
            cls.code = RefusalReason.Name(reason)
