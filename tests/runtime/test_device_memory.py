"""Too little memory is one sentence, with fields of the config that the command was given."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime.device_memory import (
    FirstCalls,
    cgroup_room,
    saving,
)
from qrag_jax.runtime.dry_run import fit
from qrag_jax.runtime.saved_config import flat
from qrag_jax.runtime.targets import TARGETS, described_devices
from qrag_jax.systems import SYSTEMS
from tests.entry_points import ROOT

EXPERIMENTS = {
    "q_rag": ["hotpotqa", ""],
    "harr": ["harr_grpo", "tiny"],
    "rlvr": ["rlvr", "smol"],
    "leret": ["leret", "smol"],
    "deepretrieval": ["deepretrieval", "smol"],
}


def fields_in(text: str) -> list[str]:
    words = text.replace(",", " ").replace(")", " ").replace("(", " ").split()
    return [w.removeprefix("--config.").partition("=")[0] for w in words if w.startswith("--conf")]


@pytest.mark.parametrize("system", SYSTEMS)
def test_fields_that_are_named_are_fields_of_the_system(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    name, variant = EXPERIMENTS[system]
    known = flat(import_module(f"configs.{name}").get_config(variant).to_dict())
    named = fields_in(saving(system))
    assert len(named) >= 5
    assert not [name for name in named if name not in known]
    # Systems whose rows are computed in blocks refuse other values than 1.
    assert ("train.accumulation" in named) == (system == "q_rag")
    assert ("sampling.rows" in named) == (system in ("rlvr", "leret", "deepretrieval"))


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()  # where version 1 of control groups has its files
    for folder, most, used in (
        (tmp_path, "memory.max", "memory.current"),
        (tmp_path / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        (folder / most).write_text("4096\n")
        (folder / used).write_text("1024\n")
        (folder / "memory.stat").write_text("anon 512\ninactive_file 256\n")
    assert {*cgroup_room(tmp_path)} == {4096 - 1024 + 256}
    assert cgroup_room(tmp_path / "none") == []


def test_memory_of_a_program_is_told_once_before_it_runs_and_compiles_nothing_twice() -> None:
    from qrag_jax.runtime.compilation import CompilationCounter

    lines: list[str] = []
    calls = FirstCalls(jax.local_devices()[:1], "q_rag", lines.append)
    program = jax.jit(lambda a, b: (a @ b, a.sum()), donate_argnums=0)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    a, b = (jax.device_put(jnp.ones((64, 64), jnp.float32), place) for _ in range(2))
    counter = CompilationCounter()
    calls.before("update", program, (a, b))
    calls.before("update", program, (a, b))
    jax.block_until_ready(program(a, b))
    assert counter.count == 1
    (told,) = lines
    assert told.startswith("memory of the update: ")
    assert " per device, 0.0 MiB of it there already and " in told or "KiB" in told


PEAK = """
import numpy as np
from qrag_jax.runtime.device_memory import PeakMemory
before = PeakMemory()
small = before.mebibytes()
np.ones(100 * 2**20, np.uint8).sum()
large = before.mebibytes()
print(small, large, PeakMemory().mebibytes())
"""


def test_peak_memory_counts_what_was_given_back() -> None:
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    small, large, again = map(float, out.stdout.split())
    assert small + 90 < large < small + 150
    # Linux forgets an earlier peak.
    assert again < large - 90 if sys.platform == "linux" else again >= large


# ---------------------------------------------------------------------- described devices


@pytest.mark.parametrize(
    "name",
    ["b9", "h100x0", "h100x", "x8", "h100 x8", "H100", "", "h100x12", "v5ex3", "v6ex512"],
)
def test_unknown_devices_and_numbers_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="--for"):
        described_devices(name)


def test_what_fits_is_told_with_what_is_missing() -> None:
    target = TARGETS["h100"]
    room = int(0.92 * target.memory)
    assert fit(room, target).startswith("fits: ")
    told = fit(room + 3 * 2**30, target, "q_rag")
    assert "3.0 GiB too much" in told
    assert "--config.encoder.block_tokens" in told
