"""The documentation against the code.

``python -m tests.unit.test_docs`` writes the generated page anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from celery_guard.config import SETTINGS
from celery_guard.signals import SIGNALS

ROOT = Path(__file__).parents[2]
SETTINGS_PAGE = ROOT / "docs" / "reference" / "settings.md"
HEAD = """# Settings

Set them like any Celery setting: `app.conf.guard_lease = 60`, `app.conf.update(...)`, a configuration module, or with a namespace
(`CELERY_GUARD_LEASE` for `namespace="CELERY"`). All are checked together at first use; an unknown `guard_*` name is an error that
names the one you meant. Durations are seconds, or a `timedelta`.

This page is made from the declarations in `celery_guard/config.py`.

| setting | type | default | |
|---|---|---|---|
"""


def settings_page() -> str:
    rows = []
    for setting in SETTINGS:
        default = "required" if setting.required else f"`{setting.default!r}`"
        unit = f", {setting.unit}" if setting.unit else ""
        kind = setting.type.replace("|", "\\|")
        rows.append(f"| `{setting.name}` | {kind}{unit} | {default} | {setting.description} |")
    return HEAD + "\n".join(rows) + "\n"


def test_settings_page_is_current() -> None:
    """The reference names every setting with the type, unit and default that the code has."""
    assert SETTINGS_PAGE.read_text() == settings_page()


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """No page links to a file that is not there."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_signals_are_documented() -> None:
    """Every decision is named in the reference."""
    text = (ROOT / "docs" / "reference" / "signals.md").read_text()
    assert [name for name in SIGNALS if f"`{name}`" not in text] == []


def test_settings_named_in_the_docs_exist() -> None:
    """No page names a guard_* setting that the code does not know."""
    known = {setting.name for setting in SETTINGS}
    named = {name for page in pages() for name in re.findall(r"\bguard_[a-z_]+\b(?!\()", page.read_text())}
    assert named - known == set()


if __name__ == "__main__":
    SETTINGS_PAGE.write_text(settings_page())
