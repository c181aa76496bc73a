"""DeepRetrieval by the commands: its ways to learn, searches that fail, and guards."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.entry_points import (
    COURSES,
    Commands,
    assert_same_state,
    end,
    metric_lines,
    saved_state,
    wait_for_step,
    wait_until,
)
from tests.retrieval.web_service import Call, Say, pubmed_says, serving
from tests.systems.corpora import write_rows

COURSE = COURSES["deepretrieval"]
SCRIPT, RL, STEPS = 4, 3, COURSE.steps
TINY = COURSE.fields
MODEL = tuple(word for word in TINY if ".model." in word or "--config=" in word)
MODEL += ("--config.optimizer.matrices=adam", "--config.train.checkpoint_every=1")
GUARDS = {"answer_in_query", "repetition", "kept_words", "new_words", "query_words", "echo"}


@pytest.fixture(scope="module")
def run(trained: Callable[[str], Path]) -> Path:
    return trained("deepretrieval")


def test_what_a_run_leaves(run: Path) -> None:
    lines = metric_lines(run)
    of_rl = [line for line in lines if "train/return" in line]
    assert [line["step"] for line in of_rl] == [*range(SCRIPT + 1, STEPS + 1)]
    for line in of_rl:
        assert {"train/ndcg@100", "train/gain", "train/format", "train/words"} <= line.keys()
        assert {"train/kl", "train/entropy", "train/value_loss", "searches"} <= line.keys()
        assert line["train/return"] == pytest.approx(line["train/gain"], abs=1e-6)
    last = lines[-1] if "eval/ndcg@10" in lines[-1] else lines[-2]
    assert {f"eval/{name}" for name in (*GUARDS, "format", "failed_share")} <= last.keys()
    assert last["original/recall@100"] == 1.0
    assert any("critic" in name for name in saved_state(run, STEPS))
    stages = [path.name for path in (run / "checkpoints" / "stages").iterdir()]
    assert stages == [f"{SCRIPT}"]


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
    "--config.engine.pause=0.001",
    "--config.engine.timeout=0.5",
    "--config.engine.requests_per_second=10000",
)


def answer(call: Call) -> Say:
    """What a query finds, which depends on its text alone."""
    first = sum(call.query.encode())
    return pubmed_says([str(1 + (first + 7 * place) % 37) for place in range(5)])


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
        assert "paused" not in commands.succeed("train", *given, f"--workdir={workdir}")
        return folder, workdir, server.queries


def test_searches_that_fail_for_good_pause_the_run_until_it_is_stopped_and_goes_on(
    commands: Commands, run: Path, undisturbed: tuple[Path, Path, Sequence[str]], tmp_path: Path
) -> None:
    folder, whole, _ = undisturbed
    workdir = tmp_path / "run"
    with serving(answer) as server:
        given = arguments(run, folder, server.url)
        process = commands.start("train", *given, f"--workdir={workdir}")
        wait_for_step(process, workdir, 1)
        server.script = lambda call: Say("", status=500)
        failing = len(server.calls)
        wait_until(lambda: len(server.calls) >= failing + 3, process)
        time.sleep(0.5)
        assert process.poll() is None
        done = end(process, signal.SIGTERM)
        assert "Traceback" not in done.stderr
        assert "HTTP 500" in done.stdout
        server.script = answer
        out = commands.succeed("train", *given, f"--workdir={workdir}")
    assert f"resumed {workdir} at step" in out
    assert_same_state(workdir, whole, RL)
