"""Every system trained by its command: what a run leaves, kills, two hosts, failing services."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import harr_grpo
from qrag_jax import train
from qrag_jax.data.sample import Decomposition
from qrag_jax.models.first_language_model import TinyLMConfig, write_tiny_lm
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.whole_files import half
from qrag_jax.systems import harr
from qrag_jax.systems.harr_scoring import score_agent
from qrag_jax.systems.scoring import ScoreOptions
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
from tests.llm.model_server import Call, ModelServer, Reply
from tests.retrieval import web_service
from tests.retrieval.web_service import Say, pubmed_says, serving
from tests.systems.corpora import write_rows
from tests.systems.knowing_model import KnowingModel
from tests.systems.small_runs import small_deepretrieval, small_harr


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


def test_a_language_model_is_exported_and_shown(
    trained: Callable[[str], Path], commands: Commands, tmp_path: Path
) -> None:
    run, out, page = trained("rlvr"), tmp_path / "exported", tmp_path / "page.html"
    commands.succeed("export", f"--workdir={run}", "--checkpoint=last", f"--out={out}")
    assert (out / "model.safetensors").stat().st_size > 1000
    assert (out / "README.md").exists()
    commands.succeed("show", str(run), f"--out={page}")
    curves = {curve["name"]: curve for curve in read_page(page)["runs"][0]["curves"]}
    assert curves["train/loss"]["steps"] == [*range(1, COURSES["rlvr"].steps + 1)]


@pytest.mark.usefixtures("one_device")
def test_scores_of_agents_are_those_of_the_log(tmp_path: Path) -> None:
    config = small_harr(train__steps=1, train__eval_every=1)
    assert train.train(config, tmp_path) == 0
    score_agent(tmp_path, config, ScoreOptions("last", sampled=4))
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
    scores = next(scores for name, scores in summary["scores"].items() if "last" in name)
    rows = [json.loads(x) for x in (tmp_path / "eval/last-1/agent_seed42.jsonl").open()]
    assert summary["questions"]["apart"]
    assert len(rows) == scores["questions"] == summary["questions"]["reported"]
    assert {half(row["id"]) for row in rows} == {1}  # others chose the checkpoint
    shown = [json.loads(line) for line in (tmp_path / "episodes.jsonl").open()]
    assert {half(each["row"]["id"]) for each in shown} == {0}
    for name in ("f1", "em", "recall"):
        assert scores[name]["mean"] == pytest.approx(np.mean([row[name] for row in rows]))
    assert all(row["sampled"] == 4 for row in rows)
    passes = summary["pass@k"]
    assert passes["1"] <= passes["2"] <= passes["4"]


# ---------------------------------------------------------------------- killed, or paused


def test_killed_and_resumed(
    trained: Callable[[str], Path], commands: Commands, tmp_path: Path
) -> None:
    """It is the run that nobody killed, to the last bit. Other systems: `nightly`."""
    course, workdir, whole = COURSES["q_rag"], tmp_path / "run", trained("q_rag")
    given = ("train", *course.fields, f"--workdir={workdir}")
    process = commands.start(*given)
    wait_for_step(process, workdir, 9)
    assert end(process, signal.SIGKILL).returncode == -signal.SIGKILL
    assert not (workdir / "learning_curve.png").exists()
    assert f"resumed {workdir} at step " in commands.succeed(*given)
    assert_same_state(workdir, whole, course.steps)
    assert losses(workdir) == losses(whole)


def found(call: web_service.Call) -> Say:
    """What a query finds, which depends on its text alone."""
    first = sum(call.query.encode())
    return pubmed_says([str(1 + (first + 7 * place) % 37) for place in range(5)])


@pytest.mark.usefixtures("one_device")
def test_searches_that_fail_pause_a_training_until_it_is_stopped_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run, relevant = tmp_path / "whole", tmp_path / "run", [str(n) for n in range(1, 30)]
    rows = [(f"{n}", f"what about {n}?", relevant) for n in range(8)]
    asked = [
        f"{write_rows(tmp_path / f'{name}.jsonl', some)},{name}"
        for name, some in (("train", rows), ("test", [("t", "what of the test?", relevant)]))
    ]
    config = small_deepretrieval(
        stages=("rl",),
        model__path=str(tmp_path / "model"),
        search__engine="remote",
        queries__train=asked[0],
        queries__test=asked[1],
        queries__held_out=2,
        reward__k=5,
        eval__measures=("ndcg@10",),
        rollout__max_failed_share=0.0,
        ppo__critic_warmup=0,
        engine__pause=0.001,
        engine__timeout=0.5,
        engine__requests_per_second=10_000,
    )
    tiny = TinyLMConfig(**config.model.tiny.to_dict())
    write_tiny_lm(tmp_path / "model", [row[1] for row in rows], tiny, seed=0)
    failed: list[str] = []

    def fails(call: web_service.Call) -> Say:
        if not losses(run):
            return found(call)
        failed.append(call.query)
        if len(failed) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return Say("", status=500)

    with serving(found) as server:
        config.engine.url = server.url
        assert train.train(config, whole) == 0
        assert "paused" not in capsys.readouterr().out
        server.script = fails
        assert train.train(config, run) == 128 + signal.SIGTERM
        assert "HTTP 500" in capsys.readouterr().out
        server.script = found
        assert train.train(config, run) == 0
    assert len(failed) >= 3
    assert_same_state(run, whole, 2)
    assert losses(run) == losses(whole)


# HARR's agent asks a model server.
STEPS, TRAINING, QUESTIONS = 4, 64, 4  # steps, questions to train on, and of one batch
REACT = (
    *("--config=configs/harr_grpo.py:synthetic-react-tiny", f"--config.train.steps={STEPS}"),
    *("--config.train.log_every=1", f"--config.train.eval_every={STEPS}"),
    *("--config.train.checkpoint_every=1", "--config.agent.staleness=1"),
    *("--config.encoder.scratch.layers=1", "--config.llm.model=tiny", "--config.llm.cache=''"),
)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decomposition]:
    """How the training questions are taken apart, and then the others, by their text."""
    folder = tmp_path_factory.mktemp("apart") / "run"
    with (
        Run.open(folder, 0.0) as run,
        harr.open_system(harr_grpo.get_config("tiny"), run) as system,
    ):
        every = (*system.inputs.train, *system.inputs.dev)
        pairs = {each.question: system.inputs.apart.get(each.id) for each in every}
    return {question: each for question, each in pairs.items() if each is not None}


@pytest.mark.nightly
def test_killed_inside_a_rollout(
    apart: dict[str, Decomposition], commands: Commands, tmp_path: Path
) -> None:
    """The model server kills the training before it answers the third batch's first request.

    Play is one batch ahead: what is saved by then is the first step.
    """
    knowing = KnowingModel(apart)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    saved = killed / "checkpoints" / "last" / "1"
    processes: list[Any] = []

    def kills(call: Call) -> Reply:
        if processes and len(begun(server.calls, apart)) > 2 * QUESTIONS:
            wait_until(saved.exists)
            processes.pop().kill()
        return knowing(call)

    with ModelServer(knowing) as server:
        given = (*REACT, f"--config.llm.url={server.url}")
        commands.succeed("train", *given, f"--workdir={whole}")
        asked = begun(server.calls, apart)
        server.calls.clear()
        server.script = kills
        process = commands.start("train", *given, f"--workdir={killed}")
        processes.append(process)
        assert end(process).returncode == -signal.SIGKILL
        assert not processes
        server.calls.clear()
        out = commands.succeed("train", *given, f"--workdir={killed}")
        again = begun(server.calls, apart)
    assert f"resumed {killed} at step 1" in out
    # The batches before are not played again; all later ones are, each question once.
    assert len(asked) == STEPS * QUESTIONS
    by_batch = [sorted(asked[n : n + QUESTIONS]) for n in range(0, len(asked), QUESTIONS)]
    resumed = [sorted(again[n : n + QUESTIONS]) for n in range(0, len(again), QUESTIONS)]
    assert resumed == by_batch[2:]
    assert losses(killed) == losses(whole)
    assert_same_state(killed, whole, STEPS)
    changed = (*given, "--config.agent.staleness=0", f"--workdir={whole}")
    assert "config.agent.staleness" in refusal(commands.run("train", *changed))


def begun(calls: Sequence[Call], apart: Mapping[str, Decomposition]) -> list[str]:
    """The training questions whose first plan was asked for, in this order."""
    found = []
    for call in list(calls):
        messages = call.body["messages"]
        if len(messages) != 2 or "<passages>" in call.prompt or "<searches>" in call.prompt:
            continue
        (question,) = (each for each in apart if each in call.prompt)
        if [*apart].index(question) < TRAINING:
            found.append(question)
    return found


# ---------------------------------------------------------------------- two hosts

_TOKENS = ("--config.train.log_every=1", "--config.train.eval_every=100")
_TOKENS += ("--config.model.dtype=float32", "--config.model.tiny.layers=1")
_TOKENS += ("--config.model.tiny.weights=",)
# Runs whose numbers do not depend on how blocks are cut: in float32, few steps, a small rate.
SPREAD = {
    "q_rag": (
        *("--config=configs/quickstart.py:tiny", "--config.train.steps=8", FLOAT32),
        *("--config.train.log_every=1", "--config.train.checkpoint_every=4"),
        *("--config.train.eval_every=8", "--config.encoder.scratch.layers=1"),
        *("--config.encoder.length_buckets=1", "--config.encoder.block_sizes=1"),
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


def nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("system", "is_stopped"),
    [
        ("q_rag", False),
        nightly("q_rag", True),
        *(nightly(x, False) for x in SPREAD if x != "q_rag"),
    ],
)
def test_two_hosts_do_what_one_does(
    system: str, is_stopped: bool, commands: Commands, tmp_path: Path
) -> None:
    """One is stopped by a signal to one of the hosts, and ended by one host of two devices."""
    alone, workdir, given = tmp_path / "alone", tmp_path / "run", SPREAD[system]
    commands.succeed("train", *given, f"--workdir={alone}")
    hosts = on_hosts(commands, "train", *given, f"--workdir={workdir}")
    if is_stopped:
        wait_for_step(hosts[1], workdir, 2)
        stop_together(hosts)
        commands.succeed("train", *given, f"--workdir={workdir}", env=commands.with_devices(2))
    else:
        first, second = (end(host) for host in hosts)
        assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
        assert first.stdout.count("step 0") > second.stdout.count("step 0") == 0
    same_numbers(workdir, alone)
    assert len([*(workdir / "tensorboard").iterdir()]) <= 2
    assert json.loads((workdir / "config.json").read_text())["seed"] == 42
