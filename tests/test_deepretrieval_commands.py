"""DeepRetrieval by the commands: a run that is killed and goes on, and searches that fail."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.entry_points import Commands, losses, metric_lines, saved_state
from tests.retrieval.web_service import Call, Say, Script, pubmed_says, serving
from tests.systems.corpora import write_rows

pytestmark = pytest.mark.long

SCRIPT, RL = 6, 4
MODEL = (
    "--config=configs/deepretrieval.py:tiny",
    "--config.model.tiny.layers=1",
    "--config.model.tiny.copies=False",
    "--config.model.tiny.hidden=32",
    "--config.model.tiny.intermediate=32",
    "--config.model.tiny.vocab=420",
    "--config.model.block_tokens=1024",
    "--config.optimizer.matrices=adam",
    "--config.train.checkpoint_every=1",
)
TINY = (
    *MODEL,
    "--config.writing.query_tokens=32",
    f"--config.script.steps={SCRIPT}",
    f"--config.train.steps={RL}",
)
GUARDS = {"answer_in_query", "repetition", "kept_words", "new_words", "query_words", "echo"}


@pytest.fixture(scope="module")
def run(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("deepretrieval") / "run"
    out = commands.succeed("train", *TINY, f"--workdir={workdir}")
    assert "6 steps of imitating 4 scripted rewritings, then 4 steps of PPO by 4 queries × 1" in out
    return workdir


def check_same(one: Path, other: Path, step: int) -> None:
    """The parameters of policy and critic, and all else that is saved, to the last bit."""
    given, wanted = saved_state(one, step), saved_state(other, step)
    assert given.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(given[name], value, err_msg=name)


def test_what_a_run_leaves(run: Path) -> None:
    lines = metric_lines(run)
    assert [line["step"] for line in lines if "eval/ndcg@10" in line] == [0, SCRIPT + RL]
    assert len(losses(run)) == SCRIPT + RL
    of_rl = [line for line in lines if "train/return" in line]
    assert [line["step"] for line in of_rl] == [7, 8, 9, 10]
    for line in of_rl:
        assert {"train/ndcg@100", "train/gain", "train/format", "train/words"} <= line.keys()
        assert {"train/kl", "train/entropy", "train/value_loss", "searches"} <= line.keys()
        assert line["train/return"] == pytest.approx(line["train/gain"], abs=1e-6)
    # The shapes of queries are of batches in which there was one.
    assert any(line.keys() >= GUARDS for line in of_rl)
    last = lines[-1] if "eval/ndcg@10" in lines[-1] else lines[-2]
    assert {f"eval/{name}" for name in (*GUARDS, "format", "failed_share")} <= last.keys()
    assert last["original/recall@100"] == 1.0
    state = saved_state(run, SCRIPT + RL)
    assert any("critic" in name for name in state)
    assert (run / "learning_curve.png").stat().st_size > 10_000
    assert (run / "model" / "tokenizer.json").exists()
    assert sorted(path.name for path in (run / "search").iterdir()) == ["made"]
    stages = [path.name for path in (run / "checkpoints" / "stages").iterdir()]
    assert stages == [f"{SCRIPT}"]


def test_a_dry_run_names_the_update_of_each_stage(commands: Commands) -> None:
    out = commands.succeed("train", *TINY, "--dry_run")
    assert "  update by ScriptConfig: " in out
    assert "  update by TokenPPOConfig: " in out
    assert "2 programs, each compiled once" in out


@pytest.mark.parametrize("fields", [(), ("--config.rollout.staleness=1",)], ids=["strict", "stale"])
def test_killed_and_gone_on(
    fields: tuple[str, ...], commands: Commands, run: Path, tmp_path: Path
) -> None:
    """Killed in the stage of imitation and in that of PPO; the same to the last bit."""
    given = (*TINY, *fields)
    whole = run
    if fields:
        whole = tmp_path / "whole"
        commands.succeed("train", *given, f"--workdir={whole}")
    workdir, told = tmp_path / "killed", ""
    for after in (3, SCRIPT + 1):
        process = commands.start("train", *given, f"--workdir={workdir}")
        while process.poll() is None and len(losses(workdir)) < after:
            time.sleep(0.005)
        process.kill()
        out, _ = process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL
        told += out
    told += commands.succeed("train", *given, f"--workdir={workdir}")
    assert told.count(f"resumed {workdir} at step") == 2
    check_same(workdir, whole, SCRIPT + RL)


WAYS = {
    "several": ("--config.ppo.epochs=2", "--config.ppo.minibatches=2"),
    "none": ("--config.ppo.critic=none", "--config.ppo.critic_warmup=0"),
    "grpo": ("--config.algorithm=grpo", "--config.grpo.longest=32"),
    "adapters": ("--config.model.lora.rank=2", "--config.rollout.staleness=1"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains(way: str, commands: Commands, run: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    fields = {"stages": "('rl',)", "train.steps": 2, "model.path": run / "model"}
    given = [*TINY, *WAYS[way], *(f"--config.{name}={value}" for name, value in fields.items())]
    out = commands.succeed("train", *given, f"--workdir={workdir}")
    assert ("GRPO by 1 queries × 4" if way == "grpo" else "PPO by 4 queries × 1") in out
    lines = [line for line in metric_lines(workdir) if "train/return" in line]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert np.isfinite(line["train/loss"])
        assert bool(line.get("train/value_loss")) == (way in ("several", "adapters"))
    names = saved_state(workdir, 2)
    assert any("critic" in name for name in names) == (way in ("several", "adapters"))
    assert any("lora_a" in name for name in names) == (way == "adapters")
    of_critic = [name for name in names if name.startswith("critic/tower")]
    assert any("lora_a" in name for name in of_critic) == (way == "adapters")


# ---------------------------------------------------------------- a service that misbehaves

QUERIES = 10
# Random weights seldom end an output, so it may be long.
REMOTE = (
    *MODEL,
    "--config.stages=('rl',)",
    "--config.search.engine=remote",
    "--config.queries.held_out=2",
    "--config.writing.query_tokens=200",
    "--config.reward.k=5",
    "--config.eval.measures=('ndcg@10',)",
    "--config.rollout.max_failed_share=0.0",
    "--config.ppo.critic_warmup=0",
    f"--config.train.steps={RL}",
    "--config.engine.attempts=1",
    "--config.engine.pause=0.001",
    "--config.engine.timeout=0.5",
    "--config.engine.requests_per_second=10000",
)


def answer(call: Call) -> Say:
    """What a query finds, which depends on its text alone."""
    first = sum(call.query.encode())
    return pubmed_says([str(1 + (first + 7 * place) % 37) for place in range(5)])


def disturbed(first: int, last: int) -> Script:
    """Requests of these numbers, counted by the server, are answered in some wrong way."""
    ways = (
        Say(drop=True),
        Say("<html>we are sorry</html>", status=503),
        Say("<html>", drip=0.2),
        Say({"esearchresult": {"count": "5", "idlist": ["1"]}}),
        Say("", status=429, headers={"Retry-After": "0.01"}),
        Say({"nonsense": [1, 2]}),
    )
    count = iter(range(10**9))

    def script(call: Call) -> Say:
        number = next(count)
        return ways[number % len(ways)] if first <= number < last else answer(call)

    return script


def arguments(run: Path, folder: Path, url: str) -> list[str]:
    """Those of a training in which the service at a URL is searched; its data are in a folder."""
    relevant = [f"{each}" for each in range(1, 30)]
    rows = [(f"{n}", f"what about {n}?", relevant) for n in range(QUERIES)]
    train = write_rows(folder / "train.jsonl", rows)
    test = write_rows(folder / "test.jsonl", [("t", "what of the test?", relevant)])
    return [
        *REMOTE,
        f"--config.queries.train={train},train",
        f"--config.queries.test={test},test",
        f"--config.model.path={run / 'model'}",
        f"--config.engine.url={url}",
    ]


@pytest.fixture(scope="module")
def undisturbed(
    commands: Commands, run: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Sequence[str]]:
    """A folder with data, a run that nobody disturbed, and what was searched for."""
    folder = tmp_path_factory.mktemp("remote")
    workdir = folder / "run"
    with serving(answer) as server:
        given = arguments(run, folder, server.url)
        out = commands.succeed("train", *given, f"--workdir={workdir}")
        assert "paused" not in out
        return folder, workdir, server.queries


def test_outputs_that_can_be_read_are_searched_for(
    undisturbed: tuple[Path, Path, Sequence[str]],
) -> None:
    _, workdir, queries = undisturbed
    originals = {f"what about {n}?" for n in range(QUERIES)}
    rewritten = [each for each in queries if each not in originals]
    assert originals <= set(queries)
    assert len(rewritten) >= 3
    lines = [line for line in metric_lines(workdir) if "train/return" in line]
    assert any(line["train/format"] > 0 and line["train/ndcg@5"] > 0 for line in lines)


def test_searches_that_die_slow_down_and_lie_change_nothing(
    commands: Commands, run: Path, undisturbed: tuple[Path, Path, Sequence[str]], tmp_path: Path
) -> None:
    folder, whole, _ = undisturbed
    first = QUERIES // 2
    with serving(disturbed(first, first + 24)) as server:
        given = arguments(run, folder, server.url)
        out = commands.succeed("train", *given, f"--workdir={tmp_path / 'run'}")
        assert len(server.calls) > first + 24
    assert re.search(r"paused: \d of \d episodes broke \(.* PubMed: .* playing them again in", out)
    check_same(tmp_path / "run", whole, RL)


def test_searches_that_fail_for_good_pause_the_run_until_it_is_stopped_and_goes_on(
    commands: Commands, run: Path, undisturbed: tuple[Path, Path, Sequence[str]], tmp_path: Path
) -> None:
    folder, whole, _ = undisturbed
    workdir = tmp_path / "run"
    with serving(answer) as server:
        given = arguments(run, folder, server.url)
        process = commands.start("train", *given, f"--workdir={workdir}")
        while process.poll() is None and len(losses(workdir)) < 1:
            time.sleep(0.005)
        server.script = lambda call: Say("", status=500)
        failing = len(server.calls)
        while process.poll() is None and len(server.calls) < failing + 3:
            time.sleep(0.01)
        time.sleep(0.5)
        assert process.poll() is None
        process.terminate()
        out, err = process.communicate(timeout=300)
        assert "Traceback" not in err
        said = r"paused: \d of \d episodes broke \(server \d; for example: PubMed: .*HTTP 500.*\); "
        assert re.search(said + r"playing them again in 2 s\. Stopped and given again, the", out)
        server.script = answer
        out = commands.succeed("train", *given, f"--workdir={workdir}")
    assert f"resumed {workdir} at step" in out
    check_same(workdir, whole, RL)


def test_guards_end_a_run_that_goes_on_all_the_same(commands: Commands, tmp_path: Path) -> None:
    """With another action the same command goes on."""
    workdir = tmp_path / "run"
    guarded = (
        *TINY,
        "--config.train.steps=8",
        "--config.train.checkpoint_every=2",
        "--config.guards.min_entropy=100",
        "--config.guards.patience=1",
    )
    ended = commands.succeed("train", *guarded, f"--workdir={workdir}")
    assert "config.guards.min_entropy" in ended
    assert len(losses(workdir)) == SCRIPT + 1
    resumed = commands.succeed(
        "train", *guarded, "--config.guards.action=tell", f"--workdir={workdir}"
    )
    assert resumed.count("guard: the policy's entropy") >= 7
    assert len(losses(workdir)) == SCRIPT + 8
