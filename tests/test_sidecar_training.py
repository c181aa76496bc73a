"""Training and answering with the real vLLM, on CPU, with a tiny random Qwen3: `make test-sidecar`.

Its answers are gibberish, so rewards are small shares of words met by chance; what is tested is
that they come, and that a server killed in the middle changes nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.llm.client.client import Client
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.llm.outcomes import Answer, ChatRequest, CompletionRequest, Failure
from qrag_jax.llm.server.server import Server
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.generation import token_counter
from tests.entry_points import Commands, losses, metric_lines, saved_state
from tests.llm.server.test_sidecar import PYTHON, family, pytestmark, settings
from tests.llm.stand_in import running
from tests.retrieval_logs import write_log
from tests.support import tiny_qwen3
from tests.test_answer import ROWS

__all__ = ["pytestmark"]

STEPS, ROOM = 6, 2048
TRAINING = (
    "--config=configs/hotpotqa.py:tiny",
    f"--config.train.steps={STEPS}",
    "--config.train.log_every=1",
    "--config.train.checkpoint_every=100",
    "--config.train.eval_every=100",
    "--config.encoder.length_buckets=1",
    "--config.reward.name=answer_f1",
    "--config.reward.staleness=1",
    "--config.llm.max_tokens=24",
    "--config.llm.cut_off=score",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3.save(tiny_qwen3.model(0), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("logs") / "vllm.log"
    with Server(settings(folder, log, max_model_len=ROOM)) as served:
        yield served


@pytest.fixture(scope="module")
def undisturbed(
    server: Server, commands: Commands, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A finished run with a server that was there already."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    given = (f"--config.llm.url={server.url}", "--config.llm.model=tiny")
    commands.succeed("train", *TRAINING, *given, f"--workdir={workdir}")
    return workdir


def test_rewards_come_from_the_models_answers(undisturbed: Path) -> None:
    lines = [line for line in metric_lines(undisturbed) if "train/loss" in line]
    assert len(lines) == STEPS
    assert lines[-1]["llm/answers"] > STEPS
    assert lines[-1]["llm/tokens_out"] >= lines[-1]["llm/answers"]
    assert lines[-1]["llm/failures"] == 0
    # Gibberish without a letter is no answer; it is masked.
    assert all(line["train/unscored_share"] <= 0.5 for line in lines)
    assert all(0 <= line["train/return"] < 1 for line in lines)


def test_a_server_killed_in_the_middle_changes_nothing(
    folder: Path, undisturbed: Path, commands: Commands, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    own = (
        f"--config.llm.server.model={folder}",
        f"--config.llm.server.python={PYTHON}",
        f"--config.llm.server.max_model_len={ROOM}",
        "--config.llm.server.cpu_cache_gib=1",
        "--config.llm.server.dtype=float32",
        '--config.llm.server.arguments=("--enforce-eager",)',
        "--config.llm.cache=''",
    )
    process = commands.start("train", *TRAINING, *own, f"--workdir={workdir}")
    out, ours = killed_after_the_first_loss(process, workdir)
    assert out.count("vLLM serves tiny at") == 2
    one, other = saved_state(workdir, STEPS), saved_state(undisturbed, STEPS)
    for name, value in other.items():
        np.testing.assert_array_equal(one[name], value, err_msg=name)
    assert losses(workdir) == losses(undisturbed)
    assert not any(map(running, ours))


def killed_after_the_first_loss(
    process: subprocess.Popen[str], workdir: Path
) -> tuple[str, list[int]]:
    """Kills the model server that a training began; its output, and the processes it had then."""
    deadline = time.monotonic() + 400
    while not losses(workdir) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    ours = family(process.pid)[1:]
    front = next(
        pid for pid in ours if b"api_server" in command(pid) and b"watchdog" not in command(pid)
    )
    os.kill(front, signal.SIGKILL)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-3000:]
    assert "vLLM is down" in out
    return out, ours


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_the_client_and_the_budget(server: Server, folder: Path) -> None:
    count = token_counter(str(folder))
    chunks = [f"Passage {number}: " + "the rain falls on Oslo " * 30 for number in range(8)]
    question = "Which city is the capital of France?"
    prompt, budget = prompts.load("open_qa"), ROOM - 24
    too_long = ChatRequest(prompt.with_chunks(question, chunks), max_tokens=24)
    cut = prompts.fit(prompt, question, chunks, budget, count)
    assert isinstance(cut, prompts.Fitted)
    assert cut.cut.chunks >= 1
    shown = cut.messages[-1][1]
    assert shown.endswith(f"Question: {question}")
    assert chunks[-1].strip() in shown
    assert chunks[0][:20] not in shown
    plain = CompletionRequest("Oslo is", max_tokens=24, log_probs=True)
    with Client(ClientConfig(server.url, "tiny")) as client:
        refused, fits, said = client.ask_blocking(
            [too_long, ChatRequest(cut.messages, max_tokens=24, log_probs=True), plain]
        )
    assert isinstance(refused, Failure)
    assert refused.cause == "too_long"
    assert isinstance(fits, Answer)
    assert fits.usage.prompt_tokens == count(cut.messages) <= budget
    assert len(fits.log_probs) == fits.usage.completion_tokens
    assert isinstance(said, Answer)
    assert len(said.tokens) == len(said.log_probs) == said.usage.completion_tokens
    assert all(value <= 0 for value in said.log_probs)


def test_answers_of_a_log(server: Server, commands: Commands, tmp_path: Path) -> None:
    log, out = write_log(tmp_path / "log.jsonl", ROWS), tmp_path / "answers.jsonl"
    given = (f"--log={log}", f"--out={out}", f"--llm.url={server.url}", "--llm.model=tiny")
    said = commands.succeed("answer", *given, "--llm.max_tokens=16", "--cut_off=score")
    assert len(out.read_text().splitlines()) == len(ROWS)
    assert f"{len(ROWS)} answers: {out}" in said
