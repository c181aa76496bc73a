"""Too little memory is one sentence, with fields of the config that the command was given."""

from __future__ import annotations

import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from qrag_jax.runtime import device_memory
from qrag_jax.runtime.device_memory import (
    SAVING,
    FirstCalls,
    cgroup_room,
    line,
    saving,
    shortage,
)
from qrag_jax.runtime.saved_config import flat
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


def config_of(system: str) -> dict[str, Any]:
    name, variant = EXPERIMENTS[system]
    return flat(import_module(f"configs.{name}").get_config(variant).to_dict())


@pytest.mark.parametrize("system", SYSTEMS)
def test_fields_that_are_named_are_fields_of_the_system(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    known = config_of(system)
    named = fields_in(saving(system))
    assert len(named) >= 5
    assert not [name for name in named if name not in known]
    # Systems whose rows are computed in blocks refuse other values than 1.
    accumulates = "train.accumulation" in named
    assert accumulates == (system == "q_rag")
    assert any("block_tokens" in name for name in named)
    assert ("sampling.rows" in named) == (system in ("rlvr", "leret", "deepretrieval"))


def test_an_array_that_is_too_large_is_told_with_the_fields_of_the_system() -> None:
    """A real failure of XLA: so many bytes are nowhere."""
    with pytest.raises(jax.errors.JaxRuntimeError) as found:
        jax.block_until_ready(jax.jit(lambda n: jnp.ones(2**44) * n)(2.0))
    for system in SAVING:
        told = shortage(found.value, system) or ""
        assert told.startswith("the memory of the devices is not enough (65536.0 GiB more were ")
        assert told.endswith(f"; {saving(system)}.")
    assert (shortage(found.value) or "").endswith("; a smaller model or more devices needs less.")


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


COMMAND = """
import sys
import jax, jax.numpy as jnp
from qrag_jax.runtime import commandline
from qrag_jax.systems import run_flags
CONFIG = run_flags.define_experiment()
def main():
    run_flags.given_experiment(CONFIG)
    jax.block_until_ready(jax.jit(lambda n: jnp.ones(2**44) * n)(2.0))
commandline.run(main)
"""


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_command_names_the_fields_of_its_config(system: str) -> None:
    name, variant = EXPERIMENTS[system]
    config = f"--config=configs/{name}.py" + (f":{variant}" if variant else "")
    found = subprocess.run(
        [sys.executable, "-c", COMMAND, config], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].endswith(f"; {saving(system)}.")
    assert "Traceback" not in found.stderr


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


def test_a_program_that_does_not_fit_is_told_with_what_needs_less() -> None:
    there, more = 2**30, 3 * 2**30
    assert line("update", there, more, None, "q_rag") == (
        "memory of the update: 4.0 GiB per device, 1.0 GiB of it there already and 3.0 GiB more"
    )
    assert line("update", there, more, more, "q_rag").endswith("; 3.0 GiB are free")
    told = line("update", there, more, more - 1, "leret")
    assert "3.0 GiB are free, which is too little: " in told
    assert told.endswith(saving("leret"))


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


@pytest.mark.parametrize(("platform", "unit"), [("linux", 2**10), ("darwin", 1)])
def test_peak_memory_without_proc(
    platform: str, unit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """getrusage gives KiB on Linux and bytes on macOS."""
    monkeypatch.setattr(device_memory, "STATUS", tmp_path / "none")
    monkeypatch.setattr(sys, "platform", platform)
    least = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    assert least <= device_memory.peak_bytes() < least + 64 * 2**10 * unit
