"""Another system goes through the same loop: trained, stopped, resumed, scored, exported."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from qrag_jax import systems, train
from qrag_jax.errors import InputError
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.saved_config import check_same_config
from qrag_jax.runtime.step_log import NotFinite
from qrag_jax.systems import deepretrieval_config, leret_config, rlvr_config
from tests.entry_points import Commands, metric_lines, refusal
from tests.systems import line_fit


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(systems.SYSTEMS, "line_fit", "tests.systems.line_fit")


def test_a_second_system_plugs_into_the_loop(tmp_path: Path) -> None:
    assert train.train(line_fit.get_config(), tmp_path / "run") == 0
    lines = metric_lines(tmp_path / "run")
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 6
    assert losses[-1] < 0.1 * losses[0]
    errors = {line["step"]: line["eval/error"] for line in lines if "eval/error" in line}
    assert [*errors] == [0, 4, 8, 12]
    assert errors[12] < 0.1 < errors[0]
    assert all(line["untrained/error"] == errors[0] for line in lines if "eval/error" in line)
    assert lines[-2]["points/drawn"] == 96
    assert Checkpoints(tmp_path / "run").best_step() == 12
    assert (tmp_path / "run" / "learning_curve.png").exists()


def test_it_is_scored_and_exported_if_the_command_line_names_its_code(
    tmp_path: Path, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train.train(line_fit.get_config(), run)
    *_, command = capsys.readouterr().out.strip().splitlines()
    words = shlex.split(command)[3:]
    assert words == [f"--workdir={run}", f"--system={line_fit.__file__}"]
    commands.succeed("evaluate", *words, "--checkpoint=last")
    summary = json.loads((run / "eval" / "summary.json").read_text())
    assert summary["step"] == 12
    assert summary["scores"]["error"] < 0.1
    commands.succeed("export", *words, "--checkpoint=last", f"--out={tmp_path / 'line'}")
    slope, offset = map(float, (tmp_path / "line" / "line.txt").read_text().split())
    assert slope == pytest.approx(2, abs=0.1)
    assert offset == pytest.approx(1, abs=0.1)
    other = commands.run("evaluate", words[0], "--system=json", f"--out={tmp_path / 'out'}")
    assert "json" in refusal(other)
    for command in ("evaluate", "export"):
        refused = commands.run(command, words[0], f"--out={tmp_path / 'out'}")
        assert "line_fit" in refusal(refused)


def test_what_was_learned_is_saved_if_a_stopped_run_fails_in_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes in step 7. Only then is it known that steps 6 and 7 learned nothing."""
    update, begun = line_fit.LineFit.update, itertools.count(1)

    def wrecked(self: line_fit.LineFit, state: line_fit.State, episodes: object):
        step = next(begun)
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        if step > 5:
            return state, {"loss": jnp.float32("nan"), "skipped": jnp.float32(1)}
        return update(self, state, episodes)

    monkeypatch.setattr(line_fit.LineFit, "update", wrecked)
    config = line_fit.get_config()
    config.train.max_skipped_steps = 2
    with pytest.raises(NotFinite, match=r"last of them step 7 .* the state after step 5 is kept"):
        train.train(config, tmp_path / "run")
    restored = Checkpoints(tmp_path / "run", read_only=True).restore_last(line_fit_state())
    assert (restored.step, int(restored.state.step)) == (7, 5)


def line_fit_state() -> line_fit.State:
    return line_fit.LineFit(line_fit.get_config()).first_state()


def test_an_unknown_system(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.system is 'harp'.*line_fit"):
        train.train(ConfigDict({"system": "harp"}), tmp_path / "run")
    with pytest.raises(InputError, match=r"config\.system"):
        train.train(ConfigDict({}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fields", [rlvr_config, leret_config, deepretrieval_config])
def test_a_language_model_whose_digest_is_kept_may_move(fields: Any) -> None:
    saved, given = (ConfigDict({"model": {"path": path}}) for path in ("here", "there"))
    check_same_config(saved, given, (*fields.CONFIG.FREE_FIELDS, *fields.CONFIG.PATHS))
