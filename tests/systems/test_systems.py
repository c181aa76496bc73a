"""What all systems share: the loop, for one from elsewhere as well, and flags of commands."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import quickstart
from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.runtime.run import Run
from qrag_jax.systems import deepretrieval_config, leret_config, rlvr_config, training
from qrag_jax.systems.run_flags import experiment_of
from tests.entry_points import ROOT, Commands, metric_lines, refusal


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
    words = shlex.split(last)[3:]
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
    systems.before_devices(config)
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
