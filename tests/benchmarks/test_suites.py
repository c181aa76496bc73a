"""The suite quality, and what is stored and shown of all suites."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import SUITES
from benchmarks.quality.corpora import Asked, Passage, Setting, write_halves
from benchmarks.quality.figures import interval, paired
from benchmarks.quality.logs import by_turns
from benchmarks.quality.peers import batches
from benchmarks.quality.runner import write_lines
from qrag_jax.data.reading import load_samples
from tests.entry_points import ROOT
from tests.support.worlds import record_of

PARAGRAPHS = [("Dusk", ["By Ada."]), ("Dawn", ["A film."]), ("Ada", ["Born in Oslo."])]


def test_halves_share_no_question_with_each_other_nor_with_training(tmp_path: Path) -> None:
    data, dev = tmp_path / "data", [f"d{i}" for i in range(200)]
    for file, names in (("train", ["t1", "t2", "d3", "d4", "d5", "d6"]), ("dev", dev)):
        write_lines(
            data / f"{file}.jsonl",
            (
                record_of("musique", name, f"Question {name}?", "Oslo", PARAGRAPHS, [0, 2])
                for name in names
            ),
        )
    ids = {
        name: {sample.id for sample in load_samples("musique", str(path), "dev")[0]}
        for name, path in write_halves("musique", data, tmp_path / "out").items()
    }
    assert ids["train"] == {"t1", "t2"}
    assert ids["half0"] | ids["half1"] == {*dev}
    assert not ids["half0"] & ids["half1"]
    assert min(len(ids["half0"]), len(ids["half1"])) > 50


def test_contrastive_batches_have_no_gold_passage_as_a_negative() -> None:
    rng = np.random.default_rng(0)
    names = [f"p{n}" for n in range(60)]
    questions = []
    for number in range(40):
        context = tuple(rng.permutation(names)[:6].tolist())
        questions.append(Asked(f"q{number}", "?", (), context[:2], context))
    gold = {asked.id: {*asked.gold} for asked in questions}
    made = batches(questions, 8, rng)
    assert sum(map(len, made)) >= 60
    for batch in made:
        for pair, other in itertools.permutations(batch, 2):
            assert pair.question != other.question
            assert not gold[pair.question] & {other.gold, other.negative}


# ---------------------------------------------------------------- scores of lists and logs


def test_a_list_is_scored_right() -> None:
    corpus = [Passage(f"p{n}", f"Title {n}", f"Words of {n}.") for n in range(12)]
    asked = [
        Asked("a", "A?", ("words of 1",), ("p0", "p1")),
        Asked("b", "B?", ("yes",), ("p2", "p3", "p4")),
        Asked("c", "C?", ("nowhere",), ("p5",)),
    ]
    given = Setting(Path(), corpus, {"test": asked}, 0)
    found = given.scores({"a": ("p0", "p9", "p8", "p1"), "b": ("p4", "p7", "p3")}, ["c"])
    assert {*found} == {"a", "b"}  # c failed, so nobody knows its list
    assert [found["a"][f"all@{k}"] for k in (2, 4, 6, 10)] == [0.0, 1.0, 1.0, 1.0]
    assert found["a"]["recall@2"] == 0.5
    assert found["a"]["ap@10"] == pytest.approx((1 / 1 + 2 / 4) / 2)
    assert (found["a"]["answer@2"], found["a"]["answer@4"]) == (0.0, 1.0)
    assert "answer@4" not in found["b"]  # yes is looked for in no passage
    assert not any(given.scores({"a": ("p0",)})["c"].values())  # it found nothing
    assert by_turns([["a", "b", "c"], ["b", "d"]]) == ("a", "b", "d", "c")


# ---------------------------------------------------------------- intervals and cases


def runs_of(table: np.ndarray) -> list[dict[str, dict[str, float]]]:
    return [{f"q{n}": {"em": float(value)} for n, value in enumerate(run)} for run in table]


def test_differences_are_paired_by_question_and_seed() -> None:
    hard = np.random.default_rng(0).normal(size=(3, 200)) * 5
    gain: Any = paired(runs_of(hard + 0.5), runs_of(hard), "em")
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.5, 0.5, 0.5))
    # Three trainings and one: the mean is that of the difference, whichever comes first.
    one = runs_of(hard.mean(axis=0, keepdims=True))
    more: Any = paired(runs_of(hard + 1), one, "em")
    less: Any = paired(one, runs_of(hard + 1), "em")
    assert (more.mean, less.mean) == pytest.approx((1.0, -1.0))
    assert more.low < more.mean < more.high  # trainings differ
    # Questions that a training lacks are left out of all.
    first, second = runs_of(np.array([[1.0, 1.0, 0.0]])), runs_of(np.array([[0.0, 1.0]]))
    both: Any = interval([*first, *second], "em")
    assert (both.mean, both.questions) == (0.75, 2)


# ---------------------------------------------------------------- results


@pytest.mark.nightly
@pytest.mark.parametrize("suite", SUITES)
def test_a_quick_run_of_each_suite(suite: str) -> None:
    command = [sys.executable, "-m", "benchmarks", "--suite", suite, "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for case in json.loads(done.stdout.splitlines()[-1])["cases"]:
        assert case["value"] is not None
        # Quick sizes have no targets of time: ours and the peer's results are equal.
        assert suite != "speed" or case["holds"] is not False, case
