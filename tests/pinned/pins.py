"""The pinned numbers and how they are compared; `make pin` writes them again.

`make pin ARGS="NAME …"` writes those that are named. What changed is printed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from tests.pinned import pieces, trainings
from tests.pinned.pieces import Numbers
from tests.support.small_models import FAMILIES

VALUES = Path(__file__).parent / "numbers.json"
PIECES: Mapping[str, Callable[[Path], Numbers]] = {
    **{f"embeddings/{name}": partial(pieces.embeddings, name) for name in FAMILIES},
    "rankings": pieces.rankings,
    "rewards": pieces.rewards,
}
TRAININGS: Mapping[str, Callable[[Path], Numbers]] = {
    name: partial(trainings.run, name) for name in trainings.TRAININGS
}


def processor() -> str:
    """What rounds: the processor's model."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("model name")), "").partition(":")[2]


def differences(
    numbers: Numbers, pinned: Numbers, tolerance: float, values: int | None = None
) -> Iterator[str]:
    """Where two runs differ by more than the tolerance times the largest value of a metric.

    Args:
        values: how many of each metric's values are compared, from the first; None: all.
    """
    for key in sorted(numbers.keys() | pinned.keys()):
        one, other = numbers.get(key, []), pinned.get(key, [])
        if len(one) != len(other):
            yield f"{key}: {len(one)} values, pinned are {len(other)}"
            continue
        size = max((abs(value) for value in other if value is not None), default=0.0)
        for step, (value, expected) in enumerate(list(zip(one, other, strict=True))[:values]):
            if value is expected is None:  # a metric that nothing was measured of
                continue
            if (
                value is None
                or expected is None
                or not abs(value - expected) <= tolerance * max(size, 1e-3)
            ):
                yield f"{key}, value {step}: {value!r}, pinned is {expected!r}"
                break


def pin() -> None:
    """Writes all numbers, or those named, and prints what changed."""
    pinned = json.loads(VALUES.read_text())["numbers"] if VALUES.exists() else {}
    everything = {**PIECES, **TRAININGS}
    for name in sys.argv[1:] or everything:
        with tempfile.TemporaryDirectory() as folder:
            numbers = everything[name](Path(folder))
        for line in differences(numbers, pinned.get(name, {}), 1e-6):
            print(f"{name}: {line}")
        pinned[name] = numbers
        lines = (f"{json.dumps(key)}: {json.dumps(pinned[key])}" for key in sorted(pinned))
        head = f'{{"processor": {json.dumps(processor())}, "numbers": {{\n'
        VALUES.write_text(head + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    pin()
