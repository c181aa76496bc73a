"""Trains a multi-step retriever: python -m qrag_jax.train --config=configs/hotpotqa.py

Give the same command again to resume a run that was interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import jax
import ml_collections
import numpy as np
from absl import flags
from jax.sharding import Mesh
from ml_collections import config_flags

from qrag_jax import experiment, saved_config
from qrag_jax.data.episodes import EpisodeShape, training_batches
from qrag_jax.data.generators import book_record
from qrag_jax.data.loading import without_questions
from qrag_jax.data.sample import Sample
from qrag_jax.deferred_steps import DeferredSteps
from qrag_jax.encoder_settings import fill_from_saved, settled
from qrag_jax.errors import InputError
from qrag_jax.feedback.service import PendingService, RewardsLost, leave_room, open_rewards
from qrag_jax.learners import placement
from qrag_jax.learners.optimizers import make_optimizer
from qrag_jax.programs import Programs
from qrag_jax.runtime import commandline, leftovers, locks, whole_files
from qrag_jax.runtime.checkpoints import Checkpoints, SaveError
from qrag_jax.runtime.compilation import CompilationCounter, enable_persistent_cache
from qrag_jax.runtime.curve import plot_curve
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.writers import METRICS_NAME, MetricWriter, read_metrics
from qrag_jax.skipped_steps import NotFinite
from qrag_jax.steps import Batches, FusedSteps, Steps
from qrag_jax.training import Inputs, Progress, Run, log

CONFIG = config_flags.DEFINE_config_file("config", None, "Experiment, FILE or FILE:VARIANT.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; default runs/CONFIG-NAME.")


def train(config: ml_collections.ConfigDict, workdir: Path) -> int:
    """Runs or resumes the experiment in `workdir`; returns the exit status.

    Raises:
        InputError: the config, the data, the encoder or the workdir cannot be used.
        SaveError: a checkpoint could not be written; the last good one is kept.
        RewardsLost: the language model was lost; the run is saved.
        NotFinite: too many steps in a row had no finite numbers; the run is saved.
    """
    started = time.monotonic()
    # ------------------------------------------------------------------ config and workdir
    experiment.check_values(config)
    if config.reward.name == "gt":
        config.reward.name = "ground_truth"
    _make_folder(workdir)
    if jax.process_index() > 0:  # the first host holds the lock
        return _train_alone(config, workdir, started)
    with locks.run_lock(workdir):
        if jax.process_count() == 1:  # another host may be making something there already
            leftovers.clean_run(workdir, log)
            leftovers.clean_weights(leftovers.MEMORY, log)
        return _train_alone(config, workdir, started)


def _train_alone(config: ml_collections.ConfigDict, workdir: Path, started: float) -> int:
    """`train` with the folder made, and no other process that trains in it."""
    config_path = workdir / saved_config.CONFIG_NAME
    if config_path.exists():
        saved = saved_config.load_config(config_path)
        fill_from_saved(config, saved)
        saved_config.draw_as(config, saved)
        saved_config.check_same_config(saved, config)
    else:
        saved_config.refuse_lost_config(workdir)
    by_model = not experiment.is_ground_truth(config)
    if by_model:
        leave_room(config.llm)
    enable_persistent_cache(workdir / "compilation_cache")
    counter = CompilationCounter()
    mesh = make_mesh(config.runtime.mesh)
    batch_size = _per_host_batch(config, mesh)
    with contextlib.ExitStack() as stack:
        opening = None
        if by_model:
            # Its server starts while the data and the encoder are read.
            opening = stack.enter_context(open_rewards(config, workdir, log))
        return _train(config, workdir, mesh, batch_size, counter, started, opening)


def _train(
    config: ml_collections.ConfigDict,
    workdir: Path,
    mesh: Mesh,
    batch_size: int,
    counter: CompilationCounter,
    started: float,
    opening: PendingService | None,
) -> int:
    # ------------------------------------------------------------------ data and encoder
    inputs = load_inputs(config, workdir, opening.check if opening else lambda samples: None)
    config_path = workdir / saved_config.CONFIG_NAME
    if not config_path.exists():  # once: a start that fails must not cost the run its config
        book_record.write_books(workdir, experiment.backgrounds(config, "train"))
        saved_config.save_config(settled(config, inputs.encoder.encoder), config_path)
    shares = experiment.mixture_shares(config, inputs.stores)
    if len(shares) > 1:
        log("mixture: " + ", ".join(f"{share:.1%} {name}" for name, share in shares.items()))
    batches = training_batches(
        inputs.stores,
        shares,
        inputs.shape,
        batch_size=batch_size,
        seed=config.seed,
        workers=config.data.workers,
        shard=(jax.process_index(), jax.process_count()),
    )

    # ------------------------------------------------------------------ compiled programs
    optimizer, tower = make_optimizer(experiment.optimizer_config(config)), inputs.encoder.trained
    rules = experiment.sharding_rules(config, inputs.encoder.partition_rules)
    shardings = placement.state_shardings(mesh, rules, tower, optimizer)
    programs = Programs(config, mesh, shardings, inputs)

    # ------------------------------------------------------------------ state: resumed or new
    checkpoints = Checkpoints(workdir, log=log)
    state = placement.first_state(shardings, tower, optimizer, config.seed)
    progress = Progress(data={name: s.content_key for name, s in inputs.stores.items()})
    step = checkpoints.last_step() or 0
    if step:
        state, extra, step = checkpoints.restore_last(state)
        if extra["data"] != progress.data:
            raise InputError(
                f"the training data of {config.data.path or 'the hub'} are not those that "
                f"{workdir} began with; bring them back, or give another --workdir."
            )
        if "made_with" in extra:  # its name in older checkpoints
            extra["provenance"] = extra.pop("made_with")
        progress = Progress(**extra)
        batches.set_state(progress.batches)
        log(f"resumed {workdir} at step {step}")
        if checkpoints.best_step() == 0:
            log("the best checkpoint so far is that of step 0, the untrained weights")
    if opening is not None:
        before, progress.provenance = progress.provenance, opening.provenance
        for name, value in opening.provenance.items():
            if before.get(name, value) != value:
                log(f"rewards so far were with {name} = {before[name]!r}, from now {value!r}")

    # ------------------------------------------------------------------ the loop
    with StopSignal() as stop:
        questions = sum(map(len, inputs.stores.values()))
        log(
            f"{questions} training questions, {len(inputs.dev_indices)} scored every "
            f"{config.train.eval_every} steps; {config.train.steps} steps of "
            f"{config.train.batch_size} questions on {jax.device_count()} {jax.default_backend()} "
            f"device(s); {workdir}"
        )
        rewards = None if opening is None else opening.ready(stop)
        if stop.requested:
            return _stopped(stop, step)
        ahead = Batches(mesh, batches)
        steps: Steps = (
            FusedSteps(programs.step, ahead)
            if rewards is None
            else DeferredSteps(
                mesh,
                programs.play_step,
                programs.learn_step,
                ahead,
                inputs.train_samples,
                rewards,
                config.reward.staleness,
                config.train.steps,
            )
        )
        with MetricWriter(workdir, step or None) as writer:
            run = Run(
                config,
                mesh,
                inputs,
                steps,
                programs.play,
                workdir,
                checkpoints,
                writer,
                counter,
                stop,
                rewards,
                progress,
                started - progress.seconds,
            )
            stopped_at = run.loop(state, step)
    _finish(workdir, run.progress)
    if stop.requested and (stopped_at < config.train.steps or progress.evaluation_due):
        return _stopped(stop, stopped_at)
    if checkpoints.best_step() == 0:
        log(
            "the best checkpoint is that of step 0: no evaluation scored above the untrained "
            f"weights (config.eval.best_by={config.eval.best_by}); --checkpoint=last names the "
            "trained ones"
        )
    log(f"done: {workdir / 'learning_curve.png'}; score it with")
    log(f"  python -m qrag_jax.evaluate --workdir={workdir}")
    return 0


def _stopped(stop: StopSignal, step: int) -> int:
    assert stop.name is not None
    saved = f"saved at step {step}" if step else "before the first step"
    log(f"{stop.name}: stopped, {saved}; give the same command to go on.")
    return 128 + signal.Signals[stop.name]


def load_inputs(
    config: ml_collections.ConfigDict,
    workdir: Path,
    check: Callable[[Sequence[Sample]], None] = lambda samples: None,
) -> Inputs:
    """Reads and tokenises everything, and checks that it fits, before any compute.

    Args:
        check: raises `InputError` for a source whose samples have no use.
    """
    dev = experiment.read_samples(config, "dev", hold_out=True)
    train_samples = without_questions(
        experiment.read_samples(config, "train", hold_out=True), dev.all
    )
    for line in [*train_samples.report, *dev.report]:
        log(line)
    for samples in (*train_samples.by_source.values(), *dev.by_source.values()):
        check(samples)
    encoder = experiment.prepare_encoder(config, workdir, train_samples.all)
    stores = {
        name: experiment.tokenise_training(config, encoder.tokenizer, samples)
        for name, samples in train_samples.by_source.items()
    }
    for name, store in stores.items():
        if report := experiment.truncation_report(store):
            log(f"{name}: {report}")
    dev_store = experiment.tokenise_samples(config, encoder.tokenizer, dev.all)
    shape = EpisodeShape.holding([*stores.values(), dev_store])
    experiment.check_fit(config, encoder.encoder, shape, stores)
    scored = _fixed_subset(config, len(dev.all))
    return Inputs(encoder, stores, dev.all, dev_store, train_samples.all, scored, shape)


def _fixed_subset(config: ml_collections.ConfigDict, count: int) -> list[int]:
    order = np.random.default_rng(config.eval.seed).permutation(count)
    return sorted(order[: config.eval.samples or count].tolist())


def _per_host_batch(config: ml_collections.ConfigDict, mesh: Mesh) -> int:
    parts = mesh.size * config.train.accumulation
    if config.train.batch_size % parts:
        raise InputError(
            f"config.train.batch_size is {config.train.batch_size}, which does not split into "
            f"{parts} equal parts (devices × config.train.accumulation); use a multiple of {parts}."
        )
    if config.eval.batch_size % mesh.size:
        raise InputError(
            f"config.eval.batch_size is {config.eval.batch_size}; use a multiple of the "
            f"{mesh.size} devices."
        )
    return config.train.batch_size // jax.process_count()


def _finish(workdir: Path, progress: Progress) -> None:
    if jax.process_index() == 0:
        rows = read_metrics(workdir / METRICS_NAME)
        plot_curve(rows, workdir / "learning_curve.png", workdir.name)
        seconds = json.dumps({"seconds": progress.seconds}) + "\n"
        whole_files.write_whole(workdir / "training.json", seconds)


def _make_folder(workdir: Path) -> None:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--workdir={workdir} cannot be made ({error.strerror}); give another folder."
        ) from None


def _default_workdir() -> Path:
    """`runs/NAME` or `runs/NAME-VARIANT` of `--config=…/NAME.py:VARIANT`."""
    path, _, name = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    return Path("runs") / "-".join(filter(None, [Path(path).stem, name]))


def main() -> int:
    """Reads the flags and trains."""
    try:
        config = CONFIG.value
        _ = config is None or config.seed  # a file that cannot be read fails at its first use
    except OSError as error:
        reason = str(error).strip().split("\n")[-1].strip()
        raise InputError(f"--config: the file cannot be loaded ({reason}).") from None
    if config is None:
        raise InputError("give an experiment, for example --config=configs/hotpotqa.py.")
    workdir = Path(WORKDIR.value) if WORKDIR.value else _default_workdir()
    try:
        return train(config, workdir)
    except SaveError as error:
        _leave_at_once(str(error))
    except NotFinite as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except RewardsLost as error:
        log(f"error: {str(error).rstrip('.')}. Give the same command to go on.")
        return 1
    except InputError:
        raise
    except Exception as error:  # libraries tell a full disk by many classes
        if not whole_files.disk_is_full(error):
            raise
        _leave_at_once(
            f"{workdir} cannot be written ({whole_files.reason(error)}); free space there and "
            "give the same command to go on from the last checkpoint."
        )


def _leave_at_once(sentence: str) -> NoReturn:
    """Exits with 1 past the threads of an asynchronous save that failed, which would not end."""
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    commandline.run(main)
