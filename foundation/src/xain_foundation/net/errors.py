"""Root of the errors between peers."""


class MessagingError(Exception):
    """Root of all errors of groups, messages and conditional events."""
