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
from pathlib import Path

import pytest

from tests.entry_points import FLOAT32, ROOT, SHARED, Commands
from tests.markdown_blocks import PAGES, Block, blocks

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
TRAIN = {"steps": 9, "log_every": 1, "eval_every": 9, "checkpoint_every": 9}
RUN = (
    *(flag for flag in SHARED if ".train." not in flag),
    *(f"--config.train.{name}={value}" for name, value in TRAIN.items()),
    *("--config.env.max_steps=4", "--config.optimizer.learning_rate=3e-3", FLOAT32),
)
PASSAGES = (
    *("Acme was founded by Ada Berg.", "Acme makes anvils.", "Ada Berg was born in Oslo."),
    *("Oslo is a city.", "Bo Lund leads Nord."),
)
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
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    write(folder / "HELD_OUT" / log.name, rows[::2])  # no question is in both
    write(folder / "TEST" / log.name, rows[1::2])
    write(folder / "LOG", rows)
    passages = [{"id": str(i), "title": "", "text": text} for i, text in enumerate(PASSAGES)]
    write(folder / "corpus.jsonl", passages)
    write(folder / "questions.jsonl", [{"id": "1", "question": QUESTION}])
    index = (f"--corpus={folder / 'corpus.jsonl'}", f"--index={folder / 'my-index'}")
    commands.succeed("index", *index, f"--encoder={folder / 'exported'}")
    context = [[str(i), [text]] for i, text in enumerate(PASSAGES)]
    facts = {"answer": "Oslo", "supporting_facts": [["0", 0], ["2", 0]], "context": context}
    own = {"passages": PASSAGES, "support": [0, 2]}
    for split in ("train", "dev"):
        asked = [f"{QUESTION} ({split} {i})" for i in range(4)]
        write(
            folder / "FOLDER" / f"{split}.jsonl",
            [{"_id": q, "question": q, **facts} for q in asked],
        )
        write(folder / "NAMED" / f"{split}.jsonl", [{"query": q, **own} for q in asked])
    return folder


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_blocks(page: Path) -> list[Block]:
    """The blocks of a page that a reader runs or saves."""
    return [b for b in blocks(page) if not b.not_run and (b.language in ("sh", "python") or b.file)]


@pytest.mark.parametrize("page", [*filter(run_blocks, PAGES)], ids=lambda page: page.name)
@pytest.mark.nightly
def test_a_reader_can_run_the_page(
    page: Path, provided: Path, commands: Commands, tmp_path: Path
) -> None:
    programs, work = tmp_path / "bin", tmp_path / "work"
    programs.mkdir()
    for name, words in (("python", ""), ("qrag", " -m qrag_jax")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
        (programs / name).chmod(0o755)
    installed = bool(os.environ.get("QRAG_READ_INSTALLED"))  # else the checkout is used
    paths = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": "" if installed else str(ROOT),
    }
    environment = {**commands.environment, **paths, "HAYSTACK_TELEMETRY_ENABLED": "False"}

    def program(*words: str) -> str:
        done = subprocess.run(
            words, cwd=work, env=environment, text=True, capture_output=True, timeout=900
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr[-3000:]}"
        return done.stdout

    work.mkdir()
    for name in NEEDS.get(page.name, ()):
        target = work / name
        target.parent.mkdir(exist_ok=True, parents=True)
        (shutil.copytree if (provided / name).is_dir() else shutil.copy)(provided / name, target)
    for block in run_blocks(page):
        if block.file:
            (work / block.file).parent.mkdir(exist_ok=True)
            (work / block.file).write_text(block.text)
        elif block.language == "sh":
            program("bash", "-euo", "pipefail", "-c", block.text)
    code = [b.text for b in run_blocks(page) if b.language == "python" and not b.file]
    if code:  # later blocks use the names of earlier ones
        (work / "page.py").write_text("".join(code))
        printed = program(sys.executable, "page.py")
        if page.name in ("README.md", "search.md"):  # a passage a step
            steps = [int(step) for step in re.findall(r"^(\d+) -?\d+\.\d+ ", printed, re.M)]
            assert steps == [*range(1, len(steps) + 1)]
            assert len(steps) > 1
