"""The section [http]: the HTTP face, which is off unless it has a port."""

from pydantic import Field

from xain_foundation.settings.fields import Host, Section, join_host_port

_MAX_BODY_BYTES = 256 << 20  # a body is in memory as a whole, several times
_MAX_WAIT_S = 24 * 3600.0


class HttpSettings(Section):
    """[http]"""

    port: int | None = Field(default=None, ge=0, le=65535)
    host: Host = "127.0.0.1"
    participants_timeout_s: float = Field(default=30.0, ge=0, le=_MAX_WAIT_S)
    max_body_bytes: int = Field(default=4 << 20, ge=1024, le=_MAX_BODY_BYTES)

    @property
    def is_on(self) -> bool:
        """Whether the coordinator has an HTTP face, and with it is in serve mode."""
        return self.port is not None

    def url(self, port: int, *, is_encrypted: bool = False) -> str:
        """The address of the face. port: where it listens."""
        return f"{'https' if is_encrypted else 'http'}://{join_host_port(self.host, port)}"
