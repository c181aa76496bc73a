"""Writes what training steps report: metrics, rates, the progress bar, skipped steps.

The log waits for the results of a step and writes them while the next step runs. Only one step is
ahead of the log. So the rates are true, a signal is heeded at once, and memory is bounded.

The update itself checks that the loss and the gradient are finite. If they are not, it learns
nothing from the step and says so in the metric `skipped`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from qrag_jax.runtime.not_learning import Evaluated, Watch
from qrag_jax.runtime.run import Run, log
from qrag_jax.runtime.saved_config import TrainConfig
from qrag_jax.runtime.writers import Logged, MetricWriter

Metrics = dict[str, jax.Array]
SHOWN = 8  # most questions named in the message about one skipped step
_IMPORTED = time.monotonic()
LAST_VALUE = ("env_steps",)  # counts so far: the last value is written, not the mean


class NotFinite(RuntimeError):
    """Too many steps in a row learned nothing; the message is one sentence for the user."""


Sampler = Callable[[int], Any]  # (most episodes) → so many of them, see `evaluators.evaluation`


@dataclasses.dataclass(frozen=True)
class LogText:
    """What a system gives the log besides metrics."""

    names: Callable[[Sequence[int]], list[str]]  # the ids of questions from their numbers
    shown: Mapping[str, str]  # metrics shown beside the progress bar, name → format
    advice: str  # what the user can change if no step is finite; part of an error message


class StepLog:
    """The log of a training's steps. Use it as a context manager around the loop."""

    def __init__(
        self,
        run: Run,
        train: TrainConfig,
        profile: int,
        experience: Any,
        text: LogText,
        *,
        logged: Logged | None = None,
    ) -> None:
        """
        Args:
            profile: number of steps to trace.
            experience: one of `rollouts.experience`; the log reads `waited`, `samples`, `counts`.
            logged: where metrics go besides the run's `metrics.jsonl`.
        """
        self._run, self._train, self._experience, self._text = run, train, experience, text
        done = run.step
        self._profile = StepProfile(run.workdir / "profile", profile, done, log)
        first = jax.process_index() == 0  # of several hosts it alone writes
        self._writer = MetricWriter(run.workdir, done or None, logged) if first else None
        # Without smoothing, the time that is left has the evaluations' share in it.
        count = {"initial": done, "total": train.steps}
        self._bar = tqdm(**count, unit="step", smoothing=0, disable=not first)
        self._running: tuple[int, Metrics, np.ndarray] | None = None
        self._watch = Watch(train.steps)
        self._has_stepped = self._has_failed = False  # both in this start of the run
        self.restart_window()

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.ExitStack() as stack:
            for each in (self._writer, self._bar, self._profile):
                if each is not None:
                    stack.callback(each.close)

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
        with self._profile.step(step):
            yield

    def step(self, step: int, metrics: Metrics) -> None:
        """Takes the results of a step and writes those of the step before.

        The device may still be computing the new results.
        """
        before = self._running
        self._running = step, metrics, self._experience.samples
        if before is not None:
            self._tell(*before)

    def finish(self) -> None:
        """Waits for the last step and writes its results."""
        last, self._running = self._running, None
        if last is not None:
            self._tell(*last)

    def finish_after(self, why: Exception) -> Exception:
        """As `finish`; returns `why` the run ends, or the `NotFinite` of the last step."""
        try:
            self.finish()
        except NotFinite as error:
            return error
        return why

    def restart_window(self) -> None:
        """Begins a new line of metrics, without the steps before."""
        self._metrics: list[Metrics] = []  # of every step of the line
        self._line_began, self._waited = time.monotonic(), dict(self._experience.waited)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Writes metrics that do not come from a step."""
        if self._writer is not None:
            self._writer.write(step, metrics)

    def look_at(self, evaluation: Evaluated) -> None:
        """Says what in the training so far shows that it does not learn; each sign once."""
        for sentence in self._watch.evaluated(evaluation):
            log(sentence)

    def write_episodes(self, step: int, sampler: Sampler | None) -> None:
        """Keeps some episodes of an evaluation, as `config.train.log_episodes` says."""
        most = self._train.log_episodes
        if sampler is not None and most and self._writer is not None:
            found = sampler(most)
            self._writer.write_episodes(step, found.kind, found.rows, found.text)

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
            forms = self._text.shown.items()  # a stage without rewards has no return
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
            questions = self._text.names(samples[:, 0].tolist())
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
        questions = ", ".join(self._text.names(samples[:, 0].tolist()))
        return NotFinite(
            f"the loss or its gradient was not finite in {in_a_row} steps in a row, the last of "
            f"them step {step} (questions {questions}); {kept}, the checkpoints hold finite "
            f"numbers alone: begin again in another --workdir with {self._text.advice}without "
            "such questions (--config.train.max_skipped_steps=0 never stops)."
        )

    def _tell_start(self, step: int) -> None:
        seconds, counter = process_age(), self._run.counter
        hits = counter.cache_hits
        self.write(
            step, {"speed/time_to_first_step": seconds, "speed/compilation_cache_hits": hits}
        )
        log(
            f"first step after {seconds:.1f} s, {counter.seconds:.1f} s of it compiling "
            f"{counter.count} programs ({hits} from the cache)"
        )

    def _write(self, step: int) -> dict[str, float]:
        elapsed = time.monotonic() - self._line_began
        progress, counter = self._run.progress, self._run.counter
        rows = jax.device_get(self._metrics)
        # A skipped step does not hide the others' loss.
        known = {name: list[float]() for row in rows for name in row}
        for row in rows:
            for name, value in row.items():
                known[name] += [value] if np.isfinite(value) else []
        means = {name: float(np.mean(own)) if own else math.nan for name, own in known.items()}
        skipped = round(means.pop("skipped") * len(rows))
        self._watch.line(len(rows), means, skipped)
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
    """Seconds since this process was created, including Python's start and every import.

    On Linux it is exact to a hundredth of a second. Elsewhere it counts from this module's import.
    """
    try:
        # proc_pid_stat(5): field 22, after the name in parentheses, is the start in clock ticks.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):
        return time.monotonic() - _IMPORTED


PERFETTO_NAME = "perfetto_trace.json.gz"


class StepProfile:
    """Traces `steps` training steps, without the first two of this start, which compile.

    In whichever way the loop ends, `close` writes an open trace with the steps so far. Only the
    first host traces.

    Args:
        folder: gets `plugins/profile/DATE/` with an `.xplane.pb` (TensorBoard) and
            `perfetto_trace.json.gz`.
        steps: steps to trace; 0 traces nothing.
        done: steps done before this start.
    """

    SKIPPED = 2

    def __init__(self, folder: Path, steps: int, done: int, log: Callable[[str], None]) -> None:
        self._folder, self._log = folder, log
        self._begin = done + self.SKIPPED + 1  # step traced first
        self._end = self._begin + steps  # first step after the trace
        self._wanted = steps > 0 and jax.process_index() == 0
        self._last: int | None = None  # step traced last, while a trace is open

    def turn(self, step: int, running: Any) -> None:
        """Opens the trace before the first step to trace, and closes it after the last one.

        It first waits for the arrays in `running`, so that the trace holds whole steps.
        """
        if self._wanted and step == self._begin:
            jax.block_until_ready(running)
            options = jax.profiler.ProfileOptions()
            # Else every Python call is an event: a million in seconds, which crowd out the rest.
            options.python_tracer_level = 0
            jax.profiler.start_trace(
                self._folder, create_perfetto_trace=True, profiler_options=options
            )
            self._last = step
        elif self._last is not None and step == self._end:
            jax.block_until_ready(running)
            self.close()

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Marks the host's part of a step; viewers group the device's work by these marks."""
        if self._last is None:
            return contextlib.nullcontext()
        self._last = step
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def close(self) -> None:
        """Writes an open trace; says so if the loop was too short for one."""
        if self._last is None:
            if self._wanted:
                self._log(f"nothing profiled: this start had not more than {self.SKIPPED} steps.")
            return
        last, self._last, self._wanted = self._last, None, False
        jax.profiler.stop_trace()
        self._log(
            f"profile of steps {self._begin} to {last}: run tensorboard --logdir="
            f"{shlex.quote(str(self._folder))}, or open {PERFETTO_NAME} there at "
            "https://ui.perfetto.dev"
        )
