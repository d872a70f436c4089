"""Names of a package whose modules are loaded when one of their names is used first."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from xain_foundation.wheels import pip_install


def loaded_on_use(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    modules: the names that each of its modules has for programs, with blanks between them. A module
        of another distribution has its whole name; ImportError says how that is installed.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        module = home if home.startswith("xain_") else f"{package}.{home}"
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            distribution = module.partition(".")[0]
            if error.name != distribution:
                raise
            wheel = distribution.replace("_", "-")
            raise ImportError(f"{package}.{name} needs {wheel}: {pip_install(wheel)}") from None

    return find, lambda: sorted(homes)
