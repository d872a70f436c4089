"""A round of the server's loop."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol

from xain_session.record import Record, W
from xain_wire.fl import access_pb2 as control

EPOCHS: Final = "epochs"


class Running(Protocol[W]):
    """The session of a round."""

    @property
    def participants(self) -> Sequence["Participant"]: ...

    def _run(self, round_: "Round[W]", request: control.ConfigureRoundRequest | None) -> Record[W]:
        """Configure a round, unless there is nothing to be decided, and wait for its model."""

    def _stop(self) -> None:
        """Let the present round be the last one."""


class Round(Generic[W]):
    """A round that the script is to run.

    number: number of the round. is_configured: whether it was configured before the script was
    started again; then configure() and select() may be left out.
    """

    def __init__(
        self,
        session: "Running[W]",
        number: int,
        decided: control.ConfigureRoundRequest | None = None,
    ) -> None:
        """decided: what was configured before the script was started again."""
        self.number = number
        self.is_configured = decided is not None
        self._decided_before = decided
        self._session = session
        self._values: dict[str, Any] = {}
        self._by_site: dict[str, dict[str, Any]] = {}
        self._selected: list[str] = []
        self._is_decided = False
        self._record: Record[W] | None = None

    def __repr__(self) -> str:
        return f"Round({self.number})"

    @property
    def record(self) -> Record[W] | None:
        """The record of run(); None before."""
        return self._record

    def configure(
        self, by_site: Mapping[str, Mapping[str, object]] | None = None, **settings: object
    ) -> None:
        """Decide on settings of this round, which round.config has at the sites: numbers, text,
        lists and mappings, beside those of `train`, over which they prevail; `epochs` takes the
        place of the session's. A second call adds to the first.

        by_site: settings of single sites, over which nothing prevails.
        Raises RuntimeError after run(), and TypeError for a value that JSON cannot hold. After a
        restart other settings than before raise SessionError in run().
        """
        self._require_open("configure")
        self._values |= plain(settings, "")
        for site, values in (by_site or {}).items():
            if not isinstance(site, str):
                raise TypeError(f"by_site has the key {site!r}; it must be the name of a site")
            if not isinstance(values, Mapping):
                raise TypeError(
                    f"by_site[{site!r}] is {values!r}; it must be a mapping of settings"
                )
            self._by_site.setdefault(site, {}).update(plain(values, f" of {site}"))
        self._is_decided = True

    def select(
        self,
        chosen: Iterable["str | Participant"]
        | Callable[[Sequence["Participant"]], Iterable["str | Participant"]],
    ) -> None:
        """Decide which sites take part, all of them: names, or a function that is given the
        connected ones and returns some of them, or names. It is not called for a round that is
        configured already.

        Raises RuntimeError after run().
        """
        self._require_open("select")
        if callable(chosen):
            if self._decided_before is not None:
                self._selected = list(self._decided_before.selected)
                return
            chosen = chosen(self._session.participants)
        sites = [chosen] if isinstance(chosen, str) else list(chosen)
        if not sites:
            raise ValueError(f"round {self.number}: select() was given no site")
        names = [one.name if isinstance(one, Participant) else one for one in sites]
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"select() was given {name!r}; it takes names of sites")
        self._selected = names
        self._is_decided = True

    def run(self) -> Record[W]:
        """Have the sites train, and wait for the model. A second call returns the same record.

        Raises SessionError if the session ends without it, or does not take what was configured.
        """
        if self._record is None:
            self._record = self._session._run(self, self._request())
        return self._record

    def stop(self) -> None:
        """Let this round be the last one. The body goes on to its end."""
        self._session._stop()

    def _request(self) -> control.ConfigureRoundRequest | None:
        """Make the request of the script's decisions; None if they were made before and stay."""
        if self.is_configured and not self._is_decided:
            return None
        values, by_site = dict(self._values), {k: dict(v) for k, v in self._by_site.items()}
        epochs = {site: of.pop(EPOCHS) for site, of in by_site.items() if EPOCHS in of}
        return control.ConfigureRoundRequest(
            round=self.number,
            epochs=_epochs(values.pop(EPOCHS), self.number) if EPOCHS in values else 0,
            site_epochs={site: _epochs(n, self.number) for site, n in epochs.items()},
            config=json.dumps(values, sort_keys=True) if values else "",
            by_site={site: json.dumps(of, sort_keys=True) for site, of in by_site.items() if of},
            selected=self._selected,
        )

    def _require_open(self, what: str) -> None:
        """Check that the round has not run yet. what: the method that was called. Raises
        RuntimeError."""
        if self._record is not None:
            raise RuntimeError(f"round {self.number}: {what}() comes before run()")


class Participant:
    """A connected site. name; samples: of its data, None if they are not known; tags."""

    def __init__(self, name: str, samples: int | None, tags: Mapping[str, str]) -> None:
        self.name = name
        self.samples = samples
        self.tags = tags

    def __repr__(self) -> str:
        return f"Participant({self.name!r})"


class AsyncRound(Generic[W]):
    """A round under asyncio: run() and evaluate() of its record are as in Round, but for `await
    round.run()`."""

    def __init__(
        self, round_: Round[W], do: Callable[[Callable[[], Record[W]]], Awaitable[Record[W]]]
    ) -> None:
        """do: runs a function in the thread of the session."""
        self._round = round_
        self._do = do
        self._running: asyncio.Future[Record[W]] | None = None
        self.number = round_.number
        self.is_configured = round_.is_configured

    @property
    def record(self) -> Record[W] | None:
        """The record of run(); None before."""
        return self._round.record

    def configure(
        self, by_site: Mapping[str, Mapping[str, object]] | None = None, **settings: object
    ) -> None:
        """Decide on settings of this round, as Round.configure() does."""
        self._round.configure(by_site, **settings)

    def select(
        self, chosen: Iterable[str] | Callable[[Sequence[Participant]], Iterable[str]]
    ) -> None:
        """Decide which sites take part, as Round.select() does."""
        self._round.select(chosen)

    async def run(self) -> Record[W]:
        """Have the sites train, and wait for the model, as Round.run() does. After a timeout it may
        be awaited again."""
        if self._running is None:
            self._running = asyncio.ensure_future(self._do(self._round.run))
            # Its error is nobody's to hear where nobody awaits the round any more.
            self._running.add_done_callback(lambda one: one.cancelled() or one.exception())
        return await asyncio.shield(self._running)

    def stop(self) -> None:
        """Let this round be the last one."""
        self._round.stop()


def plain(settings: Mapping[str, object], of: str) -> dict[str, Any]:
    """Convert settings to what JSON holds. Raises TypeError, which names the one that it cannot."""
    found = {}
    for name, value in settings.items():
        item = getattr(value, "item", None)
        plain = item() if callable(item) and getattr(value, "ndim", None) == 0 else value
        try:
            _require_text_keys(plain)
            text = json.dumps(plain, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"the setting {name!r}{of} is {_shortened(value)}, which JSON cannot hold: {error}"
            ) from None
        found[name] = json.loads(text)
    return found


def _require_text_keys(value: object) -> None:
    """Check that mappings have text as keys, which JSON would make of any other. Raises
    TypeError."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no text")
            _require_text_keys(one)
    elif isinstance(value, list | tuple):
        for one in value:
            _require_text_keys(one)


def _shortened(value: object) -> str:
    """A value's repr, 60 characters of it at most."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _epochs(value: object, number: int) -> int:
    """Return the number of epochs if it is a whole one from 1; else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"round {number}: epochs is {value!r}; it must be a whole number from 1")
    return value
