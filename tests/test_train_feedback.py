"""Training on what a user brings: a model that rewards (a real HTTP server that answers, or
misbehaves), records, rewards and agents of files, passages that nobody marked.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from qrag_jax.data.sample import Sample
from qrag_jax.errors import FeedbackLost
from qrag_jax.systems import training
from qrag_jax.systems.q_rag.system import QRag
from tests.entry_points import (
    Commands,
    assert_same_state,
    json_lines,
    losses,
    metric_lines,
    refusal,
    saved_state,
)
from tests.llm.model_server import Call, ModelServer, Reply, supported_answers
from tests.systems.parts import samples_of
from tests.systems.small_runs import small_harr, small_q_rag

STEPS = 4


def config_of(**fields: Any) -> ConfigDict:
    usual = {"train__steps": STEPS, "train__eval_every": 100, "train__checkpoint_every": 2}
    usual |= {"reward__penalize_extra_steps": False}
    return small_q_rag(stages=("pqn",), **usual, **fields)


@pytest.fixture(scope="module")
def samples() -> dict[str, Sample]:
    """By question."""
    splits = [samples_of(config_of(), name).all for name in ("train", "dev")]
    return {sample.question: sample for split in splits for sample in split}


@pytest.fixture
def server(samples: dict[str, Sample]) -> Iterator[ModelServer]:
    with ModelServer(supported_answers(samples)) as running:
        yield running


def rewarded(server: ModelServer, **fields: Any) -> ConfigDict:
    asked = {"reward__name": "answer_em", "llm__url": server.url, "llm__model": "tiny"}
    return config_of(**asked, **fields)


@pytest.mark.usefixtures("one_device")
def test_rewards_like_those_of_the_facts_train_alike(server: ModelServer, tmp_path: Path) -> None:
    # Two hops in two steps: the last fact is found at the last step, or not at all.
    assert training.train(config_of(), tmp_path / "facts") == 0
    assert training.train(rewarded(server, reward__staleness=0), tmp_path / "model") == 0
    model, facts = (saved_state(tmp_path / name, STEPS) for name in ("model", "facts"))
    for name, value in facts.items():
        np.testing.assert_allclose(model[name], value, atol=1e-5, err_msg=name)
    last = [line for line in metric_lines(tmp_path / "model") if "llm/calls" in line][-1]
    # Greedy answers are kept: no prompt was sent twice.
    assert len({call.prompt for call in server.calls}) == len(server.calls)
    asked = last["llm/calls"] + last["llm/cache_hits"] + last["llm/shared"]
    assert asked == STEPS * 8 + 8  # and the evaluation of step 0
    assert last["train/unscored_share"] == last["llm/failures"] == 0


@pytest.mark.usefixtures("one_device")
def test_faults_of_the_server_and_a_stop_leave_no_trace(
    server: ModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """While two batches are in flight; every fault, and outages: tests/llm/test_client.py."""
    whole, run, good, failed = tmp_path / "whole", tmp_path / "run", server.script, [0]
    config = rewarded(server, reward__staleness=2)
    assert training.train(config, whole) == 0
    update, begun = QRag.update, itertools.count(1)

    def stopped(self: QRag, state: Any, episodes: Any) -> Any:
        if next(begun) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, state, episodes)

    def misbehaves(call: Call) -> Reply:
        if call.number % 3 == 0 and failed[0] < 6:
            failed[0] += 1
            return Reply(drop=True) if failed[0] % 2 else Reply(raw="<html>oops")
        return good(call)

    monkeypatch.setattr(QRag, "update", stopped)
    server.script = misbehaves
    assert training.train(config, run) == 128 + signal.SIGTERM
    last = [line for line in metric_lines(run) if "llm/calls" in line][-1]
    assert last["llm/retries"] > last["llm/failures"] == 0
    config.llm.max_tokens = 99
    assert training.train(config, run) == 0
    assert "99" in capsys.readouterr().out  # what answers are written with may change; it is said
    assert next(begun) == STEPS + 1  # no step was taken twice
    assert_same_state(run, whole, STEPS)
    assert losses(run) == losses(whole)


# ---------------------------------------------------------------- records of a file

# What nobody can know without the supporting facts.
OF_FACTS = ("fact_em", "fact_f1", "fact_precision", "fact_recall", "until_found")
HIDDEN = "--config.data.columns.support="
DATA = """
def records(split):
    for number in range(20 if split == "train" else 6):
        rivers = [f"{split}river{number}x{n}" for n in range(4)]
        yield {"query": f"{split} river of town {number % 4}?", "id": f"{split}-{number}",
               "chunks": [f"{split} town {n} lies at {river}" for n, river in enumerate(rivers)],
               "answers": [rivers[number % 4]], "support": [number % 4]}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("own") / "my_data.py"
    file.write_text(DATA)
    return f"--config.data.path={file}:records"


@pytest.fixture(scope="module")
def run(commands: Commands, data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("own") / "run"
    of_train = ("steps=4", "log_every=1", "eval_every=2", "checkpoint_every=2")
    text = commands.succeed(
        *("train", "--config=configs/own.py:tiny", f"--workdir={workdir}", data, HIDDEN),
        *("--config.data.columns.question=query", "--config.reward.name=answer_in_chunk"),
        *("--config.env.max_steps=2", "--config.encoder.length_buckets=1"),
        *("--config.encoder.block_sizes=1", "--config.encoder.scratch.layers=1"),
        *(f"--config.train.{field}" for field in of_train),
    )
    assert "kept 20 of 20 records" in text
    return workdir


def test_training_logs_no_score_of_facts(run: Path) -> None:
    lines = metric_lines(run)
    names = {name for line in lines for name in line}
    assert {"train/loss", "train/return", "eval/return", "eval/answer_found"} <= names
    assert {"untrained/answer_found", "single_step/answer_found"} <= names
    assert not [name for name in names for part in OF_FACTS if part in name]
    returns = [line["eval/return"] for line in lines if "eval/return" in line]
    found = [line["eval/answer_found"] for line in lines if "eval/answer_found" in line]
    # The weak reward: 1 for the answer in the first chunk taken, 0.75 in the second.
    for mean, share in zip(returns, found, strict=True):
        assert 0.74 * share - 1e-6 <= mean <= share + 1e-6


def test_scores_with_and_without_the_facts(
    run: Path, data: str, commands: Commands, tmp_path: Path
) -> None:
    scoring = ("evaluate", f"--workdir={run}", "--checkpoint=last")
    # A folder of a run may be somebody else's: what its config names does not run by itself.
    assert data in refusal(commands.run(*scoring))
    commands.succeed(*scoring, data)
    summary = json.loads((run / "eval/summary.json").read_text())
    assert list(summary["gains"]["untrained"]) == ["answer_found"]
    assert not [name for name in summary["scores"]["trained"] for part in OF_FACTS if part in name]
    # The same play, measured afterwards.
    out = tmp_path / "shown"
    commands.succeed(*scoring, data, "--config.data.columns.support=support", f"--out={out}")
    known = json.loads((out / "summary.json").read_text())["scores"]["trained"]
    assert 0 <= known["fact_recall"]["mean"] <= 1
    assert "answer_found" not in known
    (hidden,) = run.glob("eval/last-*/eval_seed42.jsonl")
    (seen,) = out.glob("last-*/eval_seed42.jsonl")
    for one, other in zip(json_lines(hidden), json_lines(seen), strict=True):
        assert one["pred_idx"] == other["pred_idx"]
        assert (one["sf_idx"], bool(other["sf_idx"])) == ([], True)
    assert "sf_idx" in refusal(commands.run("evaluate", f"--log={hidden}"))  # it needs facts


# ---------------------------------------------------------------- functions of a file

REWARD = """
calls = 0

def score(question, answers, taken, gold):
    global calls
    calls += 1
    if calls % 4 == 0:
        raise RuntimeError("every fourth call fails")
    return 0.5 * sum(text in gold for text in taken)

def fails(question, answers, taken, gold):
    raise RuntimeError("it never works")
"""


@pytest.mark.usefixtures("one_device")
def test_a_reward_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = tmp_path / "my_reward.py", tmp_path / "run"
    file.write_text(REWARD)
    config = small_q_rag(stages=("pqn",), reward__path=f"{file}:score")
    assert training.train(config, run) == 0
    assert f"{file}:score" in capsys.readouterr().out  # a user sees what code runs
    lines = metric_lines(run)
    shares = [line["train/unscored_share"] for line in lines if "train/unscored_share" in line]
    assert shares == [0.25] * 2  # of 8 episodes, each scored once
    config.reward.path = f"{file}:fails"
    with pytest.raises(FeedbackLost, match="RuntimeError: it never works"):
        training.train(config, tmp_path / "other")


AGENT = """
def agent(question, max_searches):
    texts = yield question
    return texts[0].split()[-1]

def fails(question, max_searches):
    yield question
    raise KeyError(1)
"""


@pytest.mark.usefixtures("one_device")
def test_an_agent_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = tmp_path / "my_agent.py", tmp_path / "run"
    file.write_text(AGENT)
    config = small_harr(agent__name="own", reward__mixture="recall=1", train__steps=1)
    config.train.log_every, config.agent.path = 1, f"{file}:agent"
    assert training.train(config, run) == 0
    assert f"{file}:agent" in capsys.readouterr().out
    assert [line["step"] for line in metric_lines(run) if "train/loss" in line] == [1]
    config.agent.path = f"{file}:fails"
    with pytest.raises(FeedbackLost, match="KeyError: 1"):
        training.train(config, tmp_path / "other")
