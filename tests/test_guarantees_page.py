"""docs/guarantees.md names tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()


def test_every_test_in_the_guarantees_exists():
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for source in sources for name in re.findall(r"(?:def |^)(test_\w+)", source, re.MULTILINE)}
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 20
    assert named <= defined, sorted(named - defined)


def test_every_file_in_the_guarantees_exists():
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE)) | {
        f"docs/{name}" for name in re.findall(r"\]\((\w+\.md)\)", PAGE)
    }
    assert len(named) >= 8
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
