"""Logs with a line that no log has: refused after the first part of it."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics import answer_log, retrieval_log
from qrag_jax.metrics.answer_log import AnswerRow, VerdictRow

READERS: dict[str, Callable[[Path], Any]] = {
    "read": retrieval_log.read,
    "read_partial": retrieval_log.read_partial,
    "answers": lambda path: answer_log.read_partial(path, AnswerRow),
    "verdicts": lambda path: answer_log.read_partial(path, VerdictRow),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_line_of_two_gigabytes_is_refused(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with path.open("wb") as file:
        file.truncate(2 << 30)  # zeros, which take no room on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=r"log\.jsonl"):
        READERS[reader](path)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 500  # MiB
    assert path.stat().st_size == 2 << 30  # nothing was cut off


@pytest.mark.parametrize("reader", READERS)
def test_a_line_of_brackets_is_refused(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"[" * 200_000 + b"\n")
    with pytest.raises(InputError, match=r"line 1.*deep"):
        READERS[reader](path)
