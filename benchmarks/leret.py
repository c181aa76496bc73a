"""Measures LeReT: its embedded default, what its parts are worth, and genuine passages.

Part `quick-SEED` trains configs/leret.py:quick by the command and scores 300 questions of the
unseen world hop by hop, at the end of each stage. Part `start` is its first stage alone, the
imitation of scripts; the ablations (seed 42) go on from copies of it for one iteration, each with
one thing changed, to be compared with the first iteration of quick-42.
`vllm` is the sampling by a server (`leret_serving`). `real` trains configs/leret.py:smol on
2WikiMultihopQA of the folder QRAG_DATA (default ../shared/data) and scores it over the open corpus;
it takes more than an hour, so it runs if it is named alone. Runs and results are kept in
runs/benchmarks/leret by version of the code; `--only=PART` runs one part, such as quick-42.
`--quick` trains a smaller `:tiny`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import leret_serving
from benchmarks.kept_runs import Kept, Part, begin_anew, command, train
from benchmarks.report import Case, markdown
from benchmarks.speed.ours import DATA
from configs.leret import get_config
from qrag_jax.metrics import hop_log
from qrag_jax.runtime.saved_config import CONFIG_NAME, save_config

SEEDS = (42, 43, 44)
QUICK, START, REAL, VLLM = "quick", "start", "real", "vllm"
LEAST_GAIN, MOST_FALL, MOST_MINUTES = 0.25, 0.02, 20
SCORES = ("recall", "ap", "all_gold")
HOPS = 2
SUMMED_BETA = 0.05  # β of IPO where log-probabilities are summed
# What each ablation changes; all have four tries a state, and one iteration.
ABLATIONS: dict[str, dict[str, Any]] = {
    "pairs-all": {"pairs.pairing": "all"},
    "pairs-best": {"pairs.pairing": "best"},
    "averaged": {"preference.averaged": True},  # and β, see `adapted`
    "solved": {"next_state.solved_go_on": True, "pairs.solved_share": 1.0},
    "prompts-1": {"tries.prompts": 1, "tries.samples": 4},
    "prompts-2": {"tries.prompts": 2, "tries.samples": 2},
    "temperature": {"tries.ways": "bare", "tries.samples": 4},
}
# The rows of the table, by how the summary calls them; of the others, which are the main row's.
BEFORE, SFT, IPO = "after script", "after sft of iteration 1", "after preference of iteration 1"
END = "the end"
TINY = (
    *("--config.model.tiny.layers=1", "--config.model.tiny.copies=False"),
    *("--config.model.tiny.hidden=32", "--config.model.tiny.intermediate=32"),
    *("--config.questions.bridge_train=12", "--config.questions.bridge_corpus=12"),
    *("--config.questions.bridge_dev=4", "--config.styles.most_words=4"),
    *("--config.writing.query_tokens=32", "--config.sampling.room=192"),
    *("--config.tries.samples=2", "--config.iterations=1", "--config.optimizer.matrices=adam"),
    *("--config.script.steps=50", "--config.script.learning_rate=1e-2"),
    *("--config.sft.steps=1", "--config.preference.steps=1", "--config.train.eval_every=100"),
    *("--config.train.checkpoint_every=100", "--config.writing.passage_words=6"),
    "--config.sampling.rows=8",
)
# LeReT, table of the repository: recall and AP of the pool in % after each hop, HotpotQA.
PUBLISHED = {
    "Llama-3-8B": {"base": ("42.3/38.8", "54.7/41.9"), "few-shot": ("49.9/45.6", "64.8/53.9")}
    | {"SFT": ("51.4/47.3", "69.8/58.0"), "SFT, IPO": ("56.7/52.5", "77.1/66.3")},
    "Gemma-2-9B": {"base": ("52.2/48.4", "70.9/57.7"), "few-shot": ("54.4/50.4", "66.7/57.8")}
    | {"SFT": ("53.5/49.6", "71.9/59.2"), "SFT, IPO": ("56.1/52.2", "79.9/67.0")},
}
WHY_OTHERS = (
    "Published: HotpotQA, ColBERTv2 over all of Wikipedia's abstracts (5 million passages), 8 to 9 "
    "billion weights, 90,447 training questions, whole weights. Here: 2WikiMultihopQA, BM25 over "
    "9,594 passages, 135 million weights with adapters, 120 training questions. The figures cannot "
    "be compared, the order of the rows can."
)


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All cases of the suite; for the full suite, those of its finished parts.

    Raises:
        InputError: PyTorch, TRL or data are missing, or `only` names an unknown part.
    """
    if quick:
        # Of the commands below, which are not timed; jax read its own when it was imported.
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        with tempfile.TemporaryDirectory() as folder:
            result = whole(Path(folder), "tiny", 42, TINY)
        return [*cases("tiny", result, asked=False)]
    kept = Kept.of("leret")
    parts: dict[str, Part] = {}
    for seed in SEEDS:
        name = f"{QUICK}-{seed}"
        parts[name] = partial(whole, kept.runs / name, QUICK, seed)
    parts[START] = partial(start, kept.runs / START)
    for name, changed in ABLATIONS.items():
        parts[name] = partial(ablation, kept.runs / name, kept.runs / START, changed)
    parts[VLLM] = partial(_kept, leret_serving.cases)
    every = [*parts]
    parts[REAL] = partial(real, kept.runs / REAL)
    results = kept.finish(parts, only or every)
    found = [Case(**case) for part in results.values() for case in part.get("cases", [])]
    for name, part in results.items():
        if name.startswith(QUICK):
            found += cases(name, part, asked=True)
    kept.write_tables(results, "Means and 95 % intervals over the questions.", tables(results))
    return found


def _kept(cases: Callable[[], Iterable[Case]]) -> dict[str, Any]:
    return {"cases": [dataclasses.asdict(case) for case in cases()]}


# ---------------------------------------------------------------- trainings


def whole(workdir: Path, variant: str, seed: int, flags: Sequence[str] = ()) -> dict[str, Any]:
    """A training from its beginning, and its scores."""
    began = time.monotonic()
    # The last checkpoint is scored, which no question chooses.
    flags = (f"--config.seed={seed}", "--config.eval.part=all", *flags)
    train(workdir, f"configs/leret.py:{variant}", *flags)
    minutes = (time.monotonic() - began) / 60
    return scored(workdir) | {"minutes": minutes}


def start(workdir: Path) -> dict[str, Any]:
    """The first stage of seed 42, the imitation of scripts, and its scores."""
    return whole(workdir, QUICK, SEEDS[0], ("--config.stages=script",))


def ablation(workdir: Path, begun: Path, changed: Mapping[str, Any]) -> dict[str, Any]:
    """A training that goes on from the end of another one's first stage, and its scores.

    That stage does not depend on the fields of later ones, so a copy of its run is the beginning of
    this one; its config is this one's from there on.

    Args:
        begun: the run of `start`; trained first, if it is not there.
        changed: fields of the config.
    """
    if not (begun / "eval" / "summary.json").exists():
        start(begun)
    told = {**changed, **adapted(changed, begun)}
    fields = {"iterations": 1, "eval.part": "all", **told}
    config = get_config(QUICK)
    config.update_from_flattened_dict({"seed": SEEDS[0], **fields})
    if not (workdir / CONFIG_NAME).exists():
        workdir.mkdir(parents=True, exist_ok=True)
        begin_anew(workdir)  # a copy that was broken off
        ignored = shutil.ignore_patterns("eval", CONFIG_NAME, ".lock")
        shutil.copytree(begun, workdir, ignore=ignored, dirs_exist_ok=True)
        save_config(config, workdir / CONFIG_NAME)
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    return whole(workdir, QUICK, SEEDS[0], flags) | {"changed": told}


def adapted(changed: Mapping[str, Any], begun: Path) -> dict[str, Any]:
    """β where log-probabilities are averaged: that of sums times the tokens of a query.

    So a pair's margin of 1/(2β) nats is the same for queries of that length.
    """
    if not changed.get("preference.averaged"):
        return {}
    summary = json.loads((begun / "eval" / "summary.json").read_text())
    tokens = summary["scores"][summary["main"]]["sampled_tokens"] / HOPS
    return {"preference.beta": round(SUMMED_BETA * tokens, 2)}


def scored(workdir: Path, *flags: str, out: Path | None = None) -> dict[str, Any]:
    """What `evaluate` says of a run, and the paired differences of its stages."""
    out = out or workdir / "eval"
    command("qrag_jax.evaluate", f"--workdir={workdir}", "--checkpoint=last", *flags)
    summary = json.loads((out / "summary.json").read_text())
    named = {path.stem: path for path in out.glob("*.jsonl")}
    logs = {}
    for told in summary["scores"]:
        for row, beginning in ((BEFORE, BEFORE), (SFT, SFT), (IPO, IPO), (END, summary["main"])):
            if told.startswith(beginning):
                step = told.rsplit(" ", 1)[1]
                file = named.get(f"stage-{step}") if row != END else named.get(f"last-{step}")
                logs[row] = hop_log.read(file) if file else []
    paired = {
        f"{one} - {other}": hop_log.gains(logs[one], logs[other])
        for one, other in ((IPO, BEFORE), (SFT, BEFORE), (IPO, SFT), (END, BEFORE), (END, IPO))
        if logs.get(one) and logs.get(other)
    }
    return {"scores": summary["scores"], "main": summary["main"], "paired": paired}


def real(workdir: Path) -> dict[str, Any]:
    """SmolLM2 with adapters on genuine questions, scored over another corpus."""
    data = DATA / "2wikimultihopqa"
    index, out = workdir.with_name("open-corpus"), workdir / "open"
    if not (index / "bm25").exists():
        corpus = f"--corpus={data / 'open_corpus.jsonl.gz'}"
        command("qrag_jax.index", corpus, f"--index={index}", "--engine=bm25")
    questions = (
        f"--config.questions.train={data},2wiki,train",
        f"--config.questions.dev={data},2wiki,dev",
    )
    began = time.monotonic()
    train(workdir, "configs/leret.py:smol", *questions)
    minutes = (time.monotonic() - began) / 60
    asked = f"--config.questions.dev={data / 'open_dev.jsonl.gz'},2wiki,dev"
    searched = f"--config.search.index={index}"
    return scored(workdir, asked, searched, f"--out={out}", out=out) | {"minutes": minutes}


# ---------------------------------------------------------------- cases and tables


def row_of(part: Mapping[str, Any], row: str) -> Mapping[str, Any] | None:
    """The scores of one row; None: the run has no such stage."""
    beginning = part["main"] if row == END else row
    return next((s for told, s in part["scores"].items() if told.startswith(beginning)), None)


def cases(name: str, part: Mapping[str, Any], *, asked: bool) -> list[Case]:
    """What a run gains by its tries, what preferences add, and whether the first hop falls."""
    before, imitated, after = (row_of(part, row) for row in (BEFORE, SFT, IPO))
    if after is None:
        after = row_of(part, END)  # it is the last stage
    assert before is not None
    assert imitated is not None
    assert after is not None
    gold = f"hop{HOPS}/all_gold"
    gain = after[gold]["mean"] - before[gold]["mean"]
    over = after[gold]["mean"] - imitated[gold]["mean"]
    fall = _paired(part, BEFORE)["hop1/recall"]

    def case(told: str, value: float, unit: str, target: str, holds: bool, **more: str) -> Case:
        return Case(
            f"{name}: {told}",
            value,
            unit,
            target=target if asked else None,
            holds=holds if asked else None,
            details=more,
        )

    intervals = {
        "start": _cell(before[gold]),
        "SFT": _cell(imitated[gold]),
        "IPO": _cell(after[gold]),
    }
    return [
        case(
            f"all gold after hop {HOPS}, IPO of iteration 1 - start",
            gain,
            "share",
            f">= {LEAST_GAIN}, the two intervals apart",
            gain >= LEAST_GAIN and after[gold]["low"] > before[gold]["high"],
            **intervals,
        ),
        case(
            f"all gold after hop {HOPS}, IPO of iteration 1 - SFT of iteration 1",
            over,
            "share",
            "> 0, the two intervals apart",
            after[gold]["low"] > imitated[gold]["high"],
            **intervals,
        ),
        case(
            "recall after hop 1, IPO of iteration 1 - start",
            fall["mean"],
            "share",
            f"the paired interval begins at -{MOST_FALL} or above",
            fall["low"] >= -MOST_FALL,
            interval=_cell(fall),
        ),
        case(
            "training",
            part["minutes"],
            "min",
            f"<= {MOST_MINUTES}",
            part["minutes"] <= MOST_MINUTES,
        ),
    ]


def _paired(part: Mapping[str, Any], other: str) -> Mapping[str, Any]:
    return part["paired"].get(f"{IPO} - {other}") or part["paired"][f"{END} - {other}"]


def tables(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The tables of the trainings, of the ablations and of genuine passages."""
    found = []
    for name, part in results.items():
        if name.startswith(QUICK):
            found.append(f"{name}, {part['minutes']:.1f} minutes:\n\n{_table(part)}")
    lines: list[tuple[str, ...]] = []
    if START in results:  # its end is where all others begin
        scores = results[START]["scores"][results[START]["main"]]
        lines.append(("", BEFORE, *_cells(scores)))
    for name in (f"{QUICK}-{SEEDS[0]}", *ABLATIONS):
        if name in results:
            part = results[name]
            changed = part.get("changed", {"nothing": ""})
            told = ", ".join(f"{field} {value}".strip() for field, value in changed.items())
            lines += _ablation_lines(told, part, (SFT, IPO, END))
    if lines:
        head = ("changed", "stage", *_names(), "tokens a question")
        found.append(f"Ablations from one start, seed {SEEDS[0]}:\n\n{markdown(head, lines)}")
    if REAL in results:
        part = results[REAL]
        rows = [
            (f"{model}, {row} (published, %)", *figures)
            for model, ways in PUBLISHED.items()
            for row, figures in ways.items()
        ]
        published = markdown(("", "hop 1, recall/AP", "hop 2, recall/AP"), rows)
        found.append(
            f"Genuine passages, {part['minutes']:.0f} minutes:\n\n{_table(part)}\n"
            f"{WHY_OTHERS}\n\n{published}"
        )
    return found


def _names() -> list[str]:
    return [f"hop {hop}: {score}" for hop in range(1, HOPS + 1) for score in SCORES]


def _ablation_lines(
    told: str, part: Mapping[str, Any], rows: Sequence[str]
) -> list[tuple[str, ...]]:
    found = [(row, row_of(part, row)) for row in rows]
    return [(told, row, *_cells(scores)) for row, scores in found if scores is not None]


def _table(part: Mapping[str, Any]) -> str:
    rows = [
        (f"**{told}**" if told == part["main"] else told, *_cells(each))
        for told, each in part["scores"].items()
    ]
    return markdown(("queries by", *_names(), "tokens a question"), rows)


def _cells(scores: Mapping[str, Any]) -> list[str]:
    cells = [_cell(scores[f"hop{hop}/{score}"]) for hop in range(1, HOPS + 1) for score in SCORES]
    return [*cells, f"{scores['read_tokens'] + scores['sampled_tokens']:.0f}"]


def _cell(found: Mapping[str, float]) -> str:
    return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
