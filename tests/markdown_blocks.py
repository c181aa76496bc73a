"""The README and the pages of docs/: their blocks of code, headings and links."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import NamedTuple

from tests.entry_points import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(
    r"^(?:<!-- (not run|file): (.+?) -->\n)?^ *(`{3,})(\w*)\n(.*?)^ *\3 *$", re.M | re.S
)


class Block(NamedTuple):
    """A fenced block.

    not_run: why it is not run; "": it is.
    file: what the page tells the reader to save it as; "": no file.
    """

    page: Path
    language: str
    text: str
    not_run: str
    file: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    for kind, said, _, language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        marks = (said if kind == mark else "" for mark in ("not run", "file"))
        found.append(Block(page, language, text, *marks))
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks and the marks before them."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures, without those in code."""
    return re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(page)))


def anchors(page: Path) -> set[str]:
    """Names of its headings that are the same on GitHub and on the site of mkdocs."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    here = {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", each.lower().strip())) for each in headings}
    plain = (unicodedata.normalize("NFKD", each).encode("ascii", "ignore") for each in headings)
    there = (re.sub(r"[^\w\s-]", "", each.decode()).strip().lower() for each in plain)
    return here & {re.sub(r"[-\s]+", "-", each) for each in there}
