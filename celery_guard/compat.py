"""The only reader of the versions of Celery and redis-py.

It imports Celery, and never redis-py: that stays under ``stores/redis``.
"""

from __future__ import annotations

import re
from importlib import metadata

import celery

__all__ = ["CELERY_VERSION", "SUPPORTED_CELERY", "SUPPORTED_REDIS", "Version", "parse_version", "redis_version", "version_warnings"]

Version = tuple[int, ...]

#: First and last series that the test suite runs on.
SUPPORTED_CELERY: tuple[Version, Version] = ((5, 4), (5, 7))
SUPPORTED_REDIS: tuple[Version, Version] = ((5,), (8,))


def parse_version(text: str) -> Version:
    """Read the leading numbers of a version: ``"5.5.0rc2"`` is (5, 5, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


#: Version of the installed Celery: (major, minor, micro).
CELERY_VERSION: Version = (celery.VERSION.major, celery.VERSION.minor, parse_version(str(celery.VERSION.micro))[0])


def redis_version() -> Version | None:
    """Return the version of the installed redis-py, None when it is not installed."""
    try:
        return parse_version(metadata.version("redis"))
    except metadata.PackageNotFoundError:
        return None


def _outside(package: str, version: Version, supported: tuple[Version, Version]) -> list[str]:
    first, last = supported
    have, low, high = (".".join(map(str, parts)) for parts in (version, first, last))
    if version[: len(first)] < first:
        return [f"{package} {have} is older than {low} and not supported; install {package} {low} to {high}"]
    if version[: len(last)] > last:
        return [f"{package} {have} is newer than {high}, the last that celery_guard was tested with; look for a newer celery_guard"]
    return []


def version_warnings(celery_version: Version | None = None, redis: Version | None = None) -> list[str]:
    """Tell which versions lie outside of what is supported.

    Args:
        celery_version: Version of Celery; None: the installed one.
        redis: Version of redis-py; None: the installed one, if there is one.

    Returns:
        One text for each, for the log; empty when all is well.
    """
    redis = redis or redis_version()
    found = _outside("celery", celery_version or CELERY_VERSION, SUPPORTED_CELERY)
    return found if redis is None else found + _outside("redis", redis, SUPPORTED_REDIS)
