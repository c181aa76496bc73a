"""Long documents: is a retriever trained on short ones as good on long ones, and at what cost?

The full suite trains MiniLM on bAbI stories of tasks qa1 and qa2 among 50 sentences and on needles
in about 4,000 tokens, with the user's own commands, then scores them at many lengths, beside the
peer `torch-sequential`. Documents scored have noise of other books than those trained on, and the
same questions at every length. Stories, books and needles come from the folder QRAG_DATA (default
../shared/data), else they are invented. Runs are kept in runs/benchmarks/long, where an interrupted
suite goes on. `--quick` trains a tiny encoder instead. The peer needs the extra "test".
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learn import DATA
from benchmarks.report import Case
from qrag_jax.data.noise import NoiseConfig, noise
from qrag_jax.data.sources import load_samples

RUNS = Path("runs/benchmarks/long")
LENGTHS = {50: 200, 160: 200, 1200: 100, 4600: 100, 40_000: 20}  # chunks: documents played
LONGEST = 400_000
SHORT, LONG = 50, 4600  # trained on; compared with it
BEAM = 4
NEEDLES = {200: 100, 6600: 50}  # chunks of about 21 tokens: 4k and 128k tokens


def run(quick: bool) -> list[Case]:
    """All cases of the suite."""
    if quick:
        return _quick_cases()
    cases: list[Case] = []
    for task in ("qa1", "qa2"):
        workdir = _train_task(task)
        cases += _length_cases(task, workdir, LENGTHS)
    cases += _beam_cases("qa2", workdir)
    cases += _cost_cases("qa1", RUNS / "qa1")
    cases += _needle_cases()
    return cases


def _train_task(task: str) -> Path:
    fields = []
    if (DATA / "babi").exists():
        fields = [
            f"--config.data.path={DATA / 'babi'}",
            f"--config.data.babilong.noise={DATA / 'gutenberg'}",
        ]
    return _train(task, f"configs/babilong.py:{task}-minilm", *fields)


def _train(name: str, config: str, *fields: str) -> Path:
    workdir = RUNS / name
    _command("qrag_jax.train", f"--config={config}", f"--workdir={workdir}", *fields)
    return workdir


def _command(module: str, *arguments: str) -> None:
    print(f"$ python -m {module} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)  # noqa: S603


def _score(
    workdir: Path, lengths: dict[int, int], *fields: str, out: str = "lengths"
) -> dict[int, dict[str, Any]]:
    """What `qrag_jax.evaluate_lengths` says, by length."""
    _command(
        "qrag_jax.evaluate_lengths",
        f"--workdir={workdir}",
        f"--chunks={','.join(map(str, lengths))}",
        f"--samples={','.join(map(str, lengths.values()))}",
        f"--out={workdir / out}",
        "--restart",
        *fields,
    )
    (table,) = (workdir / out).glob("*/*_lengths.json")
    return {result["chunks"]: result for result in json.loads(table.read_text())}


def _length_cases(task: str, workdir: Path, lengths: dict[int, int]) -> list[Case]:
    results = _score(workdir, lengths)
    short = min(results)
    cases = []
    for length, result in results.items():
        same = result["em_shortest"]  # of the same questions
        before = results[short]["fact_em"] if same is None else same
        gain = result["fact_em"] / max(before, 1e-9)
        asked = length == LONG
        cases.append(
            Case(
                f"{task}: fact EM at {length} chunks, beside {short}",
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
    }
    return {
        "95 % interval of EM": f"[{em['low']:.3f}, {em['high']:.3f}]",
        **{label: result[name] for name, label in names.items()},
    }


def _beam_cases(task: str, workdir: Path) -> list[Case]:
    """Beam search beside greedy play, on the same documents with the same checkpoint."""
    lengths = {SHORT: 200, 1200: 100}
    # Embeddings are kept from one to the other: the cost is that of searching.
    kept = f"--embeddings={RUNS / 'embeddings'}"
    _score(workdir, lengths, kept, out="greedy")
    greedy = _score(workdir, lengths, kept, out="greedy")
    search = (f"--config.eval.beam={BEAM}", "--config.eval.beam_score=policy")
    beam = _score(workdir, lengths, kept, *search, out=f"beam{BEAM}")
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
    return cases


def _cost_cases(task: str, workdir: Path) -> list[Case]:
    from benchmarks.long_cost import cost_cases

    cases = cost_cases(workdir, LONG, (1200, LONG, 40_000))
    once = _score(workdir, {LONGEST: 1}, "--config.data.babilong.noise_repeats=0", out="longest")[
        LONGEST
    ]
    cases.append(
        Case(
            f"{task}: a document of {LONGEST} chunks",
            once["seconds_per_episode"],
            "s an episode",
            target="runs on this machine",
            holds=True,
            details=_shown(once),
        )
    )
    return cases


def _needle_cases() -> list[Case]:
    """RULER's multi-value needles: four numbers under one key."""
    books = DATA / "gutenberg"
    fields = [f"--config.data.niah.noise={books}"] if books.exists() else []
    workdir = _train("niah", "configs/niah.py:minilm", *fields)
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
        for length, result in results.items()
    ]
    files = DATA / "ruler_niah"
    if files.exists():
        out = workdir / "ruler"
        path = f"--config.eval.path={files}"
        _command("qrag_jax.evaluate", f"--workdir={workdir}", path, f"--out={out}", "--restart")
        (log,) = out.glob("best-*/eval_seed*.jsonl")
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        asked = [row["em"] for row in rows if "multivalue" in row["id"]]
        cases.append(_file_case("niah multivalue records of the data folder", asked))
        shared = _known(files, books) if books.exists() else 0.0
        known = {"of their sentences, in the books of training": shared}
        every = [row["em"] for row in rows]
        cases.append(_file_case("all niah records of the data folder", every, known))
    return cases


def _known(files: Path, books: Path) -> float:
    """The share of the records' sentences that the noise of training has: they are not split."""
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


def _quick_cases() -> list[Case]:
    workdir = _train("quick", "configs/babilong.py:tiny", "--config.train.steps=6")
    cases = _length_cases("tiny", workdir, {20: 8, 80: 8})
    from benchmarks.long_cost import cost_cases

    return cases + cost_cases(workdir, 200, (100, 200, 400), documents=2)
