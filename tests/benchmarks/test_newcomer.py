"""The suite `newcomer`: what is hidden from its trainings, and what its cases say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import newcomer, newcomer_mistakes, newcomer_pages, newcomer_start
from qrag_jax.__main__ import COMMANDS
from qrag_jax.data.sources import hotpotqa
from qrag_jax.data.sources.own import Columns
from qrag_jax.data.sources.registry import load_samples

PARAGRAPHS = [("Dusk", ["By Ada."]), ("Dawn", ["A film."]), ("Ada", ["Born in Oslo."])]


def write(path: Path, names: list[str]) -> None:
    records = [hotpotqa.to_record(n, f"Question {n}?", "Oslo", PARAGRAPHS, [0, 2]) for n in names]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_files_are_own_data_whose_support_can_be_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newcomer, "DATA", tmp_path)
    write(tmp_path / "hotpotqa" / "train.jsonl", ["t1", "t2", "d1"])
    write(tmp_path / "hotpotqa" / "dev.jsonl", [f"d{number}" for number in range(40)])
    halves = newcomer.neutral_halves(tmp_path / "runs")
    hidden = Columns(support=newcomer.HIDDEN.partition("=")[2])
    ids = {}
    for name, path in halves._asdict().items():
        samples, _ = load_samples("own", str(path), "train", columns=hidden)
        assert {sample.support for sample in samples} == {()}
        assert {sample.support for sample in load_samples("own", str(path), "dev")[0]} == {(0, 2)}
        ids[name] = {sample.id for sample in samples}
    assert ids["train"] == {"t1", "t2"}
    assert len(ids["selects"] | ids["reported"]) == 40
    assert not ids["selects"] & ids["reported"]


def result(gain: float, *, hidden: bool = True) -> dict[str, Any]:
    scores = {"fact_recall": 0.6, "fact_em": 0.3}
    return {
        "summary": {"samples": 20, "seconds": 60.0, "trained": scores, "untrained": scores},
        "recall_gain": {"mean": gain, "low": gain - 0.05, "high": gain + 0.05},
        "hidden": hidden,
        "env_steps": 1280.0,
    }


def test_a_gain_must_hold_in_every_seed_and_nothing_may_leak() -> None:
    def holds(results: list[dict[str, Any]]) -> list[bool]:
        return [case.holds for case in newcomer.hidden_cases(results) if case.holds is not None]

    assert holds([result(0.1), result(0.2)]) == [True, True]
    assert holds([result(0.1), result(0.04)]) == [True, False]
    assert holds([result(0.1), result(0.2, hidden=False)]) == [False, True]
    assert newcomer.hidden_cases([]) == []


def test_a_mistake_needs_one_sentence_that_names_it_and_says_what_to_do() -> None:
    mistake = newcomer_mistakes.Mistake("what", ("train",), ("config.train.steps",), ("above 0",))
    right = "error: config.train.steps is -1; it must be above 0."

    def fault(told: str, status: int = 2) -> str:
        return newcomer_mistakes.fault_of(mistake, status, told)

    assert fault(right) == fault(f"a line before\n{right}") == ""
    assert "status 0" in fault(right, 0)
    assert "traceback" in fault(f"Traceback (most recent call last):\n  …\n{right}")
    assert "no error" in fault("config.train.steps is -1; it must be above 0.")
    assert "characters" in fault(right + " And so on." * 100)
    assert "name config.train.steps" in fault("error: steps are -1; they must be above 0.")
    assert "what to do" in fault("error: config.train.steps is -1.")


def test_mistakes_differ_and_are_of_commands_that_exist() -> None:
    found = newcomer_mistakes.mistakes()
    assert len({each.what for each in found}) == len(found) >= 30
    wrong = {each.command[0] for each in found} - set(COMMANDS)
    assert wrong == {"trian"}


@pytest.mark.long
def test_a_mistake_is_made_for_real(tmp_path: Path) -> None:
    newcomer_mistakes.make_files(tmp_path)
    found = {each.what: each for each in newcomer_mistakes.mistakes()}
    for what in ("a misspelt command", "a source of data that is not there"):
        told = newcomer_mistakes.tried(found[what], tmp_path)
        assert not told["fault"], told
    cases = newcomer.mistake_cases({"one": {"fault": "", "sentence": "", "seconds": 1.0}})
    assert [case.holds for case in cases] == [True]
    cases = newcomer.mistake_cases({"one": {"fault": "bad", "sentence": "", "seconds": 1.0}})
    assert [case.holds for case in cases] == [False, False]


def test_what_is_asked_of_the_first_minutes() -> None:
    row = {"installed": 90.0, "untrained_point": 40.0, "first_point": 170.0, "whole": 300.0}
    row["scores"] = [0.3, 0.7]  # type: ignore[assignment]
    holds = [case.holds for case in newcomer_start.start_cases({"start": row, "wheel": row})]
    assert holds == [True, True, None] * 2
    late = row | {"first_point": 181.0, "scored": 61.0}
    assert [case.holds for case in newcomer_start.start_cases({"start": late})][:2] == [
        False,
        False,
    ]


REPORT = """<testsuites><testsuite>
<testcase name="test_a_reader_can_run_the_page[README.md]" time="20.5" />
<testcase name="test_a_reader_can_run_the_page[show.md]" time="3">
<failure message="AssertionError: status 1">more</failure></testcase>
<testcase name="test_what_pages_take_for_granted" time="0.1" />
</testsuite></testsuites>"""


def test_a_page_that_cannot_be_followed_is_named(tmp_path: Path) -> None:
    report = tmp_path / "pages.xml"
    report.write_text(REPORT)
    pages = dict(newcomer_pages.read(report))
    assert pages == {
        "README.md": {"seconds": 20.5, "wrong": ""},
        "show.md": {"seconds": 3.0, "wrong": "AssertionError: status 1"},
    }
    asked = {"train": {"seconds": 2.0, "wrong": ""}}
    followed, helped = newcomer_pages.page_cases({"pages": {"pages": pages, "help": asked}})
    assert (followed.value, followed.holds) == (1, False)
    assert followed.details == {
        "seconds": 23.5,
        "slowest, s": 20.5,
        "show.md": "AssertionError: status 1",
    }
    assert (helped.value, helped.holds) == (1, True)
    report.write_text("<testsuites />")
    with pytest.raises(RuntimeError, match="has no page"):
        list(newcomer_pages.read(report))
