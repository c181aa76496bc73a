"""Every system trained by its command: what a run leaves, kills, two hosts, failing services."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from qrag_jax.models.first_language_model import TinyLMConfig, write_tiny_lm
from qrag_jax.sweep import Plan
from qrag_jax.systems import training
from tests.entry_points import (
    ROOT,
    SHARED,
    Commands,
    assert_same_run,
    end,
    flags_of,
    free_address,
    losses,
    on_hosts,
    refusal,
    same_numbers,
    wait_for_step,
    wait_until,
)
from tests.retrieval import web_service
from tests.retrieval.web_service import Say, pubmed_says, serving
from tests.systems.corpora import tree, write_corpus_file, write_rows, write_tower
from tests.systems.small_runs import small_deepretrieval


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
    test = [("t", "what of the test?", relevant)]
    config = small_deepretrieval(
        stages=("rl",),
        model__path=str(tmp_path / "model"),
        search__engine="remote",
        queries__train=f"{write_rows(tmp_path / 'train.jsonl', rows)},train",
        queries__test=f"{write_rows(tmp_path / 'test.jsonl', test)},test",
        queries__held_out=2,
        reward__k=5,
        eval__measures=("ndcg@10",),
        rollout__max_failed_share=0.0,
        ppo__critic_warmup=0,
        engine__timeout=0.5,
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
        assert training.train(config, whole) == 0
        server.script = fails
        assert training.train(config, run) == 128 + signal.SIGTERM
        assert "HTTP 500" in capsys.readouterr().out
        server.script = found
        assert training.train(config, run) == 0
    assert len(failed) >= 3
    assert_same_run(run, whole, 2)


# ---------------------------------------------------------------------- two hosts

_TOKENS = (
    " train.log_every=1 train.eval_every=100 model.dtype=float32 model.tiny.layers=1 "
    "model.tiny.weights="
)
# Runs whose numbers do not depend on how blocks are cut: in float32, few steps, a small rate.
SPREAD = {
    "q_rag": flags_of(
        "quickstart.py:tiny",
        "train.steps=8 train.log_every=1 train.checkpoint_every=4 train.eval_every=8 "
        "encoder.dtype=float32 encoder.length_buckets=1 encoder.block_sizes=1 "
        "encoder.scratch.layers=1",
    ),
    "harr": flags_of(
        "harr_ppo.py:tiny",
        "train.steps=3 train.batch_size=12 train.log_every=1 encoder.lora.rank=4 "
        "encoder.dtype=float32 optimizer.learning_rate=1e-4 policy.pool=16 policy.passages=8",
    ),
    "rlvr": flags_of("rlvr.py:tiny", "sft.steps=1 train.steps=2" + _TOKENS),
    "deepretrieval": flags_of(
        "deepretrieval.py:tiny",
        "script.steps=2 queries.made_train=12 queries.made_corpus=25" + _TOKENS,
    ),
    "leret": flags_of(
        "leret.py:tiny",
        "script.steps=10 questions.bridge_corpus=24 writing.k=12 writing.passage_words=8 "
        "sampling.room=512 iterations=1 model.lora.rank=4" + _TOKENS,
    ),
}


@pytest.mark.parametrize(
    "system",
    ["q_rag", *(pytest.param(x, marks=pytest.mark.nightly) for x in SPREAD if x != "q_rag")],
)
def test_two_hosts_do_what_one_does(system: str, commands: Commands, tmp_path: Path) -> None:
    """Q-RAG's are stopped by a signal to one of them, and one host goes on alone."""
    alone, workdir, given = tmp_path / "alone", tmp_path / "run", SPREAD[system]
    commands.succeed("train", *given, f"--workdir={alone}")
    hosts = on_hosts(commands, "train", *given, f"--workdir={workdir}")
    if system == "q_rag":
        wait_for_step(hosts[1], workdir, 2)
        hosts[1].send_signal(signal.SIGTERM)  # which stops both
        ended = [end(host) for host in hosts]
        assert {each.returncode for each in ended} <= {0, 128 + signal.SIGTERM}, ended
        commands.succeed("train", *given, f"--workdir={workdir}")
    else:
        first, second = (end(host) for host in hosts)
        assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
        assert first.stdout.count("step 0") > second.stdout.count("step 0") == 0
    same_numbers(workdir, alone)


# ---------------------------------------------------------------------- hosts that die or wait

COUNT, PART = 75, 8  # 10 parts, the last one of 3 passages


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("corpus")
    source, tower = write_corpus_file(folder / "corpus.jsonl", COUNT), write_tower(folder / "model")
    return (f"--corpus={source}", f"--encoder={tower}", f"--part={PART}", "--workers=0")


def finished_parts(out: Path) -> list[Path]:
    return sorted(out.glob("exact/vectors.*.json"))


@pytest.mark.nightly
def test_an_index_of_two_hosts_has_the_bytes_of_one_though_one_is_killed(
    commands: Commands, corpus: tuple[str, ...], tmp_path: Path
) -> None:
    """What was finished by then is not embedded again."""
    commands.succeed("index", *corpus, f"--index={tmp_path / 'one'}")
    out = tmp_path / "two"
    first, second = on_hosts(commands, "index", *corpus, f"--index={out}")
    wait_until(lambda: len(finished_parts(out)) >= 2, second)
    assert end(second, signal.SIGKILL).returncode == -signal.SIGKILL
    assert end(first).returncode not in (0, 2)
    assert not (out / "exact" / "manifest.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in finished_parts(out)}
    assert len(kept) < -(-COUNT // PART)
    first, second = (end(host) for host in on_hosts(commands, "index", *corpus, f"--index={out}"))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    passages = sum(3 if path.name.startswith("vectors.9.") else PART for path in kept)
    assert f"{COUNT - passages} embedded now" in first.stdout
    assert tree(out) == tree(tmp_path / "one")


def test_a_host_that_stays_alone_gives_up() -> None:
    code = "import sys; from qrag_jax.runtime.hosts import joined\nwith joined(sys.argv[1], 2): 1"
    words = [sys.executable, "-c", code, f"{free_address()},2,0"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert "--hosts" in refusal(done, 1)


def test_wrong_hosts(commands: Commands, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        given = (f"--index={tmp_path / 'out'}", "--encoder=x", f"--hosts={address},2,0")
        assert address in refusal(commands.run("index", *given))


# ---------------------------------------------------------------------- a sweep of several runs

PATHS = {"data.path": ["examples/worlds/records.py:tiny_hotpotqa", "/no/such.jsonl"]}
GOOD, BAD = (f"data.path={path}" for path in PATHS["data.path"])
# The fields of `entry_points.SHARED`, so that programs are found in the cache; one run fails.
SWEEP = (
    *("--config=configs/hotpotqa.py:tiny", f"--set=data.path={','.join(PATHS['data.path'])}"),
    *(word.replace("--config.", "--set=") for word in SHARED[1:] if "eval_every" not in word),
    *("--set=train.eval_every=24", "--samples=4"),
)
NAMES = [run.name for run in Plan("", [42], PATHS).runs()]


def test_stopped_gone_on_with_and_compared(commands: Commands, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    first = out / NAMES[0]
    process = commands.start("sweep", *SWEEP, f"--out={out}", stdin=subprocess.DEVNULL)
    wait_for_step(process, first, 4)
    done = end(process, signal.SIGINT)
    assert done.returncode == 128 + signal.SIGINT, done.stderr[-2000:]
    saved = max(int(path.name) for path in (first / "checkpoints/last").iterdir())
    assert 4 <= saved < 24
    # The same command goes on; the second run fails, and the sweep does not end with it.
    result = commands.run("sweep", *SWEEP, f"--out={out}")
    assert result.returncode == 1, result.stderr[-2000:]
    assert [step for step, _ in losses(first)] == [*range(1, 25)]
    good, bad = json.loads((out / "table.json").read_text())["settings"]
    assert (good["settings"], good["seeds"], good["questions"]) == (GOOD, [42], 4)
    summary = json.loads((first / "eval/summary.json").read_text())
    assert good["mean"] == pytest.approx(summary["scores"]["trained"]["fact_f1"]["mean"])
    assert bad == {"settings": BAD, "seeds": []}
    assert NAMES[1] in commands.succeed("sweep", f"--out={out}", "--table")
    assert "seeds" in refusal(commands.run("sweep", *SWEEP, "--seeds=42,43", f"--out={out}"))
