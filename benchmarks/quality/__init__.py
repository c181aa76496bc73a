"""Measures what trainings reach: each system on its data, and all of them side by side.

    python -m benchmarks --suite quality --only=hotpotqa/pqn-42      # one training
    python -m benchmarks --suite quality --only=2wiki/bm25,2wiki/q_rag/pqn
    python -m benchmarks --suite quality --quick                     # under 50 seconds

A part is one training with a seed, or one ranking of a common test; `parts` lists them. Parts train
and score by the user's commands, with the data of the folder QRAG_DATA (default
../shared/data). Runs and results are kept by version of the code (`runner`), so an interrupted
suite resumes; a call without `--only` runs all parts but those of hours, which run if they are
named. Figures are means over trainings and questions with 95 % bootstrap intervals over both, and
differences are paired by question and seed; nothing corrects for the number of pairs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks import DATA, report
from benchmarks.quality import corpora, figures, rankings
from benchmarks.quality.parts import PARTS, QUICK, Part
from benchmarks.quality.runner import Kept
from benchmarks.report import Case
from qrag_jax.errors import InputError


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All cases of the suite; for the full suite, those of its finished parts.

    Raises:
        InputError: data or packages are missing, or `only` names an unknown part.
    """
    if quick:
        return _quick()
    kept = Kept.of()
    print(f"runs: {kept.runs}")
    runs = {
        name: partial(rankings.run, part, seed, kept.runs, DATA)
        for part in PARTS
        for name, seed in part.runs.items()
    }
    failed = kept.finish(runs, named(PARTS, only))
    results = kept.finished(runs)
    lines = figures.table(PARTS, results)
    print(report.markdown(("part", "way", "trainings", "mean [95 % interval]"), lines))
    broken = [Case(f"{name}: failed, see above", None, "") for name in failed]
    return [*figures.cases(PARTS, results), *broken]


def named(parts: Sequence[Part], only: Sequence[str]) -> list[str]:
    """The runs that are asked for: a part's name means all of its seeds.

    First come the rows of one seed and the first seed of all others, so that an interrupted suite
    has something of every part.

    Raises:
        InputError: a name is unknown.
    """
    chosen = {
        name: place
        for part in parts
        for place, name in enumerate(part.runs)
        if (not only and not part.optional) or {name, part.name} & {*only}
    }
    known = {name for part in parts for name in (part.name, *part.runs)}
    if unknown := [name for name in only if name not in known]:
        raise InputError(f"--only={unknown[0]}: the parts are {', '.join(p.name for p in parts)}.")
    return sorted(chosen, key=lambda name: chosen[name])


def _quick() -> list[Case]:
    """Tiny trainings and invented questions through the same runner, on two cores side by side."""
    # Of the commands, which are not timed here; jax read its own when it was imported.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    with tempfile.TemporaryDirectory() as folder:
        kept, data = Kept(Path(folder), Path(folder) / "results"), Path(folder) / "data"
        corpora.write_invented(data, 8, 4, 40)
        runs = {
            name: partial(rankings.run, part, seed, kept.runs, data)
            for part in QUICK
            for name, seed in part.runs.items()
        }
        (first, *others), failed = [*runs], list[str]()
        with ThreadPoolExecutor(2) as pool:
            for names in pool.map(partial(kept.finish, runs), ([first], others)):
                failed += names
        cases = [*figures.cases(QUICK, kept.finished(runs))]
    return cases + [Case(f"{name}: failed, see above", None, "") for name in failed]
