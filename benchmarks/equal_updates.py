"""Whether an update's loss and gradient are those of a peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.report import Case

EQUAL_LOSS, EQUAL_GRADIENT = 1e-5, 1e-4  # differences that are allowed


class Learned(NamedTuple):
    """What one update computes: its loss, and the gradient by the names in files."""

    loss: float
    gradient: Mapping[str, np.ndarray]


def equality_cases(title: str, ours: Learned, theirs: Learned, peer: str) -> Iterator[Case]:
    """Differences of the losses, beside the peer's where that is above 1, and of the gradients."""
    apart = abs(ours.loss - theirs.loss) / max(1.0, abs(theirs.loss))
    yield Case(
        f"{title}: difference of the losses, beside {peer}'s where that is above 1",
        apart,
        "share",
        target=f"<= {EQUAL_LOSS:g}",
        holds=apart <= EQUAL_LOSS,
        details={"ours": ours.loss, peer: theirs.loss},
    )
    largest = max(float(np.abs(each).max()) for each in theirs.gradient.values())
    most = max(float(np.abs(ours.gradient[n] - g).max()) for n, g in theirs.gradient.items())
    yield Case(
        f"{title}: largest difference of the gradients, beside the largest",
        most / largest,
        "share",
        target=f"<= {EQUAL_GRADIENT:g}",
        holds=most / largest <= EQUAL_GRADIENT,
    )
