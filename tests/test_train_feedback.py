"""Training on what a user brings: a model that rewards (a real HTTP server that answers, or
misbehaves), records, rewards and agents of files, passages that nobody marked.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from configs import hotpotqa
from qrag_jax.data.sample import Sample
from qrag_jax.errors import FeedbackLost
from qrag_jax.systems import training
from tests.entry_points import (
    Commands,
    assert_same_state,
    end,
    flags_of,
    json_lines,
    losses,
    metric_lines,
    refusal,
    saved_state,
    wait_for_step,
    wait_until,
)
from tests.llm.model_server import Call, ModelServer, Reply, supported_answers
from tests.systems.parts import samples_of
from tests.systems.small_runs import small_harr, small_q_rag

STEPS = 8
FIELDS = flags_of(
    "hotpotqa.py:tiny",
    f"train.steps={STEPS} train.log_every=1 train.checkpoint_every=100 train.eval_every=4 "
    "encoder.length_buckets=1 encoder.block_sizes=1 reward.penalize_extra_steps=False",
)


@pytest.fixture(scope="module")
def samples() -> dict[str, Sample]:
    """By question."""
    config = hotpotqa.get_config("tiny")
    splits = [samples_of(config, name).all for name in ("train", "dev")]
    return {sample.question: sample for split in splits for sample in split}


@pytest.fixture
def server(samples: dict[str, Sample]) -> Iterator[ModelServer]:
    with ModelServer(supported_answers(samples)) as running:
        yield running


def fields(server: ModelServer, staleness: int = 2, reward: str = "answer_em") -> tuple[str, ...]:
    rewarded = (f"--config.reward.name={reward}", f"--config.reward.staleness={staleness}")
    return (*FIELDS, *rewarded, f"--config.llm.url={server.url}", "--config.llm.model=tiny")


@pytest.fixture(scope="module")
def undisturbed(
    samples: dict[str, Sample], commands: Commands, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A finished run, two batches stale."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    with ModelServer(supported_answers(samples)) as server:
        commands.succeed("train", *fields(server), f"--workdir={workdir}")
    return workdir


def test_rewards_like_those_of_the_facts_train_alike(
    server: ModelServer, commands: Commands, tmp_path: Path, undisturbed: Path
) -> None:
    # Two hops in two steps: the last fact is found at the last step, or not at all.
    commands.succeed("train", *FIELDS, f"--workdir={tmp_path / 'facts'}")
    at_once = fields(server, staleness=0)
    commands.succeed("train", *at_once, f"--workdir={tmp_path / 'model'}")
    model, facts = (saved_state(tmp_path / name, STEPS) for name in ("model", "facts"))
    for name, value in facts.items():
        np.testing.assert_allclose(model[name], value, atol=1e-5, err_msg=name)
    last = [line for line in metric_lines(tmp_path / "model") if "llm/calls" in line][-1]
    # Greedy answers are kept: no prompt was sent twice.
    assert len({call.prompt for call in server.calls}) == len(server.calls)
    asked = last["llm/calls"] + last["llm/cache_hits"] + last["llm/shared"]
    assert asked == STEPS * 8 + 2 * 8  # and the evaluations of steps 0 and 4
    assert last["train/unscored_share"] == last["llm/failures"] == 0
    assert losses(undisturbed) != losses(tmp_path / "model")  # two batches stale


def test_faults_of_the_server_and_a_kill_leave_no_trace(
    server: ModelServer,
    samples: dict[str, Sample],
    commands: Commands,
    undisturbed: Path,
    tmp_path: Path,
) -> None:
    good, faults, dies = supported_answers(samples), [0], threading.Event()
    workdir = tmp_path / "run"

    def misbehaves(call: Call) -> Reply:
        if call.number == 40:
            dies.set()
        if len(losses(workdir)) >= 4:  # its evaluation and the next batches are asked for
            return Reply("never", delay=300)
        if (
            [each.prompt for each in server.calls].count(call.prompt) == 1
            and faults[0] < 12
            and call.number % 3 == 0
        ):
            faults[0] += 1
            return (
                Reply("slow down", status=429, headers={"retry-after": "0.1"}),
                Reply(raw="<html>oops"),
                Reply(""),
                Reply("broken", status=503),
                Reply("late", delay=1.5),
                Reply(drop=True),
            )[faults[0] % 6]
        return good(call)

    server.script = misbehaves

    def stop_and_start() -> None:
        if dies.wait(120):
            server.kill()
            time.sleep(1.5)
            server.start()

    outage = threading.Thread(target=stop_and_start)
    outage.start()
    given = ("train", *fields(server), f"--workdir={workdir}", "--config.train.checkpoint_every=2")
    patience = ("--config.llm.attempt_timeout=1", "--config.llm.deadline=60")
    process = commands.start(*given, *patience)
    wait_for_step(process, workdir, 4)
    outage.join()
    wait_until(lambda: server.calls[-1].number > 40, process)
    done = end(process, signal.SIGKILL)
    assert done.returncode == -signal.SIGKILL
    last = [line for line in metric_lines(workdir) if "llm/calls" in line][-1]
    assert last["llm/retries"] >= 10
    assert last["llm/waited_seconds"] > 1
    assert last["llm/failures"] == 0
    server.script = good
    # What answers are written with may change; a user sees it.
    said = commands.succeed(*given, "--config.llm.max_tokens=99")
    assert "99" in said
    assert_same_state(workdir, undisturbed, STEPS)
    assert dict(losses(workdir)) == dict(losses(undisturbed))
    scored = {line["step"] for line in metric_lines(workdir) if "eval/return" in line}
    assert scored == {0, 4, STEPS}


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
        *("--config.encoder.block_sizes=1", *(f"--config.train.{field}" for field in of_train)),
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
    assert 0 <= known["fact_recall"] <= 1
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
