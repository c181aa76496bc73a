"""Manages the folder of a run: its lock, progress, checkpoints and final files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict
from tqdm import tqdm

from qrag_jax.errors import InputError
from qrag_jax.runtime import buckets, hosts, whole_files
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.config_fields import (
    CONFIG_NAME,
    FREE_FIELDS,
    STEPS,
    flat,
    has_begun,
    read_fields,
    save_config,
)
from qrag_jax.runtime.platform import CompilationCounter, enable_persistent_cache
from qrag_jax.runtime.writers import METRICS_NAME, read_metrics

DEV = "evaluation"  # the key of the digest of the data that choose the best checkpoint


@dataclasses.dataclass
class Progress:
    """The state of a run besides its arrays; saved with every checkpoint."""

    seconds: float = 0.0  # of training and evaluating, over all starts
    best_return: float = -math.inf  # the score that chooses the best checkpoint
    baselines: dict[str, float] = dataclasses.field(default_factory=dict)
    batches: Any = None  # position of the data iterator
    # Episodes played but not yet learned from, if rewards come later.
    pending: list[Any] = dataclasses.field(default_factory=list)
    evaluation_due: bool = False  # the run ended during this step's evaluation
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)  # of a model's rewards
    data: dict[str, str] = dataclasses.field(default_factory=dict)  # content key of each source
    skipped_steps: int = 0  # steps whose numbers were not finite
    skipped_in_a_row: int = 0  # skipped steps since the last good one


class Run:
    """A run that this process trains."""

    def __init__(self, workdir: Path, began: float) -> None:
        # Whether the run had a config when it was opened: the files in its folder belong to it.
        self.workdir, self.has_begun = workdir, has_begun(workdir)
        self.config_path = workdir / CONFIG_NAME
        enable_persistent_cache()
        self.counter = CompilationCounter()
        self.progress = Progress()
        self.step = self.saved = 0  # of the checkpoint that the run goes on from; saved last
        self.has_learned = False  # a step has learned something since the last save
        self._began = began
        self._changed: dict[str, Any] = {}  # fields that the run's config gets: paths, steps

    @classmethod
    @contextlib.contextmanager
    def open(cls, workdir: Path, began: float) -> Iterator[Run]:
        """Opens the run in the folder, which is made if absent; no other process trains in it.

        This start of the run `began` at so many seconds of the monotonic clock.
        """
        is_new = not workdir.exists()
        with whole_files.writing(workdir, "--workdir"):
            workdir.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(buckets.held(workdir))

            def take() -> None:  # the first host holds the lock, and the others wait for it
                stack.enter_context(whole_files.run_lock(workdir))
                stack.callback(_delete_empty, workdir, is_new)
                whole_files.clean_unfinished(workdir)

            hosts.first_does(take)
            whole_files.clean_weights(whole_files.MEMORY)
            run, kept = cls(workdir, began), sorted(workdir.glob("checkpoints/*/[0-9]*"))
            if kept and not run.has_begun:  # the settings of its checkpoints are unknown
                raise InputError(
                    f"{workdir} holds checkpoints ({kept[0].relative_to(workdir)}) but its config "
                    f"({CONFIG_NAME}) is missing; restore it, or give another --workdir."
                )
            yield run

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        """Made at first use, so that a refused start leaves no folder for checkpoints."""
        return Checkpoints(self.workdir, log=log)

    def begin(self, write: Callable[[], None]) -> None:
        """Lets the first host write the config of a new run, with what belongs to it.

        It is written once: a later start that fails must not lose it. All hosts call this.
        """
        if self.has_begun:
            return
        hosts.first_does(write)
        if not has_begun(self.workdir):
            raise InputError(f"{self.workdir} lacks the first host's files; give a shared one.")

    @property
    def seconds(self) -> float:
        """Seconds of training and evaluating, over all starts."""
        return time.monotonic() - self._began

    def check_config(
        self, saved: ConfigDict, config: ConfigDict, free: Sequence[str], paths: Sequence[str]
    ) -> None:
        """Refuses to go on under another config; more steps are none.

        Args:
            free: beginnings of names of fields that do not change what a run computes, besides
                `FREE_FIELDS`.
            paths: names of fields of data whose digests `restore` compares.
        """
        old, new = flat(saved.to_dict()), flat(config.to_dict())
        names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        changed = {name: (old.get(name), new.get(name)) for name in names}
        grows = STEPS in changed and (old.get(STEPS) or 0) < (new.get(STEPS) or 0)
        kept = (*FREE_FIELDS, *free, *paths, *([STEPS] if grows else []))
        if different := [
            f"config.{name}: the run has {before!r:.200}, given is {now!r:.200}"
            for name, (before, now) in changed.items()
            if not name.startswith(kept)
        ]:
            raise InputError(
                f"the run has another config: {'; '.join(different)}; keep it, or change --workdir."
            )
        self._changed = {name: new[name] for name in (*paths, STEPS) if name in changed}
        if grows:
            log("config.{} was {}, now {}; a rate decays up to that".format(STEPS, *changed[STEPS]))

    def restore(
        self, first_state: Callable[[], Any], data: Mapping[str, str], provenance: Mapping[str, Any]
    ) -> Any:
        """The state from which the run goes on: a new one, or that of the newest checkpoint.

        Args:
            first_state: builds a new state, placed on the devices.
            data: content keys of the training data by source, and of `DEV`.
            provenance: what the rewards depend on.
        """
        state, progress = first_state(), Progress(data=dict(data))
        self.step = self.checkpoints.last_step() or 0
        if self.step:
            state, extra, self.step = self.checkpoints.restore_last(state)
            old, new = extra["data"], progress.data
            if other := [n for n in sorted({*old, *new}) if old.get(n) != new.get(n)]:
                raise InputError(
                    f"{self.workdir} began with other data: give back {', '.join(other)}"
                )
            progress = Progress(**extra)
            log(f"resumed {self.workdir} at step {self.step}")
            if self.checkpoints.best_step() == 0:
                log("the best checkpoint so far is that of step 0, the untrained weights")
        elif moved := [name for name in self._changed if name != STEPS]:
            raise InputError(
                f"config.{', config.'.join(moved)}: {self.workdir} began with other paths, and "
                "has no checkpoint yet; give the run's own, or another --workdir."
            )
        if self._changed:  # where the data are now, which are equal, and the steps
            saved = ConfigDict(read_fields(self.config_path))
            with saved.ignore_type():
                saved.update_from_flattened_dict(self._changed)
            hosts.first_does(lambda: save_config(saved, self.config_path))
        self.progress, self.saved = progress, self.step
        self._began -= progress.seconds
        if provenance:
            before, progress.provenance = progress.provenance, dict(provenance)
            for name, value in provenance.items():
                if before.get(name, value) != value:
                    log(f"rewards so far were with {name} = {before[name]!r}, from now {value!r}")
        return state

    def save(self, step: int, state: Any, position: tuple[Any, list[Any]]) -> None:
        """Saves the whole state; `position` is that of the experience."""
        self.has_learned, self.saved = False, step
        self.progress.seconds = self.seconds
        self.progress.batches, self.progress.pending = position
        self.checkpoints.save_last(step, state, dataclasses.asdict(self.progress))

    def keep_if_best(self, step: int, params: Any, score: float, scores: dict[str, float]) -> None:
        """Saves parameters that scored higher than all before, unless the last step was skipped."""
        if score > self.progress.best_return and not self.progress.skipped_in_a_row:
            self.progress.best_return = score
            self.checkpoints.save_best(step, params, {"scores": scores})

    def write_last_files(self) -> None:
        """Draws the learning curve and writes how long the training took."""
        if jax.process_index() == 0:
            from qrag_jax.runtime.plots import plot_curve

            rows = read_metrics(self.workdir / METRICS_NAME)
            plot_curve(rows, self.workdir / "learning_curve.png", self.workdir.name)
            seconds = json.dumps({"seconds": self.progress.seconds}) + "\n"
            whole_files.write_whole(self.workdir / "training.json", seconds)


def _delete_empty(workdir: Path, is_new: bool) -> None:
    """A start that was refused leaves nothing; its lock is still held."""
    lock = workdir / whole_files.LOCK
    with contextlib.suppress(OSError):
        if [*workdir.iterdir()] == [lock]:
            lock.unlink()
            if is_new:
                workdir.rmdir()


def log(line: str) -> None:
    """One line on the screen, from the first host only."""
    if jax.process_index() == 0:
        tqdm.write(line)
        sys.stdout.flush()  # at once, even if the output goes to a file
