"""HARR with the real vLLM, on CPU, and a genuine small model: `make test-sidecar`.

SmolLM2-135M follows ReAct's form if its prompts show an example. What it says is mostly wrong, so
rewards are small; what is tested is that its searches and answers are played and learned from, and
that a server killed in the middle loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qrag_jax.llm.server.server import Server
from qrag_jax.models.smollm2 import find_smollm2
from tests.entry_points import ROOT, Commands, metric_lines
from tests.llm.server.test_sidecar import PYTHON, pytestmark, settings
from tests.llm.stand_in import running
from tests.test_sidecar_training import killed_after_the_first_loss

__all__ = ["pytestmark"]

ROOM = 2048
TRAINING = (
    "--config.train.steps=2",
    "--config.train.batch_size=2",
    "--config.train.log_every=1",
    "--config.train.eval_every=2",
    "--config.eval.samples=4",
    "--config.reward.mixture=recall=1,f1=1",
    "--config.llm.max_tokens=48",
    f"--config.agent.prompts={ROOT / 'tests' / 'llm' / 'small_prompts'}",
)
REACT = ("--config=configs/harr_grpo.py:synthetic-react-tiny", *TRAINING)
SEARCH_R1 = (
    "--config=configs/harr_grpo.py:synthetic-search_r1-tiny",
    *TRAINING,
    "--config.agent.chat_template={prompt}",
    "--config.agent.max_broken_share=1",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    found = find_smollm2()
    if found is None:
        pytest.skip("the package index has no SmolLM2")
    return found


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("logs") / "vllm.log"
    with Server(settings(folder, log, max_model_len=ROOM)) as served:
        yield served


def trained(workdir: Path) -> list[dict[str, float]]:
    return [line for line in metric_lines(workdir) if "train/loss" in line]


def test_react(server: Server, commands: Commands, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    given = (f"--config.llm.url={server.url}", "--config.llm.model=tiny")
    commands.succeed("train", *REACT, *given, f"--workdir={workdir}")
    lines = trained(workdir)
    assert len(lines) == 2
    assert lines[-1]["llm/answers"] > 8
    assert lines[-1]["llm/failures"] == 0
    assert all(line["train/unscored_share"] <= 0.5 for line in lines)
    assert all(1 <= line["train/hops"] <= 3 for line in lines)
    out = commands.succeed("evaluate", f"--workdir={workdir}", "--checkpoint=last", "--samples=4")
    assert "gain over untrained" in out
    (log,) = workdir.glob("eval/last-2/agent_seed42.jsonl")
    assert len(log.read_text().splitlines()) == 4


def test_search_r1(server: Server, commands: Commands, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    given = (f"--config.llm.url={server.url}", "--config.llm.model=tiny")
    commands.succeed("train", *SEARCH_R1, *given, f"--workdir={workdir}")
    lines = trained(workdir)
    assert len(lines) == 2
    assert lines[-1]["llm/answers"] > 8
    # Some of its replies have neither a search nor an answer; such episodes are masked.
    assert any(line["train/unscored_share"] < 1 for line in lines)


def test_a_server_killed_in_the_middle_loses_nothing(
    folder: Path, commands: Commands, tmp_path: Path
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
    steps = ("--config.train.steps=5", "--config.train.eval_every=5")
    process = commands.start("train", *REACT, *steps, *own, f"--workdir={workdir}")
    _, ours = killed_after_the_first_loss(process, workdir)
    lines = trained(workdir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["train/unscored_share"] <= 0.5 for line in lines)
    assert not any(map(running, ours))
