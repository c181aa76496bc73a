"""The effects of a training around its compiled step: metrics, evaluation, checkpoints, screen."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
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
from qrag_jax.runtime.process import process_age
from qrag_jax.runtime.profile import StepProfile
from qrag_jax.runtime.writers import MetricWriter

Metrics = dict[str, jax.Array]


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
    dev_samples: Sequence[Sample]
    dev_store: TokenStore
    dev_indices: list[int]  # the fixed questions scored during training
    shape: EpisodeShape


@dataclasses.dataclass
class Window:
    """The steps that the next line of metrics averages over."""

    metrics: list[Metrics] = dataclasses.field(default_factory=list)  # of each step
    began: float = dataclasses.field(default_factory=time.monotonic)
    waited: float = 0.0  # seconds in which the device may have waited for its next batch

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """What is done in here, in seconds or hours, is no part of the rates."""
        before = time.monotonic()
        yield
        self.began += time.monotonic() - before


@dataclasses.dataclass
class Run:
    """The effects of one run around its compiled step: metrics, evaluation, checkpoints."""

    config: ml_collections.ConfigDict
    mesh: Mesh
    inputs: Inputs
    step_program: TrainStep
    play: evaluation.Play
    workdir: Path
    checkpoints: Checkpoints
    writer: MetricWriter
    counter: CompilationCounter
    progress: Progress = dataclasses.field(default_factory=Progress)
    started: float = 0.0  # on the monotonic clock, earlier starts of the run counted in
    window: Window = dataclasses.field(default_factory=Window)
    has_stepped: bool = False  # in this start

    def loop(self, state: pqn.TrainState, step: int, batches: Any, stop: StopSignal) -> int:
        """Steps until the run is done or interrupted; saves; returns the step reached."""
        settings = self.config.train
        profile = StepProfile(self.workdir / "profile", self.config.profile, step, say)
        bar = tqdm(initial=step, total=settings.steps, unit="step", disable=jax.process_index() > 0)
        # The results of a step are waited for and written while the next one runs. One step is
        # ahead and no more: rates stay true, a signal is heeded at once, memory is bounded.
        running: tuple[int, Metrics] | None = None
        self.window = Window()
        # So is one batch; its position is saved only once it is used.
        ahead, saved = self._fetch(batches), step
        with bar, profile:
            while step < settings.steps and not stop.requested:
                batch, self.progress.batches = ahead
                step += 1
                with self.window.pause():
                    profile.turn(step, running)
                with profile.step(step):
                    with jax.transfer_guard("disallow"):
                        state, metrics = self.step_program(state, batch)
                    ahead = self._fetch(batches, metrics)
                    if running is not None:
                        self._finish(*running, bar)
                    running = step, metrics
                last = step == settings.steps
                evaluates = step % settings.eval_every == 0 or last
                saves = step % settings.checkpoint_every == 0 or last
                if evaluates or saves:  # both need the state, which the next step overwrites
                    self._finish(*running, bar)
                    running = None
                with self.window.pause():
                    if evaluates:
                        self.evaluate(step, state)
                    if saves:
                        self._save(step, state)
                        saved = step
            if running is not None:
                self._finish(*running, bar)
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

    def _fetch(self, batches: Any, running: Any = None) -> tuple[EpisodeBatch, Any]:
        """The next batch on the device and the iterator's position behind it."""
        before = time.monotonic()
        batch = next(batches)
        ahead = shard_batch(self.mesh, batch), batches.get_state()
        # Grain's threads or processes build batches ahead, so this takes a moment, in which the
        # device has work; it was kept waiting only if that is done by now.
        if running is None or running["loss"].is_ready():
            self.window.waited += time.monotonic() - before
        return ahead

    def _finish(self, step: int, metrics: Metrics, bar: tqdm) -> None:
        """Waits until the step is computed; shows it, and writes what is due."""
        jax.block_until_ready(metrics)
        if not self.has_stepped:
            self._tell_start(step)
            self.has_stepped = True
        bar.update()
        self.window.metrics.append(metrics)
        if step % self.config.train.log_every == 0 or step == self.config.train.steps:
            shown = self._log(step)
            bar.set_postfix(loss=f"{shown['loss']:.3f}", fact_em=f"{shown['fact_em']:.2f}")
            self.window = Window()

    def _tell_start(self, step: int) -> None:
        seconds, counter = process_age(), self.counter
        hits = counter.cache_hits
        metrics = {"speed/time_to_first_step": seconds, "speed/compilation_cache_hits": hits}
        self.writer.write(step, metrics)
        say(
            f"first step after {seconds:.1f} s, {counter.seconds:.1f} s of it compiling "
            f"{counter.count} programs ({hits} from the cache)"
        )

    def _log(self, step: int) -> dict[str, float]:
        window, elapsed = self.window, time.monotonic() - self.window.began
        rows = jax.device_get(window.metrics)
        means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
        means["env_steps"] = float(rows[-1]["env_steps"])
        metrics = {f"train/{name}": value for name, value in means.items()}
        metrics |= {
            "speed/steps_per_second": len(rows) / elapsed,
            "speed/input_wait_share": window.waited / elapsed,
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
