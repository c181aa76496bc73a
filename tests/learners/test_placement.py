"""Weights on the mesh: as they were read, where they belong, and how much memory that took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.devices import environment_of
from tests.learners import placed_weights


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `placed_weights` measures: memory is counted by process."""
    result = subprocess.run(
        [
            *(sys.executable, "-m", "tests.learners.placed_weights"),
            str(tmp_path_factory.mktemp("placed")),
        ],
        cwd=Path(__file__).parents[2],
        env=environment_of(8),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-5000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_what_is_placed_is_what_was_read(tmp_path: Path) -> None:
    placed_weights.write(tmp_path / "small", placed_weights.SMALL, np.float32, 10**5)
    placed_weights.write(tmp_path / "half", placed_weights.SMALL, ml_dtypes.bfloat16, 10**9)
    assert placed_weights.values(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts the memory")
def test_memory_on_the_way_is_that_of_a_tensor(memory: dict[str, Any]) -> None:
    """Virtual devices keep their arrays in this process: what it grew by at most, less the arrays
    that are there in the end, is what the host held on the way, mapped pages of files included."""
    assert memory["whole"] > 4 * memory["shard"]
    allowed = 1.3 * memory["shard"] + memory["tensor"]
    # Reading all tensors and stacking them does not pass, so this measures what it says.
    assert memory["reading_all"] > 2 * allowed
    assert memory["ours"] < allowed
    assert memory["ours"] < 2 * memory["tensor"] + 5e6
    # All of the model is there once, but for small leaves.
    assert memory["held"] < 1.02 * memory["whole"]
    assert memory["most_on_a_device"] < 1.02 * memory["whole"] / 8
