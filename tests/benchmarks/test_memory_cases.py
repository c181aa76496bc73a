"""Bytes of compiled steps: what goes in is the sum of the parts that each device holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json
import jax
from benchmarks.memory_cases import TINY, Step, mesh_of, part_bytes, whole_bytes

for shape in ((1, 1, 1), (1, 4, 2)):
    for lora in (False, True):
        step = Step(TINY, mesh_of(shape), lora)
        stats = step.compile().memory_analysis()
        leaves = jax.tree.leaves(step.arguments)
        parts, wholes = sum(map(part_bytes, leaves)), sum(map(whole_bytes, leaves))
        found = stats.argument_size_in_bytes, parts, wholes, step.gathered_bytes()
        print(json.dumps([list(shape), lora, *found]))
"""


@pytest.fixture(scope="module")
def found() -> list[list]:
    flags = "--xla_force_host_platform_device_count=8"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_goes_in_is_what_each_device_holds(found: list[list]) -> None:
    assert len(found) == 4
    for _, _, arguments, parts, *_ in found:
        assert arguments == pytest.approx(parts, rel=0.01)


def test_eight_devices_hold_less_and_gather(found: list[list]) -> None:
    for shape, _, _, parts, wholes, gathered in found:
        one = shape == [1, 1, 1]
        assert (parts == wholes) == one
        assert (gathered == 0) == one
