"""How every system is opened and trained, and the dry run that prints what it would run."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import jax
import ml_collections
from jax.sharding import Mesh

from qrag_jax import systems
from qrag_jax.errors import FeedbackLost
from qrag_jax.learners.state import TrainState, place
from qrag_jax.learners.update import Learner
from qrag_jax.runtime import aot, buckets, hosts, writers
from qrag_jax.runtime.config_fields import LogConfig, check_value, flat, save_config
from qrag_jax.runtime.interrupt import EndedEarly, Stopped, StopSignal
from qrag_jax.runtime.mesh import host_mesh, make_mesh, shardings_of
from qrag_jax.runtime.run import Run, log
from qrag_jax.runtime.step_log import Evaluated, NotFinite, StepLog
from qrag_jax.systems.config import SystemConfig

Config = TypeVar("Config", bound=SystemConfig)


class Opening(NamedTuple):
    """Where and how a run is opened."""

    config: Any  # its settings
    workdir: Path
    mesh: Mesh  # of this host's devices
    stack: ExitStack  # ends what is started
    begun: bool = True  # the run has begun: its model is used as it is
    dry: bool = False  # nothing will be played
    # Of a command that plays; None: the run trains
    stop: StopSignal | None = None
    asked: Mapping[str, Any] | None = None  # what it asks in place of the run's own


@dataclasses.dataclass(kw_only=True)
class MeshSystem(systems.System, Generic[Config]):
    """What the systems of the package share: how they are opened, and where parameters are."""

    SETTINGS: ClassVar[type[SystemConfig]]
    # Beginnings of the names of fields that say which questions are scored, see `systems.scoring`:
    # of those for which others need a folder of their own, and of those that choose a checkpoint
    OF_QUESTIONS: ClassVar[tuple[str, ...]]
    ASKED: ClassVar[tuple[str, ...]] = ("questions.dev", "questions.bridge_seed")
    SEARCH: ClassVar[str] = ""  # what these search, in the run's folder; "": nothing of their own
    config: Config
    mesh: Mesh
    inputs: Any  # what the run reads; `model` is what is trained
    workdir: Path
    placed: bool = True  # else the mesh's devices are described, and only shapes are made
    # Of this host's devices, which play without the other hosts; None: there is one host
    local_mesh: Mesh | None = None
    # Saves the parameters at the end of a stage, with the steps done until then
    keep: Callable[[int, Any], None] = lambda step, params: None

    def __post_init__(self) -> None:
        self.train, self.profile = self.config.train, self.config.profile
        self.provenance = dict[str, Any]()
        self._call = aot.Calls(log)
        self._step: int | None = None  # of the next update

    # ---------------------------------------------------------------- how it is opened

    @classmethod
    def played_by(cls, raw: ml_collections.ConfigDict) -> type[Self]:
        """The class of a system with this config."""
        return cls

    @classmethod
    def check(cls, config: ml_collections.ConfigDict) -> None:
        cls.SETTINGS.of(config)

    @classmethod
    def before_devices(cls, config: ml_collections.ConfigDict, **how: bool) -> None:
        cls.SETTINGS.before_devices(config, **how)

    @classmethod
    @contextlib.contextmanager
    def open_system(
        cls,
        config: ml_collections.ConfigDict,
        run: Run,
        *,
        dry: bool = False,
        devices: Sequence[jax.Device] | None = None,
    ) -> Iterator[Self]:
        raw, kind = config, cls.played_by(config)
        kind.SETTINGS.resume(raw, run)
        settings: Any = kind.SETTINGS.of(raw)
        mesh = make_mesh(settings.runtime.mesh, devices)
        local = mesh if devices is not None else host_mesh(settings.runtime.mesh)
        kind.check_mesh(settings, mesh, local)
        with ExitStack() as stack:
            parts = kind.parts(Opening(settings, run.workdir, local, stack, run.has_begun, dry))
            run.begin(lambda: kind.write(raw, run, parts["inputs"]))
            # Checkpoints are asked for when they are needed, not made by a start that fails.
            parts["keep"] = lambda *stage: run.checkpoints.save_stage(*stage)
            parts |= {"workdir": run.workdir, "placed": devices is None, "local_mesh": local}
            system = kind(config=settings, mesh=mesh, **parts)
            stack.callback(system.close)
            yield system

    @classmethod
    def check_mesh(cls, config: Any, mesh: Mesh, local_mesh: Mesh) -> None:
        """Refuses sizes that these devices, or those of this host, cannot share."""

    @classmethod
    def parts(cls, at: Opening) -> dict[str, Any]:
        """What a run reads and asks, by the names of fields: `inputs` and further ones."""
        raise NotImplementedError

    @classmethod
    def write(cls, raw: ml_collections.ConfigDict, run: Run, inputs: Any) -> None:
        """Writes the config of a new run, with what belongs to it."""
        save_config(raw, run.config_path)

    # ---------------------------------------------------------------- its parameters

    @property
    def learner(self) -> Learner:
        """What is trained, and how; of several stages, that of the first."""
        raise NotImplementedError

    def first_state(self) -> TrainState:
        model = self.inputs.model
        second = getattr(model, "second", None)
        return self.learner.first_state(model.trained, self.config.seed, second)

    @property
    def param_shardings(self) -> Any:
        """Where the trained parameters lie."""
        return self.learner.shardings.params

    @property
    def untrained(self) -> Any:
        """The parameters that training begins with, on the mesh."""
        return place(self.inputs.model.trained, self.param_shardings)

    @cached_property
    def base(self) -> tuple[Any, ...]:
        """What adapters are on, as updates take it; () if all weights are trained."""
        return self.learner.placed_base(self.inputs.model.stored, placed=self.placed)

    @cached_property
    def _here(self) -> tuple[Any, Any]:
        """Where parameters play on this host, None: where they are trained; and the base there."""
        model, local_mesh = self.inputs.model, self.local_mesh
        if local_mesh is None or local_mesh is self.mesh:
            return None, self.base[0] if self.base else None
        rules, base = model.trunk.partition_rules(), None
        if model.base is not None:
            base = place(model.base, shardings_of(local_mesh, rules, model.base))
        return shardings_of(local_mesh, rules, model.trained), base

    def here(self, params: Any) -> Any:
        """Brings parameters of training to where they play; all hosts call it together."""
        shardings = self._here[0]
        return params if shardings is None else hosts.copied(params, shardings)

    def _updates(self, state: TrainState) -> int:
        """Updates that the state has seen; asked of the device once, which would wait each time."""
        if self._step is None:
            self._step = int(jax.device_get(state.step))
        return self._step

    def names(self, numbers: Sequence[int], step: int) -> list[str]:
        return [self.inputs.train[number].id for number in numbers]

    def close(self) -> None:
        """Ends what the system has started."""


# ---------------------------------------------------------------- the loop


def train(config: ml_collections.ConfigDict, workdir: Path, others: str = "") -> int:
    """Runs or resumes the experiment in `workdir`; returns the exit status.

    Raises `SaveError`, `FeedbackLost` or `NotFinite`; the last good checkpoint is kept.
    """
    began = time.monotonic()
    kind = systems.check(config)
    logged = _logged(config)
    kind.before_devices(config)
    with (
        hosts.joined(others),
        # ---- run folder (locked: one run per folder); then mesh, data, policy, feedback, update
        Run.open(workdir, began) as run,
        kind.open_system(config, run) as system,
    ):
        # ---- state: built in place, then restored if there is a checkpoint
        state = run.restore(system.first_state, system.data, system.provenance)
        steps, ended = system.train.steps, None
        with hosts.AgreedStop() as stop, contextlib.ExitStack() as stack:
            log(f"{system.line}; {workdir}")
            try:
                # ---- experience: played in the update, K steps before it, or on the host
                experience = system.experience(run, stop)
            except Stopped as why:
                return _stopped(why, run.step)
            step_log = StepLog(run, system, experience, logged)
            step, step_log = run.step, stack.enter_context(step_log)
            try:
                if step == 0 or run.progress.evaluation_due:
                    log(f"scoring the weights of step {step}; programs are compiled first")
                    _evaluate(system, run, step_log, (step, state), stop)
                    if step:  # replaces the checkpoint that lacks this evaluation
                        run.save(step, state, experience.position())
                step_log.restart_window()
                # No evaluation changes the training, so the clock may choose the step of the first.
                minutes = system.train.first_eval_minutes
                unscored = bool(minutes) and not hosts.any_of(writers.has_evaluation(workdir))
                # ---- the loop
                while step < steps:
                    stop.before_step()
                    with step_log.traced(step + 1):
                        episodes = experience.next(state, step, stop)
                        state, metrics = system.update(state, episodes)  # one program
                        experience.prepare(state)  # while the device computes
                        step += 1
                        step_log.step(step, metrics)  # waits for the previous step
                    early = unscored and step % system.train.log_every == 0
                    early = early and hosts.any_of(run.seconds >= 60 * minutes)
                    last = step == steps
                    if early or last or step % system.train.eval_every == 0:
                        _evaluate(system, run, step_log, (step, state), stop)
                        unscored = False
                    if last or step % system.train.checkpoint_every == 0:
                        with step_log.finished():
                            # Two states are kept. One that has learned nothing would only delete
                            # the older one, so it is not saved.
                            skipped = run.progress.skipped_in_a_row
                            if run.has_learned or not skipped or last:
                                run.save(step, state, experience.position())
                step_log.finish()
            except (Stopped, FeedbackLost, NotFinite, EndedEarly) as why:
                ended = why
                try:
                    step_log.finish()
                except NotFinite as error:
                    ended = error
            failed = isinstance(ended, NotFinite)
            if step != run.saved and (run.has_learned or not failed):
                run.save(step, state, experience.position())
            run.checkpoints.wait()  # until everything is on disk
        if ended is not None and not isinstance(ended, Stopped | EndedEarly):
            raise ended
        run.write_last_files()
        source = systems.source(config.system)
        if isinstance(ended, Stopped):
            return _stopped(ended, step)
        if ended is not None:
            log(f"ended at step {step}: {ended}")
        return _done(run, source)


def dry_run(config: ml_collections.ConfigDict, device_names: str = "") -> int:
    """Prints the config, the programs (for these devices, "": what is here) and their memory."""
    kind = systems.check(config)
    _logged(config)
    kind.before_devices(config, dry=True, described=bool(device_names))
    target, devices = aot.described_devices(device_names) if device_names else (None, None)
    with (
        tempfile.TemporaryDirectory() as folder,
        Run.open(Path(folder) / "run", time.monotonic()) as run,
        kind.open_system(config, run, dry=True, devices=devices) as system,
    ):
        for name, value in flat(config.to_dict()).items():
            log(f"  --config.{name}={value}")
        log(system.line)
        there = devices or jax.devices()
        for line in aot.program_lines(system.programs(), there, target):
            log(line)
    return 0


def _logged(config: ml_collections.ConfigDict) -> writers.Logged:
    # A system of somebody else may have no such section.
    fields = config.log if "log" in config else {}
    settings = check_value(LogConfig, fields, "config.log")
    writers.check_usable(settings)
    return writers.Logged(settings, config.to_dict(), log)


def _evaluate(
    system: systems.System, run: Run, step_log: StepLog, at: tuple[int, Any], stop: StopSignal
) -> None:
    """Scores the parameters; keeps them if they are the best so far.

    One that is broken off, by a signal or without rewards, is repeated by the next start.
    """
    progress, (step, state) = run.progress, at
    with step_log.finished():
        progress.evaluation_due = True
        try:
            evaluation = system.evaluate(state, step, stop)
        except (Stopped, FeedbackLost):
            log(f"the evaluation of step {step} was broken off; the next start begins with it")
            raise
        progress.evaluation_due = False
        if step == 0:
            progress.baselines = evaluation.baselines
        step_log.write(step, evaluation.metrics | progress.baselines)
        step_log.write_episodes(step, evaluation.episodes)
        log(evaluation.line)
        known = Evaluated(step, evaluation.score, evaluation.each, evaluation.q_spread)
        for sentence in step_log.watch.evaluated(known):
            log(sentence)
        run.keep_if_best(step, state.params, evaluation.score, evaluation.scores)


def _stopped(why: Stopped, step: int) -> int:
    saved = f"saved at step {step}" if step else "before the first step"
    log(f"{why}: stopped, {saved}; give the same command to go on.")
    return 128 + signal.Signals[str(why)]


def _done(run: Run, source: str) -> int:
    if run.checkpoints.best_step() == 0:
        log(
            "the best checkpoint is that of step 0, the untrained weights: no evaluation scored "
            "above them; --checkpoint=last names the trained ones"
        )
    command = ["qrag", "evaluate", f"--workdir={buckets.shown(run.workdir)}"]
    score = shlex.join([*command, f"--system={source}"] if source else command)
    log(f"done: {run.workdir / 'learning_curve.png'}; score it with\n  {score}")
    return 0
