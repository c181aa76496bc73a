"""Writes what training steps report: metrics, rates, the progress bar, skipped steps.

The log waits for the results of a step and writes them while the next step runs. Only one step is
ahead of the log. So the rates are true, a signal is heeded at once, and memory is bounded.

The update itself checks that the loss and the gradient are finite. If they are not, it learns
nothing from the step and says so in the metric `skipped`. `Watch` finds signs that a training does
not learn; it stops no run.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from qrag_jax.runtime.config_fields import TrainConfig
from qrag_jax.runtime.run import Run, log
from qrag_jax.runtime.writers import Logged, MetricWriter

Metrics = dict[str, jax.Array]
SHOWN = 8  # most questions named in the message about one skipped step
LAST_VALUE = ("env_steps",)  # counts so far: the last value is written, not the mean


class NotFinite(RuntimeError):
    """Too many steps in a row learned nothing; the message is one sentence for the user."""


Sampler = Callable[[int], Any]  # (most episodes) → so many of them, see `evaluators.evaluation`


class StepLog(contextlib.AbstractContextManager):
    """The log of a training's steps. Use it as a context manager around the loop."""

    def __init__(self, run: Run, system: Any, experience: Any, logged: Logged) -> None:
        """
        Args:
            system: a `systems.System`; the log reads `train`, `profile`, `shown` and `names`.
            experience: one of `rollouts.experience`; the log reads `waited`, `samples`, `counts`.
        """
        train: TrainConfig = system.train
        self._run, self._train, self._experience, self._system = run, train, experience, system
        done = run.step
        self._profile = StepProfile(run.workdir / "profile", system.profile, done)
        first = jax.process_index() == 0  # of several hosts it alone writes
        self._writer = MetricWriter(run.workdir, done or -1, logged) if first else None
        # Without smoothing, the time that is left has the evaluations' share in it.
        count = {"initial": done, "total": train.steps}
        self._bar = tqdm(**count, unit="step", smoothing=0, disable=not first)
        self._running: tuple[int, Metrics, np.ndarray] | None = None
        self.watch = Watch(train.steps)
        self._has_stepped = self._has_failed = False  # both in this start of the run
        self.restart_window()

    def __exit__(self, *error: Any) -> None:
        with contextlib.ExitStack() as stack:
            for output in (self._writer, self._bar, self._profile):
                if output is not None:
                    stack.callback(output.close)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time spent in the block, be it seconds or hours, out of the rates."""
        before = time.monotonic()
        yield
        self._line_began += time.monotonic() - before

    @contextlib.contextmanager
    def finished(self) -> Iterator[None]:
        """As `paused`, but first waits for the last step and writes its results.

        Code that reads the state runs in this block, because the next step overwrites the state.
        """
        self.finish()
        with self.paused():
            yield

    @contextlib.contextmanager
    def traced(self, step: int) -> Iterator[None]:
        """Surrounds the host's part of a step; traces the step if the profile includes it."""
        with self.paused():
            self._profile.turn(step, self._running)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):  # viewers group by these
            yield

    def step(self, step: int, metrics: Metrics) -> None:
        """Takes results, which may still be computed, and writes those of the step before."""
        before = self._running
        self._running = step, metrics, self._experience.samples
        if before is not None:
            self._tell(*before)

    def finish(self) -> None:
        """Waits for the last step and writes its results."""
        last, self._running = self._running, None
        if last is not None:
            self._tell(*last)

    def restart_window(self) -> None:
        """Begins a new line of metrics, without the steps before."""
        self._metrics: list[Metrics] = []  # of every step of the line
        self._line_began, self._waited = time.monotonic(), dict(self._experience.waited)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if self._writer is not None:
            self._writer.write(step, metrics)

    def write_episodes(self, step: int, sampler: Sampler | None) -> None:
        """Keeps some episodes of an evaluation, as `config.train.log_episodes` says."""
        most = self._train.log_episodes
        if sampler is not None and most and self._writer is not None:
            episodes = sampler(most)
            self._writer.write_episodes(step, episodes.kind, episodes.rows, episodes.text)

    def _tell(self, step: int, metrics: Metrics, samples: np.ndarray) -> None:
        jax.block_until_ready(metrics)
        if not self._has_stepped:
            self._has_stepped = True
            self._tell_start(step)
        self._bar.update()
        self._metrics.append(metrics)
        in_a_row = self._count(step, bool(metrics["skipped"]), samples)
        if step % self._train.log_every == 0 or step == self._train.steps:
            means = self._write(step)
            forms = self._system.shown.items()  # a stage without rewards has no return
            self._bar.set_postfix({n: format(means[n], form) for n, form in forms if n in means})
            self.restart_window()
        # A short run in which every step is skipped stops, too. The error is raised only once.
        limit = min(self._train.max_skipped_steps, self._train.steps)
        if 0 < limit <= in_a_row and not self._has_failed:
            self._has_failed = True
            raise self._stop_error(step, in_a_row, samples)

    def _count(self, step: int, skipped: bool, samples: np.ndarray) -> int:
        """Counts the step; returns how many steps in a row were skipped."""
        progress = self._run.progress
        if not skipped:
            self._run.has_learned, progress.skipped_in_a_row = True, 0
            return 0
        progress.skipped_steps += 1
        progress.skipped_in_a_row += 1
        if progress.skipped_in_a_row == 1:
            questions = self._system.names(samples[:, 0].tolist(), step)
            more = f" and {len(questions) - SHOWN} more" if len(questions) > SHOWN else ""
            log(
                f"step {step}: the loss or its gradient is not finite; nothing is learned from "
                f"this batch (questions {', '.join(questions[:SHOWN])}{more}); skipped so far: "
                f"{progress.skipped_steps}"
            )
        return progress.skipped_in_a_row

    def _stop_error(self, step: int, in_a_row: int, samples: np.ndarray) -> NotFinite:
        """Why the run stops, which of its states are good, and what can be done."""
        since = step - in_a_row
        kept = f"the state after step {since} is kept" if since else "nothing was learned before"
        questions = ", ".join(self._system.names(samples[:, 0].tolist(), step))
        return NotFinite(
            f"the loss or its gradient was not finite in {in_a_row} steps in a row, to step {step} "
            f"(questions {questions}); {kept}: begin again in another --workdir with a lower rate "
            "(--config.optimizer.learning_rate or the stage's), in float32 or without such "
            "questions (--config.train.max_skipped_steps=0 never stops)."
        )

    def _tell_start(self, step: int) -> None:
        seconds, counter = process_age(), self._run.counter
        hits = counter.cache_hits
        speed = {"speed/time_to_first_step": seconds, "speed/compilation_cache_hits": hits}
        self.write(step, speed)
        compiled = f"{counter.seconds:.1f} s of it compiling {counter.count} programs"
        log(f"first step after {seconds:.1f} s, {compiled} ({hits} from the cache)")

    def _write(self, step: int) -> dict[str, float]:
        elapsed = time.monotonic() - self._line_began
        progress, counter = self._run.progress, self._run.counter
        rows = jax.device_get(self._metrics)
        # A skipped step does not hide the others' loss.
        means = dict[str, float]()
        for name in dict.fromkeys(name for row in rows for name in row):
            values = [row[name] for row in rows if name in row and np.isfinite(row[name])]
            means[name] = float(np.mean(values)) if values else math.nan
        skipped = round(means.pop("skipped") * len(rows))
        self.watch.line(len(rows), means, skipped)
        means |= {name: float(rows[-1][name]) for name in LAST_VALUE if name in rows[-1]}
        means["skipped_steps"] = float(progress.skipped_steps)
        means["skipped_in_a_row"] = float(progress.skipped_in_a_row)
        metrics = {f"train/{name}": value for name, value in means.items()}
        metrics |= {
            "speed/steps_per_second": len(rows) / elapsed,
            **{
                f"speed/{cause}_wait_share": (seconds - self._waited.get(cause, 0.0)) / elapsed
                for cause, seconds in self._experience.waited.items()
            },
            "speed/compilations": float(counter.count),
            "speed/compilation_seconds": counter.seconds,
            "speed/seconds": self._run.seconds,
            **self._experience.counts(),
        }
        self.write(step, metrics)
        self._run.checkpoints.check()
        return means


def process_age() -> float:
    """Seconds since this process was created, including Python's start and every import."""
    # proc_pid_stat(5): field 22, after the name in parentheses, is the start in clock ticks.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


PERFETTO_NAME = "perfetto_trace.json.gz"


class StepProfile:
    """Traces `steps` training steps, without the first two of this start, which compile.

    In whichever way the loop ends, `close` writes an open trace with the steps so far. Only the
    first host traces. `folder` gets `plugins/profile/DATE/` with an `.xplane.pb` (TensorBoard) and
    `perfetto_trace.json.gz`.
    """

    SKIPPED = 2

    def __init__(self, folder: Path, steps: int, done: int) -> None:
        self._folder, self._step = folder, done
        self._begin = done + self.SKIPPED + 1  # step traced first
        self._end = self._begin + steps  # first step after the trace
        self._wanted = steps > 0 and jax.process_index() == 0

    def turn(self, step: int, running: Any) -> None:
        """Opens the trace before the first step to trace, and closes it after the last one.

        It first waits for the arrays in `running`, so that the trace holds whole steps.
        """
        self._step = step
        if not self._wanted or step not in (self._begin, self._end):
            return
        jax.block_until_ready(running)
        if step == self._end:
            self.close()
            return
        options = jax.profiler.ProfileOptions()
        # Else every Python call is an event: a million in seconds, which crowd out the rest.
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)

    def close(self) -> None:
        """Writes an open trace; says so if the loop was too short for one."""
        if not self._wanted:
            return
        self._wanted = False
        if self._step < self._begin:
            log(f"nothing profiled: this start had not more than {self.SKIPPED} steps.")
            return
        jax.profiler.stop_trace()
        log(
            f"profile of steps {self._begin} to {min(self._step, self._end - 1)}: run tensorboard "
            f"--logdir={shlex.quote(str(self._folder))}, or open {PERFETTO_NAME} there at "
            "https://ui.perfetto.dev"
        )


# ---------------------------------------------------------------------- signs of no learning
# Each rule looks at one number that a sound training does not show; docs/troubles.md has the likely
# causes.

# What the rules are called; also the headings in docs/troubles.md.
FLAT, WORSE, NO_ENTROPY = "flat", "worse", "no-entropy"
EQUAL_Q, SKIPPED, NO_GRADIENT = "equal-q", "skipped", "no-gradient"
FLAT_GROUPS, ONE_RETURN = "flat-groups", "one-return"

LEAST_EVALUATIONS = 3  # after that of the untrained weights
LEAST_SHARE = 0.2  # of the training's steps, before its scores are judged: warm-up is over
LEAST_QUESTIONS = 20  # of an evaluation; the interval of fewer is too wide to say anything
LEAST_STEPS = 20  # before the means of steps are judged
LEAST_LINES = 3  # of these means, likewise
LEAST_ENTROPY = 0.01  # nats: the likeliest of two actions then has more than 99.8 %
EQUAL = 1e-5  # of the largest Q: what float32 rounds, over a row of some hundred products
MOST_SKIPPED = 0.2  # share of the steps
MOST_FLAT = 0.95  # share of the groups
KEPT = 100  # lines
NORMAL_95 = 1.96  # standard errors on both sides of a mean


class Evaluated(NamedTuple):
    step: int  # after which it was
    score: float  # the mean that chooses the best checkpoint
    each: Sequence[float] = ()  # this score of each question that has one
    # The largest difference, over all questions, between the best Q-values of the first step, over
    # the largest |Q|; None: the policy has no Q, or one value of it is known.
    q_spread: float | None = None


class Watch:
    """What a start of a training has shown so far; says each kind of finding once."""

    def __init__(self, steps: int) -> None:
        self._steps, self._said = steps, set[str]()
        self.evaluations: list[Evaluated] = []  # a resumed run lacks the earlier ones
        # Numbers of steps and the means over these: `entropy`, `grad_norm`, `flat_groups`,
        # `return`, as far as the system has them.
        self.lines: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=KEPT)
        self.counted = self.skipped = 0  # steps of all lines, and those that learned nothing

    def line(self, count: int, means: Mapping[str, float], skipped: int) -> None:
        self.lines.append((count, dict(means)))
        self.counted += count
        self.skipped += skipped

    def evaluated(self, evaluation: Evaluated) -> Iterator[str]:
        """Takes an evaluation, and gives one sentence for each sign that is seen first now."""
        self.evaluations.append(evaluation)
        for kind, measured in self.findings():
            if kind not in self._said:
                self._said.add(kind)
                causes = f"for likely causes see docs/troubles.md#{kind}"
                yield f"step {evaluation.step}: the run may not be learning: {measured}; {causes}"

    def findings(self) -> Iterator[tuple[str, str]]:
        """All signs that the training does not learn: the rule's name, and what was measured."""
        if not self.evaluations:
            return
        first, last = self.evaluations[0], self.evaluations[-1]
        if interval := self._first_interval():
            yield from self._of_scores(*interval)
        if last.step and last.q_spread is not None and last.q_spread <= EQUAL:
            text = "the best Q-values of the first step are equal for every question of the last "
            yield EQUAL_Q, f"{text}evaluation (they differ by {last.q_spread:.1g} of the largest)"
        if self.counted >= LEAST_STEPS and self.skipped >= MOST_SKIPPED * self.counted:
            share = f"{self.skipped} of {self.counted} steps ({self.skipped / self.counted:.0%})"
            why = "learned nothing, because their loss or gradient was not finite"
            yield SKIPPED, f"{share} {why}"
        # A policy that has learned may be sure of itself. A resumed run does not know its first
        # score, so it is taken to have learned.
        if first.step == 0 and last.score <= (interval[1] if interval else first.score):
            yield from self._of_means()

    def _first_interval(self) -> tuple[float, float] | None:
        """That of the untrained weights' score; None: too little is known for a judgement."""
        first, *later = self.evaluations
        known = [value for value in first.each if math.isfinite(value)]
        if first.step != 0 or len(known) < LEAST_QUESTIONS or len(later) < LEAST_EVALUATIONS:
            return None
        if later[-1].step < LEAST_SHARE * self._steps:
            return None
        # Of the mean, by its standard error. The bootstrap of the scores' tables gives nearly the
        # same from 20 values on, but its library takes a second to import.
        half = NORMAL_95 * float(np.std(known, ddof=1)) / math.sqrt(len(known))
        mean = float(np.mean(known))
        return mean - half, mean + half

    def _of_scores(self, low: float, high: float) -> Iterator[tuple[str, str]]:
        later = [evaluation.score for evaluation in self.evaluations[1:]]
        last = later[-LEAST_EVALUATIONS:]
        scores = f"the last {len(last)} evaluations scored {', '.join(f'{x:.3f}' for x in last)}"
        count = f"({len(self.evaluations[0].each)} questions)"
        first = f"95 % interval of the untrained weights, {low:.3f} to {high:.3f} {count}"
        if all(low <= score <= high for score in later):
            yield FLAT, f"{scores}, all {len(later)} so far within the {first}"
        if all(score < low for score in last):
            yield WORSE, f"{scores}, below the {first}"

    def _of_means(self) -> Iterator[tuple[str, str]]:
        """What the last lines of the log show."""
        lines = "the last {} lines of the log".format
        if (known := self._last_means("entropy")) and max(known) < LEAST_ENTROPY:
            value = f"{max(known):.2g} nats or less for {lines(len(known))}"
            text = f"the policy's entropy is {value}, and the score is no better than at first"
            yield NO_ENTROPY, text
        if (known := self._last_means("grad_norm")) and not any(known):
            yield NO_GRADIENT, f"the gradient is 0 in {lines(len(known))}"
        if (known := self._last_means("flat_groups")) and min(known) >= MOST_FLAT:
            share = f"{min(known):.0%} or more of the groups have equal rewards"
            yield FLAT_GROUPS, f"{share} in {lines(len(known))}, and such a group teaches nothing"
        if (known := self._last_means("return")) and min(known) == max(known):
            value = f"exactly {known[0]:.4g} in each of {lines(len(known))}"
            yield ONE_RETURN, f"the mean return is {value}"

    def _last_means(self, name: str) -> list[float]:
        """The last means, which cover enough steps and lines; [] if there are too few."""
        last, steps = list[float](), 0
        for count, means in reversed(self.lines):
            value = means.get(name, math.nan)
            if not math.isfinite(value):
                return []  # another stage, or a line without any good step
            last.append(value)
            steps += count
            if len(last) >= LEAST_LINES and steps >= LEAST_STEPS:
                return last[::-1]
        return []
