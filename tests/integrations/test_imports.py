"""An adapter imports its own library and no other, and says what to install if it is missing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib

import pytest

from qrag_jax.integrations.searches import imported
from tests.entry_points import ROOT

# Adapter, which is also the extra → what it imports beside us and Python's own.
ADAPTERS = {
    "langchain": {"langchain_core", "pydantic"},
    "llamaindex": {"llama_index"},
    "haystack": {"haystack"},
    "dspy": {"dspy"},
    "mteb": {"mteb", "numpy"},
    "remote": set[str](),
}
LIBRARIES = ("langchain_core", "llama_index", "haystack", "dspy", "mteb")

WITHOUT = """
import importlib, json, sys
import qrag_jax
import qrag_jax.integrations.remote
there = {name.partition(".")[0] for name in sys.modules}
told = {"there": sorted(there & {*json.loads(sys.argv[1]), "jax", "torch", "transformers"})}
sys.modules |= dict.fromkeys(json.loads(sys.argv[1]))  # as if they were not installed
for name in json.loads(sys.argv[2]):
    try:
        importlib.import_module(f"qrag_jax.integrations.{name}")
    except ModuleNotFoundError as error:
        told[name] = [str(error), error.__suppress_context__]
print(json.dumps(told))
"""


def test_without_its_library_an_adapter_says_what_to_install() -> None:
    names = [name for name in ADAPTERS if name != "remote"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps(LIBRARIES), json.dumps(names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told.pop("there") == []
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert told.keys() == set(names)
    for name, (sentence, alone) in told.items():
        (package,) = extras[name]
        assert sentence == (
            f"qrag_jax.integrations.{name} needs the package {package.partition('>=')[0]}: run pip "
            f"install 'qrag_jax[{name}]'"
        )
        assert alone
        assert package in extras["test"]


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_imports_one_library(name: str) -> None:
    text = (ROOT / "qrag_jax" / "integrations" / f"{name}.py").read_text()
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    roots = {each.partition(".")[0] for each in found}
    assert roots - sys.stdlib_module_names - {"qrag_jax"} == ADAPTERS[name]


def test_a_library_that_lacks_another_one_says_so_itself() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match="'litellm'"),
        imported("dspy", "dspy", "dspy"),
    ):
        raise ModuleNotFoundError("No module named 'litellm'", name="litellm")
