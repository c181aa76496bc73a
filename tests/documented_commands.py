"""Commands as pages tell them, checked without running them: names, flags, configs and fields."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from qrag_jax.__main__ import COMMANDS
from qrag_jax.systems import q_rag_config
from qrag_jax.systems.answer_settings import answer_settings
from tests.entry_points import ROOT

MORE = ("…", "--verbosity=1")  # a gap in a command, and absl's own flag
# Programs of others, whose arguments are not looked at.
OTHERS = (
    *("curl", "docker", "export", "kubectl", "mkdir", "pip", "sky", "source", "srun"),
    *("wandb", "mlflow", "trackio"),
)
OF_LAUNCHERS = {"launch/slurm.sbatch": "train", "launch/sidecar.sh": "serve_llm"}
SIDECAR_CONFIG = "configs/quickstart.py"  # what launch/sidecar.sh takes where none is given
WRITTEN = re.compile(r"^cat > (\S+) <<'EOF'\n(.*?\n)EOF\n", re.M | re.S)
ENDS = ("&&", "||", "|", ";", "&", ">")


@dataclasses.dataclass(frozen=True)
class Command:
    """One of our commands as it stands in a block."""

    name: str
    words: tuple[str, ...]

    def value(self, flag: str) -> str:
        """The value of `--flag=VALUE`; "" without it."""
        found = [w.partition("=")[2] for w in self.words if w.startswith(f"--{flag}=")]
        return found[0] if found else ""


def simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command of a shell block, without assignments before it.

    Files that the block writes (`cat > FILE <<'EOF'`) are left out; `written_files` gives them.
    """
    text = WRITTEN.sub("", text)
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            cuts = [i for i, word in enumerate(words) if word in ENDS]
            one, words = (words[: cuts[0]], words[cuts[0] + 1 :]) if cuts else (words, [])
            while one and re.fullmatch(r"[A-Z_]+=.*", one[0]):
                one = one[1:]
            if one:
                yield one


def written_files(text: str) -> dict[str, str]:
    """The files that a shell block writes: name → text."""
    return dict(WRITTEN.findall(text))


def checked(text: str, runs: dict[str, Any]) -> int:
    """Checks all commands of a shell block; returns how many of them are ours.

    Args:
        text: the block.
        runs: folder of a run → its config; those of `train` in the block are added.
    """
    ours = 0
    for words in simple_commands(text):
        command = _of_ours(words)
        if command:
            check(command, runs)
            ours += 1
        else:
            _check_other(words)
    return ours


def _of_ours(words: list[str]) -> Command | None:
    for i, word in enumerate(words):
        if word.startswith("qrag_jax.") and words[i - 1] == "-m":
            return Command(word.partition(".")[2], tuple(words[i + 1 :]))
        if word == "qrag" and i + 1 < len(words):
            name, *rest = words[i + 1 :]
            return None if name == "--help" else Command(name, tuple(rest))
        if word in OF_LAUNCHERS:
            return Command(OF_LAUNCHERS[word], tuple(words[i + 1 :]))
    return None


def _check_other(words: list[str]) -> None:
    program, *rest = words
    if "benchmarks" in rest:
        given = [word for word in rest if word.startswith("--")]
        assert {w.partition("=")[0] for w in given} <= {"--suite", "--quick", "--only", "--run"}
        suite = rest[rest.index("--suite") + 1]
        assert importlib.util.find_spec(f"benchmarks.{suite}"), words
    elif program == "make":
        text = (ROOT / "Makefile").read_text()
        for word in rest:
            assert "=" in word or re.search(rf"^{word}( [\w-]+)*:", text, re.M), word
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for names in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
            assert set(names.split(",")) <= extras["optional-dependencies"].keys(), words
    else:
        assert program in OTHERS or words == ["qrag", "--help"], words
    for word in words:
        if word.startswith("launch/"):
            assert (ROOT / word).is_file(), word


def check(command: Command, runs: dict[str, Any]) -> None:
    """Its name, its flags, and the fields and values of its config.

    Raises:
        AssertionError: there is no such command or flag, or nobody knows the run that it names.
        Exception: that of the parser, where a config has no such field or not of this type.
    """
    assert command.name in COMMANDS, f"{command.name} is no command"
    known = flags_of(command.name)
    for word in command.words:
        name = word.lstrip("-").partition("=")[0]
        if word.startswith("--") and "." not in name and word not in MORE:
            assert name in known | {"help"}, f"{command.name} has no flag --{name}"
    given = [word for word in command.words if re.match(r"--(config|llm)\.", word)]
    if command.name == "answer":
        parse("llm", answer_settings(), given)
        return
    config, folder = None, command.value("workdir")
    file = command.value("config")
    if command.name == "serve_llm":
        file = file or SIDECAR_CONFIG
    if file:
        also = ("llm", "llm.server") if command.name == "serve_llm" else ()
        config = experiment(file, command.words, also)
        if command.name == "train":
            runs[folder or default_folder(file)] = (file, command.words)
    elif given:
        assert folder in runs or of_default(folder), f"which config has the run {folder}?"
        file, words = runs.get(folder) or (of_default(folder), ())
        config = experiment(file, (*words, *command.words))
    if config is not None:
        parse("config", config, given)


def experiment(file: str, words: tuple[str, ...], also: tuple[str, ...] = ()) -> Any:
    """The config of `FILE:VARIANT` in configs/, with the fields that the words choose."""
    path, _, variant = file.partition(":")
    assert (ROOT / path).is_file(), file
    module = importlib.import_module(f"configs.{Path(path).stem}")
    config = module.get_config(variant)
    return q_rag_config.complete(config, words, also) if config.system == "q_rag" else config


def parse(name: str, config: Any, words: list[str]) -> None:
    """Lets the command line's own parser set the fields."""
    values = flags.FlagValues()
    given = ["command", *(word for word in words if not word.endswith("=…"))]
    config_flags.DEFINE_config_dict(name, config, flag_values=values, sys_argv=given)
    values(given)


def default_folder(file: str) -> str:
    """The run's folder where a training names none."""
    path, _, variant = file.partition(":")
    return "runs/" + "-".join(filter(None, [Path(path).stem, variant]))


def of_default(folder: str) -> str:
    """The config whose run has this folder, as `default_folder` names it; "" without one."""
    for path in sorted((ROOT / "configs").glob("*.py"), key=lambda p: -len(p.stem)):
        if folder == f"runs/{path.stem}":
            return f"configs/{path.name}"
        if folder.startswith(f"runs/{path.stem}-"):
            return f"configs/{path.name}:{folder.removeprefix(f'runs/{path.stem}-')}"
    return ""


@functools.cache
def flags_of(name: str) -> frozenset[str]:
    """The flags that a command defines, by itself or through the modules that it shares."""
    tree = ast.parse((ROOT / "qrag_jax" / f"{name}.py").read_text())
    found = _defined(tree)
    systems = ROOT / "qrag_jax" / "systems"
    shared = ast.parse((systems / "run_flags.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("run_flags.define"):
            functions = [f for f in shared.body if getattr(f, "name", "") == node.attr]
            found |= _defined(functions[0])
        if isinstance(node, ast.alias) and node.name == "search_flags":
            found |= _defined(ast.parse((systems / "search_flags.py").read_text()))
    return frozenset(found)


def _defined(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            first = node.args[0]
            if node.func.attr.startswith("DEFINE_") or node.func.attr == "add_argument":
                assert isinstance(first, ast.Constant), ast.unparse(node)
                found.add(str(first.value).lstrip("-"))
    return found
