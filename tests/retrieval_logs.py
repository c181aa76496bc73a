"""Retrieval logs of invented play, for the tests of the commands that read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qrag_jax.metrics.facts import fact_em, fact_f1
from qrag_jax.metrics.row_log import RETRIEVALS, Row, begin

STEPS = 5


def played_rows(count: int, seed: int, prefix: str = "q") -> list[Row]:
    """Rows of `STEPS` steps over ten chunks with 1 to 3 facts; Q mostly ranks facts above noise."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        facts = rng.permutation(10)[: rng.integers(1, 4)].tolist()
        score = rng.normal(0.2, 0.15, size=10)
        score[facts] += 0.5
        taken = np.argsort(-score)[:STEPS].tolist()
        rows.append(
            Row(
                id=f"{prefix}{number}",
                question="Where?",
                answer="there",
                sf_idx=facts,
                pred_idx=taken,
                q_values=score[taken].tolist(),
                sf_texts=[f"chunk {index}" for index in facts],
                pred_texts=[f"chunk {index}" for index in taken],
                ret=fact_em(facts, taken),
                text_len=100,
                f1=fact_f1(facts, taken),
                em=fact_em(facts, taken),
            )
        )
    return rows


def write_log(path: Path, rows: list[Row]) -> Path:
    """A new log with its meta file."""
    begin(path, {"encoder": "best-7", "max_steps": STEPS})
    RETRIEVALS.append(path, rows)
    return path
