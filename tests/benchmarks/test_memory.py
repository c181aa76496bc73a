"""The memory suite's bytes: those of the parts that each device holds, from programs never run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory import GIB, fits, total
from tests.devices import virtual_devices


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.memory_bytes"],
        cwd=Path(__file__).parents[2],
        env=virtual_devices(8),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_arguments_are_the_shards_of_a_device(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["arguments"] == row["expected"], row
    one, eight, lora = rows
    assert one["expected"] == one["whole"]
    assert eight["expected"] < 0.5 * eight["whole"]
    assert lora["expected"] < 0.8 * lora["whole"]  # of a tiny base little is large enough to split


def test_the_state_is_donated(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert 0 <= row["outputs"] < 4096  # metrics


def test_what_is_gathered(rows: list[dict[str, Any]]) -> None:
    one, eight, lora = rows
    assert one["gathered"] == 0
    # All kernels and word tables of two towers and their targets, against one of each.
    assert 0.9 < eight["gathered"] / (one["whole"] / 2) < 1
    assert 0 < lora["gathered"] < lora["whole"]
    for row in rows:
        assert row["temporaries"] > row["gathered"]


def test_what_fits() -> None:
    row = {"arguments": 20 * GIB, "outputs": GIB, "temporaries": GIB}
    assert total(row) == 22 * GIB
    assert fits(row) == "24 GiB"
    assert fits(row | {"temporaries": 2 * GIB}) == "40 GiB"  # room is left for the runtime
    assert fits(row | {"temporaries": 200 * GIB}) == "none"
