"""The training loop of every system, and the dry run that prints what it would run."""

from __future__ import annotations

import contextlib
import shlex
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import ml_collections

from qrag_jax import systems
from qrag_jax.errors import FeedbackLost
from qrag_jax.runtime import buckets, hosts
from qrag_jax.runtime.aot import described_devices, program_lines
from qrag_jax.runtime.config_fields import fill
from qrag_jax.runtime.interrupt import EndedEarly, Stopped, StopSignal
from qrag_jax.runtime.run import Run, log
from qrag_jax.runtime.saved_config import LogConfig, flat
from qrag_jax.runtime.step_log import Evaluated, NotFinite, StepLog
from qrag_jax.runtime.writers import Logged, check_usable, has_evaluation


def train(config: ml_collections.ConfigDict, workdir: Path, others: str = "") -> int:
    """Runs or resumes the experiment in `workdir`; returns the exit status.

    Raises `SaveError`, `FeedbackLost` or `NotFinite`; the last good checkpoint is kept.
    """
    began = time.monotonic()
    systems.check(config)
    logged = _logged(config)
    systems.before_devices(config)
    with (
        hosts.joined(others),
        # ---- run folder (locked: one run per folder); then mesh, data, policy, feedback, update
        Run.open(workdir, began) as run,
        systems.open_system(config, run) as system,
    ):
        # ---- state: built in place, then restored if there is a checkpoint
        state = run.restore(system.first_state, system.data, system.provenance)
        steps, ended = system.train.steps, None
        with hosts.AgreedStop() as stop, contextlib.ExitStack() as stack:
            log(f"{system.line}; {workdir}")
            try:
                # ---- experience: played in the update, K steps before it, or on the host
                experience = system.experience(run, stop)
            except Stopped:
                return _stopped(stop, run.step)
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
                unscored = bool(minutes) and not hosts.any_of(has_evaluation(workdir))
                # ---- the loop
                while step < steps:
                    stop.before_step(step + 1)
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
                ended = step_log.finish_after(why)
            failed = isinstance(ended, NotFinite)
            if step != run.saved and (run.has_learned or not failed):
                run.save(step, state, experience.position())
            run.checkpoints.wait()  # until everything is on disk
        if ended is not None and not isinstance(ended, Stopped | EndedEarly):
            raise ended
        run.write_last_files()
        source = systems.source(config.system)
        if isinstance(ended, Stopped):
            return _stopped(stop, step)
        if ended is not None:
            log(f"ended at step {step}: {ended}")
        return _done(run, source)


def dry_run(config: ml_collections.ConfigDict, device_names: str = "") -> int:
    """Prints the config, the programs (for these devices, "": what is here) and their memory."""
    systems.check(config)
    _logged(config)
    systems.before_devices(config, dry=True, described=bool(device_names))
    target, devices = described_devices(device_names) if device_names else (None, None)
    with (
        tempfile.TemporaryDirectory() as folder,
        Run.open(Path(folder) / "run", time.monotonic()) as run,
        systems.open_system(config, run, dry=True, devices=devices) as system,
    ):
        for name, value in flat(config.to_dict()).items():
            log(f"  --config.{name}={value}")
        log(system.line)
        there = devices or jax.devices()
        for line in program_lines(system.programs(), there, target):
            log(line)
    return 0


def _logged(config: ml_collections.ConfigDict) -> Logged:
    # A system of somebody else may have no such section.
    settings = fill(LogConfig, config.log, "log") if "log" in config else LogConfig()
    check_usable(settings)
    return Logged(settings, config.to_dict(), log)


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
            found = system.evaluate(state, step, stop)
        except (Stopped, FeedbackLost):
            log(f"the evaluation of step {step} was broken off; the next start begins with it")
            raise
        progress.evaluation_due = False
        if step == 0:
            progress.baselines = found.baselines
        step_log.write(step, found.metrics | progress.baselines)
        step_log.write_episodes(step, found.episodes)
        log(found.line)
        step_log.look_at(Evaluated(step, found.score, found.each, found.q_spread))
        run.keep_if_best(step, state.params, found.score, found.scores)


def _stopped(stop: StopSignal, step: int) -> int:
    assert stop.name is not None
    saved = f"saved at step {step}" if step else "before the first step"
    log(f"{stop.name}: stopped, {saved}; give the same command to go on.")
    return 128 + signal.Signals[stop.name]


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
