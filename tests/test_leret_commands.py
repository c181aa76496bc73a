"""LeReT by the commands: a run that is killed and goes on, its scores, and who cannot read it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.entry_points import Commands, losses, metric_lines, refusal, saved_state

pytestmark = pytest.mark.long

SCRIPT, SFT, PAIRS = 12, 2, 2
STEPS = SCRIPT + 2 * (SFT + PAIRS)
TINY = (
    "--config=configs/leret.py:tiny",
    "--config.model.tiny.layers=1",
    "--config.model.tiny.copies=False",
    "--config.model.tiny.hidden=32",
    "--config.model.tiny.intermediate=32",
    "--config.model.tiny.vocab=420",
    "--config.model.block_tokens=1024",
    "--config.questions.bridge_train=8",
    "--config.questions.bridge_corpus=8",
    "--config.questions.bridge_dev=5",  # one chooses, four are reported
    "--config.tries.questions=1",
    "--config.tries.prompts=2",
    "--config.writing.k=4",
    "--config.writing.passage_words=8",
    "--config.styles.most_words=4",
    f"--config.script.steps={SCRIPT}",
    "--config.script.batch_size=4",
    "--config.script.learning_rate=0.02",
    "--config.script.observed=False",
    f"--config.sft.steps={SFT}",
    f"--config.preference.steps={PAIRS}",
    "--config.optimizer.matrices=adam",
    "--config.train.checkpoint_every=1",
    "--config.train.eval_every=100",
)


@pytest.fixture(scope="module")
def run(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("leret") / "run"
    out = commands.succeed("train", *TINY, f"--workdir={workdir}")
    assert "2 × tries by 2 prompts × 4, 2 steps of imitating the best and 2 of IPO by pairs" in out
    return workdir


def test_what_a_run_leaves(run: Path) -> None:
    lines = metric_lines(run)
    assert [line["step"] for line in lines if "eval/hop2/all_gold" in line] == [0, STEPS]
    assert len(losses(run)) == STEPS
    pairs = [line["step"] for line in lines if "train/accuracy" in line]
    assert pairs == [15, 16, 19, 20]
    for number in (1, 2):
        folder = run / "tries" / f"iteration-{number}"
        assert sorted(path.name for path in folder.iterdir()) == [
            *("hop-1.json", "hop-1.jsonl", "hop-2.json", "hop-2.jsonl"),
            *("reference.json", "report.json", "start.json"),
        ]
        report = json.loads((folder / "report.json").read_text())
        assert report["states"]["paired"] > 0
        assert report["prompts"] == ["question", "entity"]
    stages = sorted(int(each.name) for each in (run / "checkpoints" / "stages").iterdir())
    assert stages == [12, 14, 16, 18]


def in_the_script(workdir: Path) -> bool:
    return len(losses(workdir)) >= 4


def in_the_tries(workdir: Path) -> bool:
    path = workdir / "tries" / "iteration-1" / "hop-1.jsonl"
    return path.exists() and b'{"part"' in path.read_bytes()


def in_the_preferences(workdir: Path) -> bool:
    return len(losses(workdir)) >= SCRIPT + SFT + 1


def test_killed_and_gone_on(commands: Commands, run: Path, tmp_path: Path) -> None:
    """Killed three times, it is the same to the last bit as the run that nobody killed."""
    workdir, told = tmp_path / "killed", ""
    for when in (in_the_script, in_the_tries, in_the_preferences):
        process = commands.start("train", *TINY, f"--workdir={workdir}")
        while process.poll() is None and not when(workdir):
            time.sleep(0.005)
        process.kill()
        out, _ = process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL
        told += out
    told += commands.succeed("train", *TINY, f"--workdir={workdir}")
    assert told.count(f"resumed {workdir} at step") == 3
    assert re.search(r"iteration 1, hop 1: 64 tries at 8 states, \d+ are kept", told)
    one, other = saved_state(workdir, STEPS), saved_state(run, STEPS)
    assert one.keys() == other.keys()
    for name, value in other.items():
        np.testing.assert_array_equal(one[name], value, err_msg=name)
    for path in run.glob("tries/*/*"):
        again = workdir / path.relative_to(run)
        assert again.read_bytes() == path.read_bytes(), path


@pytest.fixture(scope="module")
def scored(commands: Commands, run: Path) -> tuple[Path, str]:
    out = commands.succeed("evaluate", f"--workdir={run}", "--checkpoint=last")
    return run / "eval", out


def test_the_scores_beside_each_other(scored: tuple[Path, str]) -> None:
    folder, out = scored
    found = json.loads((folder / "summary.json").read_text())
    assert found["main"] == f"last checkpoint of step {STEPS}"
    assert [*found["scores"]] == [
        "last checkpoint of step 20",
        "after script, step 12",
        "after sft of iteration 1, step 14",
        "after preference of iteration 1, step 16",
        "after sft of iteration 2, step 18",
        "untrained",
        "prompt question, by what made the first tries",
        "prompt entity, by what made the first tries",
        "the question",
        "the question and the first passage",
    ]
    assert found["notes"] == []
    asked = found["questions"]
    assert (asked["choosing"], asked["reported"], asked["apart"]) == (1, 4, True)
    for told, scores in found["scores"].items():
        assert scores["questions"] == 4
        assert told in out
    rules = found["scores"]["the question"]
    assert (rules["read_tokens"], rules["sampled_tokens"]) == (0, 0)
    # Hop 1 finds the first passage; the same query again finds nothing more.
    assert rules["hop1/recall"] == rules["hop2/recall"]
    assert "hop2/all_gold" in found["gains"]["untrained"]


def test_logs_are_not_made_twice(scored: tuple[Path, str], commands: Commands, run: Path) -> None:
    folder, _ = scored
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}
    assert len(before) == 10
    commands.succeed("evaluate", f"--workdir={run}", "--checkpoint=last")
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}
    for changed in ("--samples=2", "--config.sampling.temperature=0.5", "--config.writing.k=3"):
        told = refusal(commands.run("evaluate", f"--workdir={run}", "--checkpoint=last", changed))
        assert "--restart" in told


def test_other_questions(commands: Commands, run: Path, tmp_path: Path) -> None:
    """They are searched for in a pool of their own; and weights that are not kept are named."""
    workdir, out = tmp_path / "run", tmp_path / "others"
    shutil.copytree(run, workdir)
    shutil.rmtree(workdir / "checkpoints" / "stages" / "12")
    given = (f"--workdir={workdir}", "--checkpoint=last", "--config.questions.bridge_dev=6")
    refused = refusal(commands.run("evaluate", *given))
    assert "(not as in its config: config.questions.bridge_dev); give --out=FOLDER" in refused
    told = commands.succeed("evaluate", *given, f"--out={out}")
    found = json.loads((out / "summary.json").read_text())
    assert {each["questions"] for each in found["scores"].values()} == {5}  # one chooses
    assert (out / "search" / "corpus" / "corpus.json").exists()
    assert "note: after script, step 12 is not here: its weights are not kept" in told
    assert len(found["notes"]) == 3  # and two prompts, asked by these weights


def test_an_export_has_the_scores(
    scored: tuple[Path, str], commands: Commands, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "exported"
    told = commands.succeed("export", f"--workdir={run}", "--checkpoint=last", f"--out={out}")
    assert str(out / "model.safetensors") in told
    name = f"last checkpoint of step {STEPS}"
    own = json.loads((scored[0] / "summary.json").read_text())["scores"][name]
    cells = [f"{own[f'hop2/{metric}']['mean']:.3f}" for metric in ("recall", "ap", "all_gold")]
    card = (out / "README.md").read_text()
    assert "| passages found | recall | ap | all_gold |" in card
    assert f"| after hop 2, 4 questions | {' | '.join(cells)} |" in card


def test_who_cannot_read_it(commands: Commands, run: Path) -> None:
    told = refusal(commands.run("index", f"--workdir={run}"))
    assert "is a run of leret, which this command cannot read; give a run of" in told


def test_its_curve_is_drawn(commands: Commands, run: Path, tmp_path: Path) -> None:
    out = commands.succeed("analyze", str(run), f"--out={tmp_path / 'analysis'}")
    assert out == f"curve: {tmp_path / 'analysis' / 'curve-run.png'}\n"


@pytest.mark.slow
def test_the_tiny_variant_ends(commands: Commands, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    commands.succeed("train", "--config=configs/leret.py:tiny", f"--workdir={workdir}")
    assert len(losses(workdir)) == 52
    out = commands.succeed("train", "--config=configs/leret.py:tiny", "--dry_run")
    assert "  update of preference: " in out
