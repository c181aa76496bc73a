"""Trains a tiny model of every family by the user's own command, and exports it."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.encoder_cases.round_trip import round_trip_case
from benchmarks.encoder_cases.small_models import write_trainable_model
from benchmarks.report import Case
from configs import hotpotqa
from qrag_jax.data.loading import load_split
from qrag_jax.systems.q_rag_config import QRagConfig

CONFIG = "configs/hotpotqa.py:tiny"
STEPS, LOG_EVERY = 30, 5
QUESTIONS = 64  # scored


def training_cases(families: Sequence[str], layers: int, folder: Path) -> Iterator[Case]:
    """Loss, fact EM and rate of 30 steps from random weights, on invented questions."""
    texts = training_texts()
    for family in families:
        model = write_trainable_model(family, folder / f"model-{family}", texts, layers)
        # Qwen3's vectors keep length 1; the other families' mean of hidden states is divided by 10.
        scale = 1.0 if family == "qwen3" else 0.1
        workdir = folder / f"run-{family}"
        lines = _train(folder, workdir, {"encoder.path": model, "encoder.scale": scale})
        yield from _cases(family, lines)
        if importlib.util.find_spec("sentence_transformers"):
            yield round_trip_case(family, workdir, folder / f"exported-{family}", texts)


def training_texts() -> list[str]:
    """The texts of the tiny trainings: invented questions and passages."""
    data = QRagConfig.of(hotpotqa.get_config("tiny")).data
    samples = load_split(data, "train", hold_out=True).all
    return [text for sample in samples for text in (sample.question, *sample.chunks)]


def _train(folder: Path, workdir: Path, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs the training; returns the lines of metrics.jsonl."""
    fields = {
        "data.cache": folder / "tokens",
        "data.synthetic.dev": QUESTIONS,
        "encoder.length_buckets": 1,  # less to compile
        "encoder.block_sizes": 1,
        "train.steps": STEPS,
        "train.log_every": LOG_EVERY,
        "train.eval_every": STEPS,
        "train.checkpoint_every": STEPS,
        "eval.samples": 0,
        **fields,
    }
    command = [sys.executable, "-m", "qrag_jax.train", f"--config={CONFIG}"]
    command += [f"--workdir={workdir}", *(f"--config.{key}={v}" for key, v in fields.items())]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(  # noqa: S603
        command, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the training command failed:\n{done.stderr}")
    return [*map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())]


def _cases(family: str, lines: Sequence[dict[str, Any]]) -> Iterator[Case]:
    losses, exact, f1, rates = (
        [line[key] for line in lines if key in line]
        for key in ("train/loss", "eval/fact_em", "eval/fact_f1", "speed/steps_per_second")
    )
    title = f"tiny PQN training, {family}, {STEPS} steps"
    yield Case(
        f"{title}: loss of the last {LOG_EVERY} steps beside the first",
        losses[-1],
        "",
        peer=losses[0],
        target="finite",
        holds=all(map(math.isfinite, losses)),
        details={f"loss up to step {LOG_EVERY * (i + 1)}": loss for i, loss in enumerate(losses)},
    )
    yield Case(
        f"{title}: fact EM beside the untrained",
        exact[-1],
        "share",
        peer=exact[0],
        details={"questions": QUESTIONS, "fact F1": f1[-1], "fact F1, untrained": f1[0]},
    )
    # The first line includes compilation.
    yield Case(f"{title}: rate", sorted(rates[1:])[len(rates[1:]) // 2], "steps/s")
