"""Bytes of a device's memory, for people; and what to do when they are not enough."""

from __future__ import annotations

import re

EXHAUSTED = "RESOURCE_EXHAUSTED"
SAVES = (
    "a lower --config.encoder.block_tokens, --config.encoder.remat=layers or a higher "
    "--config.train.accumulation needs less"
)


def shortage(error: Exception) -> str | None:
    """One sentence if a program did not fit into a device's memory, None for another error.

    XLA's error has no class of its own: its message begins with the name of the status.
    """
    text = str(error)
    if not text.startswith(EXHAUSTED):
        return None
    asked = re.search(r"allocat\w+ (\d+) ?bytes", text)
    size = f" ({shown(int(asked[1]))} more were asked for)" if asked else ""
    return f"the memory of the devices is not enough{size}; {SAVES}."


def shown(count: int) -> str:
    """A number of bytes as text for people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**10:.0f} KiB"
