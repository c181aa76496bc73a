"""Draws that depend on named numbers alone, such as a seed, an iteration and a question.

They are the same whatever was drawn before, in whatever order, process or version of a library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def uniform(*parts: int | str | Sequence[int]) -> float:
    """A number in [0, 1), uniform over all `parts` there may be.

    Args:
        parts: what the draw is of, such as `("next_state", (seed, iteration, hop, question))`.
    """
    flat = [str(p) for each in parts for p in ([each] if isinstance(each, int | str) else each)]
    digest = hashlib.sha256("/".join(flat).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53
