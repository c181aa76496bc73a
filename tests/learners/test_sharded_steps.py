"""Training under any mesh: the unsharded numbers, an eighth of the memory, nothing else sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from qrag_jax.runtime.sharding import LEAST_SPLIT
from tests.devices import run_two_processes
from tests.episodes_maker import tower
from tests.learners.sharded_steps import (
    CASES,
    ENCODER,
    SHARED,
    SKIPS,
    SLOW_CASES,
    WHOLE,
    Case,
    bad_programs,
    forget,
    found,
    may_be_sent,
    moved,
    played,
    skipped_step,
)
from tests.support import hlo

pytestmark = pytest.mark.long

FSDP8 = Case(1, 8, 1)


def each(quick: list[Case], slow: list[Case]) -> pytest.MarkDecorator:
    """A test of every case, of which some are for `make test-slow`."""
    marked = [pytest.param(case, id=case.name) for case in quick]
    marked += [pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in slow]
    return pytest.mark.parametrize("case", marked)


every_case = each(CASES, SLOW_CASES)


@pytest.fixture(scope="module", autouse=True)
def programs_are_forgotten() -> Iterator[None]:
    yield
    forget()


def check_equal(one: dict[str, np.ndarray], whole: dict[str, np.ndarray]) -> None:
    assert one.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(one[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def moments(state: dict[str, np.ndarray], name: str) -> list[np.ndarray]:
    return [value for path, value in state.items() if f"/{name}/" in path]


def check_moments(one: dict[str, np.ndarray], whole: dict[str, np.ndarray]) -> None:
    for moment, atol in (("mu", 1e-6), ("nu", 1e-9)):  # which are small numbers
        for ours, theirs in zip(moments(one, moment), moments(whole, moment), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=atol)


# ---------------------------------------------------------------------- numbers


def test_the_unsharded_run_trains() -> None:
    whole = found(WHOLE).arrays
    assert whole["step"] == 10
    assert len(set(whole["losses"].tolist())) == 10
    start = {"params/" + n: v for n, v in _flat(tower(ENCODER, 0)).items()}
    for name, value in start.items():
        # Keys' biases shift all scores of a query alike: softmax, hence the loss, ignores them.
        assert np.abs(whole[name] - value).max() > 1e-3 or "key/bias" in name, name
    # The moments are far above what they are compared with below.
    assert max(np.abs(value).max() for value in moments(whole, "mu")) > 1e-3
    assert len(moments(whole, "mu")) == len(moments(whole, "nu")) == len(start)


@every_case
def test_same_losses_and_state_after_ten_steps(case: Case) -> None:
    check_equal(found(case).arrays, found(WHOLE).arrays)
    check_moments(found(case).arrays, found(WHOLE).arrays)


@pytest.mark.slow
def test_two_processes_train_alike(tmp_path: Path) -> None:
    run_two_processes("tests.learners.sharded_steps", str(tmp_path))
    for case in SHARED:
        with np.load(tmp_path / f"{case.name}.npz") as arrays:
            check_equal(dict(arrays), found(WHOLE).arrays)
        # Between CPU hosts a reduce-scatter is wrong now and then.
        program = (tmp_path / f"{case.name}.hlo").read_text()
        kinds = {kind for kind, _ in hlo.collectives(program)}
        assert kinds == {"all-gather", "all-reduce", "all-to-all"}


@pytest.mark.parametrize("case", SKIPS, ids=[case.name for case in SKIPS])
def test_devices_agree_to_skip_what_one_of_them_cannot_learn_from(case: Case) -> None:
    changed, skipped = skipped_step(case)
    assert skipped == [1.0] * 8
    # Neither parameters nor targets nor moments: the run's step and that of the schedule.
    *schedule, env_steps, step = sorted(changed, key=lambda name: name.count("/"))[::-1]
    assert {env_steps, step} == {"env_steps", "step"}
    assert [name.rpartition("/")[2] for name in schedule] == ["count"]


def test_a_run_may_change_its_mesh(tmp_path: Path) -> None:
    check_equal(moved(tmp_path), found(WHOLE).arrays)


def test_split_parameters_play_the_same_episodes() -> None:
    whole = played(WHOLE)
    check_equal(played(Case(2, 4, 1)), whole)
    assert whole["multi_step/valid"].sum() > 16


# ---------------------------------------------------------------------- memory


def test_a_device_holds_an_eighth() -> None:
    held = found(FSDP8).held
    for part in ("params/", "target_params/", "opt_state/"):
        sizes = [size for name, size in held.items() if name.startswith(part)]
        total, own = map(sum, zip(*sizes))
        assert 1 / 8 < own / total < 0.15, part
    for name, (total, own) in held.items():
        assert own == (total // 8 if total >= 4 * LEAST_SPLIT else total), name


def test_without_fsdp_every_device_holds_all() -> None:
    assert all(total == own for total, own in found(Case(8, 1, 2)).held.values())


@pytest.fixture(scope="module")
def bad() -> dict[str, str]:
    return bad_programs()


@every_case
def test_the_states_buffers_are_reused(bad: dict[str, str], case: Case) -> None:
    # The constant key is passed through, which some versions count as an alias and some do not.
    assert hlo.donated(found(case).program) >= len(found(case).held) - 1
    assert hlo.donated(bad["copied"]) == 0


# ---------------------------------------------------------------------- what is sent


@every_case
def test_nothing_else_is_sent(case: Case) -> None:
    text, split = found(case).program, case.fsdp > 1
    assert hlo.unexpected(text, may_be_sent(case)) == []
    kinds = {kind for kind, _ in hlo.collectives(text)}
    of_parts = {"all-gather", "all-to-all", "reduce-scatter"} if split else set()
    assert kinds == {"all-reduce"} | of_parts


def test_what_should_not_be_sent_is_found(bad: dict[str, str]) -> None:
    allowed, alone = may_be_sent(FSDP8), may_be_sent(Case(8, 1, 2))
    # No table and no stack of layers is ever whole.
    for shapes in allowed.values():
        assert not {(320, 128), (2, 320, 128), (2, 128, 128), (2, 2, 128, 128)} & shapes
    assert any("f32[16, 6, 128]" in line for line in hlo.unexpected(bad["gathered"], allowed))
    assert "all-gather of s32[16, 6, 8]" in hlo.unexpected(bad["copied"], alone)
    # A step that gathers parameters is not one of pure data parallelism.
    sent = hlo.unexpected(found(FSDP8).program, alone)
    assert any(line.startswith("all-gather of f32[128, 384]") for line in sent)


def _flat(tree: dict) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.stack([leaf, leaf])
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
