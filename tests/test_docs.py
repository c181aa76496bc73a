"""The README and docs/: links lead somewhere, and commands have such flags, configs and fields.

`test_docs_blocks.py` runs the blocks; here all are read, also those that are not run.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from absl import flags
from ml_collections import config_flags

from qrag_jax.__main__ import COMMANDS
from qrag_jax.evaluators.answer_run import answer_settings
from tests.entry_points import ROOT, Commands
from tests.markdown_blocks import PAGES, anchors, blocks, links, prose

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
WRITTEN = re.compile(r"^cat > (\S+) <<'EOF'\n(.*?\n)EOF\n", re.M | re.S)
ENDS = ("&&", "||", "|", ";", "&", ">")
OF_LAUNCHERS = {"launch/slurm.sbatch": "train", "launch/sidecar.sh": "serve_llm"}
SIDECAR_CONFIG = "configs/quickstart.py"  # what launch/sidecar.sh takes by itself


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if "://" in link:
            assert link.startswith("https://"), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        # The site has the files of docs/ alone.
        assert target.is_relative_to(ROOT if page.name == "README.md" else ROOT / "docs"), link
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert page.name == "README.md" or f": {page.name}\n" in navigation


@every_page
def test_files_that_the_text_names_exist(page: Path) -> None:
    for name in re.findall(r"`((?:qrag_jax|configs|tests|benchmarks|docs)/[\w./-]+)", prose(page)):
        assert (ROOT / name).exists(), name


@every_page
def test_blocks_can_be_read_and_import_what_exists(page: Path) -> None:
    for block in blocks(page):
        assert block.language in ("sh", "python", "json", "text"), block
        written = [(f".{block.language}", block.text)]
        if block.language == "sh":
            written = WRITTEN.findall(block.text)
        for name, text in written:
            if name.endswith(".py") or name == ".python":
                compile(text, page.name, "exec")
            elif name.endswith((".json", ".jsonl")):
                with_lines = "[" + ",".join(text.strip().splitlines()) + "]"
                assert any(map(is_json, (text, with_lines))), block
        for module, names in re.findall(r"^from (qrag_jax[\w.]*) import (.+)$", block.text, re.M):
            if ".integrations." in module:  # of a library that may be missing
                assert (ROOT / f"{module.replace('.', '/')}.py").exists()
            else:
                found = importlib.import_module(module)
                assert all(hasattr(found, name.strip()) for name in names.split(",")), block


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


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


def experiment(file: str) -> Any:
    """The config of `FILE:VARIANT` in configs/."""
    path, _, variant = file.partition(":")
    return importlib.import_module(f"configs.{Path(path).stem}").get_config(variant)


def config_of_folder(folder: str) -> str:
    """The config of a run whose folder nobody has named."""
    for path in sorted((ROOT / "configs").glob("*.py"), key=lambda path: -len(path.stem)):
        if f"{folder}-".startswith(f"runs/{path.stem}-"):
            return f"configs/{path.name}:{folder.removeprefix(f'runs/{path.stem}').lstrip('-')}"
    raise AssertionError(f"which config has the run {folder}?")


def check_ours(name: str, words: list[str], known: set[str], runs: dict[str, str]) -> None:
    """Flags, config and fields; `runs` knows the configs of trainings before."""
    values = dict(word.removeprefix("--").partition("=")[::2] for word in words)
    for word in words:
        flag = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and "." not in flag:
            assert flag in known or flag.removeprefix("no") in known, f"{name} has no --{flag}"
    fields = [word for word in words if re.match(r"--(config|llm)\.", word)]
    fields = [word for word in fields if not word.endswith("=…")]
    file = values.get("config", SIDECAR_CONFIG if name == "serve_llm" else "")
    folder = values.get("workdir", "")
    if file and name == "train":
        runs[folder or "runs/" + file.removeprefix("configs/").replace(".py:", "-")] = file
    if not file and fields and name != "answer":
        file = runs.get(folder) or config_of_folder(folder)
    if name == "answer" or file:
        kind, config = ("config", experiment(file)) if file else ("llm", answer_settings())
        line, parser = ["command", *fields], flags.FlagValues()
        config_flags.DEFINE_config_dict(kind, config, flag_values=parser, sys_argv=line)
        parser(line)


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
    runs: dict[str, str] = {}
    for block in (block for block in blocks(page) if block.language == "sh"):
        for words in simple_commands(block.text):
            check_other(words)
            if ours := of_ours(words):
                name, rest = ours
                assert name in COMMANDS, words
                check_ours(name, rest, known_flags(name), runs)


@every_page
def test_fields_that_the_text_names_exist(page: Path) -> None:
    for name in re.findall(r"`(?:--)?config\.(?!json)([a-z_]\w*(?:\.\w+)*)", prose(page)):
        name = re.sub(r"data\.sources\.\w+", "data.sources.NAME", name)
        assert any(f"{field}.".startswith(f"{name}.") for field in known_fields()), name


@functools.cache
def known_fields() -> set[str]:
    """The fields of all systems."""
    modules = ("q_rag", "harr", "rlvr", "leret", "deepretrieval")
    made = (importlib.import_module(f"qrag_jax.systems.{name}_config") for name in modules)
    names = {name for each in made for name, *_ in each.help_lines()}
    return {re.sub(r"data\.sources\.\w+", "data.sources.NAME", name) for name in names}
