"""Saving and restoring: whole states, the best parameters, what does not fit, what is broken."""

from __future__ import annotations

import time
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


def assert_equal(left: Any, right: Any) -> None:
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)


def test_states_and_the_best_and_stages_come_back_whole(tmp_path: Path) -> None:
    empty = Checkpoints(tmp_path, read_only=True)
    assert empty.last_step() is empty.best_step() is None
    for which in ("best", "last"):
        with pytest.raises(InputError, match=which):
            empty.restore_params(which, state(0).params)
    assert not list(tmp_path.iterdir())
    checkpoints = Checkpoints(tmp_path)
    extra = {"batches": {"next_index": 7}, "seconds": 1.5, "best_return": -float("inf")}
    for step in (1, 2, 6):
        checkpoints.save_last(step, state(step), extra)
        checkpoints.save_best(step, state(step).params, {"scores": {"return": step}})
    checkpoints.save_stage(2, state(2).params)
    checkpoints.save_stage(2, state(9).params)  # a resumed run has the same parameters
    checkpoints.wait()
    assert sorted(path.name for path in (tmp_path / "checkpoints/last").iterdir()) == ["2", "6"]
    assert [path.name for path in (tmp_path / "checkpoints/best").iterdir()] == ["6"]
    again = Checkpoints(tmp_path)
    restored, found, step = again.restore_last(state(1))
    assert (step, found) == (6, extra)
    assert_equal(restored, state(6))
    assert isinstance(restored, State)
    assert_equal(again.restore_params_of(2, state(0).params), state(2).params)
    for which in ("last", "best"):
        params, step = again.restore_params(which, state(1).params)
        assert step == 6
        assert_equal(params, state(6).params)
    # After a kill, evaluations may be at other steps than before.
    again.save_best(4, state(4).params, {})
    again.wait()
    assert again.best_step() == 4


# ---------------------------------------------------------------------- damage


def largest(folder: Path) -> Path:
    """The file of a step that holds its arrays."""
    return max(folder.glob("state/ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)


def flip_a_bit(folder: Path) -> None:
    data = bytearray(largest(folder).read_bytes())
    data[len(data) // 2] ^= 0x40
    largest(folder).write_bytes(data)


def saved_twice(workdir: Path) -> Path:
    """States of steps 1 and 2 and the best of step 2; returns the folder of checkpoints."""
    checkpoints = Checkpoints(workdir)
    for step in (1, 2):
        checkpoints.save_last(step, state(step), {"step": step})
    checkpoints.save_best(2, state(2).params, {"scores": {}})
    checkpoints.wait()
    return workdir / "checkpoints"


def test_of_a_step_without_its_digests_the_one_before_is_taken(tmp_path: Path) -> None:
    """As if the process had been killed between a step and its digests."""
    folder, lines = saved_twice(tmp_path), []
    (folder / "last" / "2" / "digests.json").unlink()
    # As evaluation takes it: nothing is changed.
    params, step = Checkpoints(tmp_path, read_only=True, log=lines.append).restore_params(
        "last", state(0).params
    )
    assert step == 1
    assert_equal(params, state(1).params)
    (line,) = lines
    assert "digests.json" in line
    assert (folder / "last" / "2").exists()
    # As training does: it is put aside.
    restored, extra, step = Checkpoints(tmp_path, log=lines.append).restore_last(state(0))
    assert (step, extra) == (1, {"step": 1})
    assert_equal(restored, state(1))
    assert (folder / "damaged-2").exists()


def test_where_all_are_damaged_nothing_is_taken(tmp_path: Path) -> None:
    """The best is saved again, when a killed run repeats the step."""
    folder = saved_twice(tmp_path)
    for path in ("best/2", "last/1", "last/2"):
        flip_a_bit(folder / path)
    with pytest.raises(InputError, match=r"\bbest\b"):
        Checkpoints(tmp_path, read_only=True).restore_params("best", state(0).params)
    resumed = Checkpoints(tmp_path)
    with pytest.raises(InputError, match=r"\blast\b"):
        resumed.restore_last(state(0))
    assert sorted(path.name for path in (folder / "last").iterdir()) == ["1", "2"]
    for _ in range(2):
        resumed.save_best(2, state(2).params, {"scores": {}})
        resumed.wait()
    assert_equal(resumed.restore_params("best", state(0).params)[0], state(2).params)


# ---------------------------------------------------------------------- what does not fit


def test_other_shapes_are_refused_by_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_last(1, state(1), {})
    checkpoints.save_best(1, state(1).params, {})
    checkpoints.wait()
    template = state(0, width=4).params
    with pytest.raises(InputError, match=r"kernel.*\(2, 3\).*\(2, 4\)"):
        checkpoints.restore_params("best", template)
    with pytest.raises(InputError, match="bias"):
        checkpoints.restore_params("last", {"bias": template["kernel"]})
    with pytest.raises(InputError, match="checkpoint 1 "):
        checkpoints.restore_last(state(0, width=4))


def test_a_save_that_fails_or_is_killed_leaves_the_one_before(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_last(1, state(1), {})
    checkpoints.wait()

    def save() -> None:
        checkpoints.save_last(2, state(2), {"batches": object()})  # is not JSON
        checkpoints.wait()

    with pytest.raises(SaveError, match="step 1"):
        save()
    seen: list[Path] = []
    while seen != (seen := sorted(tmp_path.rglob("*"))):  # other writes may still be under way
        time.sleep(0.3)
    (tmp_path / "checkpoints/last/2.orbax-checkpoint-tmp").mkdir(exist_ok=True)  # of a kill
    again = Checkpoints(tmp_path)
    assert again.last_step() == 1
    assert_equal(again.restore_last(state(0))[0], state(1))
    again.save_last(2, state(2), {})
    again.wait()
    assert_equal(Checkpoints(tmp_path).restore_last(state(0))[0], state(2))
