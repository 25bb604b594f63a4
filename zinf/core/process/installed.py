"""Which versions of packages are installed."""

from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str:
    """The installed version; zinf has none where a checkout is on the path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
