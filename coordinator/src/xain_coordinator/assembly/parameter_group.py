"""A parameter server in the coordinator's process: its scheduler, and one of its servers.

Both are in threads of their own, with connections of their own, so that rounds do not wait for
them. Imported if [parameters] is on only.
"""

import threading

from xain_coordinator.config.sections.parameters import ParametersSettings
from xain_foundation.logs.logger import get_logger
from xain_foundation.net.backoff import Backoff
from xain_foundation.security.tls import Certificates
from xain_foundation.settings.fields import join_host_port
from xain_parameters.errors import Invalid
from xain_parameters.node.server import ParameterServer
from xain_parameters.scheduler import reports
from xain_parameters.scheduler.journal import Journal
from xain_parameters.scheduler.service import SchedulerServer
from xain_parameters.scheduler.state import Settings

log = get_logger(__name__)

NAME = "coordinator"  # of the server in this process; its log is found by it after a restart
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0
STOP_S = 5.0


class ParameterGroup:
    """The scheduler serves when the constructor returns; the server joins it meanwhile.

    A server that ends is started again, after a pause that grows from FIRST_RETRY_S to
    LAST_RETRY_S: it ends when its log fails, or when the scheduler has taken it for dead, as after
    a suspension of the machine. Rounds go on meanwhile.

    tls: the certificates of the coordinator; None: nothing is encrypted.
    insecure: without them also on a host that other machines reach.
    Raises OSError, with one line for the operator, if port or journal cannot be used.
    """

    def __init__(
        self,
        settings: ParametersSettings,
        tls: Certificates | None = None,
        *,
        insecure: bool = False,
    ) -> None:
        """Start the scheduler, and a server in a thread if one is set. Raises OSError."""
        self._settings = settings
        self._tls = tls
        self._insecure = insecure
        chosen = Settings(
            num_replicas=settings.replicas,
            has_log=settings.log,
            checkpoint_interval=settings.checkpoint_interval,
            checkpoints=settings.checkpoints_url,
        )
        try:
            journal = Journal(settings.path / "scheduler.db")
            self._scheduler = SchedulerServer(
                journal,
                chosen,
                settings.address,
                tls,
                insecure=insecure,
            )
            self._scheduler.start()
        except (Invalid, OSError) as error:
            raise OSError(f"[parameters] cannot be served: {error}") from None
        log.info("serving_parameters", address=self.target, path=str(settings.path))
        self._is_closing = threading.Event()
        self._server: ParameterServer | None = None
        self._thread = threading.Thread(target=self._serve, name="parameter server", daemon=True)
        if settings.server:
            self._thread.start()

    @property
    def target(self) -> str:
        """The address of the scheduler, for workers and further servers."""
        return self._scheduler.target

    def status(self) -> str:
        """The state of the group as JSON, see scheduler.reports.Status. Safe for any thread."""
        return reports.as_json(self._scheduler.status())

    def close(self, leave_s: float = 0.0) -> None:
        """End server and scheduler. May be called again.

        leave_s: how long the ranges of this server may take to move to other servers, where they
            would be lost with it: without a log. Ends at once if there is no other server.
        """
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        server = self._server
        if server is not None:
            status = self._scheduler.status()
            if len(status.addresses) > 1 and not status.has_log:
                server.leave(leave_s)
            server.close()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self._scheduler.stop()

    def _serve(self) -> None:
        """The thread of the server: start it, and again when it has ended."""
        settings = self._settings
        port = self.target.rpartition(":")[2]
        scheduler = join_host_port(settings.local_host, int(port))
        advertised = settings.advertised
        if advertised is not None and ":" in advertised:
            advertised = f"[{advertised}]"
        backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
        while not self._is_closing.is_set():
            try:
                server = self._server = ParameterServer(
                    scheduler,
                    NAME,
                    join_host_port(settings.host, settings.server_port),
                    advertised=advertised,
                    folder=settings.path / NAME,
                    tls=self._tls,
                    insecure=self._insecure,
                )
                with server:
                    log.info("parameter_server_ready", address=server.address)
                    backoff.reset()
                    if not self._is_closing.is_set():
                        server.wait()
                    return
            except Exception as error:  # of the log, the network, the scheduler
                self._server = None
                delay_s = backoff.next_s()
                log.error("parameter_server_failed", error=str(error), next_try_s=delay_s)
                self._is_closing.wait(delay_s)
