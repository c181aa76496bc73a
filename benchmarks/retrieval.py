"""Measures search over corpora: judged collections, steps, exact search, indexing, a server.

The collections and questions are those of the folder QRAG_DATA (default ../shared/data). Retrievers
are trained with three seeds on HotpotQA and on 2WikiMultihopQA, then search the passages of all
evaluation questions at once, and 2WikiMultihopQA's open corpus. They are trained again with
negatives that the first ones find among the passages of all training questions. Runs and results
are kept in runs/benchmarks/retrieval by version of the code: an interrupted suite resumes, and
`--only=PART` runs one part. `--quick` takes BM25 on SciFact, small exact searches and a small index
instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.kept_runs import Kept, Part, command, train
from benchmarks.report import Case
from benchmarks.retrieval_cases import judged, multi_step
from benchmarks.retrieval_cases.exact_search import exact_cases
from benchmarks.retrieval_cases.indexing import indexing_cases
from benchmarks.retrieval_cases.server import server_cases, stepped_cases

SEEDS = (42, 43, 44)
SOURCES = {"hotpotqa": "hotpotqa", "two_wiki": "2wikimultihopqa"}  # config → folder of the data
COUNTS = {"hotpotqa": (2, 4, 10, 20), "two_wiki": (4, 8, 20)}  # multiples of the steps
NEGATIVES = 10  # mined passages of a training question, as many as its own
OPEN = "open corpus"
Cases = Callable[[], Iterator[Case]]


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All cases of the suite; for the full suite, those of its finished parts.

    Raises:
        InputError: data or an extra are missing, or `only` names an unknown part.
    """
    if quick:
        return _shown([judged.word_cases(True), exact_cases(True), indexing_cases(True)])
    kept = Kept.of("retrieval")
    results = kept.finish(_parts(kept.runs), only)
    cases = [Case(**case) for part in results.values() for case in part.get("cases", [])]
    tables = [report.cases_markdown(cases)]
    for source in SOURCES:
        parts = [part for name, part in results.items() if name.startswith(f"{source}-")]
        for corpus in parts[0]["scores"] if parts else ():
            scores = [part["scores"][corpus] for part in parts]
            cases += multi_step.cases(f"{source}, {corpus}", scores)
            tables.append(f"{source}, {corpus}:\n\n{multi_step.table(scores)}")
    note = "Of searches in several steps: means over the seeds, intervals over the questions."
    kept.write_tables(results, note, tables)
    return cases


def _parts(runs: Path) -> dict[str, Part]:
    single: dict[str, Cases] = {
        "words": partial(judged.word_cases, False),
        "vectors": judged.vector_cases,
        "exact": partial(exact_cases, False),
        "indexing": partial(indexing_cases, False),
        "server": server_cases,
        "server-steps": stepped_cases,
    }
    parts: dict[str, Part] = {name: partial(_kept, cases) for name, cases in single.items()}
    for source in SOURCES:
        for seed in SEEDS:
            parts[f"{source}-{seed}"] = partial(_steps, source, seed, runs)
    return parts


def _kept(cases: Cases) -> dict[str, Any]:
    return {"cases": [dataclasses.asdict(case) for case in _shown([cases()])]}


def _shown(series: Sequence[Iterator[Case]]) -> list[Case]:
    found = []
    for cases in series:
        for case in cases:
            print(f"measured: {case.case}", flush=True)
            found.append(case)
    return found


def _steps(source: str, seed: int, runs: Path) -> dict[str, Any]:
    """The scores of all ways to search, by corpus, of one training and of that with negatives.

    A training that was interrupted goes on.
    """
    data = multi_step.DATA / SOURCES[source]
    config, fields = f"configs/{source}.py:minilm", [f"--config.data.path={data}"]
    fields.append(f"--config.seed={seed}")
    first = train(runs / f"{source}-{seed}", config, *fields)
    passages = multi_step.training_corpus(first, runs / f"{source}-{seed}-passages.jsonl")
    index = runs / f"{source}-{seed}-index"
    command("qrag_jax.index", f"--corpus={passages}", f"--index={index}", f"--workdir={first}")
    negatives = {"index": index, "search": first, "count": NEGATIVES}
    fields += [f"--config.data.negatives.{name}={value}" for name, value in negatives.items()]
    mined = train(runs / f"{source}-{seed}-mined", config, *fields)
    corpora: Mapping[str, multi_step.Reader] = {
        "all passages of the questions": multi_step.pooled,
        **({OPEN: multi_step.two_wiki_open} if source == "two_wiki" else {}),
    }
    both = {"trained": first, "mined": mined}
    return {
        "scores": {
            # Vectors of towers that several seeds have are kept.
            name: multi_step.scores_of(both, reader, COUNTS[source], runs / f"{source}, {name}")
            for name, reader in corpora.items()
        }
    }
