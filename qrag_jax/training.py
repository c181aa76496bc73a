"""The effects of a training around its compiled step: metrics, evaluation, checkpoints, screen."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from typing import Any

import jax
import ml_collections
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from qrag_jax import evaluation
from qrag_jax.algorithms import pqn
from qrag_jax.algorithms.train_step import TrainStep
from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape
from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import TokenStore
from qrag_jax.encoders.pretrained import LoadedEncoder
from qrag_jax.metrics.retrieval_log import Row
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.compilation import CompilationCounter
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import shard_batch
from qrag_jax.runtime.writers import MetricWriter


@dataclasses.dataclass
class Progress:
    """What a run has besides arrays; saved with every checkpoint."""

    seconds: float = 0.0  # of training and evaluating, over all starts
    best_return: float = -math.inf
    baselines: dict[str, float] = dataclasses.field(default_factory=dict)
    batches: Any = None  # position of the data iterator
    data: dict[str, str] = dataclasses.field(default_factory=dict)  # content key by source


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run learns from and is scored on."""

    encoder: LoadedEncoder
    stores: dict[str, TokenStore]  # training tokens by source
    dev_samples: list[Sample]
    dev_store: TokenStore
    dev_indices: list[int]  # the fixed questions scored during training
    shape: EpisodeShape


@dataclasses.dataclass
class Run:
    """The effects of one run around its compiled step: metrics, evaluation, checkpoints."""

    config: ml_collections.ConfigDict
    mesh: Mesh
    inputs: Inputs
    step_program: TrainStep
    play: evaluation.Play
    checkpoints: Checkpoints
    writer: MetricWriter
    counter: CompilationCounter
    progress: Progress = dataclasses.field(default_factory=Progress)
    started: float = 0.0  # on the monotonic clock, earlier starts of the run counted in

    def loop(self, state: pqn.TrainState, step: int, batches: Any, stop: StopSignal) -> int:
        """Steps until the run is done or interrupted; saves; returns the step reached."""
        settings = self.config.train
        bar = tqdm(initial=step, total=settings.steps, unit="step", disable=jax.process_index() > 0)
        window: list[dict[str, jax.Array]] = []
        waited, clock, saved = 0.0, time.monotonic(), step
        # One batch is always ahead of the device; its position is saved only once it is used.
        ahead = self._fetch(batches)
        with bar:
            while step < settings.steps and not stop.requested:
                batch, self.progress.batches = ahead
                with jax.transfer_guard("disallow"):
                    state, metrics = self.step_program(state, batch)
                step += 1
                window.append(metrics)
                before = time.monotonic()
                ahead = self._fetch(batches)
                waited += time.monotonic() - before
                # At most one step runs ahead of the host: rates are true, signals are prompt.
                jax.block_until_ready(metrics)
                bar.update()
                last = step == settings.steps
                if step % settings.log_every == 0 or last:
                    shown = self._log(step, window, time.monotonic() - clock, waited)
                    bar.set_postfix(loss=f"{shown['loss']:.3f}", fact_em=f"{shown['fact_em']:.2f}")
                    window, waited, clock = [], 0.0, time.monotonic()
                before = time.monotonic()
                if step % settings.eval_every == 0 or last:
                    self.evaluate(step, state)
                if step % settings.checkpoint_every == 0 or last:
                    self._save(step, state)
                    saved = step
                clock += time.monotonic() - before
        if step != saved:
            self._save(step, state)
        self.checkpoints.wait()
        return step

    def evaluate(self, step: int, state: pqn.TrainState) -> None:
        """Scores the fixed questions; keeps the parameters if they are the best so far."""
        multi: list[Row] = []
        single: list[Row] = []
        for rows, single_rows in evaluation.play_samples(
            self.play,
            self.mesh,
            state.params,
            self.inputs.dev_samples,
            self.inputs.dev_store,
            self.inputs.shape,
            self.config.eval.batch_size,
            self.inputs.dev_indices,
        ):
            multi += rows
            single += single_rows
        scores = _means(multi)
        if step == 0:
            self.progress.baselines = {
                **{f"untrained/{name}": value for name, value in scores.items()},
                **{f"single_step/{name}": value for name, value in _means(single).items()},
            }
        self.writer.write(
            step,
            {
                **{f"eval/{name}": value for name, value in scores.items()},
                **{f"eval_single_step/{name}": value for name, value in _means(single).items()},
                **self.progress.baselines,
            },
        )
        say(
            f"step {step}: fact EM {scores['fact_em']:.3f}, F1 {scores['fact_f1']:.3f}, "
            f"return {scores['return']:.3f} on {len(multi)} questions"
        )
        if scores["return"] > self.progress.best_return:
            self.progress.best_return = scores["return"]
            self.checkpoints.save_best(step, state.params, {"scores": scores})

    def _fetch(self, batches: Any) -> tuple[EpisodeBatch, Any]:
        """The next batch on the device and the iterator's position behind it."""
        batch = next(batches)
        return shard_batch(self.mesh, batch), batches.get_state()

    def _log(
        self, step: int, window: list[dict[str, jax.Array]], elapsed: float, waited: float
    ) -> dict[str, float]:
        rows = jax.device_get(window)
        means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
        means["env_steps"] = float(rows[-1]["env_steps"])
        metrics = {f"train/{name}": value for name, value in means.items()}
        metrics |= {
            "speed/steps_per_second": len(rows) / elapsed,
            "speed/input_wait_share": waited / elapsed,
            "speed/compilations": float(self.counter.count),
            "speed/compilation_seconds": self.counter.seconds,
            "speed/seconds": time.monotonic() - self.started,
        }
        self.writer.write(step, metrics)
        self.checkpoints.check()
        return means

    def _save(self, step: int, state: pqn.TrainState) -> None:
        self.progress.seconds = time.monotonic() - self.started
        self.checkpoints.save_last(step, state, dataclasses.asdict(self.progress))


def say(line: str) -> None:
    """One line on the screen, from the first host only."""
    if jax.process_index() == 0:
        tqdm.write(line)
        sys.stdout.flush()  # at once also where the output goes to a file


def _means(rows: list[Row]) -> dict[str, float]:
    return {
        "fact_em": float(np.mean([row.em for row in rows])),
        "fact_f1": float(np.mean([row.f1 for row in rows])),
        "return": float(np.mean([row.ret for row in rows])),
    }
