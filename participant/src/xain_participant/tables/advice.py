"""Advice to a site: what to do when it does not reach its coordinator."""

from xain_foundation.security.handshakes import Cause, Fault
from xain_foundation.settings.hints import hint


def advised(cause: Cause) -> str:
    """The text of a cause with what to do about it."""
    advice = _advice(cause.fault)
    return f"{cause.text}; {advice}" if advice and cause else cause.text


def new_token() -> str:
    """Words for a site that needs another certificate."""
    return (
        "ask the coordinator's operator for a new token, who has to "
        + hint("xain-coordinator", "xain-coordinator tokens create --name NAME")
        + ", and "
        + hint("xain-participant", "xain-participant join FILE")
        + " here"
    )


def _advice(fault: Fault) -> str:
    """The thing to do about a fault; "" if nothing is known."""
    match fault:
        case Fault.NEEDS_TLS:
            return "this site has no certificate: " + new_token()
        case Fault.OTHER_AUTHORITY:
            return "is it the right coordinator? If its authority was made anew, " + new_token()
        case Fault.REFUSED:
            return new_token()
        case Fault.OTHER_HOST:
            return (
                "connect to one of these, "
                + hint("xain-participant", "--coordinator HOST:PORT")
                + ", or have the operator of the coordinator add the one that you use: "
                + hint("xain-coordinator", "xain-coordinator certs renew --host HOST")
            )
        case Fault.EXPIRED:
            return "its operator has to " + hint("xain-coordinator", "xain-coordinator certs renew")
        case Fault.NOT_YET_VALID:
            return "are the clocks of both machines right?"
        case Fault.NO_TLS:
            return (
                "if a coordinator is there, it has no certificates, and its operator has to "
                + hint("xain-coordinator", "xain-coordinator certs init --host HOST")
            )
        case Fault.OTHER:
            return ""
