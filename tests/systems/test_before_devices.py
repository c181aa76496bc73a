"""What JAX reads when it looks for devices is set before that, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOLD = """
from jax._src import xla_bridge
from qrag_jax import train
from qrag_jax.runtime import commandline
from qrag_jax.systems import q_rag

def tell(asked):
    print("started:", xla_bridge.backends_are_initialized(), "asked:", asked)

def ask(deterministic, described=False):
    tell(deterministic)
    raise SystemExit(0)

q_rag.leave_room = lambda llm: tell(llm.server.memory_share)
q_rag.determinism.ask = ask
commandline.run(train.main)
"""


def told(workdir: Path, *words: str) -> list[str]:
    given = ["--config=configs/quickstart.py:tiny", f"--workdir={workdir}", *words]
    command = [sys.executable, "-c", TOLD, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("wanted", [True, False])
def test_a_training_asks_for_determinism_in_time(tmp_path: Path, wanted: bool) -> None:
    words = [] if wanted else ["--config.runtime.deterministic=False"]
    assert told(tmp_path / "run", *words) == [f"started: False asked: {wanted}"]


def test_a_training_leaves_room_for_its_server_in_time(tmp_path: Path) -> None:
    words = ["--config.reward.name=answer_f1", "--config.llm.server.model=org/name"]
    first = told(tmp_path / "run", *words, "--config.llm.server.memory_share=0.4")[0]
    assert first == "started: False asked: 0.4"
