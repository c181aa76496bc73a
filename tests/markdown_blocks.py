"""The README and the pages of docs/: their blocks of code, headings and links."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from pathlib import Path

from tests.entry_points import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
NAMES = [page.name for page in PAGES]
LANGUAGES = ("sh", "python", "json", "text")
# Why a block is not run. A new reason is written down here first, so that there are few.
NOT_RUN = (
    "trains for minutes or hours",
    "benchmarks of minutes or hours",
    "installs packages",
    "needs the network",
    "needs a GPU",
    "needs JAX's CUDA packages (6 GB)",
    "needs a running model server",
    "needs several machines or a cloud",
    "a server that keeps running; tests/test_serve.py starts it",
    "the tests themselves",
)
_MARK = re.compile(r"<!-- (not run|file): (.+) -->")
_FENCE = re.compile(r"(`{3,})(\w*)")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: where it is, its language and text, and what the comment before it says."""

    page: Path
    line: int  # of its fence, from 1
    language: str
    text: str
    not_run: str  # the reason; "": it is run
    file: str  # what the page tells the reader to save it as; "": no file

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order; a fence that does not close is an error."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        fence = _FENCE.fullmatch(lines[at].strip())
        if not fence:
            at += 1
            continue
        assert fence[2], f"{page.name}:{at + 1}: the block has no language"
        end = lines.index(fence[1], at + 1)
        mark = _MARK.fullmatch(lines[at - 1]) if at else None
        kind, told = mark.groups() if mark else ("", "")
        text = "\n".join(lines[at + 1 : end]) + "\n"
        not_run, file = (told if kind == each else "" for each in ("not run", "file"))
        found.append(Block(page, at + 1, fence[2], text, not_run, file))
        at = end + 1
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks and comments."""
    kept, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if _FENCE.fullmatch(line.strip()):
            inside = not inside
        elif not inside and not _MARK.fullmatch(line):
            kept.append(line)
    return "\n".join(kept)


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures, without those in code."""
    return _LINK.findall(re.sub(r"`[^`]*`", "", prose(page)))


def anchors(page: Path) -> set[str]:
    """Names of its headings that are the same on GitHub and on the site of mkdocs."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {_on_github(each) for each in headings} & {_on_the_site(each) for each in headings}


def _on_github(heading: str) -> str:
    kept = re.sub(r"[^\w\s-]", "", heading.lower().strip())
    return re.sub(r"\s", "-", kept)


def _on_the_site(heading: str) -> str:
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
