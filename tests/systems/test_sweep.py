"""A sweep's plan and its table; the runs themselves are in `test_sweep_runs`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.bootstrap import crossed_interval
from qrag_jax.systems import sweep_table
from qrag_jax.systems.sweep_plan import Plan, seeds_of, sets_of
from qrag_jax.systems.sweep_table import Scored, compared, markdown
from tests.entry_points import ROOT

TINY = f"{ROOT}/configs/quickstart.py:tiny"
RATES = {"optimizer.learning_rate": ("1e-5", "3e-5")}


def test_runs_are_every_combination_with_every_seed() -> None:
    plan = Plan("c.py", (1, 2), RATES | {"train.steps": ("6",), "eval.beam": ("1", "2")})
    runs = plan.runs()
    assert [run.name for run in runs[:3]] == [
        "learning_rate-1e-5-beam-1-seed1",
        "learning_rate-1e-5-beam-1-seed2",
        "learning_rate-1e-5-beam-2-seed1",
    ]
    assert len(runs) == len({run.name for run in runs}) == 8
    assert runs[2].settings == "optimizer.learning_rate=1e-5, eval.beam=2"
    assert plan.words(runs[2]) == [
        "--config=c.py",
        "--config.seed=1",
        "--config.optimizer.learning_rate=1e-5",
        "--config.train.steps=6",
        "--config.eval.beam=2",
    ]


def test_names_stay_apart_and_are_no_paths() -> None:
    plan = Plan("c.py", (1,), {"data.path": ("a/b", "a_b", "../..", "x" * 300)})
    names = [run.name for run in plan.runs()]
    assert names[:3] == ["path-a_b-seed1", "path-a_b-2-seed1", "path-seed1"]
    assert all(re.fullmatch(r"[A-Za-z0-9._+-]{1,100}", name) for name in names)
    assert [run.name for run in Plan("c.py", (7,)).runs()] == ["base-seed7"]


def test_values_with_brackets_and_quotes_are_one() -> None:
    given = ["model.lora.targets=('q', 'v'),('q',)", "config.data.path='a,b',c", "train.steps="]
    assert sets_of(given) == {
        "model.lora.targets": ("('q', 'v')", "('q',)"),
        "data.path": ("'a,b'", "c"),
        "train.steps": ("",),
    }


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["x"], "--set=x is not of the form FIELD=VALUE,VALUE"),
        (["a b=1"], "is not of the form"),
        (["--out=1"], "is not of the form"),
        (["seed=1,2"], "give --seeds in its place"),
        (["a=1", "config.a=2"], "gives the values of a again"),
        (["a=1,1"], "has a value twice"),
    ],
)
def test_sets_that_are_refused(given: list[str], told: str) -> None:
    with pytest.raises(InputError, match="--set") as error:
        sets_of(given)
    assert told in str(error.value)


@pytest.mark.parametrize("given", [[], ["a"], ["-1"], ["1.5"], ["1", "1"], [str(2**32)], [""]])
def test_seeds_that_are_refused(given: list[str]) -> None:
    with pytest.raises(InputError, match="--seeds="):
        seeds_of(given)
    assert seeds_of(["0", "42"]) == (0, 42)


def test_every_combination_is_checked_before_anything_starts() -> None:
    Plan(TINY, (42,), {"optimizer.learning_rate": ("1e-5",), "reward.name": ("gt",)}).check()
    with pytest.raises(InputError, match="learning_rat") as error:
        Plan(TINY, (42,), {"optimizer.learning_rat": ("1e-5",)}).check()
    assert "has no field" in str(error.value)
    with pytest.raises(InputError, match=r"^train\.steps=0: config\.train\.steps is 0"):
        Plan(TINY, (42,), {"train.steps": ("5", "0")}).check()
    with pytest.raises(InputError, match=r"optimizer\.learning_rate"):
        Plan(TINY, (42,), {"optimizer.learning_rate": ("1e-5", "fast")}).check()
    with pytest.raises(InputError, match=r"nowhere\.py"):
        Plan("nowhere.py", (42,)).check()
    with pytest.raises(InputError, match="make 1002 runs; at most are 1000"):
        Plan(TINY, tuple(range(501)), {"train.steps": ("5", "6")}).check()


def test_the_plan_is_kept_and_another_one_is_refused(tmp_path: Path) -> None:
    plan = Plan(TINY, (42, 43), RATES, samples=8, checkpoint="last")
    plan.write(tmp_path)
    kept = Plan.read(tmp_path)
    assert kept == plan
    plan.refuse_other(kept, tmp_path)
    for other, told in (
        (Plan(TINY, (42,), RATES, 8, "last"), "(seeds: 42,43 there, 42 given)"),
        (Plan("b.py", (42, 43), RATES, 8, "last"), f"(config: '{TINY}' there, 'b.py' given)"),
        (
            Plan(TINY, (42, 43), {}, 8, "last"),
            "(sets: optimizer.learning_rate=1e-5,3e-5 there, none given)",
        ),
        (Plan(TINY, (42, 43), RATES, 9, "last"), "(samples: 8 there, 9 given)"),
    ):
        with pytest.raises(InputError, match="has another plan") as error:
            other.refuse_other(kept, tmp_path)
        assert told in str(error.value)
    (tmp_path / "sweep.json").write_text('{"config": 3}')
    with pytest.raises(InputError, match=r"sweep\.json cannot be read"):
        Plan.read(tmp_path)
    with pytest.raises(InputError, match="give the folder of a sweep, or --config to begin one"):
        Plan.read(tmp_path / "none")


# ------------------------------------------------------------------------------------ the table


def questions(values: list[float], first: int = 0) -> dict[str, float]:
    return {f"q{first + number}": value for number, value in enumerate(values)}


def test_means_intervals_and_paired_differences() -> None:
    draws = np.random.default_rng(0)
    hard = draws.random(40)  # how hard a question is for all
    one = {seed: questions([*hard + 0.01 * seed]) for seed in (1, 2)}
    other = {seed: questions([*hard + 0.01 * seed + 0.1]) for seed in (2, 1)}
    table = compared(Scored("f1", ("a", "b"), {"a": one, "b": other}, {}))
    first, second = table["settings"]
    values = np.array([[*one[1].values()], [*one[2].values()]])
    assert (first["mean"], first["low"], first["high"]) == crossed_interval(values)
    assert first["by_seed"] == {"1": pytest.approx(values[0].mean()), "2": values[1].mean()}
    assert first["questions"] == 40
    assert "difference" not in first
    difference = second["difference"]
    # The questions' own difficulty is in both, so the difference is sharp.
    for name in ("mean", "low", "high"):
        assert difference[name] == pytest.approx(0.1)
    assert difference["seeds"] == [2, 1]
    assert second["high"] - second["low"] > 0.1


def test_only_common_questions_and_seeds_are_compared() -> None:
    runs: Mapping[str, Mapping[int, dict[str, float]]] = {
        "a": {1: questions([0.0, 0.0, 1.0]), 2: questions([0.0, 0.0, 1.0])},
        "b": {2: questions([1.0, 1.0], first=1), 3: questions([1.0, 1.0], first=1)},
        "c": {3: questions([1.0])},
    }
    found = compared(Scored("f1", ("a", "b", "c", "d"), runs, {"d-seed1": "train: exit 1: no"}))
    a, b, c, d = found["settings"]
    assert a["mean"] == pytest.approx(1 / 3)
    assert (b["questions"], b["mean"]) == (2, 1.0)
    assert b["difference"]["seeds"] == [2]
    assert b["difference"]["questions"] == 2
    assert b["difference"]["mean"] == 0.5  # of q1 and q2 alone: 1 - 0 and 1 - 1
    assert "difference" not in c  # no seed in common
    assert d == {"settings": "d", "seeds": []}  # and no mean of 0
    text = markdown(Plan("c.py", (1, 2, 3)), found)
    assert "| d | none |  |  |  |" in text
    assert "- d-seed1: train: exit 1: no" in text


def test_runs_that_failed_are_listed_with_the_reason(tmp_path: Path) -> None:
    plan = Plan(TINY, (1, 2, 3), {})
    (tmp_path / "base-seed1").mkdir()
    (tmp_path / "base-seed1.log").write_text("error: no such | file.\nstep 3\r\n\n")
    (tmp_path / "base-seed2").mkdir()
    found = sweep_table.scored(plan, tmp_path)
    assert found.missing == {
        "base-seed1": "not finished: error: no such | file.",
        "base-seed2": "not finished",
        "base-seed3": "not begun",
    }
    text = sweep_table.write(tmp_path, plan, compared(found))
    assert (tmp_path / "table.md").read_text() == text
    assert r"no such \| file" in text
    assert "| base | none |  |  |  |" in text
    rows = json.loads((tmp_path / "table.json").read_text())
    assert rows["settings"] == [{"settings": "base", "seeds": []}]


def test_a_run_is_two_commands(tmp_path: Path) -> None:
    plan = Plan("c.py", (1,), {"data.path": ("a b",)}, samples=8, checkpoint="last")
    (run,) = plan.runs()
    where = f"--workdir={tmp_path / run.name}"
    assert plan.line(run, tmp_path) == (
        f"{sys.executable} -m qrag_jax.train --config=c.py --config.seed=1 "
        f"'--config.data.path=a b' {where} && "
        f"{sys.executable} -m qrag_jax.evaluate {where} --samples=8 --checkpoint=last"
    )
