"""The suite `newcomer`: what is hidden from its trainings, and what its cases say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import newcomer
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
