"""What all systems share: the loop, for one from elsewhere as well, and flags of commands."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import quickstart
from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.runtime.run import Run
from qrag_jax.systems import training
from qrag_jax.systems.deepretrieval import config as deepretrieval_config
from qrag_jax.systems.leret import config as leret_config
from qrag_jax.systems.rlvr import config as rlvr_config
from qrag_jax.systems.run_flags import experiment_of
from tests.entry_points import ROOT, SHARED, Commands, metric_lines, refusal


def test_a_system_in_one_file_is_trained_resumed_scored_and_exported(
    tmp_path: Path, commands: Commands
) -> None:
    """By the commands, as the last line of its training says."""
    config, run = "--config=examples/bandit.py", tmp_path / "run"
    commands.succeed("train", config, f"--workdir={run}", "--config.train.steps=20")
    *_, last = commands.succeed("train", config, f"--workdir={run}").strip().splitlines()
    hits = {line["step"]: line["eval/hit"] for line in metric_lines(run) if "eval/hit" in line}
    assert [*hits] == [0, 20, 40]
    assert hits[40] > 0.7 > hits[0]
    words = shlex.split(last)[2:]  # behind qrag evaluate
    assert words == [f"--workdir={run}", f"--system={ROOT / 'examples' / 'bandit.py'}"]
    commands.succeed("evaluate", *words, "--checkpoint=last")
    summary = json.loads((run / "eval" / "summary.json").read_text())
    assert (summary["step"], summary["scores"]["hit"]) == (40, hits[40])
    out = f"--out={tmp_path / 'out'}"
    assert "json" in refusal(commands.run("evaluate", words[0], "--system=json", out))
    for name in ("evaluate", "export"):  # what a folder names is not run
        assert "examples/bandit.py" in refusal(commands.run(name, words[0], out))
    whole = tmp_path / "whole"
    commands.succeed("train", config, f"--workdir={whole}")
    weights = []
    for each in (run, whole):
        to = tmp_path / f"{each.name}-exported"
        words = [f"--workdir={each}", *words[1:]]
        commands.succeed("export", *words, "--checkpoint=last", f"--out={to}")
        weights.append((to / "weights.txt").read_text())
    assert weights[0] == weights[1]


# Of copies of the package that lack a system, one after the other: the others open and are scored
# there, and one of them learns.
WITHOUT_ONE = """
import importlib, sys
from pathlib import Path
folder, learning, *fields = sys.argv[1:]
for copy in sorted(Path(folder).iterdir()):
    for name in [each for each in sys.modules if each.partition(".")[0] in ("qrag_jax", "configs")]:
        del sys.modules[name]
    sys.path[0] = str(copy)
    from qrag_jax import systems
    from qrag_jax.systems import run_flags, training
    assert Path(systems.__file__).is_relative_to(copy)
    for other in systems.SYSTEMS:
        assert importlib.import_module(systems.SYSTEMS[other]).SYSTEM, other
    if copy.name == learning:
        status = training.train(run_flags.experiment_of(fields), copy / "run")
        assert status == 0, status
    print(copy.name, "is not needed")
"""


def test_any_system_can_be_deleted(tmp_path: Path, commands: Commands) -> None:
    """With its folder and its line of the registry."""
    for name, module in systems.SYSTEMS.items():
        package, line = tmp_path / name / "qrag_jax", f'    "{name}": "{module}",\n'
        shutil.copytree(ROOT / "qrag_jax", package)
        shutil.rmtree(package / "systems" / name)
        registry = package / "systems" / "__init__.py"
        before = registry.read_text()
        registry.write_text(before.replace(line, ""))
        assert registry.read_text() != before, name
    words = [str(tmp_path), "harr", *SHARED, "--config.train.steps=1", "--config.eval.samples=2"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ONE, *words],
        cwd=ROOT,
        env=commands.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(f"{name} is not needed" in done.stdout for name in systems.SYSTEMS)


def test_an_unknown_system(tmp_path: Path) -> None:
    for fields in ({"system": "harp"}, {}):
        with pytest.raises(InputError, match=r"config\.system"):
            training.train(ConfigDict(fields), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fields", [rlvr_config, leret_config, deepretrieval_config])
def test_a_language_model_whose_digest_is_kept_may_move(fields: Any, tmp_path: Path) -> None:
    saved, given = (ConfigDict({"model": {"path": path}}) for path in ("here", "there"))
    Run(tmp_path, 0.0).check_config(saved, given, fields.CONFIG.FREE_FIELDS, fields.CONFIG.PATHS)


# ---------------------------------------------------------------- the command line


def test_a_training_leaves_room_for_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Determinism: tests/runtime/test_platform.py, tests/test_on_gpu.py."""
    fraction, config = "XLA_PYTHON_CLIENT_MEM_FRACTION", quickstart.get_config("tiny")
    monkeypatch.delenv(fraction, raising=False)
    config.reward.name = "answer_f1"
    config.llm.server.update(model="org/name", memory_share=0.4)
    systems.kind(config).before_devices(config)
    assert os.environ.pop(fraction) == "0.55"


def test_names_with_commas_between() -> None:
    for words, read in (
        ("sft, grpo", ("sft", "grpo")),
        ("grpo", ("grpo",)),
        ("('sft', 'grpo')", ("sft", "grpo")),
        ("a/b,c", ("a/b,c",)),
    ):
        config = experiment_of(["--config=configs/rlvr.py:tiny", f"--config.stages={words}"])
        assert config.stages == read
