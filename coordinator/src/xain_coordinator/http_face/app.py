"""The paths of the HTTP face. See fits.py for what a path does."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import AsyncExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import urlsplit

from fastapi import FastAPI, Header, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse

from xain_coordinator.config.sections.http import HttpSettings
from xain_coordinator.http_face import bodies, chimera
from xain_coordinator.http_face.admission import RELEASE, Bodies
from xain_coordinator.http_face.callers import HttpCallers
from xain_coordinator.http_face.docs_page import HEADERS, docs_page
from xain_coordinator.http_face.errors import HttpError
from xain_coordinator.http_face.events import EventReaders
from xain_coordinator.http_face.fits import Fits
from xain_coordinator.http_face.wrong_requests import sentence
from xain_coordinator.inspection.plain import snapshot_json
from xain_coordinator.ports import Reader
from xain_coordinator.stores.reading import chunks
from xain_foundation.logs.logger import get_logger
from xain_foundation.settings.fields import is_loopback
from xain_workloads.errors import NoModel
from xain_workloads.exported import formats

log = get_logger(__name__)

Format = Literal["npy", "npz", "safetensors", "json", "skops", "onnx"]
Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_ROUND = r"^(last|best|[0-9]{1,10})$"
Which = Annotated[str, InPath(alias="round", pattern=_ROUND, description="A number, last, or best")]
SessionId = Annotated[
    str | None,
    Query(max_length=100, description="The present session, or the one to predict with"),
]


# Answers that may be open at a time, by the end of the path: a client that reads slowly has them
# for as long as it likes.
MAX_OPEN = {"/events": 64, "/download": 16}
FILE_CHUNK_BYTES = 256 << 10
MAX_SETTINGS_BYTES = 256 << 10  # of a body without rows

OPENAPI = "/v1/openapi.json"
_AS_CONFIGURED = bodies.FitRequest()


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI descriptions of the errors with these HTTP statuses."""
    return {status: {"model": bodies.ErrorBody} for status in statuses}


def make_app(
    fits: Fits,
    settings: HttpSettings,
    *,
    callers: HttpCallers | None = None,
    any_host: bool = False,
) -> Any:
    """The ASGI application. callers: of a closed coordinator; None lets everybody in who reaches
    it. any_host: answer under other names than this machine's, too."""
    app = FastAPI(
        title="xain-coordinator",
        version="1",
        description="Fit a model over the participants of a coordinator, and predict with it.",
        redoc_url=None,
        openapi_url=OPENAPI,
        docs_url=None,
        # A redirect to the path with another slash at its end would lose the body.
        redirect_slashes=False,
    )
    _add_errors(app)
    _add_paths(app, fits)

    @app.get("/v1/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi(), OPENAPI), headers=HEADERS)

    app.include_router(chimera.make_router(fits))
    return _Guarded(app, settings, callers, any_host=any_host)


def _add_paths(app: FastAPI, fits: Fits) -> None:
    """Add the paths of /v1 to the application."""
    readers = EventReaders(fits)

    @app.post(
        "/v1/fit",
        status_code=202,
        responses={
            200: {"model": bodies.Status, "description": "With wait: the session is completed"},
            **_errors(409, 413, 422, 503),
        },
    )
    async def fit(
        http: Request, response: Response, request: bodies.FitRequest = _AS_CONFIGURED
    ) -> bodies.Status:
        """Fit. The request survives a kill of the coordinator once it is acknowledged. Poll
        /v1/status, or listen to /v1/events, or wait."""
        fitting = await fits.fit(request)
        if request.wait:
            await http.scope[RELEASE]()
            await fits.wait_for_end(fitting)
            response.status_code = 200
        return await fits.status()

    @app.post("/v1/fit/cancel", responses=_errors(409, 503))
    async def cancel() -> bodies.Status:
        """End the fit that goes on, without a result. The participants stay for the next one."""
        await fits.cancel()
        return await fits.status()

    @app.post("/v1/predict", responses=_errors(404, 409, 413, 422, 501, 503))
    async def predict(request: bodies.PredictRequest) -> bodies.Predictions:
        """Predict rows with a model of the last session that was completed."""
        predictor = await fits.predictor(str(request.model))
        predicted = await fits.predict(
            predictor, request.columns, request.rows, probabilities=request.probabilities
        )
        probabilities = predicted.probabilities
        return bodies.Predictions(
            session=predictor.session_id,
            round=predictor.round,
            predictions=predicted.values.tolist(),
            classes=list(predicted.classes),
            threshold=predictor.threshold,
            probabilities=None if probabilities is None else probabilities.tolist(),
            answered=list(predicted.answered),
            missing=dict(predicted.missing),
        )

    @app.get("/v1/status", responses=_errors(503))
    async def status() -> bodies.Status:
        """The present session: its state and progress, and the models to predict with."""
        return await fits.status()

    @app.get("/v1/rounds", responses=_errors(503))
    async def rounds() -> bodies.Rounds:
        """The latest rounds of the present session: who was selected, who counted, metrics."""
        snapshot = await fits.snapshot()
        return bodies.Rounds(
            session=snapshot.status.session_id, rounds=snapshot_json(snapshot)["rounds"]
        )

    @app.get("/v1/models", responses=_errors(404, 422, 503))
    async def models(session: SessionId = None) -> bodies.Models:
        """The global models of the present session."""
        trained = await fits.models(session)
        if trained is None:
            return bodies.Models(session=fits.sessions.session.session_id, models=[])
        listed = [trained.described(entry) for entry in trained.entries.values()]
        return bodies.Models(session=trained.session_id, models=listed)

    @app.get("/v1/models/{round}", responses=_errors(404, 422, 503))
    async def model(round_: Which, session: SessionId = None) -> dict[str, Any]:
        """Lineage and metrics of a global model of the present session."""
        trained = await fits.trained(session)
        try:
            return trained.described(trained.choose(round_))
        except NoModel as error:
            raise HttpError("NO_MODEL", str(error)) from None

    @app.get(
        "/v1/models/{round}/download",
        response_class=Response,
        responses={
            200: {
                "content": {"application/octet-stream": {}},
                "description": "The flat vector as .npy, or an export",
            },
            **_errors(404, 422, 503),
        },
    )
    async def download(
        round_: Which,
        format_: Annotated[Format, Query(alias="format")] = "npy",
        session: SessionId = None,
    ) -> Response:
        """The weights of a global model of the present session as a file."""
        trained = await fits.trained(session)

        def work() -> tuple[str, Iterator[bytes]]:
            """The name of the file and its pieces."""
            entry = trained.choose(round_)
            name = f"{trained.session_id}-{entry.model.round}.{format_}"
            if format_ == "npy":
                return name, _read(fits.sessions.open(trained.session_id, entry.model.ref))
            with tempfile.TemporaryDirectory(prefix="xain-") as folder:
                path = Path(folder) / f"model.{format_}"
                formats.write(path, trained.load(entry.model), trained.described(entry))
                return name, _read_file(path.open("rb"))  # its folder may go meanwhile

        name, data = await fits.in_thread(work)
        disposition = f'attachment; filename="{name}"'
        return StreamingResponse(
            data,
            media_type="application/octet-stream",
            headers={"content-disposition": disposition},
        )

    @app.get(
        "/v1/events",
        response_class=StreamingResponse,
        responses={
            200: {"content": {"text/event-stream": {}}, "description": "One event after another"},
            **_errors(422, 503),
        },
    )
    async def events(
        last_event_id: Annotated[str | None, Header(max_length=100)] = None,
    ) -> StreamingResponse:
        """The events of the journal as server-sent events, from the beginning of the present
        session, or after the one that Last-Event-ID names."""
        return StreamingResponse(
            readers.open(last_event_id),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )


def _read(reader: Reader) -> Iterator[bytes]:
    """The bytes of a stored object, which is closed at the end."""
    with reader:
        yield from chunks(reader)


def _read_file(file: BinaryIO) -> Iterator[bytes]:
    """The bytes of a file, which is closed at the end."""
    with file:
        while chunk := file.read(FILE_CHUNK_BYTES):
            yield chunk


# --- errors ---


def _answer(request: Request, error: HttpError, headers: Any = None) -> JSONResponse:
    """The answer to a request that has failed: the envelope of /v1, or Chimera's."""
    if request.url.path.startswith(chimera.PREFIX):
        body = chimera.envelope(error)
    else:
        body = {"error": {"code": error.code, "message": error.message}}
    if error.code == "UNAUTHENTICATED":
        headers = {"www-authenticate": "Bearer"}
    return JSONResponse(body, error.status, headers)


def _add_errors(app: FastAPI) -> None:
    """Have every exception of a handler, and of the framework, answered in the one envelope."""

    @app.exception_handler(HttpError)
    async def refused(request: Request, error: HttpError) -> JSONResponse:
        return _answer(request, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        text = sentence(error.errors(), error.body)
        if error.errors()[0]["loc"] == ("body",) and "json" not in request.headers.get(
            "content-type", ""
        ):
            text = "the body must be JSON, with the header content-type: application/json"
        return _answer(request, HttpError("INVALID_REQUEST", text))

    @app.exception_handler(400)
    @app.exception_handler(404)
    @app.exception_handler(405)
    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        codes = {404: "NO_SUCH_PATH", 405: "NO_SUCH_METHOD"}
        code = codes.get(error.status_code, "INVALID_REQUEST")
        return _answer(request, HttpError(code, str(error.detail)), error.headers)

    @app.exception_handler(Exception)
    async def crashed(request: Request, error: Exception) -> JSONResponse:
        log.error("http_crashed", path=request.url.path, exc_info=error)
        return _answer(request, HttpError("INTERNAL", "the coordinator's log says why"))


class _Guarded:
    """Refuses requests that web pages of other sites make in a browser on this machine, bodies that
    are too large, and what is too much at a time. The application gets whole bodies."""

    def __init__(
        self,
        app: Any,
        settings: HttpSettings,
        callers: HttpCallers | None = None,
        *,
        any_host: bool = False,
    ) -> None:
        self._app = app
        self._max = settings.max_body_bytes
        self._bodies = Bodies(self._max)
        self._open: Counter[str] = Counter()
        self._callers = callers
        # A page of another site has no token.
        self._any_host = any_host or callers is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse one that is foreign, not permitted, too large or too many."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (error := self._foreign(dict(scope["headers"]))) is not None:
            await _answer(Request(scope), error)(scope, receive, send)
            return
        request = Request(scope)
        most = self._max if request.url.path.endswith("/predict") else MAX_SETTINGS_BYTES
        try:
            admitted = nullcontext() if self._callers is None else self._callers.admitted(scope)
            with admitted, self._one_of_its_kind(request.url.path):
                length = request.headers.get("content-length", "")
                if length.isdecimal() and int(length[:20]) > most:
                    raise HttpError("TOO_LARGE", f"the body has more than {most} bytes")
                await self._answer_request(scope, receive, send, most)
        except HttpError as refused:
            await _answer(request, refused)(scope, receive, send)
        except asyncio.IncompleteReadError:
            pass

    async def _answer_request(self, scope: Scope, receive: Receive, send: Send, most: int) -> None:
        """Answer a request. Raises HttpError and IncompleteReadError before the answer begins."""
        async with AsyncExitStack() as stack:
            body: bytes | None = await stack.enter_async_context(self._bodies.held(receive, most))

            async def receive_whole() -> Message:
                """The whole body once, and then what else comes."""
                nonlocal body
                if body is None:
                    return await receive()  # waits for the end of the connection
                message = {"type": "http.request", "body": body, "more_body": False}
                body = None
                return message

            async def send_and_release(message: Message) -> None:
                await stack.aclose()  # what is made of the body has been used
                await send(message)

            await self._app({**scope, RELEASE: stack.aclose}, receive_whole, send_and_release)

    @contextmanager
    def _one_of_its_kind(self, path: str) -> Iterator[None]:
        """Bound the open requests of a kind whose answers clients can make last, such as downloads,
        in this context. Raises HttpError if there are too many."""
        kind = next((end for end in MAX_OPEN if path.endswith(end)), None)
        if kind is None:
            yield
            return
        if self._open[kind] >= MAX_OPEN[kind]:
            raise HttpError("TOO_BUSY", f"{MAX_OPEN[kind]} clients read {kind[1:]} already")
        self._open[kind] += 1
        try:
            yield
        finally:
            self._open[kind] -= 1

    def _foreign(self, headers: dict[bytes, bytes]) -> HttpError | None:
        """The refusal of a request that another site's page makes; None for other requests.

        Browsers send a page's POST request without a body and ask nothing beforehand. The header
        Origin tells the page's site. The header Host tells the name in the URL, which another site
        may point to this machine (DNS rebinding).
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._any_host and not _names_loopback(host):
            return HttpError(
                "FOREIGN_SITE",
                f"the face answers as 127.0.0.1 or localhost, and not as {host[:80]!r}",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin.partition("://")[2].lower() != host.lower():
            return HttpError("FOREIGN_SITE", f"web pages of {origin[:80]!r} may not make requests")
        return None


def _names_loopback(host: str) -> bool:
    """Whether the host of a header names this machine's loopback. host: with its port, if it has
    one."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
