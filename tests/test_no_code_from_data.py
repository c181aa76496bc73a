"""Nothing that a user is given runs: what the source may not call, and folders that try."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs import harr_grpo
from qrag_jax.errors import InputError
from qrag_jax.llm.text.generation import chat_tokenizer
from qrag_jax.runtime.saved_config import save_config
from tests.entry_points import ROOT, Commands, refusal

# The only module that knows of pickle; it says how it keeps code from running.
WITH_PICKLE = {"models/files/torch_checkpoint.py"}
# The only module that runs a file of Python, which the command line or a config must name.
WITH_OWN_CODE = {"runtime/own_code.py"}
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "shelve", "tarfile", "yaml"}
UNSAFE_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "extract", "extractall"),
    *("unpack_archive", "pickle.load", "pickle.loads", "torch.load", "exec_module"),
}
RUNS_REMOTE_CODE = ("from_pretrained", "CrossEncoder", "SentenceTransformer")
FOR_ALL = ("0.0.0.0", "::")  # noqa: S104  (what must not be there)


def named(function: ast.expr) -> str:
    """`a.b` of a call `a.b(…)`, `.b` of one on anything else."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        of = function.value
        return f"{of.id}.{function.attr}" if isinstance(of, ast.Name) else f".{function.attr}"
    return ""


def keyword(call: ast.Call, name: str) -> object:
    values = [k.value for k in call.keywords if k.arg == name]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None


def wrong(source: str, module: str) -> Iterator[str]:
    """What a module of the package may not do."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                names = {node.module or ""}
            roots = {name.partition(".")[0] for name in names}
            yield from sorted(roots & UNSAFE_MODULES)
            if "pickle" in roots and module not in WITH_PICKLE:
                yield "pickle"
        elif isinstance(node, ast.Call):
            name = named(node.func)
            last = name.rpartition(".")[2]
            if last == "exec_module" and module not in WITH_OWN_CODE:
                yield name
            if name in UNSAFE_CALLS or (last != name and last in ("extract", "extractall")):
                yield name
            if keyword(node, "shell") or keyword(node, "allow_pickle"):
                yield f"{name} with shell or allow_pickle"
            if last in RUNS_REMOTE_CODE and keyword(node, "trust_remote_code") is not False:
                yield f"{name} without trust_remote_code=False"
        elif isinstance(node, ast.Constant) and node.value in FOR_ALL:
            yield f"the address {node.value}"


def test_the_package_does_none_of_it() -> None:
    folder = ROOT / "qrag_jax"
    found = [
        f"{path.relative_to(folder).as_posix()}: {what}"
        for path in sorted(folder.rglob("*.py"))
        for what in wrong(path.read_text(encoding="utf-8"), path.relative_to(folder).as_posix())
    ]
    assert found == []


def test_each_rule_finds_what_it_is_for() -> None:
    for source in (
        "import pickle",
        "from joblib import load",
        "eval('1')",
        "found.loader.exec_module(module)",
        "import torch; torch.load('a')",
        "np.load('a', allow_pickle=True)",
        "subprocess.run('a', shell=True)",
        "archive.extract('b')",
        "AutoTokenizer.from_pretrained('a')",
        "SentenceTransformer('a', trust_remote_code=given)",
        "socket.bind(('0.0.0.0', 80))",
    ):
        assert list(wrong(source, "llm/a.py")), source


# ------------------------------------------------------------------ folders with code in them


def test_models_and_tokenizers_of_a_folder_run_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every config of the folder asks for the class of a file in it."""
    from qrag_jax.retrieval.towers import TorchTower

    # transformers asks whether to run the code, where it is told nothing: a user who says yes.
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
        chat_tokenizer(str(folder))
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
    config.llm.url = "http://127.0.0.1:9/v1"  # then nothing is started
    save_config(config, tmp_path / "config.json")
    assert "llm.server" not in refusal(commands.run(*scoring))
