"""Every system by its commands: what a run leaves, a kill, two hosts, and the way to a page."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.entry_points import (
    COURSES,
    FLOAT32,
    Commands,
    assert_same_state,
    end,
    losses,
    metric_lines,
    on_hosts,
    refusal,
    same_numbers,
    stop_together,
    wait_for_step,
    wait_until,
)
from tests.evaluators.shown_pages import read_page


@pytest.mark.parametrize("system", COURSES)
def test_what_a_run_leaves(system: str, trained: Callable[[str], Path]) -> None:
    run, course = trained(system), COURSES[system]
    assert [step for step, _ in losses(run)] == [*range(1, course.steps + 1)]
    assert np.isfinite([loss for _, loss in losses(run)]).all()
    lines = [line for line in metric_lines(run) if f"eval/{course.main}" in line]
    assert [lines[0]["step"], lines[-1]["step"]] == [0, course.steps]
    assert json.loads((run / "config.json").read_text())["train"]["log_every"] == 1
    assert json.loads((run / "training.json").read_text())["seconds"] > 0
    assert (run / "learning_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    last = sorted(int(path.name) for path in (run / "checkpoints" / "last").iterdir())
    assert last[-1] == course.steps
    assert not [path.name for path in run.iterdir() if path.name.startswith(".encoder")]


def in_the_tries(workdir: Path) -> bool:
    path = workdir / "tries" / "iteration-1" / "hop-1.jsonl"
    return path.exists() and path.stat().st_size > 0


# When a run is killed: after a step, or where something is true of its folder. HARR is killed
# inside a rollout by `test_harr_commands`; `nightly` kills all at random moments.
KILLS: dict[str, Any] = {"q_rag": 9, "leret": in_the_tries}


@pytest.mark.parametrize("system", ["q_rag", pytest.param("leret", marks=pytest.mark.nightly)])
def test_killed_and_resumed(
    system: str, trained: Callable[[str], Path], commands: Commands, tmp_path: Path
) -> None:
    """It is the run that nobody killed, to the last bit."""
    course, when, workdir = COURSES[system], KILLS[system], tmp_path / "run"
    given = ("train", *course.fields, f"--workdir={workdir}")
    process = commands.start(*given)
    if isinstance(when, int):
        wait_for_step(process, workdir, when)
    else:
        wait_until(lambda: when(workdir), process)
    assert end(process, signal.SIGKILL).returncode == -signal.SIGKILL
    assert not (workdir / "learning_curve.png").exists()
    assert f"resumed {workdir} at step " in commands.succeed(*given)
    assert_same_state(workdir, trained(system), course.steps)
    assert losses(workdir) == losses(trained(system))
    for path in trained(system).glob("tries/*/*"):
        assert (workdir / path.relative_to(trained(system))).read_bytes() == path.read_bytes(), path


@pytest.mark.parametrize("system", ["q_rag", "rlvr"])
def test_from_scores_to_a_page(
    system: str, scored: Callable[[str], Path], commands: Commands, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(scored(system), tmp_path / "run"))
    course, out, page = COURSES[system], tmp_path / "exported", tmp_path / "page.html"
    summary = run / "eval" / "summary.json"
    text = (summary if summary.exists() else run / "summary.json").read_text()
    assert course.main.rpartition("/")[2] in text
    of_run = (f"--workdir={run}", "--checkpoint=last")
    if system == "rlvr":
        commands.succeed("predict", *of_run)
        (file,) = run.glob("predictions/*.jsonl")
        assert file.read_text().count("\n") > 1
        assert str(run) in refusal(commands.run("index", f"--workdir={run}"))
    commands.succeed("export", *of_run, f"--out={out}")
    weights = "model.safetensors" if system == "rlvr" else "state/model.safetensors"
    assert (out / weights).stat().st_size > 1000
    assert (out / "README.md").exists()
    commands.succeed("show", str(run), f"--out={page}")
    curves = {curve["name"]: curve for curve in read_page(page)["runs"][0]["curves"]}
    assert curves["train/loss"]["steps"] == [*range(1, course.steps + 1)]


# ---------------------------------------------------------------------- two hosts

_TOKENS = ("--config.train.log_every=1", "--config.train.eval_every=100")
_TOKENS += ("--config.model.dtype=float32", "--config.model.tiny.layers=1")
_TOKENS += ("--config.model.tiny.weights=",)
# Runs whose numbers do not depend on how blocks are cut: in float32, few steps, a small rate.
SPREAD = {
    "q_rag": (
        *("--config=configs/quickstart.py:tiny", "--config.train.steps=8", FLOAT32),
        *("--config.train.log_every=1", "--config.train.checkpoint_every=4"),
        "--config.train.eval_every=8",
    ),
    "harr": (
        *("--config=configs/harr_ppo.py:tiny", "--config.encoder.lora.rank=4", FLOAT32),
        *("--config.train.steps=3", "--config.train.batch_size=12", "--config.train.log_every=1"),
        *("--config.optimizer.learning_rate=1e-4", "--config.policy.pool=16"),
        "--config.policy.passages=8",
    ),
    "rlvr": (
        *("--config=configs/rlvr.py:tiny", "--config.sft.steps=1", "--config.train.steps=2"),
        *_TOKENS,
    ),
    "deepretrieval": (
        *("--config=configs/deepretrieval.py:tiny", "--config.script.steps=2", *_TOKENS),
        *("--config.queries.made_train=12", "--config.queries.made_corpus=25"),
    ),
    "leret": (
        *("--config=configs/leret.py:tiny", "--config.script.steps=10", *_TOKENS),
        *("--config.questions.bridge_corpus=24", "--config.writing.k=12"),
        *("--config.writing.passage_words=8", "--config.sampling.room=512"),
        *("--config.iterations=1", "--config.model.lora.rank=4"),
    ),
}


@pytest.mark.parametrize(
    "system",
    [pytest.param(each, marks=[pytest.mark.nightly] * (each != "q_rag")) for each in SPREAD],
)
def test_two_hosts_do_what_one_does(system: str, commands: Commands, tmp_path: Path) -> None:
    """Q-RAG's is stopped by a signal to one of them, and ended by one host of two devices."""
    alone, workdir, given = tmp_path / "alone", tmp_path / "run", SPREAD[system]
    commands.succeed("train", *given, f"--workdir={alone}")
    hosts = on_hosts(commands, "train", *given, f"--workdir={workdir}")
    if system == "q_rag":
        wait_for_step(hosts[1], workdir, 2)
        stop_together(hosts)
        again = commands.start(
            "train", *given, f"--workdir={workdir}", env=commands.with_devices(2)
        )
        assert end(again).returncode == 0
    else:
        first, second = (end(host) for host in hosts)
        assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
        assert first.stdout.count("step 0") > second.stdout.count("step 0") == 0
    same_numbers(workdir, alone)
    assert len([*(workdir / "tensorboard").iterdir()]) <= 2
    assert json.loads((workdir / "config.json").read_text())["seed"] == 42
