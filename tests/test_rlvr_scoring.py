"""RLVR's commands around a run: predictions of its model, their scores, and pages of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.metrics import predictions
from qrag_jax.rollouts.trajectories import TokenTrajectory
from tests.entry_points import Commands, refusal

TINY = (
    "--config=configs/rlvr.py:tiny",
    "--config.model.tiny.layers=1",
    "--config.model.tiny.hidden=32",
    "--config.model.tiny.intermediate=32",
    "--config.tools.turn_tokens=12",
    "--config.train.checkpoint_every=1",
    "--config.questions.bridge_train=24",
    "--config.sft.steps=2",
    "--config.train.steps=1",
    "--config.train.eval_every=3",
)
QUESTIONS, DRAWS = 8, 3


@pytest.fixture(scope="module")
def run(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("rlvr") / "run"
    commands.succeed("train", *TINY, f"--workdir={workdir}")
    return workdir


@pytest.fixture(scope="module")
def predicted(commands: Commands, run: Path) -> Path:
    arguments = ("--checkpoint=last", f"--sampled={DRAWS}")
    out = commands.succeed("predict", f"--workdir={run}", *arguments)
    file = run / "predictions" / "last-3-bm25.jsonl"
    assert f"24 episodes of 8 questions, last checkpoint of step 3: {file}" in out
    return file


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_has_all_of_an_episode(predicted: Path, run: Path) -> None:
    rows = lines_of(predicted)
    assert [row["draw"] for row in rows] == [*range(DRAWS)] * QUESTIONS
    assert len({row["id"] for row in rows}) == QUESTIONS
    vocabulary = json.loads((run / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    for row in rows:
        trajectory = TokenTrajectory.from_json(row["trajectory"])
        assert trajectory.to_json() == row["trajectory"]
        assert row["reward"] == trajectory.parts["reward"]
        turns = [turn for segment in trajectory.segments for turn in segment]
        assert len(turns) == len(row["turns"]) == trajectory.facts["tally"]["turns"]
        for turn, texts in zip(turns, row["turns"]):
            assert len(texts["observed_tokens"]) == len(turn.observed)
            assert len(texts["sampled_tokens"]) == len(turn.sampled)
            assert max(turn.sampled) < len(vocabulary) + 10
            assert (turn.log_probs <= 0).all()
            assert np.isfinite(turn.log_probs).all()
        assert row["question"] in row["turns"][0]["observed"]
    assert len({str(row["trajectory"]["segments"]) for row in rows}) == len(rows)


def test_a_killed_prediction_goes_on(
    commands: Commands, run: Path, predicted: Path, tmp_path: Path
) -> None:
    """Parts have two questions of three draws; what is no whole part is played again."""
    whole = predicted.read_text().splitlines(keepends=True)
    file = tmp_path / "killed.jsonl"
    shutil.copy(predicted.with_suffix(".json"), file.with_suffix(".json"))
    file.write_text("".join(whole[:8]) + whole[8][:40])
    given = (f"--workdir={run}", "--checkpoint=last", f"--out={file}")
    commands.succeed("predict", *given, f"--sampled={DRAWS}")
    assert file.read_text().splitlines(keepends=True) == whole
    told = refusal(commands.run("predict", *given, "--sampled=2"))
    assert "was begun with other settings, data or weights; give --restart" in told
    file.write_text("".join(whole[:2]) + "{}\n" + "".join(whole[3:]))
    told = refusal(commands.run("predict", *given, f"--sampled={DRAWS}"))
    assert f"{file}, line 3: field 'answers' is missing" in told


def test_without_a_run(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "untrained.jsonl"
    given = (*TINY, f"--out={file}", "--samples=2", "--retriever=golden")
    out = commands.succeed("predict", *given)
    assert f"2 episodes of 2 questions, untrained: {file}" in out
    record = predictions.read_record(file)
    assert record is not None
    assert (record["retriever"], record["greedy"]) == ("golden", False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--retriever=tfidf",), "config.tools.retriever is 'tfidf'; use one of golden, bm25"),
        (("--retriever=semantic",), "needs something that scores documents"),
        (("--out=x.json",), "--out=x.json is not named as JSON lines; give a name.jsonl."),
        (("--questions=a,b",), "has not the form path,config,split"),
        (("--checkpoint=none",), "--checkpoint"),
        (("--config=configs/rlvr.py:tiny",), "--workdir has a config of its own"),
    ],
)
def test_refused_of_a_run(
    commands: Commands, run: Path, arguments: tuple[str, ...], told: str
) -> None:
    assert told in refusal(commands.run("predict", f"--workdir={run}", *arguments))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give an experiment, for example --config=configs/rlvr.py:smol."),
        ((TINY[0],), "give the file to write, for example --out=predictions.jsonl."),
        ((TINY[0], "--out=x.jsonl", "--checkpoint=last"), "--checkpoint is of a run"),
        (("--config=configs/hotpotqa.py:tiny", "--out=x.jsonl"), "an experiment of q_rag, whose"),
    ],
)
def test_refused_without_a_run(commands: Commands, arguments: tuple[str, ...], told: str) -> None:
    assert told in refusal(commands.run("predict", *arguments))


def test_refused_runs(commands: Commands, run: Path, tmp_path: Path) -> None:
    for name, system in (("rlvr", "rlvr"), ("q_rag", "q_rag")):
        config = json.loads((run / "config.json").read_text()) | {"system": system}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    told = refusal(commands.run("predict", f"--workdir={tmp_path}/q_rag"))
    assert "is a run of q_rag, which this command cannot read; give a run of rlvr." in told
    told = refusal(commands.run("predict", f"--workdir={tmp_path}/rlvr"))
    assert "holds no model; --workdir must be a run that was trained." in told
    shutil.copytree(run / "model", tmp_path / "rlvr" / "model")
    told = refusal(commands.run("predict", f"--workdir={tmp_path}/rlvr"))
    assert "holds no checkpoint; train first" in told
