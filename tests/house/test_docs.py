"""Every path of the repository that a document names exists, and every relative link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.sources import PACKAGES, ROOT, name

DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "tests/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
SUFFIXES = (".py", ".md", ".toml", ".txt", ".csv", ".png", ".yaml", ".yml", ".sh", ".cfg", ".json")
FOLDERS = (*PACKAGES, "tests", "examples", "docs", ".ci")
MADE = ("out/", ".venv/")
"""Folders that commands make: not in a clone."""

CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
WORD = re.compile(r"^[\w.][\w./-]*$")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_path_named_exists(document: Path) -> None:
    missing = [path for path in _paths(document.read_text()) if not _exists(path, document.parent)]
    assert not missing, f"{name(document)} names {missing}, which are not there"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_link_leads_somewhere(document: Path) -> None:
    links = [
        link for link in LINK.findall(document.read_text()) if "://" not in link and not link.startswith("mailto:")
    ]
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing, f"{name(document)} links to {missing}, which are not there"


def _paths(text: str) -> list[str]:
    """Words in code spans and code blocks that look like paths of this repository.

    A path has a file suffix of ours, or starts with a folder of ours and a slash. `X.py` and `X_kernel.py` (a capital
    X) stand for any name; so does anything with braces, stars or angle brackets.
    """
    words = [word for span in CODE.findall(text) for word in span.split()]
    words += [word for block in re.findall(r"```.*?\n(.*?)```", text, re.DOTALL) for word in block.split()]
    words += [word for line in text.splitlines() if line.startswith("    ") for word in line.split()]
    found = []
    for word in words:
        path = word.strip("\"'(),:;").split("::")[0]
        if not WORD.match(path) or path.startswith(MADE) or re.match(r"(.*/)?X[._]", path):
            continue
        if path.endswith(SUFFIXES) or path.startswith(tuple(f"{folder}/" for folder in FOLDERS)):
            found.append(path)
    return found


def _exists(path: str, beside: Path) -> bool:
    """From the root, beside the document, or (a bare name, as in a table of one package) in one of the packages."""
    if (ROOT / path).exists() or (beside / path).exists():
        return True
    return any(True for folder in PACKAGES for _ in (ROOT / folder).rglob(path.rstrip("/")))
