"""The console script, wrong command lines, a wheel without a checkout, the experiment files."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import ml_collections
import pytest

from examples.worlds.records import records
from examples.worlds.world import Entity, Puzzle, puzzle_at
from qrag_jax import __main__ as console
from qrag_jax import systems
from qrag_jax.runtime import own_code
from qrag_jax.runtime.run import Run
from tests.entry_points import ROOT, Commands, refusal

TINY = "--config=configs/hotpotqa.py:tiny"


def test_commands_are_listed_and_others_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for word, status, shown in (("--help", 0, "evaluate"), ("trian", 2, "error: 'trian'")):
        monkeypatch.setattr(sys, "argv", ["qrag", word])
        assert console.main() == status
        assert shown in "".join(capsys.readouterr())
    # The top of the package is their list, but that of data, which is its folder.
    found = {path.stem for path in (ROOT / "qrag_jax").glob("*.py")}
    assert found == {*console.COMMANDS, "__init__", "__main__", "errors"} - {"data"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "configs/rlvr.py"),  # without an experiment all are listed
        ((TINY, "--config.train.stpes=1"), "steps"),  # what is meant
        (("--config=configs/hotpotqa.py:huge",), "huge"),
    ],
)
def test_a_wrong_command_line(
    words: tuple[str, ...], named: str, commands: Commands, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    assert named in refusal(commands.run("train", *words, f"--workdir={workdir}"))
    assert not workdir.exists()


def test_experiments_are_found_in_the_working_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["train", TINY, "--config.path=configs/hotpotqa.py"]
    packaged = f"{own_code.own_folder() / 'hotpotqa.py'}:tiny"
    assert own_code.resolved(argv) == ["train", f"--config={packaged}", argv[2]]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "hotpotqa.py").touch()
    assert own_code.resolved(argv) == argv


def build(kind: str, folder: Path, out: Path) -> Path:
    """As `make release` builds it, but by the hatchling that is here: no network."""
    words = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    return next(out.iterdir())


def test_a_release_trains_where_there_is_no_checkout(tmp_path: Path, commands: Commands) -> None:
    """Its wheel is built from the source release, and has all files of the package."""
    # Python before 3.11.4 has no filters of archives; this one was made here.
    shutil.unpack_archive(build("sdist", ROOT, tmp_path / "sdist"), tmp_path / "source")
    (source,) = (tmp_path / "source").iterdir()
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "constraints.txt"):
        assert (source / name).read_bytes() == (ROOT / name).read_bytes()
    wheel = build("wheel", source, tmp_path / "wheel")
    for folder, inside in (("qrag_jax", ""), ("configs", "qrag_jax/"), ("examples", "qrag_jax/")):
        files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        wanted = {f"{inside}{path.as_posix()}" for path in files if "__pycache__" not in path.parts}
        assert wanted <= {*zipfile.ZipFile(wheel).namelist()}

    site, empty = tmp_path / "site", tmp_path / "empty"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    install = ["install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([*pip, *install], check=True)
    empty.mkdir()
    path = [str(site), str(ROOT / "tests" / "without_torch")]

    def qrag(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(site / "bin" / "qrag"), *arguments],
            cwd=empty,
            env=commands.environment | {"PYTHONPATH": os.pathsep.join(path)},
            capture_output=True,
            text=True,
            check=False,
        )

    done = qrag(
        *("train", "--config=configs/quickstart.py:tiny", "--config.train.steps=1"),
        *("--config.encoder.length_buckets=1", "--config.encoder.block_sizes=1"),
        "--config.encoder.scratch.layers=1",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (empty / "runs" / "quickstart-tiny" / "checkpoints" / "last" / "1").is_dir()
    # An experiment of the user's own may build on the package's.
    (empty / "mine.py").write_text(
        "from configs import common\n"
        "def get_config():\n"
        "    config = common.get_config('hotpotqa')\n"
        "    config.train.steps = 0\n"
        "    return config\n"
    )
    done = qrag("train", "--config=mine.py")
    assert done.returncode == 2
    assert "config.train.steps" in done.stderr


# -------------------------------------------------- experiments

EVERY = sorted(
    path.stem for path in (ROOT / "configs").glob("*.py") if not path.stem.startswith("common")
)
# Those whose tiny variant another test trains, tests/pinned among them.
TRAINED = {"hotpotqa", "harr_grpo", "harr_ppo", "rlvr", "leret", "deepretrieval", "quickstart"}
TRAINED |= {"own", "babilong", "two_wiki"}
AGENTS = ("synthetic-react-tiny", "two_wiki-planner-minilm", "musique-search_r1-4b")


def module(name: str) -> ModuleType:
    return importlib.import_module(f"configs.{name}")


def variants(name: str) -> list[str]:
    """The variants that a config names when it is asked for one it does not have."""
    with pytest.raises(ValueError, match="none-such") as caught:
        module(name).get_config("none-such")
    found = re.findall(r":([\w-]+)", str(caught.value).partition("use ")[2])
    return [name for each in found for name in (AGENTS if each == "DATA-AGENT-SIZE" else (each,))]


def complete(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """The config with what the user alone can name: data, and a language model."""
    if config.get("system") == "deepretrieval":
        for field in ("train", "test"):
            config.queries[field] = config.queries[field] or "some/folder,train"
    if config.get("system") == "harr" and not config.llm.server.model:
        config.llm.update(url="http://127.0.0.1:8000/v1", model="a-model")
    return config


@pytest.mark.parametrize("name", EVERY)
def test_every_variant_builds(name: str) -> None:
    known = variants(name)
    assert "tiny" in known or name.startswith("babilong")
    for given in ((), *((variant,) for variant in known)):
        config = module(name).get_config(*given)
        assert config.is_locked
        systems.check(complete(config))
    assert f"qrag train --config=configs/{name}.py" in (module(name).__doc__ or "")


@pytest.mark.parametrize("name", sorted({*EVERY} - TRAINED))
def test_programs_of_every_tiny_experiment_fit(name: str, tmp_path: Path) -> None:
    """Data, model and the shapes of all that is computed, without computing it."""
    config: Any = module(name).get_config("tiny")
    if "cache" in config.get("data", {}):
        config.data.cache = str(tmp_path / "cache")
    kind = systems.check(config)
    with Run.open(tmp_path / "run", 0.0) as run, kind.open_system(config, run, dry=True) as system:
        shapes = {p.name: jax.eval_shape(p.function, *p.arguments) for p in system.programs()}
    updates = [shapes[key] for key in shapes if key.startswith("update")]
    assert updates
    assert all("loss" in metrics for _, metrics in updates)


# ------------------------------------------------------------ invented questions


def invented_words(puzzle: Puzzle) -> set[str]:
    """All invented words of the entities that a puzzle's passages are about or mention."""
    output = [p.entity for p in puzzle.passages]
    output += [o for p in puzzle.passages for o in p.facts.values() if isinstance(o, Entity)]
    return {word for entity in output for word in entity.words}


def test_train_and_dev_share_no_invented_word() -> None:
    train, dev = (
        set().union(*(invented_words(puzzle_at(split, n, comparison=0.4)) for n in range(150)))
        for split in ("train", "dev")
    )
    assert len(train) > 1000
    assert not train & dev
    of_dev = records("dev", dev=150, comparison=0.4)
    every = " ".join(json.dumps(record) for record in of_dev).lower()
    assert not {word.lower() for word in train} & set(re.findall(r"[a-z0-9]+", every))
