"""The README and docs/: links, blocks of code, and every command and field that they name.

Nothing is run here but small checks; `test_docs_blocks.py` runs the blocks.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from qrag_jax.__main__ import COMMANDS
from qrag_jax.systems import deepretrieval_config as deep
from qrag_jax.systems import harr_config, leret_config, q_rag_config, rlvr_config
from tests import documented_commands
from tests.entry_points import ROOT
from tests.markdown_blocks import (
    LANGUAGES,
    NAMES,
    NOT_RUN,
    PAGES,
    anchors,
    blocks,
    links,
    prose,
)

every_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)
README = ROOT / "README.md"
# Fields that are named before they are there, as a page says.
SOURCES = re.compile(r"data\.sources\.\w+")


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if "://" in link:
            assert link.startswith("https://"), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{page.name}: {link}"
        assert target.is_relative_to(ROOT), link
        # The site has the files of docs/ alone.
        assert page == README or target.is_relative_to(ROOT / "docs"), link
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_found_from_the_site_and_from_the_readme() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES[1:]:
        assert f": {page.name}\n" in navigation, f"mkdocs.yml: nav lacks {page.name}"
    files = {p.name for p in (ROOT / "docs").iterdir()} - {p.name for p in PAGES}
    pictures = {Path(link).name for page in PAGES for link in links(page)}
    assert files <= pictures, "a file of docs/ that no page shows"


@every_page
def test_blocks_are_run_or_say_why_not(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: {block.language}"
        assert not block.not_run or block.not_run in NOT_RUN, f"{block}: {block.not_run}"
        assert not block.file or block.language in ("python", "json"), block
    marks = sum(bool(block.not_run or block.file) for block in blocks(page))
    assert marks == len(re.findall(r"^<!-- (?:not run|file):", text, re.M)), "a mark without block"
    # Code that is only indented would be seen by none of these tests.
    indented = re.findall(r"(?<=\n\n)    \S.*", prose(page))
    assert not indented, indented


@every_page
def test_blocks_can_be_read(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, str(block), "exec")
        elif block.language == "json":
            _read_json(block.text)
        elif block.language == "sh":
            for name, text in documented_commands.written_files(block.text).items():
                if name.endswith(".py"):
                    compile(text, str(block), "exec")
                else:
                    assert name.endswith(".jsonl"), f"{block}: {name}"
                    _read_json(text)


def _read_json(text: str) -> None:
    """Reads one value, or one a line."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        for line in text.splitlines():
            json.loads(line)


@every_page
def test_commands_flags_and_fields_exist(page: Path) -> None:
    runs: dict[str, object] = {}
    for block in blocks(page):
        if block.language == "sh":
            try:
                documented_commands.checked(block.text, runs)
            except Exception as error:
                raise AssertionError(f"{block}: {error}") from error


def test_most_commands_are_told() -> None:
    found = re.findall(r"(?:qrag_jax\.|qrag )(\w+)", "\n".join(p.read_text() for p in PAGES))
    assert set(COMMANDS) - set(found) == {"serve_llm"}  # launch/sidecar.sh runs it


def test_wrong_commands_are_found() -> None:
    """The check itself: each of these is refused."""
    begin = "python -m qrag_jax."
    for wrong in (
        f"{begin}trian --config=configs/own.py",
        f"{begin}train --config=configs/nobody.py",
        f"{begin}train --config=configs/own.py:huge",
        f"{begin}train --config=configs/own.py --config.train.stepz=3",
        f"{begin}train --config=configs/own.py --config.train.steps=many",
        f"{begin}train --config=configs/own.py --out=x",
        f"{begin}evaluate --workdir=runs/nobody --config.eval.beam=4",
        f"{begin}answer --llm.modell=x",
        "make cofee",
        "pip install 'qrag_jax[cofee]'",
        "python -m benchmarks --suite cofee",
        "cofee --now",
    ):
        with pytest.raises(Exception, match=r"."):
            documented_commands.checked(wrong, {})
    assert documented_commands.checked(f"{begin}train --config=configs/own.py:tiny", {}) == 1


def known_fields() -> set[str]:
    systems = (q_rag_config, harr_config)
    names = {name for each in systems for name, *_ in each.help_lines()}
    for each in (rlvr_config, leret_config, deep):
        names |= {name for name, *_ in each.help_lines()}
    return {SOURCES.sub("data.sources.NAME", name) for name in names}


@pytest.fixture(scope="module")
def fields() -> set[str]:
    return known_fields()


@every_page
def test_fields_that_the_text_names_exist(page: Path, fields: set[str]) -> None:
    for name in re.findall(r"`(?:--)?config\.(?!json)([a-z_]\w*(?:\.\w+)*)", prose(page)):
        name = SOURCES.sub("data.sources.NAME", name)
        found = any(f == name or f.startswith(f"{name}.") for f in fields)
        assert found, f"{page.name}: config.{name}"


@every_page
def test_files_that_the_text_names_exist(page: Path) -> None:
    folders = "qrag_jax|configs|tests|benchmarks|launch|docs"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)", prose(page)):
        path = ROOT / name
        assert path.exists() or path.parent.name == "launch", f"{page.name}: {name}"


def test_modules_of_python_blocks_exist() -> None:
    """Also in blocks that are not run."""
    imported = re.compile(r"^from (qrag_jax[\w.]*) import (.+)$", re.M)
    for block in (each for page in PAGES for each in blocks(page) if each.language == "python"):
        for module, names in imported.findall(block.text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or path.is_dir(), f"{block}: {module}"
            if ".integrations." in module:
                continue  # it imports a library that may be missing; their tests import it
            found = importlib.import_module(module)
            assert all(hasattr(found, name.strip()) for name in names.split(",")), block
