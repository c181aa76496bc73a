"""The README and docs/: links lead somewhere, commands have such flags, configs and fields; and,
nightly, the blocks run as a reader would run them, page by page.

For these each page gets a folder of its own, with what it takes for granted: a tiny run, its
export, an index, small data. Its files are saved, its shell blocks are run by bash, and its Python
blocks are one program.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from absl import flags
from ml_collections import config_flags

from qrag_jax.__main__ import COMMANDS
from qrag_jax.answer import answer_settings
from tests.entry_points import FLOAT32, ROOT, SHARED, Commands

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
SIDECAR_CONFIG = "configs/quickstart.py"  # what launch/sidecar.sh takes by itself


@functools.cache
def known_fields() -> set[str]:
    """The fields of all systems."""
    modules = ("q_rag", "harr", "rlvr", "leret", "deepretrieval")
    made = (importlib.import_module(f"qrag_jax.systems.{name}_config") for name in modules)
    names = {name for each in made for name, *_ in each.CONFIG.help_lines()}
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


# ---------------------------------------------------------------- commands


def simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell block, without assignments before it."""
    for line in WRITTEN.sub("", text).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            cut = next((i for i, word in enumerate(words) if word in ENDS), len(words))
            one, words = words[:cut], words[cut + 1 :]
            while one and re.fullmatch(r"[A-Z_]+=.*", one[0]):
                one = one[1:]
            if one:
                yield one


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
        told = commands.run(name, "--help")
        listed = re.findall(r"--(?:\[no\])?(\w+)", told.stdout + told.stderr)
        return {*listed, "config", "help", "verbosity"}

    return known


def check_ours(name: str, words: list[str], known: set[str]) -> None:
    """Flags, config and fields."""
    for word in words:
        flag = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and "." not in flag:
            assert flag in known or flag.removeprefix("no") in known, f"{name} has no --{flag}"
    fields = [w for w in words if re.match(r"--(config|llm)\.", w) and not w.endswith("=…")]
    files = [w.partition("=")[2] for w in words if w.startswith("--config=")]
    files += [SIDECAR_CONFIG] if name == "serve_llm" and not files else []
    if files or name == "answer":
        kind, config = "llm", answer_settings()
        for path, _, variant in (file.partition(":") for file in files):
            module = importlib.import_module(f"configs.{Path(path).stem}")
            kind, config = "config", module.get_config(variant)
        line, parser = ["command", *fields], flags.FlagValues()
        config_flags.DEFINE_config_dict(kind, config, flag_values=parser, sys_argv=line)
        parser(line)
    else:  # those of a run
        names = {field.partition("=")[0].removeprefix("--config.") for field in fields}
        assert names <= known_fields(), names - known_fields()


def check_other(words: list[str]) -> None:
    """Suites, targets of make, extras and launchers."""
    text = " ".join(words)
    for suite in re.findall(r"benchmarks --suite (\w+)", text):
        assert importlib.util.find_spec(f"benchmarks.{suite}")
    for target in (word for word in words[1:] if words[0] == "make" and "=" not in word):
        assert re.search(rf"^{target}( [\w-]+)*:", (ROOT / "Makefile").read_text(), re.M), target
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for names in re.findall(r"\[([\w,]+)\]", text if "pip install" in text else ""):
        assert set(names.split(",")) <= extras["optional-dependencies"].keys()
    assert all((ROOT / word).is_file() for word in words if word.startswith("launch/"))


@every_page
def test_commands_flags_and_fields_exist(
    page: Path, known_flags: Callable[[str], set[str]]
) -> None:
    for block in (block for block in blocks(page) if block.language == "sh"):
        for words in simple_commands(block.text):
            check_other(words)
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
