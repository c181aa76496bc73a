"""Every reader of files, answers and texts, with a small sound sample made by our own writers."""

from __future__ import annotations

from benchmarks.input_readers import data, indexes, logs, models, runs, servers, texts
from benchmarks.tried_inputs import Reader


def all_readers() -> list[Reader]:
    """All of them; no two have one name."""
    groups = (data, logs, indexes, runs, models, servers, texts)
    return [reader for group in groups for reader in group.readers()]
