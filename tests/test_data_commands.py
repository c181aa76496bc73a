"""The commands `filter_data`, with a training on what it finds, and `data`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import harr_grpo
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.systems.harr.system import Harr
from tests.entry_points import Commands, json_lines, refusal
from tests.support import worlds
from tests.support.worlds import record_of, write_lines

FIELDS: dict[str, Any] = {
    "encoder.scratch.layers": 1,
    "data.path": worlds.path_of("more_chains"),
    "reward.mixture": "f1=1,recall=1,novelty=0.1",
}
TINY = (
    "--config=configs/harr_grpo.py:tiny",
    *(f"--config.{name}={value}" for name, value in FIELDS.items()),
)
QUESTIONS = 96


@pytest.fixture(scope="module")
def log(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a command that nothing stopped."""
    path = tmp_path_factory.mktemp("filter") / "varied.jsonl"
    commands.succeed("filter_data", *TINY, f"--out={path}")
    return path


def test_a_killed_command_goes_on(log: Path, commands: Commands, tmp_path: Path) -> None:
    """A torn row is played again; the threshold may change."""
    path = tmp_path / "varied.jsonl"
    shutil.copy(log.with_suffix(".json"), path.with_suffix(".json"))
    text = log.read_text().splitlines(keepends=True)
    path.write_text("".join(text[:60]) + text[60][:30])
    commands.succeed("filter_data", *TINY, f"--out={path}", "--least_std=0.2")
    rows = json_lines(path)
    assert len({row["id"] for row in rows}) == len(rows) == QUESTIONS
    assert [row["rewards"] for row in rows] == [row["rewards"] for row in json_lines(log)]
    spread = [np.std(row["rewards"]) for row in rows]
    assert [row["std"] for row in rows] == pytest.approx(spread, abs=1e-9)
    assert [row["kept"] for row in rows] == [row["std"] > 0.2 for row in rows]
    before = path.read_bytes()
    other = ("--config.policy.tau=0.1", f"--out={path}")
    assert "--restart" in refusal(commands.run("filter_data", *TINY, *other))
    assert path.read_bytes() == before


def test_refusals(commands: Commands, tmp_path: Path) -> None:
    out = f"--out={tmp_path / 'log.jsonl'}"
    for words, name in (
        (TINY, "--out"),
        ((*TINY, out, "--rollouts=1"), "--rollouts"),
        (("--config=configs/hotpotqa.py:tiny", out), "q_rag"),
    ):
        assert name in refusal(commands.run("filter_data", *words))
    assert not (tmp_path / "log.jsonl").exists()


def test_training_draws_the_kept_ones(log: Path, tmp_path: Path) -> None:
    config = harr_grpo.get_config("tiny")
    kept = [row["id"] for row in json_lines(log) if len(set(row["rewards"])) > 1]
    assert 0 < len(kept) < QUESTIONS
    config.update_from_flattened_dict(FIELDS)
    config.questions.kept, stop = str(log), StopSignal()
    with Run.open(tmp_path / "all", 0.0) as run, Harr.open_system(config, run) as system:
        assert [each.id for each in system.inputs.train] == kept
        assert len(system.inputs.index.corpus) > 8 * QUESTIONS  # that of all questions
        run.restore(system.first_state, system.data, {})
        experience, state = system.experience(run, stop), system.first_state()
        experience.next(state, 0, stop)
        assert all(number < len(kept) for number, _ in experience.samples)


# ---------------------------------------------------------------- data


def record(name: str, paragraphs: int) -> dict[str, Any]:
    context = [(f"T{place}", ["one two"] * (place + 1)) for place in range(paragraphs)]
    return record_of("hotpotqa", name, "Who?", "Ada", context, [0, 1])


def test_what_validation_keeps_mends_and_skips(tmp_path: Path, commands: Commands) -> None:
    path = write_lines(tmp_path / "mine.jsonl", [record("a", 2), record("b", 3), record("c", 4)])
    out = commands.succeed("data", "--source", "hotpotqa", "--path", str(path))
    assert "3 read, 3 kept, 0 skipped" in out
    bad = record("x", 3) | {"supporting_facts": [["T9", 0]]}
    beyond = record("b", 2) | {"supporting_facts": [["T1", 7], ["T0", 0]]}
    write_lines(tmp_path / "dev.jsonl", [record("a", 2), bad, bad, record("a", 2), beyond])
    write_lines(tmp_path / "train.jsonl", [record("a", 2)])
    arguments = ("data", "--source=hotpotqa", f"--path={tmp_path}")
    ended = commands.run(*arguments, "--split=dev")
    assert ended.returncode == 1
    assert "5 read, 2 kept, 3 skipped" in ended.stdout
    for place in ("dev.jsonl:2", "dev.jsonl:4", "dev.jsonl:5"):  # the first of each kind
        assert place in ended.stdout
    commands.succeed(*arguments)


def test_files_that_cannot_be_validated(tmp_path: Path, commands: Commands) -> None:
    path = write_lines(tmp_path / "mine.jsonl", [{"text": "no question"}])
    for source, given, name in (
        ("hotpotqa", str(path), "_id"),
        ("nonesuch", str(path), "nonesuch"),
        ("hotpotqa", "", "--path"),
    ):
        words = (f"--source={source}", f"--path={given}")
        assert name in refusal(commands.run("data", *words))
