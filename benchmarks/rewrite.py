"""Measures DeepRetrieval: its embedded defaults, PPO beside GRPO.

Part `quick-SEED` trains configs/deepretrieval.py:quick by the command and scores 300 unseen
queries; `grpo-SEED` is the same by GRPO, of as many episodes. Part `ir-SEED` trains `:ir` on
SciFact's training queries and scores four collections of the folder QRAG_DATA (default
../shared/data): as it samples, which is how it learns, beside its script; and greedily, which is
how it would be used, beside the original queries. Greedy decoding drops no word that its script
drops with a probability below one half, so it hides what the script is like. `smol` trains `:smol`
(SmolLM2) on the same; it takes about an hour, so it runs if it is named alone. Runs and results are
kept in runs/benchmarks/rewrite by version of the code; `--only=PART` runs one part, such as
quick-42. `--quick` trains a smaller `:tiny`.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kept_runs import Kept, Part, command, train
from benchmarks.report import Case, markdown
from benchmarks.speed.ours import DATA

SEEDS = (42, 43, 44)
QUICK, GRPO, IR, SMOL = "quick", "grpo", "ir", "smol"
COLLECTIONS = ("scifact", "cranfield", "cisi", "cacm")
BY, POOLED, SAMPLED = "ndcg@10", "all of them", "sampled"
LEAST_GAIN, MOST_MINUTES = 0.20, 20
# How ways are called in the summary of `evaluate`.
SCRIPT, ORIGINAL = "SFT alone", "original query"
SIMPLE = ("without function words",)
TINY = (
    *("--config.model.tiny.layers=1", "--config.model.tiny.copies=False"),
    *("--config.model.tiny.hidden=32", "--config.model.tiny.intermediate=32"),
    *("--config.script.steps=50", "--config.script.learning_rate=1e-2"),
    *("--config.train.steps=2", "--config.optimizer.matrices=adam", "--config.sampling.rows=8"),
)


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All cases of the suite; for the full suite, those of its finished parts.

    Raises:
        InputError: PyTorch or data are missing, or `only` names an unknown part.
    """
    if quick:
        # Of the commands below, which are not timed; jax read its own when it was imported.
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        with tempfile.TemporaryDirectory() as folder:
            result = whole(Path(folder), "tiny", 42, TINY)
        return [*cases("tiny", result, asked=False)]
    kept = Kept.of("rewrite")
    parts: dict[str, Part] = {}
    for seed in SEEDS:
        parts[f"{QUICK}-{seed}"] = partial(whole, kept.runs / f"{QUICK}-{seed}", QUICK, seed)
        by_groups = ("--config.algorithm=grpo",)
        name = f"{GRPO}-{seed}"
        parts[name] = partial(whole, kept.runs / name, QUICK, seed, by_groups)
        parts[f"{IR}-{seed}"] = partial(whole, kept.runs / f"{IR}-{seed}", IR, seed, _collections())
    every = [*parts]
    parts[SMOL] = partial(whole, kept.runs / SMOL, SMOL, SEEDS[0], _collections())
    results = kept.finish(parts, only or every)
    found = [Case(**case) for part in results.values() for case in part.get("cases", [])]
    for name, part in results.items():
        if "pooled" in part and not name.startswith(SMOL):
            found += cases(name, part, asked=name.startswith((QUICK, IR)))
    kept.write_tables(results, "Means and 95 % intervals over the queries.", tables(results))
    return found


def _collections() -> tuple[str, ...]:
    folder = DATA / "ir"
    tested = ";".join(f"{folder / name},dev" for name in COLLECTIONS)
    return (
        f"--config.queries.train={folder / COLLECTIONS[0]},train",
        f"--config.queries.test={tested}",
    )


def whole(workdir: Path, variant: str, seed: int, flags: Sequence[str] = ()) -> dict[str, Any]:
    """A training from its beginning, and its scores."""
    began = time.monotonic()
    train(workdir, f"configs/deepretrieval.py:{variant}", f"--config.seed={seed}", *flags)
    minutes = (time.monotonic() - began) / 60
    command("qrag_jax.evaluate", f"--workdir={workdir}", "--checkpoint=last")
    summary = _summary(workdir / "eval")
    names = ("pooled", "collections", "main", "notes")
    result = {name: summary[name] for name in names} | {"minutes": minutes}
    if variant == IR:
        out, sampled = workdir / "sampled", "--config.eval.greedy=False"
        flags = (f"--workdir={workdir}", "--checkpoint=last", sampled, f"--out={out}")
        command("qrag_jax.evaluate", *flags)
        result[SAMPLED] = _summary(out)["pooled"]
    return result


def _summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


# ---------------------------------------------------------------- cases and tables


def cases(name: str, part: Mapping[str, Any], *, asked: bool) -> list[Case]:
    """What the training adds to its script, to the originals and to the simple ways."""
    found = []
    real = name.startswith(IR)
    for told in part["pooled"]["scores"]:
        way = next((w for w in (SCRIPT, ORIGINAL, *SIMPLE) if told.startswith(w)), None)
        pooled = part[SAMPLED] if real and way == SCRIPT else part["pooled"]
        scores, gains = pooled["scores"], pooled["gains"]
        if way is None or told not in gains or (real and way in SIMPLE):
            continue
        main, how = scores[part["main"]][BY], ", as sampled" if pooled is part.get(SAMPLED) else ""
        other, gain = scores[told][BY], gains[told][BY]
        if real and way == ORIGINAL:
            target, holds = "the paired interval above 0", gain["low"] > 0
        elif way == SCRIPT and not real:
            target = f">= {LEAST_GAIN}, the two intervals apart"
            holds = gain["mean"] >= LEAST_GAIN and main["low"] > other["high"]
        else:
            target, holds = "the two intervals apart", main["low"] > other["high"]
        found.append(
            Case(
                f"{name}: {BY}{how}, the end - {told}",
                gain["mean"],
                "nDCG",
                target=target if asked else None,
                holds=holds if asked else None,
                details={
                    "the end": _cell(main),
                    told: _cell(other),
                    "paired": _cell(gain),
                },
            )
        )
    limit = MOST_MINUTES
    return [
        *found,
        Case(
            f"{name}: training",
            part["minutes"],
            "min",
            target=f"<= {limit}" if asked else None,
            holds=part["minutes"] <= limit if asked else None,
        ),
    ]


def tables(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The tables of the trainings: each way by collection."""
    found = []
    for name, part in results.items():
        if "pooled" not in part:
            continue
        every = dict(part["collections"])
        if len(every) > 1:
            every[POOLED] = part["pooled"]
        if SAMPLED in part:
            every["as sampled"] = {"scores": part[SAMPLED]["scores"]}
        rows = [
            (
                f"**{told}**" if told == part["main"] else told,
                *(
                    _cell(each["scores"][told][BY]) if told in each["scores"] else ""
                    for each in every.values()
                ),
            )
            for told in part["pooled"]["scores"]
        ]
        table = markdown(("queries by", *(f"{each}: {BY}" for each in every)), rows)
        notes = "".join(f"\n- {note}" for note in part["notes"])
        found.append(f"{name}, {part['minutes']:.1f} minutes:\n\n{table}{notes}")
    return found


def _cell(found: Mapping[str, float]) -> str:
    return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
