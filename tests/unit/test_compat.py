"""Versions of Celery and redis-py."""

from __future__ import annotations

from importlib import metadata

import celery
import pytest

from celery_guard import compat


@pytest.mark.parametrize(
    ("text", "version"),
    [("5.4.0", (5, 4, 0)), ("5.5.0rc2", (5, 5, 0)), ("8.1", (8, 1)), ("6.0.0.dev1+local", (6, 0, 0)), ("unknown", ())],
)
def test_parse_version(text: str, version: tuple[int, ...]) -> None:
    """The leading numbers count, suffixes of pre-releases do not."""
    assert compat.parse_version(text) == version


def test_installed_versions_are_read() -> None:
    """The versions are those of the installed packages."""
    assert celery.__version__.startswith(".".join(map(str, compat.CELERY_VERSION)))
    redis = compat.redis_version()
    assert redis is not None
    assert metadata.version("redis").startswith(".".join(map(str, redis)))


def test_redis_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without redis-py there is no version and no warning about it."""

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert compat.redis_version() is None
    assert compat.version_warnings((5, 4, 0)) == []


@pytest.mark.parametrize("version", [(5, 4, 0), (5, 4, 9), (5, 6, 2), (5, 7, 0), (5, 7, 11)])
@pytest.mark.parametrize("redis", [(5, 0, 0), (6, 4, 0), (8, 9, 1)])
def test_supported_versions_are_silent(version: tuple[int, ...], redis: tuple[int, ...]) -> None:
    """Every patch release of a supported series is supported."""
    assert compat.version_warnings(version, redis) == []


@pytest.mark.parametrize(
    ("version", "redis", "words"),
    [
        ((5, 3, 6), (8, 0), ["celery 5.3.6 is older than 5.4"]),
        ((5, 8, 0), (8, 0), ["celery 5.8.0 is newer than 5.7"]),
        ((6, 0, 0), (9, 0, 0), ["celery 6.0.0 is newer than 5.7", "redis 9.0.0 is newer than 8"]),
        ((5, 7, 0), (4, 6, 0), ["redis 4.6.0 is older than 5"]),
    ],
)
def test_other_versions_are_told(version: tuple[int, ...], redis: tuple[int, ...], words: list[str]) -> None:
    """A version outside of the range is named with the range."""
    found = compat.version_warnings(version, redis)
    assert len(found) == len(words)
    assert all(text.startswith(word) for text, word in zip(found, words, strict=True))
