"""How a training went on: its scores on the questions for choices, by what it had cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.which_cases.found import Course
from benchmarks.which_cases.measured import Cost
from qrag_jax.runtime.saved_config import CONFIG_NAME, read_fields
from qrag_jax.runtime.writers import METRICS_NAME, read_metrics


def of_run(workdir: Path, cost: Cost, *before: Cost, part: str = "") -> Course | None:
    """The scores that choose a run's best checkpoint, oldest first; None: it has none.

    Processor minutes are estimated: those of the command, by the share of the run's own clock that
    had passed.

    Args:
        cost: of the command.
        before: of what was done first, such as another training.
        part: of an episode, after which the score counts, such as hop2/.
    """
    measure = part + str(read_fields(workdir / CONFIG_NAME)["eval"]["best_by"])
    lines = read_metrics(workdir / METRICS_NAME)
    clock = [(line["step"], line["speed/seconds"]) for line in lines if "speed/seconds" in line]
    steps, seconds = np.array([(0.0, 0.0), *clock]).T
    first, own = (sum(c.cpu_seconds for c in costs) / 60 for costs in (before, (cost,)))
    points = tuple(
        (
            first + own * float(np.interp(line["step"], steps, seconds)) / max(seconds[-1], 1e-9),
            line[f"eval/{measure}"],
        )
        for line in lines
        if f"eval/{measure}" in line
    )
    return Course(measure, points) if points else None
