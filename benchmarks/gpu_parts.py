"""The parts of `python -m benchmarks --suite gpu --run`: each one a process of some minutes.

`python -m benchmarks.gpu_parts PART FOLDER [--quick]` prints rows as one JSON list on the last line
(see `Row`). FOLDER keeps the part's runs, so that a training can go on. `DEVICE` is the part that
tells what this machine has. A new part is a function in `PARTS`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DEVICE = "device"
TRAINING_SECONDS = 300.0  # of each half of the training
QUICK_TRAINING_SECONDS = 40.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure of the table.

    Attributes:
        name: what was measured.
        value: the figure; None: it could not be measured, and `note` says why.
        unit: its unit.
        estimate: the figure that the estimator expected, in the same unit.
        share_of_peak: of the device, by the FLOPs that the task needs.
        peer: whether it is the peer's figure for the row of the same name.
        note: in words.
        details: the estimate in words, one line each.
    """

    name: str
    value: float | None
    unit: str
    estimate: float | None = None
    share_of_peak: float | None = None
    peer: bool = False
    note: str = ""
    details: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a part runs: its folder, and whether its sizes are the small ones."""

    folder: Path
    quick: bool


Part = Callable[[Place], Sequence[Row]]


def _encoder(place: Place) -> list[Row]:
    """Tokens of the encoder's forward pass, by length and in full rows."""
    bench, questions = _bench(place, "base")
    return [_row(bench.forward(questions, full=full), bench) for full in (False, True)]


def _step(name: str, place: Place) -> list[Row]:
    """Transitions of our PQN step."""
    bench, questions = _bench(place, name)
    return [_row(bench.step(questions), bench)]


def _peer(name: str, place: Place) -> list[Row]:
    """Transitions of the PQN step in torch, with the same data and the same precision."""
    # torch computes beside jax on the same GPU.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    bench, questions = _bench(place, name)
    title = f"PQN step, {bench.encoder.name}, {questions} questions"
    if why := _without_torch():
        return [Row(title, None, "transitions/s", peer=True, note=why)]
    from benchmarks.speed.measure import on_gpu
    from benchmarks.speed.ours import peer_settings
    from benchmarks.timed_programs import ROUNDS, seconds_of
    from tests.support.torch_pqn import BatchedPeer

    batches = [bench.texts.batch(number, questions) for number in range(ROUNDS + 1)]
    settings = peer_settings(bench.texts, bench.encoder)
    peer = BatchedPeer(settings, bench.encoder.towers(), "cuda" if on_gpu() else "cpu")
    played: list[int] = []

    def step(number: int) -> None:
        played.append(peer.step(batches[number]).transitions)  # float() waits for the GPU

    seconds = sum(seconds_of(step))
    note = f"torch in {bench.texts.config.encoder.dtype}"
    return [Row(title, sum(played[1:]) / seconds, "transitions/s", peer=True, note=note)]


def _evaluation(place: Place) -> list[Row]:
    """Questions of the evaluation that a user runs."""
    bench, questions = _bench(place, "minilm")
    return [_row(bench.evaluation(2 * questions, questions), bench)]


def _training(half: str, place: Place) -> list[Row]:
    """Half of a training by the user's own command; it ends by a signal, and the next one goes on.

    Raises:
        RuntimeError: the command failed.
    """
    limit = QUICK_TRAINING_SECONDS if place.quick else TRAINING_SECONDS
    workdir, log = place.folder / "training", place.folder / "training.log"
    before, began = _logged(workdir), time.monotonic()
    command = [sys.executable, "-m", "qrag_jax.train", f"--workdir={workdir}", *_fields(place)]
    place.folder.mkdir(parents=True, exist_ok=True)
    with log.open("a") as shown:
        process = subprocess.Popen(command, stdout=shown, stderr=shown)  # noqa: S603
        try:
            process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # it saves and ends
        finally:
            if sys.exc_info()[0] is not None:
                process.terminate()
            process.wait()
    if process.returncode not in (0, 128 + signal.SIGTERM):
        raise RuntimeError(f"the training ended with status {process.returncode}: see {log}")
    invented = place.quick or _data() is None
    note = f"{'invented questions' if invented else 'HotpotQA'}, {time.monotonic() - began:.0f} s"
    return training_rows(f"training, {half} half", _logged(workdir), len(before), note)


def training_rows(title: str, log: list[dict[str, Any]], before: int, note: str) -> list[Row]:
    """Speed and quality from a run's log, of which the first `before` rows are older."""

    def found(key: str, start: int = 0) -> list[float]:
        return [row[key] for row in log[start:] if key in row]

    rates, steps = found("speed/steps_per_second", before), found("train/env_steps")
    scores, best = found("eval/fact_em"), "best line" if rates else "no step was logged in time"
    told = f"untrained {scores[0]:.3f}" if scores else "nothing was scored in time"
    return [
        Row(f"{title}: speed", max(rates, default=None), "updates/s", note=f"{best}; {note}"),
        Row(f"{title}: steps so far", max(steps, default=None), "transitions", note=note),
        Row(f"{title}: fact EM", scores[-1] if scores else None, "share", note=told),
    ]


def _programs(name: str, place: Place) -> list[Row]:
    """Programs that the suite compiles for devices that are not here, run here."""
    _as_in_a_training()
    from benchmarks.gpu_timed import timed

    rows = []
    for found in timed(name, quick=place.quick):
        rows.append(Row(**found))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


# Recipes of configs/: config, encoder of the hub, folder of the data, ms of an update as estimated
# from programs that were compiled for an H100 (`benchmarks/RESULTS.md`, "Published recipes").
RECIPES = {
    "contriever": ("two_wiki.py:contriever", "facebook/contriever", "2wikimultihopqa", 179.0),
    "e5": ("hotpotqa.py:e5", "intfloat/multilingual-e5-large", "hotpotqa", 655.0),
    "e5-float32": (
        "published.py:e5-hotpotqa",
        "intfloat/multilingual-e5-large",
        "hotpotqa",
        6140.0,
    ),
    "qwen3": ("hotpotqa.py:qwen3", "Qwen/Qwen3-Embedding-0.6B", "hotpotqa", 1350.0),
}
RECIPE_STEPS, TOLD = 24, 4  # updates, and those of a line of the log


def _recipe(name: str, place: Place) -> list[Row]:
    """The first updates of a recipe by the user's command, for a model of full size.

    Its weights are drawn, and its tokenizer is MiniLM's: a time depends on neither.

    Raises:
        RuntimeError: the command failed.
    """
    config, encoder, folder, estimate = RECIPES[name]
    title = f"`{config}`, {encoder}"
    data = _data(folder)
    if place.quick or data is None:
        return [Row(title, None, "ms an update", note="needs QRAG_DATA, and is not quick")]
    from benchmarks.scaling_folders import write_drawn

    weights = place.folder / encoder.replace("/", "--")
    if not weights.exists():
        write_drawn(encoder, weights)
    workdir, log = place.folder / f"recipe-{name}", place.folder / f"recipe-{name}.log"
    shutil.rmtree(workdir, ignore_errors=True)
    fields = {
        "encoder.path": weights,
        "data.path": data,
        "data.cache": place.folder / "cache",
        "pqn.learning_start": 0,
        "train.steps": RECIPE_STEPS,
        "train.log_every": TOLD,
        "train.eval_every": RECIPE_STEPS,
        "train.checkpoint_every": RECIPE_STEPS,
        "eval.samples": 32,
    }
    command = [sys.executable, "-m", "qrag_jax.train", f"--workdir={workdir}"]
    command += [f"--config=configs/{config}"]
    command += [f"--config.{field}={value}" for field, value in fields.items()]
    with log.open("w") as shown:
        status = subprocess.run(command, stdout=shown, stderr=shown).returncode  # noqa: S603
    if status:
        raise RuntimeError(f"{config} ended with status {status}: see {log}")
    return [recipe_row(title, _logged(workdir), estimate)]


def recipe_row(title: str, log: Sequence[dict[str, Any]], estimate: float) -> Row:
    """The median of a recipe's updates, without the first line of its log, which compiles."""
    rates = [row["speed/steps_per_second"] for row in log if "speed/steps_per_second" in row][1:]
    started = [row["speed/time_to_first_step"] for row in log if "speed/time_to_first_step" in row]
    note = f"first step after {started[0]:.0f} s" if started else ""
    each = 1e3 / statistics.median(rates) if rates else None
    return Row(title, each, "ms an update", estimate=estimate, note=note)


# A part of `python -m benchmarks --suite gpu --run`, in the order in which they are run.
PARTS: dict[str, Part] = {
    "encoder": _encoder,
    "step-minilm": functools.partial(_step, "minilm"),
    "step-minilm-torch": functools.partial(_peer, "minilm"),
    "step-base": functools.partial(_step, "base"),
    "step-base-torch": functools.partial(_peer, "base"),
    "evaluation": _evaluation,
    "search": functools.partial(_programs, "search"),
    "harr": functools.partial(_programs, "harr"),
    "language-model": functools.partial(_programs, "language-model"),
    "large-language-model": functools.partial(_programs, "large-language-model"),
    **{f"recipe-{name}": functools.partial(_recipe, name) for name in RECIPES},
    "training-1": functools.partial(_training, "first"),
    "training-2": functools.partial(_training, "second"),
}


def _as_in_a_training() -> None:
    """XLA's options of a training; before JAX looks for devices."""
    from qrag_jax.runtime import determinism

    determinism.ask(True)


def _bench(place: Place, name: str) -> Any:
    """The programs of an encoder, "minilm" or "base", and how many questions a batch has."""
    _as_in_a_training()
    from benchmarks.own_speeds import own_speeds
    from benchmarks.speed import ours
    from benchmarks.timed_programs import Bench, read_texts

    texts, tokenizer = read_texts(place.folder / "cache", 64 if place.quick else 4096)
    if place.quick:
        config, title, questions = ours.SMALL, f"{name}, cut to 1 layer, 32 wide", 4
    elif name == "minilm":
        config, title, questions = ours.MINILM, "MiniLM sizes", 256
    else:
        config, title, questions = ours.BERT_BASE, "Contriever's sizes (BERT-base)", 128
    encoder = ours.random_encoder(config, title, tokenizer, texts.config)
    return Bench(texts, encoder, own_speeds()), questions


def _row(timed: Any, bench: Any) -> Row:
    from qrag_jax.runtime import step_time_lines

    return Row(
        timed.name,
        timed.amount / timed.median,
        timed.unit,
        estimate=timed.amount / timed.expected,
        share_of_peak=timed.share_of_peak,
        note=bench.texts.origin,
        details=tuple(step_time_lines.lines(timed.estimate, timed.needed / timed.calls)),
    )


def _without_torch() -> str:
    """Why torch cannot compute where jax does; "" if it can."""
    from benchmarks.speed.measure import on_gpu

    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "torch has no GPU here" if on_gpu() and not torch.cuda.is_available() else ""


def _data(name: str = "hotpotqa") -> Path | None:
    from benchmarks.speed import ours

    return ours.DATA / name if (ours.DATA / name).exists() else None


def _fields(place: Place) -> list[str]:
    """The config of the training: MiniLM's, in batches for a GPU; tiny if quick."""
    if place.quick:
        return ["--config=configs/hotpotqa.py:tiny", "--config.train.steps=100000"]
    data = _data()
    fields = {
        "data.path": data or "synthetic",
        "data.cache": place.folder / "cache",
        "train.batch_size": 256,
        "train.accumulation": 1,
        "train.steps": 100_000,
        "train.eval_every": 200,
        "train.checkpoint_every": 200,
        "train.log_every": 10,
    }
    return [
        "--config=configs/hotpotqa.py:minilm",
        *(f"--config.{name}={value}" for name, value in fields.items()),
    ]


def _logged(workdir: Path) -> list[dict[str, Any]]:
    path = workdir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _device() -> dict[str, Any]:
    """The devices of this process: kind, number, name, and the machine in a line."""
    import jax

    from benchmarks.report import machine

    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(),
        "machine": machine(),
    }


def main() -> None:
    """Runs one part."""
    name, folder = sys.argv[1:3]
    if name == DEVICE:
        print(json.dumps(_device()))
        return
    rows = PARTS[name](Place(Path(folder), "--quick" in sys.argv[3:]))
    print(json.dumps([dataclasses.asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
