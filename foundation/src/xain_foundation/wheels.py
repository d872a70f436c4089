"""Commands that install our own distributions, which no index has."""

from importlib.metadata import PackageNotFoundError, version

# All have one version; a machine has one of these at least.
_OURS = ("xain-participant", "xain-coordinator", "xain-foundation")


def pip_install(distribution: str, extra: str = "") -> str:
    """The command for the wheel of a distribution, as `make dist` makes it, with an extra."""
    for name in (distribution, *_OURS):
        try:
            wheel = f"{distribution.replace('-', '_')}-{version(name)}-py3-none-any.whl"
        except PackageNotFoundError:
            continue
        return f"pip install '{wheel}[{extra}]'" if extra else f"pip install {wheel}"
    raise AssertionError("none of our distributions is installed")


def pip_install_extra(extra: str) -> str:
    """The command for an extra that coordinator and participant both have, with the wheel of the
    one that is installed here."""
    try:
        version("xain-coordinator")
    except PackageNotFoundError:
        return pip_install("xain-participant", extra)
    return pip_install("xain-coordinator", extra)
