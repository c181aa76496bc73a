"""Saving and restoring: whole states, the best parameters, what does not fit, what is broken."""

from __future__ import annotations

import logging
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
    restored, found, step = again.restore_last(state(1))
    assert step == 5
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


def test_the_end_of_a_stage_is_kept(tmp_path: Path) -> None:
    with_stage, without = tmp_path / "one", tmp_path / "other"
    for folder in (with_stage, without):
        checkpoints = Checkpoints(folder)
        if folder == with_stage:
            checkpoints.save_stage(2, state(2).params)
            checkpoints.save_stage(2, state(9).params)  # a resumed run has the same parameters
        for step in (3, 4, 5):
            checkpoints.save_last(step, state(step), {})
        checkpoints.wait()
    assert_equal(Checkpoints(with_stage).restore_params_of(2, state(0).params), state(2).params)
    reading = Checkpoints(without, read_only=True)
    assert reading.restore_params_of(2, state(0).params) is None
    assert not (without / "checkpoints" / "stages").exists()


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
    assert_equal(Checkpoints(tmp_path).restore_last(state(0)).state, state(2))


# ---------------------------------------------------------------------- damage


def largest(folder: Path) -> Path:
    """The file of a step that holds its arrays."""
    return max(folder.glob("state/ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)


def flip_a_bit(folder: Path) -> str:
    data = bytearray(largest(folder).read_bytes())
    data[len(data) // 2] ^= 0x40
    largest(folder).write_bytes(data)
    return "is not as it was saved"


def cut_arrays(folder: Path) -> str:
    path = largest(folder)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-7])
    return f"has {size - 7} bytes instead of {size}"


def lose_arrays(folder: Path) -> str:
    largest(folder).unlink()
    return "is missing"


def cut_metadata(folder: Path) -> str:
    path = folder / "state" / "_METADATA"
    path.write_bytes(path.read_bytes()[:50])
    return "file state/_METADATA has 50 bytes instead of"


def cut_extra(folder: Path) -> str:
    (folder / "extra" / "metadata").write_text("{")
    return "file extra/metadata has 1 bytes instead of"


def cut_step_metadata(folder: Path) -> str:
    (folder / "_CHECKPOINT_METADATA").write_text('{"item_hand')
    return "file _CHECKPOINT_METADATA cannot be read"


def lose_digests(folder: Path) -> str:
    """As if the process had been killed between a step and its digests."""
    (folder / "digests.json").unlink()
    return "file digests.json cannot be read"


DAMAGES = [
    *(flip_a_bit, cut_arrays, lose_arrays, cut_metadata, cut_extra, cut_step_metadata),
    lose_digests,
]


def saved_twice(workdir: Path) -> Path:
    """States of steps 1 and 2 and the best of step 2; returns the folder of checkpoints."""
    checkpoints = Checkpoints(workdir)
    for step in (1, 2):
        checkpoints.save_last(step, state(step), {"step": step})
    checkpoints.save_best(2, state(2).params, {"scores": {}})
    checkpoints.wait()
    return workdir / "checkpoints"


@pytest.mark.parametrize("damage", DAMAGES)
def test_of_a_damaged_step_the_one_before_is_taken(tmp_path: Path, damage: Any) -> None:
    folder, told = saved_twice(tmp_path), []
    expected = damage(folder / "last" / "2")
    # As evaluation takes it: nothing is changed.
    params, step = Checkpoints(tmp_path, read_only=True, log=told.append).restore_params(
        "last", state(0).params
    )
    assert step == 1
    assert_equal(params, state(1).params)
    (line,) = told
    assert line.startswith("checkpoint 2 is damaged (file ")
    assert expected in line
    assert line.endswith("): taking step 1")
    assert (folder / "last" / "2").exists()
    # As training does: it is put aside, and the step can be saved again.
    resumed = Checkpoints(tmp_path, log=told.append)
    restored, extra, step = resumed.restore_last(state(0))
    assert (step, extra) == (1, {"step": 1})
    assert_equal(restored, state(1))
    assert f"going on from step 1; it is now {folder / 'damaged-2'}" in told[1]
    assert (folder / "damaged-2").exists()
    assert resumed.last_step() == 1
    resumed.save_last(2, state(2), {"step": 2})
    resumed.wait()
    assert_equal(Checkpoints(tmp_path, log=told.append).restore_last(state(0)).state, state(2))
    assert len(told) == 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_best_is_refused_and_saved_again(tmp_path: Path, damage: Any) -> None:
    folder = saved_twice(tmp_path)
    expected = damage(folder / "best" / "2")
    with pytest.raises(InputError, match="best: checkpoint 2 is damaged") as caught:
        Checkpoints(tmp_path, read_only=True).restore_params("best", state(0).params)
    assert expected in str(caught.value)
    assert "give --checkpoint=last, or restore it from a backup." in str(caught.value)
    resumed = Checkpoints(tmp_path)
    resumed.save_best(2, state(2).params, {"scores": {}})
    resumed.wait()
    assert_equal(resumed.restore_params("best", state(0).params)[0], state(2).params)


def test_all_damaged_is_one_sentence(tmp_path: Path) -> None:
    folder = saved_twice(tmp_path)
    flip_a_bit(folder / "last" / "1")
    lose_arrays(folder / "last" / "2")
    with pytest.raises(InputError, match="last: every checkpoint is damaged") as caught:
        Checkpoints(tmp_path).restore_last(state(0))
    text = str(caught.value)
    assert "(2: file state/" in text
    assert "; 1: file state/" in text
    assert "restore one from a backup, or delete this folder" in text
    assert sorted(path.name for path in (folder / "last").iterdir()) == ["1", "2"]


def test_a_step_replaced_meanwhile_is_not_called_damaged(tmp_path: Path) -> None:
    """A training goes on and deletes the step that an evaluation was about to read."""
    folder, told = saved_twice(tmp_path), []
    reader = Checkpoints(tmp_path, read_only=True, log=told.append)
    training = Checkpoints(tmp_path)
    for step in (3, 4):
        training.save_last(step, state(step), {})
    training.wait()
    assert not (folder / "last" / "2").exists()
    params, step = reader.restore_params("last", state(0).params)
    assert (step, told) == (4, [])
    assert_equal(params, state(4).params)


def test_reading_leaves_a_folder_as_it_is(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, read_only=True).best_step() is None
    assert not list(tmp_path.iterdir())
    folder, told = saved_twice(tmp_path), []
    flip_a_bit(folder / "last" / "2")
    before = sorted(folder.rglob("*"))
    reader = Checkpoints(tmp_path, read_only=True, log=told.append)
    assert_equal(reader.restore_last(state(0)).state, state(1))
    assert sorted(folder.rglob("*")) == before
    (line,) = told
    assert line.startswith("checkpoint 2 is damaged (file ")
    assert line.endswith("): taking step 1")


# ---------------------------------------------------------------------- what does not fit


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


def test_reading_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Programs that load a run by themselves get no lines of Orbax; other warnings stay."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_last(1, state(0), {})
    checkpoints.wait()
    logger = logging.getLogger("absl")
    logger.addHandler(caplog.handler)
    try:
        restored = Checkpoints(tmp_path, read_only=True).restore_last(state(1))
        logger.warning("of others")
    finally:
        logger.removeHandler(caplog.handler)
    assert restored.step == 1
    assert {record.message for record in caplog.records} == {"of others"}
