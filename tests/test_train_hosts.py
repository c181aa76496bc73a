"""The command `train` on several hosts: processes of this machine, which meet on localhost."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.devices import environment_of
from tests.entry_points import FLOAT32, Commands, metric_lines, refusal, saved_state

pytestmark = pytest.mark.long

STEPS, EVERY, LIMIT = 20, 5, 200
AGENT_STEPS = 4  # in more of them rounding may turn the order of two passages
RUN = (
    "--config=configs/quickstart.py:tiny",
    f"--config.train.steps={STEPS}",
    "--config.train.log_every=1",
    f"--config.train.checkpoint_every={EVERY}",
    "--config.train.eval_every=10",
    FLOAT32,  # where blocks have other sizes, bfloat16 would round otherwise
)
# Agents play on each host alone; here they follow the data's own decompositions.
AGENTS = (
    f"--config.train.steps={AGENT_STEPS}",
    "--config.train.batch_size=12",
    "--config.train.log_every=1",
    "--config.optimizer.learning_rate=1e-4",  # rewards stay different, so that there is a gradient
    "--config.policy.pool=16",
    "--config.policy.passages=8",
    FLOAT32,
)
# Token systems: a tiny model, a step or two of each stage.
TOKENS = (
    "--config.train.log_every=1",
    "--config.train.eval_every=100",
    "--config.model.dtype=float32",
)
RLVR = ("--config=configs/rlvr.py:tiny", "--config.sft.steps=2", *TOKENS)
REWRITER = (
    *("--config=configs/deepretrieval.py:tiny", "--config.script.steps=2", *TOKENS),
    *("--config.queries.made_train=12", "--config.queries.made_corpus=25"),
)
WRITER = (
    *("--config=configs/leret.py:tiny", "--config.script.steps=10", *TOKENS),
    *("--config.iterations=1", "--config.model.lora.rank=4"),
)
# Rates, and how full blocks and batches of searches are, which depends on the number of devices;
# what a host searches and asks itself; and at first policy and reference are one but for rounding.
OF_LAYOUT = (
    *("speed/", "train/padding_share", "searches_per_batch", "turns_per_batch"),
    *("searches", "kept_search_share", "llm/", "train/accuracy", "train/margin"),
)


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def started(
    commands: Commands, hosts: int, *given: str, devices: int = 1, run: Sequence[str] = RUN
) -> list[Any]:
    """Starts the command on this many hosts."""
    address = free_address()
    environment = commands.environment | {
        "XLA_FLAGS": environment_of(devices)["XLA_FLAGS"],
    }
    return [
        commands.start("train", *run, *given, f"--hosts={address},{hosts},{n}", env=environment)
        for n in range(hosts)
    ]


def ended(processes: Sequence[Any]) -> list[subprocess.CompletedProcess[str]]:
    found = []
    for process in processes:
        out, error = process.communicate(timeout=LIMIT)
        found.append(subprocess.CompletedProcess([], process.returncode, out, error))
    return found


def wait_for_step(workdir: Path, step: int, processes: Sequence[Any]) -> None:
    until = time.monotonic() + LIMIT
    while not any(line["step"] >= step for line in metric_lines(workdir) if "train/loss" in line):
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def stop_together(processes: Sequence[Any]) -> None:
    """A signal to the second host stops both, and the run is saved."""
    processes[1].send_signal(signal.SIGTERM)
    every = ended(processes)
    if any(each.returncode for each in every):  # else it was too late
        assert {each.returncode for each in every} == {128 + signal.SIGTERM}, errors_of(every)
        assert "SIGTERM: stopped, saved at step" in every[0].stdout


def errors_of(processes: Sequence[subprocess.CompletedProcess[str]]) -> str:
    """What they said, behind a failed assertion."""
    return "\n====\n".join(each.stderr[-5000:] for each in processes)


def same_run(workdir: Path, other: Path, steps: int = STEPS) -> None:
    """The same steps once each, with the same numbers, and the same state."""
    mine, theirs = (
        # Each start tells how long it took.
        [line for line in metric_lines(each) if "speed/time_to_first_step" not in line]
        for each in (workdir, other)
    )
    assert [line["step"] for line in mine] == [line["step"] for line in theirs]
    for one, two in zip(mine, theirs, strict=True):
        for name in one:
            if not name.startswith(OF_LAYOUT) and one[name] is not None:
                np.testing.assert_allclose(one[name], two[name], 1e-5, 1e-5, err_msg=name)
    state, wanted = saved_state(workdir, steps), saved_state(other, steps)
    for name, array in wanted.items():
        np.testing.assert_allclose(state[name], array, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def alone(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one host."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    commands.succeed("train", *RUN, f"--workdir={workdir}")
    return workdir


def test_two_hosts_do_what_one_does(commands: Commands, alone: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    first, second = both = ended(started(commands, 2, f"--workdir={workdir}"))
    assert (first.returncode, second.returncode) == (0, 0), errors_of(both)
    assert "step 20: fact EM" in first.stdout
    assert "fact EM" not in second.stdout  # the first host alone tells
    same_run(workdir, alone)
    assert (workdir / "learning_curve.png").exists()
    assert len([*(workdir / "tensorboard").iterdir()]) == 1
    assert json.loads((workdir / "config.json").read_text())["seed"] == 42


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "devices"), [(4, 1), (2, 4)])
def test_any_layout_does_what_one_host_does(
    commands: Commands, alone: Path, tmp_path: Path, hosts: int, devices: int
) -> None:
    """Stopped on the way by a signal, and gone on with on two hosts of one device."""
    workdir = tmp_path / "run"
    every = started(commands, hosts, f"--workdir={workdir}", devices=devices)
    assert [each.returncode for each in ended(every)] == [0] * hosts
    same_run(workdir, alone)
    other = tmp_path / "other"
    processes = started(commands, hosts, f"--workdir={other}", devices=devices)
    wait_for_step(other, 3, processes)
    stop_together(processes)
    both = ended(started(commands, 2, f"--workdir={other}"))
    assert [each.returncode for each in both] == [0, 0], errors_of(both)
    same_run(other, alone)


def test_a_signal_to_one_host_stops_both_and_one_goes_on(
    commands: Commands, alone: Path, tmp_path: Path
) -> None:
    """Begun by two hosts, gone on with by one that has two devices, data order kept."""
    workdir = tmp_path / "run"
    processes = started(commands, 2, f"--workdir={workdir}")
    wait_for_step(workdir, 3, processes)
    stop_together(processes)
    environment = commands.environment | {"XLA_FLAGS": environment_of(2)["XLA_FLAGS"]}
    commands.succeed("train", *RUN, f"--workdir={workdir}", env=environment)
    same_run(workdir, alone)


def test_a_host_that_dies_ends_the_others_and_both_go_on(
    commands: Commands, alone: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    processes = started(commands, 2, f"--workdir={workdir}")
    wait_for_step(workdir, EVERY + 2, processes)
    processes[1].kill()
    first, _ = ended(processes)
    told = refusal(first, 1)
    assert told.startswith("error: another host (127.0.0.1) has ended")
    assert {each.returncode for each in ended(started(commands, 2, f"--workdir={workdir}"))} == {0}
    same_run(workdir, alone)


def test_a_folder_that_two_hosts_train_in_is_refused_until_they_are_killed(
    commands: Commands, tmp_path: Path
) -> None:
    """The sentence names the first host's process, on every host; the lock of the dead is none."""
    workdir = tmp_path / "run"
    endless = *RUN, "--config.train.steps=100000", f"--workdir={workdir}"
    processes = started(commands, 2, run=endless)
    wait_for_step(workdir, 1, processes)
    others = [*ended(started(commands, 2, run=endless)), commands.run("train", *endless)]
    are_alive = [process.poll() is None for process in processes]
    for process in processes:
        process.kill()
    ended(processes)
    owner = f"process {processes[0].pid} on {socket.gethostname()}"
    assert len(others) == 3
    for each in others:
        assert f"{workdir} is being trained by {owner}" in refusal(each)
    assert are_alive == [True, True]
    seen = len(metric_lines(workdir))
    again = started(commands, 2, run=endless)
    while len(metric_lines(workdir)) <= seen:
        assert all(process.poll() is None for process in again), errors_of(ended(again))
        time.sleep(0.1)
    stop_together(again)


def play_as_one(
    commands: Commands, folder: Path, run: Sequence[str], steps: int, *, is_stopped: bool
) -> Path:
    """Runs by one host and by two, which may be stopped on the way; the first one's folder."""
    alone, workdir = folder / "alone", folder / "run"
    commands.succeed("train", *run, f"--workdir={alone}")
    if is_stopped:
        processes = started(commands, 2, f"--workdir={workdir}", run=run)
        wait_for_step(workdir, 1, processes)
        stop_together(processes)
    both = ended(started(commands, 2, f"--workdir={workdir}", run=run))
    assert [each.returncode for each in both] == [0, 0], errors_of(both)
    same_run(workdir, alone, steps)
    return alone


@pytest.mark.parametrize(
    ("given", "is_stopped"),
    [
        (("--config=configs/harr_grpo.py:tiny",), True),
        (("--config=configs/harr_ppo.py:tiny", "--config.encoder.lora.rank=4"), False),
    ],
)
def test_agents_of_two_hosts_play_what_one_plays(
    commands: Commands, tmp_path: Path, given: tuple[str, ...], is_stopped: bool
) -> None:
    run = (*given, *AGENTS)
    alone = play_as_one(commands, tmp_path, run, AGENT_STEPS, is_stopped=is_stopped)
    lines = [line for line in metric_lines(alone) if "train/grad_norm" in line]
    assert all(line["train/grad_norm"] > 0 for line in lines)


@pytest.mark.parametrize(
    ("run", "steps", "is_stopped"),
    [
        pytest.param(RLVR, 6, True, id="rlvr"),
        pytest.param(REWRITER, 6, False, id="deepretrieval"),
        pytest.param(WRITER, 16, False, id="leret with adapters"),
    ],
)
def test_language_models_of_two_hosts_play_what_one_plays(
    commands: Commands, tmp_path: Path, run: tuple[str, ...], steps: int, is_stopped: bool
) -> None:
    play_as_one(commands, tmp_path, run, steps, is_stopped=is_stopped)


def test_what_is_refused_is_refused_on_all_hosts(commands: Commands, tmp_path: Path) -> None:
    bad = f"--workdir={tmp_path / 'bad'}", "--config.train.batch_size=15"
    for each in ended(started(commands, 2, *bad)):
        assert "config.train.batch_size is 15" in refusal(each)
    split = "--config=configs/harr_grpo.py:tiny", "--config.runtime.mesh=(1,2,1)"
    for each in ended(started(commands, 2, f"--workdir={tmp_path / 'split'}", run=split)):
        assert "splits the model over several hosts" in refusal(each)
    ahead = *RLVR, "--config.tools.staleness=1"
    for each in ended(started(commands, 2, f"--workdir={tmp_path / 'ahead'}", run=ahead)):
        assert "the staleness is 1, and there are 2 hosts" in refusal(each)
    web = *REWRITER, "--config.search.engine=remote", "--config.stages=rl"
    for each in ended(started(commands, 2, f"--workdir={tmp_path / 'web'}", run=web)):
        assert "which each of 2 hosts would ask" in refusal(each)
    dry = commands.run("train", *RUN, "--dry_run", "--hosts=127.0.0.1:1,2,0")
    assert "leave it out with --dry_run" in refusal(dry)
