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
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.run import Run
from qrag_jax.systems import deepretrieval_config, leret_config, rlvr_config, training
from qrag_jax.systems.run_flags import experiment_of
from tests.entry_points import Commands, metric_lines, refusal
from tests.systems import line_fit


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(systems.SYSTEMS, "line_fit", "tests.systems.line_fit")


def test_a_system_from_elsewhere_is_trained_scored_and_exported(
    tmp_path: Path, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the command line names its code, as the last line of the training says."""
    run = tmp_path / "run"
    assert training.train(line_fit.get_config(), run) == 0
    *_, command = capsys.readouterr().out.strip().splitlines()
    lines = metric_lines(run)
    errors = {line["step"]: line["eval/error"] for line in lines if "eval/error" in line}
    assert [*errors] == [0, 4, 8, 12]
    assert errors[12] < 0.1 < errors[0]
    assert all(line["untrained/error"] == errors[0] for line in lines if "eval/error" in line)
    assert lines[-2]["points/drawn"] == 96
    assert Checkpoints(run).best_step() == 12
    words = shlex.split(command)[3:]
    assert words == [f"--workdir={run}", f"--system={line_fit.__file__}"]
    commands.succeed("evaluate", *words, "--checkpoint=last")
    summary = json.loads((run / "eval" / "summary.json").read_text())
    assert (summary["step"], summary["scores"]["error"]) == (12, pytest.approx(errors[12]))
    commands.succeed("export", *words, "--checkpoint=last", f"--out={tmp_path / 'line'}")
    slope, offset = map(float, (tmp_path / "line" / "line.txt").read_text().split())
    assert (slope, offset) == pytest.approx((2, 1), abs=0.1)
    out = f"--out={tmp_path / 'out'}"
    assert "json" in refusal(commands.run("evaluate", words[0], "--system=json", out))
    for name in ("evaluate", "export"):
        assert "line_fit" in refusal(commands.run(name, words[0], out))


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
