"""What stands around the package: its image, notebook, release and the files for contributors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import qrag_jax
from qrag_jax.__main__ import COMMANDS
from tests.entry_points import ROOT, Commands

NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"
# What the test changes: a training of two steps, which does no good, so its last weights are meant.
SMALLER = {
    '"configs/quickstart.py"': '"configs/quickstart.py:tiny"',
    "train --config={CONFIG}": "train --config={CONFIG} --config.train.steps=2",
    "import Retriever": "import Retriever; from qrag_jax.systems.retriever import LoadSettings",
    "load(RUN)": 'load(RUN, LoadSettings(checkpoint="last"))',
}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    import nbformat

    book = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    for old, new in SMALLER.items():
        assert any(old in cell.source for cell in code)
        for cell in code:
            cell.source = cell.source.replace(old, new)
    for name, value in commands.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{commands.environment['PYTHONPATH']}")
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources=resources).execute()
    text = json.dumps([cell.outputs for cell in code])
    assert "image/png" in text
    assert re.findall(r"step (\d) +Q", text) == ["1", "2"]
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_version_citation_and_notebook_name_what_is_there() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == qrag_jax.__version__
    assert f"\n## {qrag_jax.__version__}\n" in read("CHANGELOG.md")
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    assert set(re.findall(r"!\{qrag\}\.(\w+)", read("docs/quickstart.ipynb"))) <= set(COMMANDS)


def build(kind: str, folder: Path, out: Path) -> None:
    """As `make release` builds it, but by the hatchling that is here: no network."""
    words = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)


def test_a_source_release_has_what_a_wheel_is_built_from(tmp_path: Path) -> None:
    for kind in ("sdist", "wheel"):
        build(kind, ROOT, tmp_path)
    (source,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    # Python before 3.11.4 has no filters of archives; this one was made here.
    shutil.unpack_archive(source, tmp_path / "source")
    (folder,) = (tmp_path / "source").iterdir()
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "constraints.txt"):
        assert (folder / name).read_bytes() == (ROOT / name).read_bytes()
    build("wheel", folder, tmp_path / "again")
    assert (tmp_path / "again" / wheel.name).read_bytes() == wheel.read_bytes()
