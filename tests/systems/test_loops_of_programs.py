"""A dry run knows the course of every loop over blocks in a system's own programs, on any mesh."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import pytest

from configs import hotpotqa
from qrag_jax.runtime import step_time
from qrag_jax.runtime.run import Run
from qrag_jax.systems import q_rag

pytestmark = pytest.mark.long


@pytest.mark.parametrize("mesh", [(2, 1, 1), pytest.param((1, 2, 2), marks=pytest.mark.slow)])
def test_every_loop_is_known(mesh: tuple[int, int, int], tmp_path: Path) -> None:
    config = hotpotqa.get_config("tiny")
    config.runtime.mesh = mesh
    devices = jax.devices()[: mesh[0] * mesh[1] * mesh[2]]
    with (
        Run.open(tmp_path / "run", time.monotonic()) as run,
        q_rag.open_system(config, run, dry=True, devices=devices) as system,
    ):
        for name, function, arguments, loops in system.programs():
            found = step_time.rows_of_loops(function.lower(*arguments).compile().as_text())
            assert found, name
            assert found <= set(loops()), name
