"""Settings that name a class, such as a rule of aggregation, and its options."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from xain_coordinator.extensions import plugins
from xain_coordinator.extensions.options import WrongOption
from xain_coordinator.extensions.plugins import PluginFailed
from xain_foundation.settings.fields import Conflicts, WrongSetting


@contextmanager
def naming(key: str, options: str, known: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Turn the errors of making an instance by its name into WrongSetting. key: of the name.
    options: key of the table of its options. known: the names that there are."""
    try:
        yield
    except KeyError:
        raise WrongSetting(key, f"it must be one of: {', '.join(known())}") from None
    except WrongOption as error:
        option = f"{options}.{error.option}" if error.option else options
        raise WrongSetting(option, error.text) from None
    except PluginFailed as error:
        raise WrongSetting(key, str(error)) from None


def known_kind(
    group: str, kind: str, builtin: Sequence[str], options: Mapping[str, object]
) -> Conflicts:
    """Check that the kind is built in, or a plug-in that can be imported; only plug-ins have
    options."""
    if kind in builtin:
        if options:
            yield WrongSetting("options", f'kind = "{kind}" has keys of its own in this section')
        return
    with naming("kind", "options", lambda: plugins.known(group, builtin)):
        _: object = plugins.load(group, kind, {})
