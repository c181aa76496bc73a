"""What does a training step of the common encoders need on each device, and where does it fit?

The step is compiled ahead of time for one device and for eight, from shapes alone: there are no
weights, nothing is computed. Bytes are those that the CPU compiler plans; a GPU's fuses otherwise,
so its temporaries are an estimate. A process of its own has eight virtual devices. `--quick`
compiles BERT-base alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.report import Case

DEVICES = 8
GIB = 2**30
CARDS = {"24 GiB": 24, "40 GiB": 40, "80 GiB": 80, "141 GB (H200)": 131}  # GiB


def run(quick: bool) -> list[Case]:
    """All cases of the suite."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    command = [sys.executable, "-m", "benchmarks.memory_cases", *(["--quick"] if quick else [])]
    cases = []
    with subprocess.Popen(  # noqa: S603
        command, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            cases.append(_case(json.loads(line)))
            print(f"compiled: {cases[-1].case}", flush=True)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {process.returncode}")
    return cases


def _case(found: dict[str, Any]) -> Case:
    data, fsdp, tensor = found["mesh"]
    training = "LoRA" if found["lora"] else "all parameters"
    count = data * fsdp * tensor
    total = sum(found[part] for part in ("arguments", "outputs", "temporaries")) / GIB
    fits = [name for name, size in CARDS.items() if total <= size]
    where = "1 device" if count == 1 else f"{count} devices, fsdp={fsdp}, tensor={tensor}"
    return Case(
        f"{found['model']}, {training}, {where}",
        total,
        "GiB a device",
        target=f"fits in {fits[0]}" if fits else "fits in none",
        details={
            "state, batch and base, GiB": found["arguments"] / GIB,
            "new arrays beside these, GiB": found["outputs"] / GIB,
            "temporaries, GiB": found["temporaries"] / GIB,
            "of which parameters gathered from other devices, GiB": found["gathered"] / GIB,
            "compiling, s": found["seconds"],
        },
    )
