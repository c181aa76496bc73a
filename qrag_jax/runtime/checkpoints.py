"""Best and last checkpoints by Orbax: asynchronous, atomic, resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from qrag_jax.errors import InputError


class SaveError(RuntimeError):
    """A checkpoint could not be written; the message is one sentence for the user."""


class Checkpoints:
    """The checkpoints under `workdir/checkpoints`.

    `last/STEP` holds the whole training state and JSON extras (iterator position, counters);
    two are kept, so a failed save never touches the good one. `best/STEP` holds the online
    parameters and their scores. Saving returns once the arrays are copied off the device; a
    step's folder appears, by a rename, when it is complete.
    """

    def __init__(self, workdir: Path) -> None:
        self.folder = workdir.absolute() / "checkpoints"
        self._last = _manager(self.folder / "last", keep=2)
        self._best = _manager(self.folder / "best", keep=1)

    def save_last(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Starts saving a training state, in the place of one of the same step.

        Raises:
            SaveError: this or an earlier save failed, for example on a full disk.
        """
        if step in self._last.all_steps():
            self.wait()
            self._last.delete(step)
        self._save(self._last, step, state, extra)

    def save_best(self, step: int, params: Any, extra: dict[str, Any]) -> None:
        """Starts saving the parameters with the best evaluation so far; raises `SaveError`.

        A run that was killed meets its steps again: the same step has the same parameters.
        """
        for old in self._best.all_steps():
            if old > step:
                self._best.delete(old)
        if step not in self._best.all_steps():
            self._save(self._best, step, params, extra)

    def last_step(self) -> int | None:
        """Step of the newest complete training state, None if there is none."""
        return self._last.latest_step()

    def best_step(self) -> int | None:
        """Step of the best parameters, None if there are none."""
        return self._best.latest_step()

    def restore_last(self, template: Any) -> tuple[Any, dict[str, Any]]:
        """The newest training state, placed and typed as `template` (arrays or shapes).

        Raises:
            InputError: the checkpoint's arrays have other names or shapes.
        """
        return _restore(self._last, self.last_step(), template)

    def restore_params(self, which: str, template: Any) -> tuple[Any, int]:
        """Online parameters of the "best" or "last" checkpoint, with their step.

        Args:
            template: arrays or `jax.ShapeDtypeStruct`s with shardings, shaped like the parameters.

        Raises:
            InputError: there is no such checkpoint, or it has other names or shapes.
        """
        if which not in ("best", "last"):
            raise InputError(f"--checkpoint is {which!r}; use best or last.")
        manager = self._best if which == "best" else self._last
        step = manager.latest_step()
        if step is None:
            raise InputError(
                f"{self.folder / which} holds no checkpoint; train first or give another --workdir."
            )
        if which == "best":
            return _restore(manager, step, template)[0], step
        return _restore(manager, step, {"params": template}, partial=True)[0]["params"], step

    def check(self) -> None:
        """Raises `SaveError` if a save that runs in the background has failed."""
        self._guard(lambda manager: manager.check_for_errors())

    def wait(self) -> None:
        """Returns when everything is on disk; raises `SaveError` if a save failed."""
        self._guard(lambda manager: manager.wait_until_finished())

    def _save(
        self, manager: ocp.CheckpointManager, step: int, tree: Any, extra: dict[str, Any]
    ) -> None:
        if jax.default_backend() == "cpu":
            # Host views of CPU arrays share memory that the next step's donation overwrites.
            tree = jax.device_put(tree, may_alias=False)
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(tree), extra=ocp.args.JsonSave(extra))
        try:
            manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._save_error(error) from error

    def _guard(self, action: Any) -> None:
        for manager in (self._last, self._best):
            try:
                action(manager)
            except Exception as error:
                raise self._save_error(error) from error

    def _save_error(self, error: Exception) -> SaveError:
        good = _complete_steps(self.folder / "last")
        kept = f"the state of step {max(good)} is kept" if good else "none was saved before"
        # The chain of what failed ends with the cause, for example "No space left on device".
        reason = " ".join(str(error).split()).rpartition(": ")[2][:200]
        return SaveError(
            f"a checkpoint could not be written to {self.folder} ({reason}); {kept}: free space "
            "there and give the same command to go on."
        )


def _manager(folder: Path, keep: int) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, create=True, enable_async_checkpointing=True
    )
    return ocp.CheckpointManager(folder, options=options)


def _restore(
    manager: ocp.CheckpointManager, step: int | None, template: Any, partial: bool = False
) -> tuple[Any, dict[str, Any]]:
    state_args = ocp.args.PyTreeRestore(
        item=template,
        restore_args=ocp.checkpoint_utils.construct_restore_args(template),
        partial_restore=partial,
    )
    args = ocp.args.Composite(state=state_args, extra=ocp.args.JsonRestore())
    try:
        _check_shapes(Path(manager.directory) / str(step) / "state", template, partial)
        restored = manager.restore(step, args=args)
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"{manager.directory}: checkpoint {step} was made with another configuration "
            f"({reason}); give the run's own config, or another --workdir."
        ) from error
    return restored["state"], restored["extra"]


def _check_shapes(folder: Path, template: Any, partial: bool) -> None:
    """Compares names and shapes before arrays are read: reads broken off midway are noisy."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        saved = ocp.tree.to_flat_dict(checkpointer.metadata(folder).item_metadata.tree, sep="/")
    wanted = ocp.tree.to_flat_dict(template, sep="/")
    differing = [f"{name} is missing" for name in sorted(wanted.keys() - saved.keys())]
    if not partial:
        differing += [f"{name} is too many" for name in sorted(saved.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & saved.keys()):
        shape, found = tuple(wanted[name].shape), tuple(saved[name].shape)
        is_key = jax.dtypes.issubdtype(wanted[name].dtype, jax.dtypes.prng_key)
        if found != shape and not is_key:
            differing.append(f"{name} has shape {found}, not {shape}")
    if differing:
        raise ValueError(", ".join(differing))


def _complete_steps(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
