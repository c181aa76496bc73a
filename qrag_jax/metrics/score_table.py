"""Tables of scores with their intervals, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def interval_text(interval: Mapping[str, float], sign: bool = False) -> str:
    """{"mean", "low", "high"} as `0.812 [0.790, 0.833]`; with `sign`, numbers ≥ 0 have a plus."""
    form = "+.3f" if sign else ".3f"
    return f"{interval['mean']:{form}} [{interval['low']:{form}}, {interval['high']:{form}}]"


def columns_text(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines with each column as wide as its widest cell, and two blanks between."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
