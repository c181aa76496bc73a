"""Saving and restoring: whole states, the best parameters, what does not fit, what is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime.checkpoints import Checkpoints, SaveError


class State(NamedTuple):
    params: Any
    step: Any
    key: Any


def state(seed: int, width: int = 3) -> State:
    rng = np.random.default_rng(seed)
    params = {"kernel": jnp.asarray(rng.normal(size=(2, width)), jnp.float32)}
    return State(params, jnp.int32(seed), jax.random.key(seed))


def as_numpy(tree: Any) -> list[np.ndarray]:
    def array(leaf: Any) -> np.ndarray:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [array(leaf) for leaf in jax.tree.leaves(tree)]


def assert_equal(left: Any, right: Any) -> None:
    for one, other in zip(as_numpy(left), as_numpy(right), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_nothing_saved_yet(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.last_step() is None
    assert checkpoints.best_step() is None
    for which in ("best", "last"):
        with pytest.raises(InputError, match=f"{which} holds no checkpoint; train first"):
            checkpoints.restore_params(which, state(0).params)
    with pytest.raises(InputError, match="'newest'; use best or last"):
        checkpoints.restore_params("newest", state(0).params)


def test_state_comes_back_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    extra = {"batches": {"next_index": 7}, "seconds": 1.5, "best_return": -float("inf")}
    checkpoints.save_last(5, state(5), extra)
    checkpoints.wait()
    again = Checkpoints(tmp_path)
    assert again.last_step() == 5
    restored, found = again.restore_last(state(1))
    assert_equal(restored, state(5))
    assert found == extra
    assert isinstance(restored, State)
    params, step = again.restore_params("last", state(1).params)
    assert step == 5
    assert_equal(params, state(5).params)


def test_two_states_and_one_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save_last(step, state(step), {})
        checkpoints.save_best(step, state(step).params, {"scores": {"return": step}})
    checkpoints.wait()
    assert sorted(path.name for path in (tmp_path / "checkpoints/last").iterdir()) == ["2", "3"]
    assert [path.name for path in (tmp_path / "checkpoints/best").iterdir()] == ["3"]
    params, step = checkpoints.restore_params("best", state(0).params)
    assert step == 3
    assert_equal(params, state(3).params)


def test_resumed_run_meets_its_best_step_again(tmp_path: Path) -> None:
    """Killed after best/6 was saved and before last/6 was, a run goes on from last/5."""
    before = Checkpoints(tmp_path)
    before.save_last(5, state(5), {})
    before.save_best(6, state(6).params, {})
    before.wait()
    resumed = Checkpoints(tmp_path)
    resumed.save_best(6, state(6).params, {})
    resumed.wait()
    assert resumed.best_step() == 6


def test_best_of_an_earlier_step_replaces_a_lost_later_one(tmp_path: Path) -> None:
    """After a kill, evaluations at other steps than before (eval_every is free to change)."""
    before = Checkpoints(tmp_path)
    before.save_best(6, state(6).params, {})
    before.wait()
    resumed = Checkpoints(tmp_path)
    resumed.save_best(4, state(4).params, {})
    resumed.wait()
    params, step = Checkpoints(tmp_path).restore_params("best", state(0).params)
    assert step == 4
    assert_equal(params, state(4).params)


def test_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_last(1, state(1), {})
    checkpoints.wait()
    (tmp_path / "checkpoints/last/2.orbax-checkpoint-tmp").mkdir()  # as a kill leaves it
    again = Checkpoints(tmp_path)
    assert again.last_step() == 1
    again.save_last(2, state(2), {})
    again.wait()
    assert_equal(Checkpoints(tmp_path).restore_last(state(0))[0], state(2))


@pytest.mark.parametrize("which", ["best", "last"])
def test_other_shapes_are_told(tmp_path: Path, which: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_last(1, state(1), {})
    checkpoints.save_best(1, state(1).params, {})
    checkpoints.wait()
    template = state(0, width=4).params
    with pytest.raises(InputError, match="checkpoint 1 was made with another config") as caught:
        checkpoints.restore_params(which, template)
    assert "kernel has shape (2, 3), not (2, 4)" in str(caught.value)
    with pytest.raises(InputError, match="checkpoint 1 was made with another configuration"):
        checkpoints.restore_last(state(0, width=4))
    with pytest.raises(InputError, match="checkpoint 1 was made with another configuration"):
        checkpoints.restore_params(which, {"bias": template["kernel"]})


def test_failed_save_names_what_is_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_last(1, state(1), {})
    checkpoints.wait()

    def save() -> None:
        checkpoints.save_last(2, state(2), {"batches": object()})  # is not JSON
        checkpoints.wait()

    with pytest.raises(SaveError) as caught:
        save()
    text = str(caught.value)
    assert f"could not be written to {tmp_path / 'checkpoints'}" in text
    assert "the state of step 1 is kept" in text
    assert "\n" not in text
    assert_equal(Checkpoints(tmp_path).restore_last(state(0))[0], state(1))
