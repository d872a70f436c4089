"""Controllers by name: those of the core, and those of plug-ins, made from the options of
`[rounds.controller_options]`."""

from collections.abc import Mapping

from xain_coordinator.core.selection import CONTROLLERS, Controller, ControllerFailed
from xain_coordinator.core.values import Option
from xain_coordinator.extensions import plugins
from xain_coordinator.extensions.options import make


def known_controllers() -> list[str]:
    """Built in or plugged in, sorted."""
    return plugins.known(plugins.CONTROLLERS, CONTROLLERS)


def make_controller(name: str, options: Mapping[str, object]) -> Controller:
    """Raises KeyError if there is no such controller, PluginFailed if it is there and cannot be
    used, and WrongOption."""
    kind = plugins.load(plugins.CONTROLLERS, name, CONTROLLERS)
    if not isinstance(kind, type):
        raise plugins.PluginFailed(f"the plug-in {name!r} is no controller: it is not a class")
    made: Controller = make(kind, f"controller {name!r}", options)
    if not callable(getattr(made, "select", None)):
        raise plugins.PluginFailed(f"the plug-in {name!r} is no controller: it has no select()")
    return made


def controller_of_session(name: str, options: Mapping[str, Option]) -> Controller:
    """The controller that a session was opened with.

    Raises ControllerFailed if there is none any more, or one that takes other options.
    """
    try:
        return make_controller(name, options)
    except KeyError:
        why = "it is not installed"
    except ValueError as error:
        why = str(error)
    raise ControllerFailed(
        f"the session's controller is {name!r}, and it cannot be had: {why}; install what the "
        "session was opened with, or open another one with --new-session"
    )
