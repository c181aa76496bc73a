"""The sources: imports go down, nothing of a user is run, refusals name something, versions fit."""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from configs import harr_grpo
from qrag_jax.errors import InputError
from qrag_jax.llm.text.generation import chat_template
from qrag_jax.runtime.config_fields import save_config
from qrag_jax.systems import SYSTEMS
from tests.entry_points import ROOT, Commands, refusal

PACKAGE = ROOT / "qrag_jax"
# Lowest first; a room may import from the floors below its own, and from itself.
FLOORS = (
    {"errors", "algorithms"},
    {"runtime"},
    {"metrics", "data", "llm"},
    {"models", "retrieval", "environments"},
    {"policies", "feedback", "serving"},
    {"rollouts"},
    {"learners"},
    {"evaluators"},
    {"systems"},
    {"integrations"},
)
COMMANDS = len(FLOORS)  # modules at the top of the package
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


@functools.cache
def modules() -> dict[str, ast.Module]:
    """All modules of the package."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text("utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def room_of(module: str) -> str:
    """`qrag_jax.data.sources` is of `data`; a module at the top is a room of its own."""
    return module.split(".")[1]


def imported(tree: ast.Module) -> set[str]:
    """All modules that a module imports, also inside of functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            at_top = node.module in ("qrag_jax", "qrag_jax.systems")  # modules are imported of them
            found |= names if at_top else {node.module}
    return found


def test_imports_go_down() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders <= LEVEL.keys()
    top = ("qrag_jax.__init__", "qrag_jax.__main__")
    inside = {name: tree for name, tree in modules().items() if name not in top}
    for module, tree in inside.items():
        level = LEVEL.get(room_of(module), COMMANDS)
        for name in (name for name in imported(tree) if name.startswith("qrag_jax.")):
            below = LEVEL.get(room_of(name), COMMANDS) < level
            assert below or room_of(name) == room_of(module), f"{module} imports {name}"
        if room_of(module) == "algorithms":  # formulas know JAX alone
            roots = {name.partition(".")[0] for name in imported(tree)}
            assert roots <= {"jax", "qrag_jax", *sys.stdlib_module_names}, module


def test_only_the_registry_names_a_system() -> None:
    """No module outside a system's folder imports it or has its name as a value."""
    folders = {name: f"qrag_jax.systems.{name}" for name in SYSTEMS}
    for module, tree in modules().items():
        of = next((name for name, folder in folders.items() if module.startswith(folder)), "")
        for name in imported(tree):
            own = f"{name}.".startswith(f"{folders.get(of)}.")
            assert own or not name.startswith(tuple(folders.values())), f"{module} imports {name}"
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert module.endswith("systems.__init__") or not texts & (SYSTEMS.keys() - {of}), module


def test_pinned_versions_have_hashes_no_address_and_fit_the_package() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "://" not in text
    # As pip reads it: a backslash joins a line with the next.
    lines = text.replace("\\\n", " ").splitlines()
    pinned = {}
    for line in (line for line in lines if line.strip() and line[0] != "#"):
        name, *digests = line.split(" --")
        assert digests, name
        assert all(re.fullmatch(r"hash=sha256:[0-9a-f]{64}", each.strip()) for each in digests)
        pinned[canonicalize_name(Requirement(name).name)] = Requirement(name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for needed in map(Requirement, project["dependencies"]):
        (only,) = pinned[canonicalize_name(needed.name)].specifier
        assert (only.operator, needed.specifier.contains(only.version)) == ("==", True), needed


# ---------------------------------------------------------------- messages

# A flag, a field or an argument, a call, a file or a value in quotes; or what a request holds.
NAMES = re.compile(r"--\w|\w+\.\w|\w=|\w\(|\w/\w|'[\w\[]|\b(question|query|passage|corpus)\b")


def test_messages_are_one_line_and_name_what_they_are_about() -> None:
    count = 0
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("InputError"):
                continue
            place, count = f"{module}, line {node.lineno}", count + 1
            assert node.args, place
            parts = [part for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
            text = "".join(str(part.value) for part in parts)
            assert "\n" not in text, place
            # A message that is put together names a value; a constant one must have a name in it.
            assert not isinstance(node.args[0], ast.Constant) or NAMES.search(text), place
    assert count > 100


# ---------------------------------------------------------------- no code from data

# The only module that knows of pickle; it says how it keeps code from running.
WITH_PICKLE = {"qrag_jax.models.files.torch_checkpoint"}
# The only module that runs a file of Python, which the command line or a config must name.
WITH_OWN_CODE = {"qrag_jax.runtime.own_code"}
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "shelve", "tarfile", "yaml"}
UNSAFE_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen"),
    *("pickle.load", "pickle.loads", "torch.load"),
}
UNSAFE_METHODS = {"extract", "extractall", "unpack_archive"}
RUNS_REMOTE_CODE = {"from_pretrained", "CrossEncoder", "SentenceTransformer"}


def test_the_package_runs_no_code_of_data() -> None:
    """Nor is there an address of all networks."""
    for module, tree in modules().items():
        roots = {name.partition(".")[0] for name in imported(tree)}
        assert not roots & UNSAFE_MODULES, module
        assert "pickle" not in roots or module in WITH_PICKLE, module
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant):
                assert node.value not in ("0.0.0.0", "::"), module  # noqa: S104
            if not isinstance(node, ast.Call):
                continue
            place, name = f"{module}, line {node.lineno}", ast.unparse(node.func)
            method = name.rpartition(".")[2]
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert name not in UNSAFE_CALLS, place
            assert method not in UNSAFE_METHODS or name == method, place
            assert method != "exec_module" or module in WITH_OWN_CODE, place
            for option in ("shell", "allow_pickle"):
                assert options.get(option, "False") == "False", place
            if method in RUNS_REMOTE_CODE:
                assert options.get("trust_remote_code") == "False", place


def test_models_and_tokenizers_of_a_folder_run_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every config of the folder asks for the class of a file in it."""
    from qrag_jax.retrieval.towers import TorchTower

    # transformers asks whether to run the code, where it is output nothing: a user who says yes.
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    folder, mark = tmp_path / "model", tmp_path / "was run"
    folder.mkdir()
    (folder / "theirs.py").write_text(f"open({str(mark)!r}, 'w')\n")
    auto = {"AutoConfig": "theirs.A", "AutoModel": "theirs.A", "AutoTokenizer": ["theirs.A", None]}
    own = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 1}
    for name, fields in {
        "tokenizer_config.json": {"tokenizer_class": "A", "auto_map": auto},
        "modules.json": [{"idx": 0, "name": "0", "path": "", "type": "theirs.A"}],
        "config.json": {"model_type": "theirs", "auto_map": auto},
    }.items():
        (folder / name).write_text(json.dumps(fields))
    with pytest.raises(InputError, match=str(folder)):
        chat_template(str(folder))
    with pytest.raises(InputError, match=str(folder)):
        TorchTower(folder, 0)
    # The list of modules alone names the class.
    (folder / "config.json").write_text(json.dumps(own))
    with pytest.raises(InputError, match=str(folder)):
        TorchTower(folder, 0)
    assert not mark.exists()


def test_a_folder_starts_no_server_by_words_of_its_own(commands: Commands, tmp_path: Path) -> None:
    scoring = ("evaluate", f"--workdir={tmp_path}", "--checkpoint=last")
    for field, value in (("arguments", ("--trust-remote-code",)), ("python", "/elsewhere/python")):
        config = harr_grpo.get_config("two_wiki-react-minilm").unlock()
        config.llm.server.update({"model": "a/model", field: value})
        save_config(config, tmp_path / "config.json")
        assert f"--config.llm.server.{field}=" in refusal(commands.run(*scoring))
