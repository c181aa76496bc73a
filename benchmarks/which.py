"""Compares the five ways to train a retriever: one corpus, the same questions, what each costs.

There are two settings, 2WikiMultihopQA's open corpus (`2wiki`) and HotpotQA's pooled passages
(`hotpotqa`), of the folder QRAG_DATA (default ../shared/data). Each row gives one ordered list of
passages for each test question, which is cut at 2, 4, 6 and 10. Rows, and what is not installed,
are in `which_cases/rows.py`. Part SETTING/ROW is a row that is not trained, SETTING/ROW-SEED one
training, which is also scored on the other setting's test. A script answers from the first 4
passages of each row (`which_cases/span_reader.py`); SETTING/answers lets a language model do so for
every finished row, and runs if it is named. Runs and results are kept in runs/benchmarks/which by
version of the code: an interrupted suite resumes, and `--only=PART` runs one part, such as
2wiki/q_rag-42. Each call writes the tables of what is finished. A call without `--only`, or
`--only=page`, which runs nothing, also keeps what is finished in
benchmarks/which_results, and writes docs/which.md anew from all that is there.
`--quick` takes two rows with a tiny encoder on 100 invented questions.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.kept_runs import Kept, Part
from benchmarks.report import Case
from benchmarks.speed.ours import DATA
from benchmarks.which_cases import (
    advice,
    answered,
    answers,
    differences,
    equal_cost,
    gpu_cost,
    invented,
    page,
    pairs,
    plot,
    published,
    remembered,
    single,
    table,
)
from benchmarks.which_cases.q_rag_row import q_rag
from benchmarks.which_cases.row import UNTRAINED, Place, Result
from benchmarks.which_cases.rows import NOT_SMALL, ROWS, Row, lacking
from benchmarks.which_cases.settings import SETTINGS, TWO_WIKI, Setting, setting
from qrag_jax.errors import InputError

ANSWERS, PAGE = "answers", "page"
_SHOWING = (
    "advice",
    "answered",
    "differences",
    "equal_cost",
    "gpu_cost",
    "page",
    "pairs",
    "plot",
    "published",
    "remembered",
    "scores",
    "span_reader",
    "table",
)
Settings = Callable[[str], Setting]


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All cases of the suite; for the full suite, those of its finished parts.

    Raises:
        InputError: data are missing, or `only` names a part that is unknown or not installed.
    """
    if quick:
        with tempfile.TemporaryDirectory() as folder:
            return quick_cases(Path(folder))
    kept = Kept.of("which", showing=[f"benchmarks/which_cases/{name}.py" for name in _SHOWING])

    @cache
    def settings(name: str) -> Setting:
        made = setting(name, DATA, kept.runs / "settings" / name)
        print(made.told, flush=True)
        return made

    left_out = dict(left_out_parts(ROWS))
    for part, why in left_out.items():
        print(f"left out, {part}: {why}")
    for name in only:
        if name in left_out:
            raise InputError(f"--only={name} cannot be run: {left_out[name]}.")
    parts = dict(all_parts(ROWS, settings, kept.runs))
    every = [name for name in parts if _by_default(name)]
    for name in SETTINGS:
        parts[f"{name}/{ANSWERS}"] = partial(answers.part, settings, kept, name)
    for name in only:
        if name.endswith(f"/{ANSWERS}"):
            answers.forget_if_older(kept, name)
    failed = finish(kept, parts, [name for name in only if name != PAGE] if only else every)
    results = kept.finished(parts)
    scored, tables = shown(results, settings, left_out, failed)
    kept.write_tables(results, "Means over trainings and questions, 95 % intervals.", tables)
    if scored:
        plot.draw(scored, kept.results / page.PICTURE)
    if not only or PAGE in only:
        published.publish(results)
        every_result = published.published()
        every_line, tables = shown(every_result, settings, left_out, failed)
        page.write(tables, lambda path: plot.draw(every_line, path), every_result)
    broken = [Case(f"{name}: failed, see above", None, "") for name in failed]
    return [*differences.cases(scored), *broken]


def shown(
    results: Mapping[str, Mapping[str, Any]],
    settings: Settings,
    left_out: Mapping[str, str],
    failed: Sequence[str] = (),
) -> tuple[list[table.Scored], list[str]]:
    """The lines of results, and their tables.

    Args:
        results: part → its result.
        left_out: parts that cannot be run on this machine, and why.
    """
    rows = {name: part for name, part in results.items() if _is_row(name)}
    read = {name: part for name, part in results.items() if not _is_row(name)}
    made = {name: Result.of_json(part) for name, part in rows.items()}
    scored = table.scored(made, settings)
    table.add_answers(scored, read)
    notes = [settings(name).told for name in dict.fromkeys(each.trained_in for each in scored)]
    absent = {part: why for part, why in left_out.items() if part not in results}
    notes += [*left_out_notes(absent), *NOT_SMALL, *published.versions(rows)]
    notes += [f"Failed: {part}." for part in failed]
    every = [f"{where}/{part}" for where in SETTINGS for row in ROWS for part in row.parts]
    waiting = [
        name for name in every if _by_default(name) and name not in results and name not in absent
    ]
    tables = [*advice.tables(scored), *table.tables(scored, notes, waiting)]
    tables += [*filter(None, [pairs.table(scored)]), *remembered.tables(scored, settings)]
    tables += answered.tables(scored, read, settings)
    tables += [*equal_cost.tables(scored), gpu_cost.table()]
    return scored, tables


def finish(kept: Kept, parts: Mapping[str, Part], names: Sequence[str]) -> list[str]:
    """Runs these parts; one that fails is told, and the others are run. Returns those that failed.

    Raises:
        InputError: see `Kept.finish`.
    """
    failed = []
    for name in names:
        try:
            kept.finish(parts, [name])
        except InputError:
            raise
        except Exception:
            # Hours of other parts may follow, which do not depend on this one.
            traceback.print_exc()
            failed.append(name)
    return failed


def _is_row(name: str) -> bool:
    return not name.endswith(f"/{ANSWERS}")


def _by_default(name: str) -> bool:
    where, _, part = name.partition("/")
    return any(where in row.settings for row in ROWS if part in row.parts)


def left_out_parts(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """The parts that cannot be run, and why."""
    for row in rows:
        refused, missing = dict(row.refused), lacking(row)
        for where in SETTINGS:
            why = refused.get(where) or missing
            for part in row.parts if why else ():
                yield f"{where}/{part}", why


def left_out_notes(left_out: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each reason.

    Args:
        left_out: part → why.
    """
    for why in dict.fromkeys(left_out.values()):
        parts = [part for part, own in left_out.items() if own == why]
        yield f"Left out: {', '.join(parts)}; {why}."


def all_parts(rows: Sequence[Row], settings: Settings, runs: Path) -> Iterator[tuple[str, Part]]:
    """The parts that can be run, in the order of the whole suite.

    First what is not trained and one training of each row, those of minutes before long ones; then
    further trainings of the rows of minutes; then those of the long ones.

    Args:
        settings: gives a setting by its name.
        runs: folder of all runs.
    """
    made = []
    for where in SETTINGS:
        for row in rows:
            if where in dict(row.refused) or lacking(row):
                continue
            for turn, (part, seed) in enumerate(zip(row.parts, row.seeds or (0,), strict=True)):
                run = partial(_result, row, settings, where, runs / where / part, seed)
                at = (turn > 0, row.is_long, turn)
                made.append((at, f"{where}/{part}", run))
    made.sort(key=lambda one: one[0])  # stable: by settings, then by rows
    for _, name, run in made:
        yield name, run


def _result(row: Row, settings: Settings, where: str, folder: Path, seed: int) -> dict[str, Any]:
    first = seed in row.seeds[:1]
    others = tuple(settings(name) for name in SETTINGS if name != where) if first else ()
    every = first or not row.is_long
    folder.mkdir(parents=True, exist_ok=True)
    return row.run(Place(settings(where), folder, seed, others, every_way=every)).to_json()


# ---------------------------------------------------------------- quick

QUICK_QUESTIONS = 100
_TINY = (
    *("--config.train.steps=4", "--config.train.eval_every=4"),
    *("--config.train.checkpoint_every=4", "--config.encoder.length_buckets=1"),
)


def quick_cases(folder: Path) -> list[Case]:
    """Two rows on invented questions: BM25, and Q-RAG with a tiny encoder."""
    # Of the commands below, which are not timed; jax read its own when it was imported.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    began = time.monotonic()
    invented.write(folder / "data", invented.Sizes(train=24, dev=8, test=QUICK_QUESTIONS))
    given = setting(TWO_WIKI, folder / "data", folder / "setting")
    place = Place(given, folder / "q_rag", 42, flags=_TINY)
    rows = {
        f"{TWO_WIKI}/bm25": Result({UNTRAINED: {TWO_WIKI: single.bm25(given)}}),
        f"{TWO_WIKI}/q_rag-42": q_rag(place, variant="tiny"),
    }
    scored = table.scored(rows, lambda name: given)
    for text in table.tables(scored, [given.told]):
        print(text)
    cases = differences.cases(scored)
    seconds = time.monotonic() - began
    cases.append(Case("the two rows", seconds, "s", target="< 50 s", holds=seconds < 50))
    return cases
