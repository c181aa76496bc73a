"""Best and last checkpoints by Orbax: asynchronous, atomic, resumable, checked when read."""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from qrag_jax.errors import InputError
from qrag_jax.runtime import hosts, whole_files
from qrag_jax.runtime.whole_files import UNFINISHED_STEP

_STAGES, _KEPT_STAGES = "stages", 8


def _is_other(record: logging.LogRecord) -> bool:
    """Orbax logs a lot, up to warnings, in programs that load a run by themselves."""
    return record.levelno > logging.WARNING or "orbax" not in record.pathname


def _show(unraisable: Any) -> None:
    """TensorStore shows every write that fails after the first one, when Orbax waits no more."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


class SaveError(RuntimeError):
    """A checkpoint could not be written; the message is one sentence for the user."""


class _Damaged(Exception):
    """A step cannot be used; the message says which file is wrong and how."""


class Checkpoints:
    """The checkpoints under `workdir/checkpoints`.

    `last/STEP` holds the whole training state and JSON extras (iterator position, counters). Two
    steps are kept, so a failed save never touches the good one. `best/STEP` holds the online
    parameters and their scores. `stages/STEP`, if there are several stages, holds the parameters
    with which one has ended. A save returns as soon as the arrays are copied off the device.
    When the step is complete, its folder appears by a rename, with digests of its files in it.
    The digests are compared before a restore. Flipped bits and cut or lost files make a step
    "damaged"; if it is a `last` step, the step before it is used, which is logged. With `read_only`
    nothing in the folder is ever made or changed.
    """

    def __init__(
        self, workdir: Path, *, read_only: bool = False, log: Callable[[str], None] = print
    ) -> None:
        logging.getLogger("absl").addFilter(_is_other)  # once, however often it is added
        if sys.unraisablehook is sys.__unraisablehook__:  # else it is pytest's or the user's
            sys.unraisablehook = _show
        self.folder = workdir.absolute() / "checkpoints"
        self._log, self._read_only = log, read_only
        self._saving: dict[str, int] = {}  # the step that is being saved, by kind
        self._managers: dict[str, ocp.CheckpointManager] = {}
        self._last, self._best = self._manager("last", 2), self._manager("best", 1)

    def _manager(self, which: str, keep: int) -> ocp.CheckpointManager:
        """Of one kind; a read-only one changes nothing in the folder."""
        if which not in self._managers:
            # Several hosts that save one step to two folders wait at barriers of different names.
            barriers = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=which)
            writer = functools.partial(self._write_digests, which)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=None if self._read_only else keep,
                create=not self._read_only,
                read_only=self._read_only,
                async_options=ocp.options.AsyncOptions(post_finalization_callback=writer),
                multiprocessing_options=barriers,
                lightweight_initialize=True,  # metadata of steps may be damaged
            )
            self._managers[which] = ocp.CheckpointManager(self.folder / which, options=options)
        return self._managers[which]

    def _write_digests(self, which: str) -> None:
        """Puts the digests into a step just before Orbax renames it to its place."""
        folder, step = self.folder / which, self._saving[which]
        (building,) = folder.glob(f"{step}{UNFINISHED_STEP}*")
        whole_files.write_digests(building)

    def save_last(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Starts saving a training state; it replaces a saved state of the same step.

        It raises `SaveError` if this or an earlier save failed, for example on a full disk.
        """
        if step in self._last.all_steps():
            self.wait()
            self._last.delete(step)
        self._save(self._last, step, state, extra)

    def save_best(self, step: int, params: Any, extra: dict[str, Any]) -> None:
        """Starts saving the parameters with the best evaluation so far; raises `SaveError`.

        A run that was killed repeats steps, and the same step has the same parameters. So a sound
        checkpoint of this step is kept; a damaged one and those of later steps are deleted.
        """
        for old in self._best.all_steps():
            if old > step:
                self._best.delete(old)
        self._save_once(self._best, step, params, extra)

    def save_stage(self, step: int, params: Any) -> None:
        """Starts saving the parameters at a stage's end, unless they are; raises `SaveError`."""
        self.wait()  # a step that is being saved is not among the steps
        # Its manager is made at first use: most runs have one stage.
        self._save_once(self._manager(_STAGES, _KEPT_STAGES), step, params, {})

    def last_step(self) -> int | None:
        return self._last.latest_step()

    def best_step(self) -> int | None:
        return self._best.latest_step()

    def restore_last(self, template: Any) -> tuple[Any, dict[str, Any], int]:
        """The newest sound training state, the JSON saved with it, and their step.

        The state is placed and typed as `template` (arrays or shapes).
        Newer damaged steps are logged and, unless `read_only`, moved to `checkpoints/damaged-STEP`.
        """
        step, state, extra, troubles = self._newest_sound(self._last, template)
        if troubles and not self._read_only:
            for damaged in troubles if jax.process_index() == 0 else ():
                aside = self.folder / f"damaged-{damaged}"
                shutil.rmtree(aside, ignore_errors=True)
                _step_folder(self._last, damaged).rename(aside)
                self._log(f"checkpoint {damaged} is now {aside}")
            hosts.together("damaged checkpoints are put aside")
            self._last.reload()
        return state, extra, step

    def restore_params(self, which: str, template: Any) -> tuple[Any, int]:
        """Online parameters of the "best" or "last" checkpoint, with their step."""
        manager = self._best if which == "best" else self._last
        step, params, *_ = self._newest_sound(manager, template, params_of=which == "last")
        return params, step

    def restore_params_of(self, step: int, template: Any) -> Any | None:
        """Online parameters after just this step; None if no sound checkpoint of it is kept."""
        managers = [self._best, self._last]
        if (self.folder / _STAGES).is_dir():
            managers.insert(0, self._manager(_STAGES, _KEPT_STAGES))
        for manager in managers:
            with contextlib.suppress(_Damaged):
                if step in manager.all_steps():
                    return _restore(manager, step, template, params_of=manager is self._last)[0]
        return None

    def _newest_sound(
        self, manager: ocp.CheckpointManager, template: Any, *, params_of: bool = False
    ) -> tuple[int, Any, dict[str, Any], dict[int, str]]:
        """The newest sound step, its state and JSON, and what is wrong with each newer one.

        Every host of a run reads the same files and so finds the same step; see `_restore`.
        """
        troubles: dict[int, str] = {}
        while steps := [step for step in manager.all_steps() if step not in troubles]:
            step = max(steps)
            try:
                state, extra = _restore(manager, step, template, params_of=params_of)
            except _Damaged as error:
                if not _step_folder(manager, step).exists():
                    manager.reload()  # a running training has just replaced it by a newer one
                else:
                    troubles[step] = str(error)
                continue
            for other, trouble in troubles.items():
                self._log(f"checkpoint {other} is damaged ({trouble}): taking step {step}")
            return step, state, extra, troubles
        if not troubles:
            raise InputError(f"{manager.directory} has no checkpoint; give another --workdir.")
        listed = "; ".join(f"{step}: {trouble}" for step, trouble in troubles.items())
        otherwise = "delete this folder to train from the beginning"
        if manager is self._best:
            otherwise = "give --checkpoint=last"
        raise InputError(f"{manager.directory} is damaged ({listed}); use a backup or {otherwise}.")

    def check(self) -> None:
        """Raises `SaveError` if a save that runs in the background has failed."""
        self._guard("check_for_errors")

    def wait(self) -> None:
        """Returns when everything is on disk; raises `SaveError` if a save failed."""
        self._guard("wait_until_finished")

    def _save_once(
        self, manager: ocp.CheckpointManager, step: int, tree: Any, extra: dict[str, Any]
    ) -> None:
        """As `_save`, unless a sound checkpoint of the step is there."""
        if step in manager.all_steps():
            if not whole_files.damage(_step_folder(manager, step)):
                return
            manager.delete(step)
        self._save(manager, step, tree, extra)

    def _save(
        self, manager: ocp.CheckpointManager, step: int, tree: Any, extra: dict[str, Any]
    ) -> None:
        if _on_cpu(tree):
            # Host views of CPU arrays share memory that the next step's donation overwrites.
            # `jax.device_put` copies no arrays that are split over hosts.
            several = jax.process_count() > 1
            tree = _copied(tree) if several else jax.device_put(tree, may_alias=False)
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(tree), extra=ocp.args.JsonSave(extra))
        try:
            manager.wait_until_finished()  # also for the earlier step's digests
            self._saving[Path(manager.directory).name] = step
            manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._save_error(error) from error

    def _guard(self, action: str) -> None:
        for manager in self._managers.values():
            try:
                getattr(manager, action)()
            except Exception as error:
                raise self._save_error(error) from error

    def _save_error(self, error: Exception) -> SaveError:
        good = [int(path.name) for path in (self.folder / "last").glob("*") if path.name.isdigit()]
        kept = f"the state of step {max(good)} is kept" if good else "none was saved before"
        # The message chains errors and ends with the cause, such as "No space left on device".
        reason = " ".join(str(error).split()).rpartition(": ")[2][:200]
        return SaveError(
            f"a checkpoint could not be written to {self.folder} ({reason}); {kept}: see that the "
            "disk has room, and give the same command to go on."
        )


def _step_folder(manager: ocp.CheckpointManager, step: int) -> Path:
    return Path(manager.directory) / str(step)


def _restore(
    manager: ocp.CheckpointManager, step: int, template: Any, *, params_of: bool
) -> tuple[Any, dict[str, Any]]:
    """State and JSON of a sound step; with `params_of` only the parameters of a whole state."""
    if trouble := whole_files.damage(_step_folder(manager, step)):
        raise _Damaged(trouble)
    template = {"params": template} if params_of else template
    how = ocp.checkpoint_utils.construct_restore_args(template)
    state_args = ocp.args.PyTreeRestore(item=template, restore_args=how, partial_restore=params_of)
    args = ocp.args.Composite(state=state_args, extra=ocp.args.JsonRestore())
    try:
        differing = _differing(_step_folder(manager, step) / "state", template, params_of)
        restored: Any = None if differing else manager.restore(step, args=args)
    except OSError as error:
        raise _Damaged(f"it cannot be read: {whole_files.reason(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        # As the files passed the check, such an error means that the template does not fit them.
        differing = whole_files.reason(error)
    if differing:
        raise InputError(
            f"{manager.directory}: checkpoint {step} was made with another configuration "
            f"({differing}); give the run's own config, or another --workdir."
        )
    state = restored["state"]["params"] if params_of else restored["state"]
    return state, restored["extra"]


def _differing(folder: Path, template: Any, partial: bool) -> str:
    """Compares names and shapes before arrays are read: a read that fails midway is noisy."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        saved = ocp.tree.to_flat_dict(checkpointer.metadata(folder).item_metadata.tree, sep="/")
    wanted = ocp.tree.to_flat_dict(template, sep="/")
    differing = [f"{name} is missing" for name in sorted(wanted.keys() - saved.keys())]
    if not partial:
        differing += [f"{name} is too many" for name in sorted(saved.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & saved.keys()):
        shape, stored = tuple(wanted[name].shape), tuple(saved[name].shape)
        is_key = jax.dtypes.issubdtype(wanted[name].dtype, jax.dtypes.prng_key)
        if stored != shape and not is_key:
            differing.append(f"{name} has shape {stored}, not {shape}")
    return ", ".join(differing)


_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def _on_cpu(tree: Any) -> bool:
    devices = (leaf.devices() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    return any(device.platform == "cpu" for device in next(devices, set()))
