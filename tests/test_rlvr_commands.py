"""RLVR by the commands: predictions of its model and their scores; a sampler that is a server."""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax import predict
from qrag_jax.errors import InputError
from qrag_jax.metrics.row_log import read_record
from qrag_jax.rollouts.trajectories import SamplingConfig
from tests.entry_points import (
    COURSES,
    Commands,
    assert_same_state,
    end,
    losses,
    metric_lines,
    refusal,
)
from tests.rollouts.token_setup import PolicyServer, write_calling_model

TINY, STEPS = COURSES["rlvr"].fields, COURSES["rlvr"].steps
QUESTIONS, DRAWS = 4, 2
MAIN = f"last-{STEPS}"
FOLDERS = (MAIN, "sft-2", "untrained")  # of what is scored


@pytest.fixture(scope="module")
def run(scored: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the scored run."""
    workdir = tmp_path_factory.mktemp("rlvr") / "run"
    return Path(shutil.copytree(scored("rlvr"), workdir))


@pytest.fixture(scope="module")
def predicted(run: Path) -> Path:
    """The predictions that were scored."""
    return run / "eval" / MAIN / "bm25.jsonl"


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_killed_prediction_goes_on(commands: Commands, run: Path, predicted: Path) -> None:
    """Parts have two questions of two draws; what is no whole part is played again."""
    whole = predicted.read_text().splitlines(keepends=True)
    file = run / "predictions" / f"{MAIN}-bm25.jsonl"
    file.parent.mkdir()
    shutil.copy(predicted.with_suffix(".json"), file.with_suffix(".json"))
    file.write_text("".join(whole[:6]) + whole[6][:40])
    given = ("predict", f"--workdir={run}", "--checkpoint=last")
    commands.succeed(*given, f"--sampled={DRAWS}")
    assert file.read_text().splitlines(keepends=True) == whole
    assert "--restart" in refusal(commands.run(*given, "--sampled=1"))
    file.write_text("".join(whole[:2]) + "{}\n" + "".join(whole[3:]))
    assert f"{file}, line 3" in refusal(commands.run(*given, f"--sampled={DRAWS}"))
    shutil.rmtree(file.parent)


def test_predictions_without_a_run(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "untrained.jsonl"
    given = (*TINY, f"--out={file}", "--samples=2", "--sampled=2", "--retriever=golden")
    commands.succeed("predict", *given)
    assert len(lines_of(file)) == 4
    record = read_record(file)
    assert record is not None
    assert (record["retriever"], record["greedy"]) == ("golden", False)


def test_scores_are_those_of_the_predictions(run: Path) -> None:
    summary = json.loads((run / "eval" / "summary.json").read_text())
    for retriever in ("bm25", "golden"):
        ways = [*summary["scores"][retriever]]
        assert len(ways) == 3  # the last weights, those after imitation, the untrained
        assert list(summary["gains"][retriever]) == ways[1:]
        for way, scores in summary["scores"][retriever].items():
            rows = lines_of(run / "eval" / summary["files"][retriever][way])
            assert len(rows) == QUESTIONS * DRAWS
            for name in ("em", "f1", "recall", "precision", "citation", "format"):
                mean = np.mean([row["trajectory"]["parts"][name] for row in rows])
                assert scores["all"][name]["mean"] == pytest.approx(mean)
            mean = np.mean([row["reward"] for row in rows])
            assert scores["all"]["reward"]["mean"] == pytest.approx(mean)
            assert {"vote_em@1", "vote_f1@2", "pass@2"} <= scores["all"].keys()
    assert summary["questions"]["choosing"] == summary["questions"]["reported"] == QUESTIONS
    records = [read_record(run / "eval" / f"{each}/bm25.jsonl") for each in FOLDERS]
    digests = [record["weights"] for record in records if record]
    assert len(digests) == 3
    assert digests[2] not in digests[:2]


def test_what_does_not_go_together_is_refused(
    commands: Commands, run: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="--config"):  # a run has a config of its own
        predict.define_flags([TINY[0], "--workdir=run"])
    for words, named in (
        (("predict", f"--workdir={run}", "--out=x.json"), "--out"),
        (("evaluate", f"--workdir={run}", "--retrievers=bm25,bm25"), "--retrievers"),
        (("predict", "--config=configs/hotpotqa.py:tiny", "--out=x.jsonl"), "q_rag"),
    ):
        assert named in refusal(commands.run(*words))
    # A folder of another system, without a model, and without a checkpoint.
    workdir, config = tmp_path / "run", json.loads((run / "config.json").read_text())
    workdir.mkdir()
    (workdir / "config.json").write_text(json.dumps(config | {"system": "q_rag"}))
    assert "q_rag" in refusal(commands.run("predict", f"--workdir={workdir}"))
    (workdir / "config.json").write_text(json.dumps(config))
    assert str(workdir) in refusal(commands.run("predict", f"--workdir={workdir}"))
    shutil.copytree(run / "model", workdir / "model")
    assert str(workdir) in refusal(commands.run("evaluate", f"--workdir={workdir}"))


# ---------------------------------------------------------------------- sampled by a server

SERVED = (
    "--config=configs/rlvr.py:tiny",
    "--config.model.lora.rank=4",
    '--config.stages=("grpo",)',
    "--config.sampling.engine=server",
    "--config.sampling.temperature=0.7",
    "--config.tools.turn_tokens=16",
    "--config.tools.max_turns=3",
    "--config.questions.bridge_train=16",
    "--config.train.steps=4",
    "--config.train.batch_size=2",
    "--config.train.log_every=1",
    "--config.train.checkpoint_every=1",
    "--config.train.eval_every=100",
    "--config.eval.samples=2",
    "--config.llm.model=tiny",
)


@pytest.mark.nightly
def test_killed_in_the_middle_of_rollouts_of_a_server(commands: Commands, tmp_path: Path) -> None:
    """No question is lost or trained twice: the weights are those of a run that was not killed."""
    folder, draw = write_calling_model(tmp_path / "model"), random.Random(0)
    with PolicyServer.started(folder, SamplingConfig(engine="server", room=640)) as server:
        given = (
            *("train", *SERVED, "--config.tools.staleness=1", f"--config.model.path={folder}"),
            *("--config.optimizer.learning_rate=1e-2", f"--config.llm.url={server.url}"),
        )
        commands.succeed(*given, f"--workdir={tmp_path / 'whole'}")
        asked, reached = len(server.asked), threading.Event()
        left = [draw.randint(asked // 3, asked // 2)]

        def counted() -> None:
            left[0] -= 1
            if left[0] == 0:
                reached.set()

        server.before = counted
        process = commands.start(*given, f"--workdir={tmp_path / 'killed'}")
        while not reached.wait(0.05):
            assert process.poll() is None, process.communicate()
        assert end(process, signal.SIGKILL).returncode == -signal.SIGKILL
        commands.succeed(*given, f"--workdir={tmp_path / 'killed'}")
    assert_same_state(tmp_path / "killed", tmp_path / "whole", 4)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    lines = [line for line in metric_lines(tmp_path / "killed") if "train/loss" in line]
    assert any(line["train/tokens"] > 0 for line in lines)
    assert all(line["train/unscored_share"] == 0 for line in lines)
