"""The README and docs/: links lead somewhere, commands have such flags, configs and fields; and,
nightly, the blocks run as a reader would run them, page by page.

For these each page gets a folder of its own, with what it takes for granted: a tiny run, its
export, an index, small data. Its files are saved, its shell blocks are run by bash, and its Python
blocks are one program.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from qrag_jax.__main__ import COMMANDS
from qrag_jax.runtime.config_fields import described
from tests.entry_points import FLOAT32, ROOT, SHARED, Commands, json_lines
from tests.support.worlds import record_of, write_lines

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(
    r"^(?:<!-- (not run|file): (.+?) -->\n)?^ *(`{3,})(\w*)\n(.*?)^ *\3 *$", re.M | re.S
)


class Block(NamedTuple):
    """A fenced block.

    not_run: why it is not run; "": it is.
    file: what the page tells the reader to save it as; "": no file.
    """

    language: str
    text: str
    not_run: str
    file: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [
        Block(language, text, *(said if kind == mark else "" for mark in ("not run", "file")))
        for kind, said, _, language, text in _BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks and the marks before them."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
WRITTEN = re.compile(r"^cat > (\S+) <<'EOF'\n(.*?\n)EOF\n", re.M | re.S)
ENDS = ("&&", "||", "|", ";", "&", ">")
OF_LAUNCHERS = {"launch/slurm.sbatch": "train", "launch/sidecar.sh": "serve_llm"}


@functools.cache
def known_fields() -> set[str]:
    """The fields of all systems."""
    modules = ("q_rag", "harr", "rlvr", "leret", "deepretrieval")
    made = (importlib.import_module(f"qrag_jax.systems.{name}.config") for name in modules)
    names = {name for each in made for name, *_ in described(each.CONFIG, "")}
    return {re.sub(r"data\.sources\.\w+", "data.sources.NAME", name) for name in names}


@every_page
def test_links_files_and_fields_exist(page: Path) -> None:
    """Anchors, and what the site's navigation leaves out, are errors of `make docs`."""
    for link in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(page))):
        if "://" in link:
            assert link.startswith("https://"), link
        else:
            assert (page.parent / link.partition("#")[0]).exists(), link
    for name in re.findall(r"`((?:qrag_jax|configs|tests|benchmarks|docs)/[\w./-]+)", prose(page)):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(?:--)?config\.(?!json)([a-z_]\w*(?:\.\w+)*)", prose(page)):
        name = re.sub(r"data\.sources\.\w+", "data.sources.NAME", name)
        assert any(f"{field}.".startswith(f"{name}.") for field in known_fields()), name


def test_contributing_points_at_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Rules")[0]
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        assert (ROOT / link.partition("#")[0]).exists(), link
    for name in re.findall(r"`((?:\w+/)+[\w.]*)`", re.sub(r"`[^`]*(?:NAME|RUN)[^`]*`", "", text)):
        assert (ROOT / name).exists() or (ROOT / "qrag_jax" / name).exists(), name
    pointed = text.partition("## Change one thing")[2]
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "qrag_jax").rglob("*.py"))
    for name in re.findall(r"`(?:[A-Z]\w+\.)?(\w+)`", pointed):
        assert re.search(rf"\b{name}\b", code), name


# ---------------------------------------------------------------- commands


def simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell block."""
    for line in WRITTEN.sub("", text).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for is_end, command in itertools.groupby(words, lambda word: word in ENDS):
            if not is_end:
                yield [*command]


def of_ours(words: list[str]) -> tuple[str, list[str]] | None:
    """The name of our command, and the words after it."""
    for i, word in enumerate(words):
        if word.startswith("qrag_jax.") and words[i - 1] == "-m":
            return word.partition(".")[2], words[i + 1 :]
        if word == "qrag" and words[i + 1 : i + 2] not in ([], ["--help"]):
            return words[i + 1], words[i + 2 :]
        if word in OF_LAUNCHERS:
            return OF_LAUNCHERS[word], words[i + 1 :]
    return None


@pytest.fixture(scope="session")
def known_flags(commands: Commands) -> Callable[[str], set[str]]:
    """The flags of a command, as its own help lists them."""

    @functools.cache
    def known(name: str) -> set[str]:
        output = commands.run(name, "--help")
        listed = re.findall(r"--(?:\[no\])?(\w+)", output.stdout + output.stderr)
        return {*listed, "config", "help", "verbosity"}

    return known


def check_ours(name: str, words: list[str], known: set[str]) -> None:
    """Flags, configs and fields."""
    for word in words:
        flag, _, value = word.removeprefix("--").partition("=")
        field = re.sub(r"data\.sources\.\w+", "data.sources.NAME", flag).removeprefix("config.")
        if word.startswith("--config=configs/"):
            path, _, variant = value.partition(":")
            importlib.import_module(f"configs.{Path(path).stem}").get_config(variant)
        elif word.startswith("--") and "." in flag:
            assert field in known_fields(), f"no config has {word}"
        elif word.startswith("--"):
            assert flag in known or flag.removeprefix("no") in known, f"{name} has no --{flag}"


@every_page
def test_commands_flags_and_fields_exist(
    page: Path, known_flags: Callable[[str], set[str]]
) -> None:
    for block in (block for block in blocks(page) if block.language == "sh"):
        for words in simple_commands(block.text):
            if ours := of_ours(words):
                name, rest = ours
                assert name in COMMANDS, words
                check_ours(name, rest, known_flags(name))


# ---------------------------------------------------------------- blocks

NEEDS = {
    "README.md": ("runs/quickstart",),
    "evaluate.md": ("runs/hotpotqa-minilm", "FOLDER", "HELD_OUT", "TEST", "LOG"),
    "experiments.md": ("runs/quickstart", "runs/one", "runs/other", "LOG"),
    "export.md": ("runs/hotpotqa-minilm", "my-index"),
    "own_data.md": ("FOLDER", "NAMED"),
    "search.md": ("runs/hotpotqa-minilm", "exported", "corpus.jsonl", "questions.jsonl"),
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
    rows = json_lines(log)
    write_lines(folder / "HELD_OUT" / log.name, rows[::2])  # no question is in both
    write_lines(folder / "TEST" / log.name, rows[1::2])
    write_lines(folder / "LOG", rows)
    passages = [{"id": str(i), "title": "", "text": text} for i, text in enumerate(PASSAGES)]
    write_lines(folder / "corpus.jsonl", passages)
    write_lines(folder / "questions.jsonl", [{"id": "1", "question": QUESTION}])
    index = (f"--corpus={folder / 'corpus.jsonl'}", f"--index={folder / 'my-index'}")
    commands.succeed("index", *index, f"--encoder={folder / 'exported'}")
    context = [(str(i), [text]) for i, text in enumerate(PASSAGES)]
    own = {"passages": PASSAGES, "support": [0, 2]}
    for split in ("train", "dev"):
        asked = [f"{QUESTION} ({split} {i})" for i in range(4)]
        rows = [record_of("hotpotqa", q, q, "Oslo", context, [0, 2]) for q in asked]
        write_lines(folder / "FOLDER" / f"{split}.jsonl", rows)
        write_lines(folder / "NAMED" / f"{split}.jsonl", [{"query": q, **own} for q in asked])
    return folder


@every_page
@pytest.mark.nightly
def test_a_reader_can_run_the_page(
    page: Path, provided: Path, commands: Commands, tmp_path: Path
) -> None:
    programs, work = tmp_path / "bin", tmp_path / "work"
    programs.mkdir()
    for name, words in (("python", ""), ("qrag", " -m qrag_jax")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    paths = {"PATH": path, "PYTHONPATH": str(ROOT)}
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
    code = ""  # later blocks use the names of earlier ones
    for block in (block for block in blocks(page) if not block.not_run):
        if block.file:
            (work / block.file).parent.mkdir(exist_ok=True)
            (work / block.file).write_text(block.text)
        elif block.language == "sh":
            program("bash", "-euo", "pipefail", "-c", block.text)
        elif block.language == "python":
            code += block.text
    if code:
        (work / "page.py").write_text(code)
        printed = program(sys.executable, "page.py")
        if page.name in ("README.md", "search.md"):  # a passage a step
            steps = [int(step) for step in re.findall(r"^(\d+) -?\d+\.\d+ ", printed, re.M)]
            assert steps == [*range(1, len(steps) + 1)]
            assert len(steps) > 1


@pytest.mark.nightly
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    import nbformat

    book = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)  # none are stored
    for name, value in commands.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{commands.environment['PYTHONPATH']}")
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=900, kernel_name="python3", resources=resources).execute()
    rows = json_lines(tmp_path / "runs" / "notebook" / "metrics.jsonl")
    assert rows[-1]["step"] == 8  # the command resumed what 6 steps in the notebook began
    *_, hits = (cell.outputs for cell in book.cells if cell.cell_type == "code")
    assert re.findall(r"^(\d) \d\.\d+ ", "".join(each["text"] for each in hits), re.M) == ["1", "2"]
