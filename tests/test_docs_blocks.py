"""The blocks of the README and of docs/ are run as a reader would, page by page.

Each page gets a folder of its own, with what it takes for granted: a tiny run, its export, an
index, small data. Its files are saved, its shell blocks are run by bash, and its Python blocks are
one program. `test_docs.py` looks at all blocks, also those that are not run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.entry_points import FLOAT32, ROOT, SHARED, Commands
from tests.markdown_blocks import NAMES, PAGES, Block, blocks

pytestmark = pytest.mark.long

TIME_LIMIT = 900  # seconds of one block, which takes 20 on two free cores
NEEDS = {
    "README.md": ("runs/quickstart",),
    "evaluate.md": ("runs/hotpotqa-minilm", "FOLDER"),
    "export.md": ("runs/hotpotqa-minilm",),
    "integrations.md": ("exported", "my-index"),
    "own_data.md": ("FOLDER", "NAMED"),
    "search.md": ("runs/hotpotqa-minilm", "exported", "corpus.jsonl", "questions.jsonl"),
    "show.md": ("runs/quickstart", "runs/one", "runs/other", "LOG"),
    "stopping.md": ("HELD_OUT", "TEST", "LOG"),
}
# A run that learns something in its few steps, so that its best checkpoint is a trained one.
RUN = (
    *(flag for flag in SHARED if ".train." not in flag),
    *("--config.train.steps=9", "--config.train.log_every=1", "--config.train.eval_every=9"),
    *("--config.train.checkpoint_every=9", "--config.env.max_steps=4"),
    *("--config.optimizer.learning_rate=3e-3", FLOAT32),
)
PASSAGES = (
    *("Acme was founded by Ada Berg.", "Acme makes anvils.", "Ada Berg was born in Oslo."),
    *("Oslo is a city.", "Bo Lund leads Nord."),
)
HITS = {"README.md": 3, "search.md": 4}  # a passage a step, and no passage twice
QUESTION = "Where was the founder of Acme born?"


@pytest.fixture(scope="module")
def provided(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that pages need, by its name there."""
    folder = tmp_path_factory.mktemp("provided")
    run = folder / "runs" / "quickstart"
    commands.succeed("train", *RUN, f"--workdir={run}")
    commands.succeed("evaluate", f"--workdir={run}")
    for name in ("one", "other", "hotpotqa-minilm"):
        shutil.copytree(run, folder / "runs" / name)
    commands.succeed("export", f"--workdir={run}", f"--out={folder / 'exported'}")
    (log,) = run.glob("eval/best-*/eval_seed42.jsonl")
    lines = log.read_text().splitlines(keepends=True)
    for name, half in (("HELD_OUT", lines[::2]), ("TEST", lines[1::2])):  # no question is in both
        (folder / name).mkdir()
        (folder / name / log.name).write_text("".join(half))
    shutil.copy(log, folder / "LOG")
    rows = [{"id": str(i), "title": "", "text": text} for i, text in enumerate(PASSAGES)]
    _write(folder / "corpus.jsonl", rows)
    _write(folder / "questions.jsonl", [{"id": "1", "question": QUESTION}])
    index = (f"--corpus={folder / 'corpus.jsonl'}", f"--index={folder / 'my-index'}")
    commands.succeed("index", *index, f"--encoder={folder / 'exported'}")
    for split in ("train", "dev"):
        questions = [f"{QUESTION} ({split} {i})" for i in range(4)]
        _write(folder / "FOLDER" / f"{split}.jsonl", [_hotpotqa(each) for each in questions])
        own = [{"query": q, "passages": PASSAGES, "support": [0, 2]} for q in questions]
        _write(folder / "NAMED" / f"{split}.jsonl", own)
    return folder


def _hotpotqa(question: str) -> dict[str, object]:
    return {
        "_id": question,
        "question": question,
        "answer": "Oslo",
        "supporting_facts": [["0", 0], ["2", 0]],
        "context": [[str(i), [text]] for i, text in enumerate(PASSAGES)],
    }


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def reader(provided: Path, commands: Commands, tmp_path: Path) -> Callable[[list[Block]], str]:
    """Runs the blocks of a page in a new folder; returns what the Python blocks print."""
    own = tmp_path / "bin"
    own.mkdir()
    for name, words in (("python", ""), ("qrag", " -m qrag_jax")):
        (own / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
        (own / name).chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    installed = bool(os.environ.get("QRAG_READ_INSTALLED"))  # else the checkout is used
    paths = {
        "PATH": f"{own}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": "" if installed else str(ROOT),
    }
    environment = {**commands.environment, **paths, "HAYSTACK_TELEMETRY_ENABLED": "False"}

    def program(words: list[str], block: Block) -> str:
        done = subprocess.run(
            words, cwd=work, env=environment, text=True, capture_output=True, timeout=TIME_LIMIT
        )
        assert done.returncode == 0, f"{block}:\n{block.text}{done.stdout}{done.stderr[-3000:]}"
        return done.stdout

    def read(page: list[Block]) -> str:
        for name in NEEDS.get(page[0].page.name, ()):
            source, target = provided / name, work / name
            target.parent.mkdir(exist_ok=True, parents=True)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        printed, so_far = "", ""
        for block in page:
            if block.file:
                (work / block.file).parent.mkdir(exist_ok=True)
                (work / block.file).write_text(block.text)
            elif block.language == "sh":
                program(["bash", "-euo", "pipefail", "-c", block.text], block)
            else:
                so_far += block.text  # later blocks use the names of earlier ones
                (work / "page.py").write_text(so_far)
                if block is [b for b in page if b.language == "python" and not b.file][-1]:
                    printed = program([sys.executable, "page.py"], block)
        return printed

    return read


def run_blocks(page: Path) -> list[Block]:
    """The blocks of a page that a reader runs or saves."""
    return [b for b in blocks(page) if not b.not_run and (b.language in ("sh", "python") or b.file)]


RUN_PAGES = [page for page in PAGES if run_blocks(page)]


@pytest.mark.parametrize("page", RUN_PAGES, ids=[page.name for page in RUN_PAGES])
def test_a_reader_can_run_the_page(page: Path, reader: Callable[[list[Block]], str]) -> None:
    printed = reader(run_blocks(page))
    if page.name in HITS:
        hits = re.findall(r"^(\d+) (-?\d+\.\d+) .*$", printed, re.M)
        assert [int(step) for step, _ in hits] == [*range(1, HITS[page.name] + 1)]


def test_what_pages_take_for_granted_is_of_pages_that_are_there() -> None:
    assert NEEDS.keys() <= set(NAMES)
