"""Compares estimated times of compiled programs with measured ones: how far can they be trusted?

The estimator (`qrag_jax.runtime.step_time`) reads a program as compiled for this machine's own
device. On a GPU its peaks are the maker's, on a CPU they are measured first. HotpotQA records come
from the folder QRAG_DATA (default ../shared/data); without them, questions are invented. Run the
suite on an idle machine. `--quick`: two layers of MiniLM's width, few questions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.own_speeds import own_speeds
from benchmarks.report import Case
from benchmarks.speed import ours
from benchmarks.timed_programs import Bench, Timed, read_texts
from qrag_jax.runtime import step_time_lines


def run(quick: bool) -> list[Case]:
    """All cases of the suite."""
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for timed in _programs(quick, Path(folder)):
            ratio = timed.median / timed.expected
            print(f"measured: {timed.name}: {ratio:.2f} times the estimate", flush=True)
            cases.append(_case(timed))
    return cases


def _programs(quick: bool, folder: Path) -> Iterator[Timed]:
    texts, tokenizer = read_texts(folder, 64 if quick else 512)
    if quick:
        sizes = [(ours.QUICK, "2 layers of MiniLM's width", 2)]
    else:
        sizes = [
            (ours.SMALL, "1 layer, 32 wide", 16),
            (ours.MINILM, "MiniLM sizes", 8),
        ]
    for config, name, questions in sizes:
        encoder = ours.random_encoder(config, name, tokenizer, texts.config)
        # Measured anew for each encoder: what else runs on a machine changes in the meantime.
        bench = Bench(texts, encoder, own_speeds())
        yield bench.forward(questions, full=True)
        yield bench.forward(questions, full=False)
        yield bench.step(questions)
        if not quick:
            yield bench.evaluation(4 * questions, questions)


def _case(timed: Timed) -> Case:
    """The measured time over the estimated one."""
    found = timed.estimate
    dearest = (
        f"{kind.seconds * 1e3:.3g} ms {name}" for name, kind in step_time_lines.dearest(found)
    )
    return Case(
        f"{timed.name}: measured over estimated time",
        timed.median / timed.expected,
        "x",
        details={
            "measured (median), ms": timed.median * 1e3,
            "measured (fastest), ms": min(timed.seconds) * 1e3,
            "estimated, ms": timed.expected * 1e3,
            "measured share of peak": timed.share_of_peak,
            "measured, " + timed.unit: timed.amount / timed.median,
            "one program": step_time_lines.summary(found, timed.needed / timed.calls),
            "its dearest instructions": "; ".join(dearest),
            "assumptions": "; ".join(step_time_lines.assumptions(found)),
        },
    )
