"""The command that finds the questions whose reward varies, and a training on these."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import harr_grpo
from qrag_jax.errors import InputError
from qrag_jax.metrics import reward_log
from qrag_jax.rollouts.agents import Start
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.systems import harr, harr_filter
from tests.entry_points import Commands, refusal

pytestmark = pytest.mark.long

FIELDS: dict[str, Any] = {
    "encoder.scratch.layers": 1,
    "data.synthetic.train": 96,
    "reward.mixture": "f1=1,recall=1,novelty=0.1",
}
TINY = (
    "--config=configs/harr_grpo.py:tiny",
    *(f"--config.{name}={value}" for name, value in FIELDS.items()),
)
QUESTIONS, ROLLOUTS = 96, 8
PART = 256 // ROLLOUTS  # questions written together


def config() -> Any:
    made = harr_grpo.get_config("tiny")
    for name, value in FIELDS.items():
        *sections, field = name.split(".")
        section = made
        for each in sections:
            section = section[each]
        section[field] = value
    return made


@pytest.fixture(scope="module")
def log(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a command that nothing stopped."""
    path = tmp_path_factory.mktemp("filter") / "varied.jsonl"
    out = commands.succeed("filter_data", *TINY, f"--out={path}")
    rows = reward_log.read(path, "the log")
    assert out.splitlines()[-5:] == [
        *reward_log.summary(rows, 0.0),
        f"rewards: {path}",
    ]
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_the_log_holds(log: Path) -> None:
    rows = lines(log)
    assert len({row["id"] for row in rows}) == len(rows) == QUESTIONS
    for row in rows:
        assert row["mean"] == pytest.approx(np.mean(row["rewards"]))
        assert row["std"] == pytest.approx(np.std(row["rewards"]), abs=1e-9)
        assert len(row["rewards"]) == row["scored"] == ROLLOUTS
        assert row["broken"] == []
        assert row["kept"] == (len(set(row["rewards"])) > 1)
    assert sum(row["kept"] for row in rows) > 0
    # Members draw by themselves, and questions as well.
    assert len({tuple(row["rewards"]) for row in rows}) > 10


def test_rewards_are_those_of_a_rollout(log: Path, tmp_path: Path) -> None:
    """Another batch of the same questions and members has the same draws."""
    with Run.open(tmp_path / "run", 0.0) as run, harr.open_system(config(), run) as system:
        mixture, asked = system.config.reward.rewards, system.inputs.train
        # Four members of the questions 2 and 50, which are played with others above.
        starts: list[Start] = []
        for number in (2, 50):
            made = harr_filter._starts(42, number, asked[number : number + 1], ROLLOUTS)
            starts += made[:4]
        params = system.first_state().params
        played = system.player.rollout(params, StopSignal()).play(starts)
    rows = lines(log)
    for place, episode in enumerate(played):
        number, member = (2, 50)[place // 4], place % 4
        gold = asked[number].gold
        found = [each.names for each in episode.searches]
        total = mixture.total(mixture.score(gold, episode.ended, found))
        assert rows[number]["rewards"][member] == pytest.approx(total)
    keys = {start.key.tobytes() for start in harr_filter._starts(42, 0, asked, ROLLOUTS)}
    assert len(keys) == QUESTIONS * ROLLOUTS


def test_killed_and_gone_on(log: Path, commands: Commands, tmp_path: Path) -> None:
    path = tmp_path / "varied.jsonl"

    def stopped(number: signal.Signals) -> tuple[int, str]:
        """Ends the command after its first part."""
        before = path.stat().st_size if path.exists() else 0
        process = commands.start("filter_data", *TINY, f"--out={path}")
        while process.poll() is None and not (path.exists() and path.stat().st_size > before):
            time.sleep(0.01)
        process.send_signal(number)
        out, _ = process.communicate(timeout=300)
        return process.returncode, out

    stopped(signal.SIGKILL)
    assert len(lines(path)) == PART
    status, out = stopped(signal.SIGINT)
    assert status == 128 + signal.SIGINT
    assert f"SIGINT: stopped, {path} is kept; give the same command to go on." in out
    assert len(lines(path)) == 2 * PART
    commands.succeed("filter_data", *TINY, f"--out={path}")
    assert path.read_bytes() == log.read_bytes()


def test_a_torn_log_and_another_threshold(log: Path, commands: Commands, tmp_path: Path) -> None:
    for each in (log, log.with_suffix(".json")):
        shutil.copy(each, tmp_path)
    shutil.copytree(log.with_suffix(".files"), tmp_path / "varied.files")
    path, whole = tmp_path / log.name, log.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[: PART + 5]) + whole[PART + 5][:30])
    commands.succeed("filter_data", *TINY, f"--out={path}", "--least_std=0.2")
    rows = lines(path)
    assert [row["rewards"] for row in rows] == [json.loads(line)["rewards"] for line in whole]
    assert [row["kept"] for row in rows] == [row["std"] > 0.2 for row in rows]
    # The threshold may change: nothing is played for it.
    out = commands.succeed("filter_data", *TINY, f"--out={path}")
    assert path.read_bytes() == log.read_bytes()
    assert "standard deviation above 0\n" in out
    told = refusal(commands.run("filter_data", *TINY, f"--out={path}", "--config.policy.tau=0.1"))
    assert f"{path} was begun with other settings, data or weights; give --restart" in told
    told = refusal(commands.run("filter_data", *TINY, f"--out={path}", "--rollouts=4"))
    assert f"{path} was begun with other settings" in told
    assert path.read_bytes() == log.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--config"),
        (TINY, "give the file to write, for example --out=varied.jsonl."),
        ((*TINY, "--out={}", "--rollouts=1"), "--rollouts is 1, but a reward varies only between"),
        ((*TINY, "--out={}", "--least_std=-1"), "--least_std is -1.0; give a number, 0 or more."),
        ((*TINY, "--out=log.json"), "--out=log.json is not named as JSON lines"),
        ((*TINY, "--out={}", "--checkpoint=last"), "--checkpoint is of a run; give its folder"),
        ((*TINY, "--workdir=none"), "--workdir has a config of its own; leave out --config=FILE"),
        (("--workdir=none", "--out={}"), "none/config.json does not exist"),
        (("--config=configs/none.py", "--out={}"), "the file cannot be loaded"),
        (("--config=configs/hotpotqa.py:tiny", "--out={}"), "is an experiment of q_rag, which"),
        ((*TINY, "--out={}", "--config.corpus.path=none.jsonl"), "none.jsonl does not exist"),
    ],
)
def test_refusals(arguments: Any, told: str, commands: Commands, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    given = [each.replace("{}", str(path)) for each in arguments]
    assert told in refusal(commands.run("filter_data", *given))
    assert not path.exists()


def test_training_draws_the_kept_ones(log: Path, tmp_path: Path) -> None:
    kept = [row["id"] for row in lines(log) if row["kept"]]
    given, stop = config(), StopSignal()
    given.questions.kept = str(log)
    with Run.open(tmp_path / "all", 0.0) as run, harr.open_system(given, run) as system:
        assert [each.gold.id for each in system.inputs.train] == kept
        assert len(system.inputs.index.corpus) > 8 * QUESTIONS  # that of all questions
        run.restore(system.first_state, system.data, {})
        experience, state = system.experience(run, stop), system.first_state()
        drawn = set()
        for step in range(-(-len(kept) // 4)):
            experience.next(state, step, stop)
            drawn |= {kept[number] for number, _ in experience.samples}
    assert drawn == set(kept)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (None, "which cannot be read (No such file or directory); give a file of qrag filter_data"),
        (lambda text: text.replace("true", "false"), f"keeps none of the {QUESTIONS} training"),
        (
            lambda text: text[text.index("\n") + 1 :],
            "lacks the training question synthetic-train-0-0: it is of other data or not finished",
        ),
    ],
)
def test_files_that_cannot_be_trained_on(
    changed: Callable[[str], str] | None, told: str, log: Path, tmp_path: Path
) -> None:
    given, path = config(), tmp_path / "varied.jsonl"
    given.questions.kept = str(path)
    if changed:
        path.write_text(changed(log.read_text()))
    with (
        Run.open(tmp_path / "run", 0.0) as run,
        pytest.raises(InputError) as caught,
        harr.open_system(given, run),
    ):
        pass
    assert f"config.questions.kept is {path}, which " in str(caught.value)
    assert told in str(caught.value)
    assert not (tmp_path / "run" / "encoder").exists()


def test_a_run_keeps_to_its_questions(log: Path, commands: Commands, tmp_path: Path) -> None:
    workdir, path = tmp_path / "run", Path(shutil.copy(log, tmp_path))
    train = ("train", *TINY, f"--workdir={workdir}", f"--config.questions.kept={path}")
    out = commands.succeed(*train, "--config.train.steps=1", "--config.train.checkpoint_every=1")
    kept = sum(row["kept"] for row in lines(log))
    assert f"{kept} of {QUESTIONS} training questions are kept by {path}" in out
    again = (*train, "--config.train.steps=1", "--config.train.checkpoint_every=1")
    # Other questions in the same file.
    text = path.read_text()
    path.write_text(text.replace('"kept": true', '"kept": false', 1))
    told = refusal(commands.run(*again))
    assert "config.questions.kept" in told
    path.unlink()
    # Its checkpoint plays all questions again, and needs no file for that.
    own = (f"--workdir={workdir}", "--checkpoint=last")
    commands.succeed("filter_data", *own, f"--out={path}", "--rollouts=2")
    rows = lines(path)
    assert [row["id"] for row in rows] == [row["id"] for row in lines(log)]
    assert {row["scored"] for row in rows} == {2}
    weights = [json.loads(each.with_suffix(".json").read_text())["weights"] for each in (log, path)]
    assert weights[0] != weights[1]
