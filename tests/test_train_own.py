"""Training on data, rewards and agents of the user; with passages that nobody marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.entry_points import Commands, metric_lines, refusal

TINY = (
    "--config=configs/own.py:tiny",
    "--config.train.steps=4",
    "--config.train.log_every=1",
    "--config.train.eval_every=2",
    "--config.train.checkpoint_every=2",
    "--config.encoder.length_buckets=1",
    "--config.encoder.block_sizes=1",
)
HIDDEN = "--config.data.columns.support="
BY_ANSWER = ("--config.reward.name=answer_in_chunk", HIDDEN)
# What nobody can know without the supporting facts.
OF_FACTS = ("fact_em", "fact_f1", "fact_precision", "fact_recall", "until_found")


def names_of(lines: list[dict[str, Any]]) -> set[str]:
    return {name for line in lines for name in line}


@pytest.fixture(scope="module")
def run(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("own") / "run"
    commands.succeed("train", f"--workdir={workdir}", *TINY, *BY_ANSWER)
    return workdir


def test_training_logs_no_score_of_facts(run: Path) -> None:
    lines = metric_lines(run)
    names = names_of(lines)
    assert {"train/loss", "train/return", "eval/return", "eval/answer_found"} <= names
    assert {"untrained/answer_found", "single_step/answer_found"} <= names
    assert not [name for name in names for part in OF_FACTS if part in name]
    returns = [line["eval/return"] for line in lines if "eval/return" in line]
    found = [line["eval/answer_found"] for line in lines if "eval/answer_found" in line]
    # The weak reward: 1 for the answer in the first chunk taken, 0.75 in the second.
    for mean, share in zip(returns, found, strict=True):
        assert 0.74 * share - 1e-6 <= mean <= share + 1e-6


def test_scores_with_and_without_the_facts(run: Path, commands: Commands, tmp_path: Path) -> None:
    commands.succeed("evaluate", f"--workdir={run}", "--checkpoint=last")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["with_facts"] == 0
    assert list(summary["gains"]["untrained"]) == ["answer_found"]
    assert not [name for name in summary["trained"] for part in OF_FACTS if part in name]
    assert not {"until_found", "return"} & (summary.keys() | summary["trained"].keys())
    # The same play, measured afterwards.
    out = tmp_path / "shown"
    shown = ("--config.data.columns.support=support", f"--out={out}", "--checkpoint=last")
    commands.succeed("evaluate", f"--workdir={run}", *shown)
    (path,) = out.glob("*_summary.json")
    known = json.loads(path.read_text())["trained"]
    assert 0 <= known["fact_recall"] <= 1
    assert "answer_found" not in known
    (hidden,) = run.glob("eval/last-*/eval_seed42.jsonl")
    (seen,) = out.glob("last-*/eval_seed42.jsonl")
    rows = [[json.loads(line) for line in log.read_text().splitlines()] for log in (hidden, seen)]
    for one, other in zip(*rows, strict=True):
        assert one["pred_idx"] == other["pred_idx"]
        assert one["sf_idx"] == []
        assert other["sf_idx"]
        assert not {"em", "f1", "return"} & one.keys()
    # What needs facts refuses them.
    assert "sf_idx" in refusal(commands.run("evaluate", f"--log={hidden}"))
    gold = ("--config=configs/own.py:tiny", f"--workdir={tmp_path / 'gold'}", HIDDEN)
    assert "support" in refusal(commands.run("train", *gold))


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


def test_a_reward_of_a_file_outside_the_package(commands: Commands, tmp_path: Path) -> None:
    file, run = tmp_path / "my_reward.py", tmp_path / "run"
    file.write_text(REWARD)
    flags = (*TINY, f"--workdir={run}", f"--config.reward.path={file}:score")
    text = commands.succeed("train", *flags)
    assert f"{file}:score" in text  # a user sees what code runs
    lines = metric_lines(run)
    shares = [line["train/unscored_share"] for line in lines if "train/unscored_share" in line]
    assert shares == [0.25] * 4  # of 8 episodes, each scored once
    assert any(line.get("reward/failures_raised", 0) for line in lines)
    config = json.loads((run / "config.json").read_text())
    assert (config["reward"]["name"], config["reward"]["path"]) == ("own", f"{file}:score")
    flags = (*TINY, f"--workdir={tmp_path / 'other'}", f"--config.reward.path={file}:fails")
    result = commands.run("train", *flags)
    assert (result.returncode, "Traceback" in result.stderr) == (1, False)
    assert "RuntimeError: it never works" in result.stdout
    flags = (
        *TINY,
        f"--workdir={tmp_path / 'none'}",
        f"--config.reward.path={tmp_path}/no.py:score",
    )
    assert "no.py" in refusal(commands.run("train", *flags))
    assert not (tmp_path / "none" / "config.json").exists()


DATA = """
def records(split):
    for number in range(20 if split == "train" else 6):
        chunks = [f"{split} town {n} lies at river {n + number}" for n in range(4)]
        yield {"query": f"{split} river of town {number % 4}?", "chunks": chunks,
               "support": [number % 4], "id": f"{split}-{number}"}
"""


def test_records_of_a_file_outside_the_package(commands: Commands, tmp_path: Path) -> None:
    file, run = tmp_path / "my_data.py", tmp_path / "run"
    file.write_text(DATA)
    text = commands.succeed(
        "train",
        *TINY,
        f"--workdir={run}",
        f"--config.data.path={file}:records",
        "--config.data.columns.question=query",
    )
    assert "kept 20 of 20 records" in text
    assert "eval/fact_em" in names_of(metric_lines(run))
    # A folder of a run may be somebody else's: what its config names does not run by itself.
    text = refusal(commands.run("evaluate", f"--workdir={run}", "--checkpoint=last"))
    assert f"--config.data.path={file}:records" in text
    named = f"--config.data.path={file}:records"
    commands.succeed("evaluate", f"--workdir={run}", "--checkpoint=last", named)


AGENT = """
calls = 0

def agent(question, max_searches):
    global calls
    calls += 1
    mine = calls  # others play beside it
    texts = yield question
    if mine % 4 == 0:
        raise RuntimeError("every fourth episode breaks")
    texts = yield question + " " + texts[0], texts[0]
    return texts[0].split()[-1]
"""


def test_an_agent_of_a_file_outside_the_package(commands: Commands, tmp_path: Path) -> None:
    file, run = tmp_path / "my_agent.py", tmp_path / "run"
    file.write_text(AGENT)
    flags = (
        "--config=configs/harr_grpo.py:tiny",
        "--config.agent.name=own",
        f"--config.agent.path={file}:agent",
        "--config.reward.mixture=recall=1",
        "--config.train.steps=1",
    )
    assert f"{file}:agent" in commands.succeed("train", *flags, f"--workdir={run}")
    assert [line["step"] for line in metric_lines(run) if "train/loss" in line] == [1]
    broken = "def agent(question, max_searches):\n    yield question\n    raise KeyError(1)\n"
    file.write_text(broken)
    result = commands.run("train", *flags, f"--workdir={tmp_path / 'broken'}")
    assert (result.returncode, "Traceback" in result.stderr) == (1, False)
    assert "KeyError: 1" in result.stdout
    scripted = (
        "--config=configs/harr_grpo.py:tiny",
        f"--config.agent.path={file}:agent",
        "--dry_run",
    )
    text = commands.succeed("train", *scripted, "--dry_run", f"--workdir={tmp_path / 'other'}")
    assert "not read: --config.agent.path" in text
