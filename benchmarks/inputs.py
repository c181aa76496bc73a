"""Tries every reader on damaged inputs: each is read, or refused in one sentence.

Small sound files and texts, made by our own writers, are damaged in many ways (`mutations`); each
reading has limits of time and of memory (`tried_inputs`). What is neither read nor refused by
`InputError` (or as the reader documents) is a fault. The smallest example of each fault is printed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.input_readers import all_readers
from benchmarks.report import Case
from benchmarks.tried_inputs import ACCEPTED, FAULT, MEMORY, REFUSED, SECONDS, Tried, try_reader

INPUTS, QUICK_INPUTS = 240, 5  # of each reader; beside them files are damaged as a whole
LEAST = 10_000


def run(quick: bool) -> list[Case]:
    """All cases of the suite: one for each reader, and the sums.

    Raises:
        InputError: a package that a reader needs is missing.
    """
    tried: dict[str, Tried] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number, reader in enumerate(all_readers()):
            place = Path(folder) / str(number)
            tried[reader.name] = try_reader(reader, place, QUICK_INPUTS if quick else INPUTS)
    seconds = time.monotonic() - began
    for found in tried.values():
        for fault in found.smallest():
            print(f"{fault.reader}, {fault.how}: {fault.what}\n  {fault.example}")
    return [*_cases(tried), _sum(tried, quick, seconds)]


def _cases(tried: dict[str, Tried]) -> Iterator[Case]:
    for name, found in tried.items():
        faults = found.counts[FAULT]
        yield Case(
            f"faults of {name}",
            float(faults),
            f"of {found.inputs}",
            target="0",
            holds=faults == 0,
        )


def _sum(tried: dict[str, Tried], quick: bool, seconds: float) -> Case:
    counts = {
        name: sum(each.counts[name] for each in tried.values())
        for name in (ACCEPTED, REFUSED, FAULT)
    }
    inputs = sum(counts.values())
    return Case(
        "damaged inputs in all",
        float(inputs),
        "inputs",
        target=None if quick else f">= {LEAST:,}, no fault",
        holds=None if quick else inputs >= LEAST and not counts[FAULT],
        details={
            **{name: float(count) for name, count in counts.items()},
            "readers": float(len(tried)),
            "seconds in all": seconds,
            "limit of one input, s": SECONDS,
            "limit of one reading's memory, MiB": float(MEMORY >> 20),
        },
    )
