"""Measures whether a retriever trained on short documents works on long ones, and at what cost.

The full suite trains MiniLM with the user's own commands: on bAbI stories of tasks qa1 and qa2
among 50 sentences, and on needles in about 4,000 tokens. It then scores the runs at many lengths,
beside the peer `torch-sequential`. The scored documents have the same questions at every length,
and noise from other books than the training documents. Stories, books and needles come from the
folder QRAG_DATA (default ../shared/data); without it they are invented. Runs and results are kept
in runs/benchmarks/long by version of the code: an interrupted suite resumes, and `--only=PART` runs
one part. `--quick` trains a tiny encoder instead. The peer needs the extra "test".
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.kept_runs import Kept, Part, begin_anew, command, metrics, train
from benchmarks.learn import DATA
from benchmarks.report import Case
from qrag_jax.data.generators.noise import NoiseConfig, noise
from qrag_jax.data.sources.registry import load_samples

TASKS = ("qa1", "qa2")
LENGTHS = {50: 200, 160: 200, 1200: 100, 4600: 100, 40_000: 20}  # chunks: documents that are played
LONGEST = 400_000
# An invented world repeats some sentences: among this many, at least 400,000 are different.
MANY = 420_000
SHORT, LONG = 50, 4600  # chunks: the length trained on, and the length compared with it
BEAM = 4
NEEDLES = {200: 100, 6600: 50}  # chunks of about 21 tokens: 4k and 128k tokens
# Noise from an invented world: books do not have that many different sentences.
DIFFERENT = (
    "--config.data.sources.babilong.noise=",
    "--config.data.sources.babilong.noise_dev=",
    "--config.data.sources.babilong.noise_repeats=1",
)
LENGTH_COLUMNS = {
    "tokens": "tokens, about",
    "samples": "documents",
    "fact_em": "fact EM",
    "em_shortest": "of the same questions at the shortest",
    "fact_f1": "fact F1",
    "fact_precision": "precision",
    "fact_recall": "recall",
    "embedded": "texts embedded",
    "seconds_per_episode": "s an episode",
    "peak_memory_mib": "peak memory, MiB",
}


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All cases of the suite; for the full suite, the cases of its finished parts."""
    kept = Kept.of("long")
    if quick:
        return _quick_cases(begin_anew(kept.runs / "quick"))
    results = kept.finish(_parts(kept.runs), only)
    cases = all_cases(results)
    note = (
        "At every length the best checkpoint is the one that was best on documents of the length "
        "trained on, of the same split's stories."
    )
    details = [
        f"{case.case}:\n\n"
        + report.markdown(("", ""), [(n, _text(v)) for n, v in case.details.items()])
        for case in cases
        if case.details and "different texts" in case.case
    ]
    tables = [lengths_table(results), report.cases_markdown(cases), *details]
    kept.write_tables(results, note, tables)
    return cases


def _parts(runs: Path) -> dict[str, Part]:
    parts: dict[str, Part] = {task: partial(_lengths, task, runs) for task in TASKS}
    parts |= {f"{task}-beam": partial(_beam, task, runs) for task in TASKS}
    parts["cost"] = partial(_cost, runs)
    parts["different"] = partial(_different, runs)
    parts["needles"] = partial(_needles, runs)
    return parts


def all_cases(results: Mapping[str, Mapping[str, Any]]) -> list[Case]:
    """The cases of the parts that have results."""
    cases: list[Case] = []
    for name, result in results.items():
        cases += _length_cases(name, result) if "lengths" in result else []
        cases += [Case(**case) for case in result.get("cases", ())]
    return cases


def _with_cases(cases: Sequence[Case]) -> dict[str, Any]:
    return {"cases": [dataclasses.asdict(case) for case in cases]}


def _train_task(task: str, runs: Path) -> Path:
    fields = []
    if (DATA / "babi").exists():
        fields = [
            f"--config.data.path={DATA / 'babi'}",
            f"--config.data.sources.babilong.noise={DATA / 'gutenberg'}",
        ]
    return train(runs / task, f"configs/babilong.py:{task}-minilm", *fields)


def _score(
    workdir: Path, lengths: Mapping[int, int], *fields: str, out: str = "lengths"
) -> list[dict[str, Any]]:
    """Runs `qrag_jax.evaluate_lengths`; returns its results, the shortest length first."""
    command(
        "qrag_jax.evaluate_lengths",
        f"--workdir={workdir}",
        f"--chunks={','.join(map(str, lengths))}",
        f"--samples={','.join(map(str, lengths.values()))}",
        f"--out={workdir / out}",
        "--restart",
        *fields,
    )
    (table,) = (workdir / out).glob("*/*_lengths.json")
    return sorted(json.loads(table.read_text()), key=lambda result: result["chunks"])


def _lengths(task: str, runs: Path) -> dict[str, Any]:
    workdir = _train_task(task, runs)
    return {
        "lengths": _score(workdir, LENGTHS),
        "checkpoints": len(metrics(workdir, "eval/return")),
    }


def _length_cases(task: str, scored: Mapping[str, Any]) -> list[Case]:
    results = scored["lengths"]
    short, cases = results[0], []
    for result in results:
        length, same = result["chunks"], result["em_shortest"]  # the same questions' EM
        before = short["fact_em"] if same is None else same
        gain = result["fact_em"] / max(before, 1e-9)
        asked = length == LONG
        cases.append(
            Case(
                f"{task}: fact EM at {length} chunks, beside {short['chunks']} (best of "
                f"{scored['checkpoints']} checkpoints, chosen on documents of the length trained "
                "on, of the same stories)",
                result["fact_em"],
                "share",
                peer=before,
                ratio=gain,
                target=">= 0.9x" if asked else None,
                holds=gain >= 0.9 if asked else None,
                details=_shown(result),
            )
        )
    return cases


def _shown(result: dict[str, Any]) -> dict[str, float | str]:
    em = result["intervals"]["fact_em"]
    names = {
        "tokens": "tokens of a document, about",
        "fits": "stories that fit the shortest",
        "stories": "of the split's",
        "samples": "documents",
        "fact_f1": "fact F1",
        "fact_precision": "fact precision",
        "fact_recall": "fact recall",
        "steps": "steps",
        "embedded": "texts embedded",
        "embed_seconds": "embedding them, s",
        "seconds_per_episode": "an episode, s",
        "peak_memory_mib": "peak memory, MiB",
        "mapped_mib": "table of embeddings mapped from a file, MiB",
    }
    return {
        "95 % interval of EM": f"[{em['low']:.3f}, {em['high']:.3f}]",
        **{label: result[name] for name, label in names.items()},
    }


def _beam(task: str, runs: Path) -> dict[str, Any]:
    """Compares beam search with greedy play on the same documents, with the same checkpoint."""
    workdir = _train_task(task, runs)
    lengths = {SHORT: 200, 1200: 100}
    # The runs share kept embeddings, so that the measured cost is that of searching.
    kept = f"--embeddings={runs / 'embeddings'}"
    search = (f"--config.eval.beam={BEAM}", "--config.eval.beam_score=policy")
    _score(workdir, lengths, kept, out="greedy")
    greedy, beam = (
        {result["chunks"]: result for result in _score(workdir, lengths, kept, *fields, out=out)}
        for fields, out in (((), "greedy"), (search, f"beam{BEAM}"))
    )
    cases = []
    for length in lengths:
        low = greedy[length]["intervals"]["fact_em"]["low"]
        cases.append(
            Case(
                f"{task}: fact EM of a beam of {BEAM} at {length} chunks, beside greedy",
                beam[length]["fact_em"],
                "share",
                peer=greedy[length]["fact_em"],
                ratio=beam[length]["fact_em"] / max(greedy[length]["fact_em"], 1e-9),
                target="not below greedy's interval",
                holds=beam[length]["fact_em"] >= low,
                details={
                    "an episode, s": beam[length]["seconds_per_episode"],
                    "greedy: an episode, s": greedy[length]["seconds_per_episode"],
                },
            )
        )
    return _with_cases(cases)


def _cost(runs: Path) -> dict[str, Any]:
    from benchmarks.long_cost import cost_cases

    workdir = _train_task("qa1", runs)
    cases = cost_cases(workdir, LONG, (1200, LONG, 40_000))
    repeated = "--config.data.sources.babilong.noise_repeats=0"  # books have fewer sentences
    (once,) = _score(workdir, {LONGEST: 1}, repeated, out="longest")
    cases.append(
        Case(
            f"qa1: a document of {LONGEST} chunks of books, in which sentences come again",
            once["seconds_per_episode"],
            "s an episode",
            target="runs on this machine",
            holds=True,
            details=_shown(once),
        )
    )
    return _with_cases(cases)


def _different(runs: Path) -> dict[str, Any]:
    """Plays a document of `LONGEST` different texts twice; the second time nothing is embedded."""
    from benchmarks.long_texts import count_texts, different_cases

    workdir = _train_task("qa1", runs)
    kept = f"--embeddings={runs / 'embeddings-different'}"
    made = [
        _score(workdir, {MANY: 1}, *DIFFERENT, kept, out=out)[0]
        for out in ("different", "different-again")
    ]
    return _with_cases(different_cases(made, count_texts(workdir, MANY, DIFFERENT), LONGEST))


def _needles(runs: Path) -> dict[str, Any]:
    """RULER's multi-value needles: four numbers under one key."""
    books = DATA / "gutenberg"
    fields = [f"--config.data.sources.niah.noise={books}"] if books.exists() else []
    workdir = train(runs / "niah", "configs/niah.py:minilm", *fields)
    results = _score(workdir, NEEDLES)
    cases = [
        Case(
            f"niah multivalue: all four facts at {length} chunks (about {result['tokens']} tokens)",
            result["fact_em"],
            "share of documents",
            target="all",
            holds=result["fact_em"] == 1.0,
            details=_shown(result),
        )
        for length, result in ((result["chunks"], result) for result in results)
    ]
    files = DATA / "ruler_niah"
    if files.exists():
        out = workdir / "ruler"
        path = f"--config.eval.path={files}"
        command("qrag_jax.evaluate", f"--workdir={workdir}", path, f"--out={out}", "--restart")
        (log,) = out.glob("best-*/eval_seed*.jsonl")
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        asked = [row["em"] for row in rows if "multivalue" in row["id"]]
        cases.append(_file_case("niah multivalue records of the data folder", asked))
        shared = _known(files, books) if books.exists() else 0.0
        known = {"of their sentences, in the books of training": shared}
        every = [row["em"] for row in rows]
        cases.append(_file_case("all niah records of the data folder", every, known))
    return _with_cases(cases)


def _known(files: Path, books: Path) -> float:
    """The share of the records' sentences that the noise of training has too.

    The books of training are not split for these records.
    """
    known = set(noise(NoiseConfig(str(books), source="niah"), "train", 1).sentences)
    texts = [
        text for sample in load_samples("niah", str(files), "dev")[0] for text in sample.chunks
    ]
    return sum(text in known for text in texts) / len(texts)


def _file_case(
    name: str, found: Sequence[float], details: Mapping[str, float | str] | None = None
) -> Case:
    share = sum(found) / len(found)
    return Case(
        f"{name}: all facts",
        share,
        "share of documents",
        target="all",
        holds=share == 1.0,
        details=details or {},
    )


def lengths_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of accuracy and cost by length, for `RESULTS.md`."""
    rows = []
    for task, scored in results.items():
        for result in scored.get("lengths", ()):
            em = result["intervals"]["fact_em"]
            cells = [_cell(name, result[name]) for name in LENGTH_COLUMNS]
            cells[2] += f" [{em['low']:.3f}, {em['high']:.3f}]"
            rows.append([task, str(result["chunks"]), *cells])
    return report.markdown(["task", "chunks", *LENGTH_COLUMNS.values()], rows)


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name in ("tokens", "samples", "embedded", "peak_memory_mib"):
        return f"{value:.0f}"
    return f"{value:.3f}"


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.6g}"


def _quick_cases(workdir: Path) -> list[Case]:
    from benchmarks.long_cost import cost_cases
    from benchmarks.long_texts import count_texts, different_cases

    fewer = "--config.encoder.length_buckets=1"  # fewer programs to compile
    train(workdir, "configs/babilong.py:tiny", "--config.train.steps=6", fewer)
    kept = f"--embeddings={workdir / 'embeddings'}"
    results = _score(workdir, {20: 8, 80: 8}, *DIFFERENT, kept)
    scored = {"lengths": results, "checkpoints": len(metrics(workdir, "eval/return"))}
    return [
        *_length_cases("tiny", scored),
        *cost_cases(workdir, 200, (100, 200, 400), documents=2),
        *different_cases(results[-1:], count_texts(workdir, 80, DIFFERENT)),
    ]
