"""Training under any mesh: the unsharded numbers, an eighth of the memory, nothing else sent."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from qrag_jax.runtime.sharding import LEAST_SPLIT
from tests.devices import virtual_devices
from tests.episodes_maker import tower
from tests.learners import hlo
from tests.learners.sharded_steps import CASES, ENCODER, SKIPS, SLOW_CASES, WHOLE, Case

FSDP8 = Case(1, 8, 1)


def each(quick: list[Case], slow: list[Case]) -> pytest.MarkDecorator:
    """A test of every case, of which some are for `make test-slow`."""
    marked = [pytest.param(case, id=case.name) for case in quick]
    marked += [pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in slow]
    return pytest.mark.parametrize("case", marked)


every_case = each(CASES, SLOW_CASES)


def start(devices: int, *arguments: str) -> subprocess.Popen[str]:
    """The process of `sharded_steps` over so many virtual devices."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.learners.sharded_steps", *arguments],
        cwd=Path(__file__).parents[2],
        env=virtual_devices(devices),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    try:
        _, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-5000:]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    finish(start(8, str(folder)))
    return folder


@pytest.fixture(scope="module")
def slow_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded_slow")
    finish(start(8, str(folder), "slow"))
    return folder


@pytest.fixture
def found_in(case: Case, request: pytest.FixtureRequest) -> Path:
    """The folder with what was found of the case."""
    return request.getfixturevalue("slow_out" if case in SLOW_CASES else "out")


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as found:
        return dict(found)


def check_equal(found: dict[str, np.ndarray], whole: dict[str, np.ndarray]) -> None:
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def moments(state: dict[str, np.ndarray], name: str) -> list[np.ndarray]:
    return [value for path, value in state.items() if f"/{name}/" in path]


def parameter_shapes(out: Path, case: Case) -> set[tuple[int, ...]]:
    """Of whole parameters, and of what a device holds of them."""
    whole = {(2, *leaf.shape) for leaf in jax.tree.leaves(tower(ENCODER, 0))}
    parts = json.loads((out / f"{case.name}.json").read_text())["parts"]
    return whole | {tuple(shape) for shape in parts}


def program(out: Path, case: Case) -> str:
    return (out / f"{case.name}.hlo").read_text()


# ---------------------------------------------------------------------- numbers


def test_the_unsharded_run_trains(out: Path) -> None:
    whole = arrays(out / f"{WHOLE.name}.npz")
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
def test_same_losses_and_state_after_ten_steps(out: Path, found_in: Path, case: Case) -> None:
    found, whole = arrays(found_in / f"{case.name}.npz"), arrays(out / f"{WHOLE.name}.npz")
    check_equal(found, whole)
    for moment, atol in (("mu", 1e-6), ("nu", 1e-9)):  # which are small numbers
        for ours, theirs in zip(moments(found, moment), moments(whole, moment), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=atol)


@pytest.mark.slow
def test_two_processes_train_alike(out: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for process in [start(4, str(tmp_path), address, number) for number in "01"]:
        finish(process)
    whole = arrays(out / f"{WHOLE.name}.npz")
    for case in (FSDP8, Case(2, 4, 1)):
        check_equal(arrays(tmp_path / f"{case.name}.npz"), whole)
        # Between CPU hosts a reduce-scatter is wrong now and then.
        kinds = {kind for kind, _ in hlo.collectives(program(tmp_path, case))}
        assert kinds == {"all-gather", "all-reduce"}


@pytest.mark.parametrize("case", SKIPS, ids=[case.name for case in SKIPS])
def test_devices_agree_to_skip_what_one_of_them_cannot_learn_from(out: Path, case: Case) -> None:
    found = json.loads((out / f"{case.name}-skipped.json").read_text())
    assert found["skipped"] == [1.0] * 8
    # Neither parameters nor targets nor moments: the run's step and that of the schedule.
    *schedule, env_steps, step = sorted(found["changed"], key=lambda name: name.count("/"))[::-1]
    assert {env_steps, step} == {"env_steps", "step"}
    assert [name.rpartition("/")[2] for name in schedule] == ["count"]


def test_a_run_may_change_its_mesh(out: Path) -> None:
    check_equal(arrays(out / "moved.npz"), arrays(out / f"{WHOLE.name}.npz"))


def test_split_parameters_play_the_same_episodes(out: Path) -> None:
    whole = arrays(out / "played-1-1.npz")
    check_equal(arrays(out / "played-2-4.npz"), whole)
    assert whole["multi_step/valid"].sum() > 16


# ---------------------------------------------------------------------- memory


def test_a_device_holds_an_eighth(out: Path) -> None:
    held = json.loads((out / f"{FSDP8.name}.json").read_text())["bytes"]
    for part in ("params/", "target_params/", "opt_state/"):
        sizes = [size for name, size in held.items() if name.startswith(part)]
        total, own = map(sum, zip(*sizes))
        assert 1 / 8 < own / total < 0.15, part
    for name, (total, own) in held.items():
        assert own == (total // 8 if total >= 4 * LEAST_SPLIT else total), name


def test_without_fsdp_every_device_holds_all(out: Path) -> None:
    held = json.loads((out / f"{Case(8, 1, 2).name}.json").read_text())["bytes"]
    assert all(total == own for total, own in held.values())


@every_case
def test_the_states_buffers_are_reused(out: Path, found_in: Path, case: Case) -> None:
    held = json.loads((found_in / f"{case.name}.json").read_text())["bytes"]
    # The constant key is passed through, which some versions count as an alias and some do not.
    assert hlo.donated(program(found_in, case)) >= len(held) - 1
    assert hlo.donated((out / "copied.hlo").read_text()) == 0


# ---------------------------------------------------------------------- what is sent


@every_case
def test_only_parameters_and_sums_are_sent(found_in: Path, case: Case) -> None:
    text, split = program(found_in, case), case.fsdp > 1
    assert hlo.unexpected(text, parameter_shapes(found_in, case), split) == []
    kinds = {kind for kind, _ in hlo.collectives(text)}
    assert kinds == ({"all-gather", "reduce-scatter", "all-reduce"} if split else {"all-reduce"})


def test_what_should_not_be_sent_is_found(out: Path) -> None:
    shapes = parameter_shapes(out, FSDP8)
    copied = hlo.unexpected((out / "copied.hlo").read_text(), shapes, split=True)
    assert "all-gather of s32[16, 6, 8]" in copied
    gathered = hlo.unexpected((out / "gathered.hlo").read_text(), shapes, split=True)
    assert any("f32[16, 6, 128]" in line for line in gathered)
    # A step that gathers parameters is not one of pure data parallelism.
    found = hlo.unexpected(program(out, FSDP8), shapes, split=False)
    assert any(line.startswith("all-gather of f32[2, 2, 128, 128]") for line in found)


def _flat(tree: dict) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.stack([leaf, leaf])
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
