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

from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import Tokens, TokenStore
from qrag_jax.evaluators import episodes
from qrag_jax.feedback.completion import EpisodeRewards
from qrag_jax.feedback.language_model import Unscored
from qrag_jax.feedback.service import Rewards, RewardsLost
from qrag_jax.learners import pqn
from qrag_jax.metrics.facts import fact_columns
from qrag_jax.metrics.retrieval_log import Row
from qrag_jax.metrics.until_found import until_found
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.compilation import CompilationCounter
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.process import process_age
from qrag_jax.runtime.profile import StepProfile
from qrag_jax.runtime.writers import MetricWriter
from qrag_jax.skipped_steps import NotFinite, skip_limit, skip_line, stop_error
from qrag_jax.steps import Steps

Metrics = dict[str, jax.Array]


@dataclasses.dataclass
class Progress:
    """What a run has besides arrays; saved with every checkpoint."""

    seconds: float = 0.0  # of training and evaluating, over all starts
    best_return: float = -math.inf  # the one that config.eval.best_by names
    baselines: dict[str, float] = dataclasses.field(default_factory=dict)
    batches: Any = None  # position of the data iterator
    # Episodes played but not yet learned from, where rewards come later.
    pending: list[Any] = dataclasses.field(default_factory=list)
    evaluation_due: bool = False  # the run was stopped while this step's waited for rewards
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)  # rewards of a model
    data: dict[str, str] = dataclasses.field(default_factory=dict)  # content key by source
    skipped_steps: int = 0  # that learned nothing, their numbers not being finite
    skipped_in_a_row: int = 0  # of these, the last ones


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run learns from and is scored on."""

    encoder: LoadedEncoder
    stores: dict[str, Tokens]  # training tokens by source
    dev_samples: Sequence[Sample]
    dev_store: TokenStore
    train_samples: Sequence[Sample]  # of all stores, one after the other
    dev_indices: list[int]  # the fixed questions scored during training
    shape: EpisodeShape


@dataclasses.dataclass
class Window:
    """The steps that the next line of metrics averages over."""

    metrics: list[Metrics] = dataclasses.field(default_factory=list)  # of each step
    began: float = dataclasses.field(default_factory=time.monotonic)
    waited: dict[str, float] = dataclasses.field(default_factory=dict)  # of the steps, as it began

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
    steps: Steps
    play: episodes.Play
    workdir: Path
    checkpoints: Checkpoints
    writer: MetricWriter
    counter: CompilationCounter
    stop: StopSignal
    rewards: Rewards | None = None  # of a language model; None: of the supporting facts
    progress: Progress = dataclasses.field(default_factory=Progress)
    started: float = 0.0  # on the monotonic clock, earlier starts of the run counted in
    window: Window = dataclasses.field(default_factory=Window)
    lost: RewardsLost | NotFinite | None = None
    has_stepped: bool = False  # in this start
    has_learned: bool = False  # since the last save

    def loop(self, state: pqn.TrainState, step: int) -> int:
        """Steps until the run is done or interrupted; saves; returns the step reached.

        Raises:
            RewardsLost: the language model was lost; the state was saved.
            NotFinite: too many steps in a row learned nothing; the last state that did is saved.
        """
        settings, saved = self.config.train, step
        profile = StepProfile(self.workdir / "profile", self.config.profile, step, log)
        bar = tqdm(initial=step, total=settings.steps, unit="step", disable=jax.process_index() > 0)
        # The results of a step are waited for and written while the next one runs. One step is
        # ahead and no more: rates stay true, a signal is heeded at once, memory is bounded.
        running: tuple[int, Metrics, np.ndarray] | None = None
        self.steps.begin(self.progress.pending)
        owed = self.progress.evaluation_due
        if step == 0 or owed:
            self.evaluate(step, state)
        if owed and not self.progress.evaluation_due:
            self._save(step, state)  # in the place of the one without this evaluation
        self._new_window()
        with bar, profile:
            while step < settings.steps and not self.stop.requested and self.lost is None:
                with self.window.pause():
                    profile.turn(step + 1, running)
                with profile.step(step + 1):
                    try:
                        stepped = self.steps.step(state, step, self.stop)
                    except RewardsLost as error:
                        self.lost, stepped = error, None
                    if stepped is None:
                        break
                    state, metrics = stepped
                    step += 1
                    if running is not None:
                        self._finish(*running, bar)
                    running = step, metrics, self.steps.samples
                last = step == settings.steps
                evaluates = step % settings.eval_every == 0 or last
                saves = step % settings.checkpoint_every == 0 or last
                if evaluates or saves:  # both need the state, which the next step overwrites
                    self._finish(*running, bar)
                    running = None
                with self.window.pause():
                    if evaluates:
                        self.evaluate(step, state)
                    # While nothing is learned the older of two checkpoints is not given away.
                    worth_it = self.has_learned or not self.progress.skipped_in_a_row or last
                    if (saves and worth_it) or self.progress.evaluation_due:
                        self._save(step, state)
                        saved = step
            if running is not None:
                self._finish(*running, bar)
        if step != saved and (self.has_learned or not isinstance(self.lost, NotFinite)):
            self._save(step, state)
        self.checkpoints.wait()
        if self.lost is not None:
            raise self.lost
        return step

    def evaluate(self, step: int, state: pqn.TrainState) -> None:
        """Scores the fixed questions; keeps the parameters if they are the best so far.

        If the run is to stop while this waits for rewards, or the language model is lost, the
        evaluation is left for the run's next start.
        """
        multi: list[Row] = []
        single: list[Row] = []
        for rows, single_rows in episodes.play_samples(
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
        scores, single_scores = _means(multi), _means(single)
        if self.rewards is not None:
            returns = self._returns(multi)
            self.progress.evaluation_due = returns is None
            if returns is None:
                log(f"the evaluation of step {step} was broken off; the next start begins with it")
                return
            scores |= returns
            del single_scores["return"]  # a language model is not asked about these
        if step == 0:
            self.progress.baselines = {
                **{f"untrained/{name}": value for name, value in scores.items()},
                **{f"single_step/{name}": value for name, value in single_scores.items()},
            }
        self.writer.write(
            step,
            {
                **{f"eval/{name}": value for name, value in scores.items()},
                **{f"eval_single_step/{name}": value for name, value in single_scores.items()},
                **self.progress.baselines,
            },
        )
        without = f", {share:.0%} without reward" if (share := scores.get("unscored_share")) else ""
        log(
            f"step {step}: fact EM {scores['fact_em']:.3f}, F1 {scores['fact_f1']:.3f}, precision "
            f"{scores['fact_precision']:.3f}, recall {scores['fact_recall']:.3f} (until found, by "
            f"the answer key: F1 {scores['fact_f1_until_found']:.3f}, precision "
            f"{scores['fact_precision_until_found']:.3f}), "
            f"return {scores['return']:.3f}{without} on {len(multi)} questions"
        )
        score = scores[self.config.eval.best_by]
        if score > self.progress.best_return and not self.progress.skipped_in_a_row:
            self.progress.best_return = score
            self.checkpoints.save_best(step, state.params, {"scores": scores})

    def _returns(self, rows: list[Row]) -> dict[str, float] | None:
        """Mean return by the language model, over the questions that it scored, and the share of
        others; None if the run is to stop first."""
        assert self.rewards is not None
        samples = [self.inputs.dev_samples[index] for index in self.inputs.dev_indices]
        size = self.config.eval.batch_size
        taken = [self._actions(row, sample) for row, sample in zip(rows, samples, strict=True)]
        asked = [
            self.rewards.begin(samples[start : start + size], taken[start : start + size])
            for start in range(0, len(rows), size)
        ]
        rewards: list[EpisodeRewards | Unscored] = []
        for part in asked:
            try:
                got = self.rewards.wait(part, self.stop)
            except RewardsLost as error:
                self.lost, got = error, None
            if got is None:
                return None
            rewards += got
        gamma = self.config.pqn.gamma
        returns = [
            sum(gamma**t * reward for t, reward in enumerate(episode.rewards))
            for episode in rewards
            if not isinstance(episode, Unscored)
        ]
        share = 1 - len(returns) / len(rewards)
        return {"return": float(np.mean(returns)), "unscored_share": share}

    def _actions(self, row: Row, sample: Sample) -> list[int]:
        """What was done in an episode, with STOP, which is no chunk, where that ended it."""
        settings, taken = self.config.env, row.pred_idx
        stopped = settings.stop_action and len(taken) < settings.max_steps
        return [*taken, len(sample.chunks)] if stopped else taken

    def _new_window(self) -> None:
        self.window = Window(waited=dict(self.steps.waited))

    def _finish(self, step: int, metrics: Metrics, samples: np.ndarray, bar: tqdm) -> None:
        """Waits until the step is computed; shows it, and writes what is due."""
        jax.block_until_ready(metrics)
        if not self.has_stepped:
            self._tell_start(step)
            self.has_stepped = True
        bar.update()
        self._count(step, bool(metrics["skipped"]), samples)
        self.window.metrics.append(metrics)
        if step % self.config.train.log_every == 0 or step == self.config.train.steps:
            shown = self._log(step)
            bar.set_postfix(loss=f"{shown['loss']:.3f}", fact_em=f"{shown['fact_em']:.2f}")
            self._new_window()

    def _count(self, step: int, skipped: bool, samples: np.ndarray) -> None:
        progress = self.progress
        if not skipped:
            self.has_learned, progress.skipped_in_a_row = True, 0
            return
        progress.skipped_steps += 1
        progress.skipped_in_a_row += 1
        questions = [self.inputs.train_samples[number].id for number, _ in samples.tolist()]
        if progress.skipped_in_a_row == 1:
            log(skip_line(step, questions, progress.skipped_steps))
        if self.lost is None and 0 < skip_limit(self.config) <= progress.skipped_in_a_row:
            self.lost = stop_error(self.config, step, progress.skipped_in_a_row, questions)

    def _tell_start(self, step: int) -> None:
        seconds, counter = process_age(), self.counter
        hits = counter.cache_hits
        metrics = {"speed/time_to_first_step": seconds, "speed/compilation_cache_hits": hits}
        self.writer.write(step, metrics)
        log(
            f"first step after {seconds:.1f} s, {counter.seconds:.1f} s of it compiling "
            f"{counter.count} programs ({hits} from the cache)"
        )

    def _log(self, step: int) -> dict[str, float]:
        window, elapsed = self.window, time.monotonic() - self.window.began
        rows = jax.device_get(window.metrics)
        means = {name: _mean_of_finite([row[name] for row in rows]) for name in rows[0]}
        del means["skipped"]
        means["env_steps"] = float(rows[-1]["env_steps"])
        means["skipped_steps"] = float(self.progress.skipped_steps)
        means["skipped_in_a_row"] = float(self.progress.skipped_in_a_row)
        metrics = {f"train/{name}": value for name, value in means.items()}
        metrics |= {
            "speed/steps_per_second": len(rows) / elapsed,
            **{
                f"speed/{cause}_wait_share": (seconds - window.waited[cause]) / elapsed
                for cause, seconds in self.steps.waited.items()
            },
            "speed/compilations": float(self.counter.count),
            "speed/compilation_seconds": self.counter.seconds,
            "speed/seconds": time.monotonic() - self.started,
            **self.steps.counts(),
        }
        self.writer.write(step, metrics)
        self.checkpoints.check()
        return means

    def _save(self, step: int, state: pqn.TrainState) -> None:
        self.has_learned = False
        self.progress.seconds = time.monotonic() - self.started
        self.progress.batches, self.progress.pending = self.steps.position()
        self.checkpoints.save_last(step, state, dataclasses.asdict(self.progress))


def log(line: str) -> None:
    """One line on the screen, from the first host only."""
    if jax.process_index() == 0:
        tqdm.write(line)
        sys.stdout.flush()  # at once also where the output goes to a file


def _mean_of_finite(values: Sequence[np.ndarray]) -> float:
    """NaN if none is: a skipped step does not hide the loss of the others."""
    finite = [value for value in values if np.isfinite(value)]
    return float(np.mean(finite)) if finite else math.nan


def _means(rows: list[Row]) -> dict[str, float]:
    """Mean scores of the play, and of the same play until all facts were found (there EM and
    recall are the same)."""
    cut = [until_found(row) for row in rows]
    columns, cut_columns = fact_columns(rows), fact_columns(cut)
    columns["return"] = [row.ret for row in rows]
    for name in ("fact_f1", "fact_precision", "steps"):
        columns[f"{name}_until_found"] = cut_columns[name]
    columns["return_until_found"] = [row.ret for row in cut]
    return {name: float(np.mean(values)) for name, values in columns.items()}
