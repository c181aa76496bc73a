"""The cases and tables of the suite leret: what counts as a gain, and what is changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import leret
from benchmarks.leret import ABLATIONS, END, IPO, QUICK, SFT, START, adapted, cases, tables
from benchmarks.leret_serving import counters
from configs.leret import get_config
from qrag_jax.systems.leret_config import LeretConfig

MAIN = "last checkpoint of step 9"
BEFORE = f"{leret.BEFORE}, step 5"


def interval(*found: float) -> dict[str, float]:
    return dict(zip(("mean", "low", "high"), found, strict=True))


def scores(*gold: float) -> dict[str, Any]:
    """Scores whose all-gold after the last hop is given, as mean, low and high."""
    names = [f"hop{hop}/{score}" for hop in (1, 2) for score in leret.SCORES]
    found = {name: interval(0.5, 0.4, 0.6) for name in names}
    tokens = {"read_tokens": 100.0, "sampled_tokens": 30.0}
    return {**found, "hop2/all_gold": interval(*gold), **tokens}


def part(
    before: tuple[float, ...],
    imitated: tuple[float, ...],
    after: tuple[float, ...],
    fall: tuple[float, ...] = (0.0, -0.01, 0.01),
) -> dict[str, Any]:
    return {
        "scores": {
            MAIN: scores(0.9, 0.85, 0.95),
            BEFORE: scores(*before),
            f"{SFT}, step 6": scores(*imitated),
            f"{IPO}, step 7": scores(*after),
            "untrained": scores(0.0, 0.0, 0.0),
        },
        "main": MAIN,
        "paired": {f"{IPO} - {leret.BEFORE}": {"hop1/recall": interval(*fall)}},
        "minutes": 20.0,
    }


LOW, MIDDLE, HIGH = (0.2, 0.15, 0.25), (0.4, 0.35, 0.45), (0.6, 0.55, 0.65)


def held(found: dict[str, Any]) -> list[bool | None]:
    return [case.holds for case in cases("quick-42", found, asked=True)]


def test_all_holds() -> None:
    gain, over, fall, minutes = cases("quick-42", part(LOW, MIDDLE, HIGH), asked=True)
    assert held(part(LOW, MIDDLE, HIGH)) == [True] * 4
    assert (gain.value, over.value) == (pytest.approx(0.4), pytest.approx(0.2))
    assert (fall.value, minutes.value) == (0.0, 20.0)
    assert gain.details["IPO"] == "0.600 [0.550, 0.650]"


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (part(LOW, (0.2, 0.1, 0.3), (0.4, 0.35, 0.45)), 0),  # a gain of 0.2
        (part(LOW, MIDDLE, (0.6, 0.45, 0.75)), 1),  # the intervals touch
        (part(LOW, MIDDLE, HIGH, fall=(-0.01, -0.03, 0.01)), 2),
        (part(LOW, MIDDLE, HIGH) | {"minutes": 20.1}, 3),
    ],
)
def test_what_is_missed(found: dict[str, Any], missed: int) -> None:
    assert held(found) == [number != missed for number in range(4)]


def test_where_nothing_is_asked() -> None:
    found = part(LOW, MIDDLE, HIGH)
    assert {case.holds for case in cases("tiny", found, asked=False)} == {None}
    # With one iteration the end is the end of IPO.
    del found["scores"][f"{IPO}, step 7"]
    found["paired"] = {f"{END} - {leret.BEFORE}": {"hop1/recall": interval(0.1, 0.0, 0.2)}}
    gain, *_ = cases("tiny", found, asked=False)
    assert gain.value == pytest.approx(0.7)


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_has_four_tries_and_the_same_start(name: str) -> None:
    config = get_config(QUICK)
    base = LeretConfig.of(config)
    config.update_from_flattened_dict(ABLATIONS[name])
    found = LeretConfig.of(config)
    assert found.tries.asked * found.tries.samples == 4
    for section in ("model", "questions", "search", "writing", "styles", "script", "optimizer"):
        assert getattr(found, section) == getattr(base, section)
    assert found != base


def test_beta_of_averages_is_as_many_times_larger_as_a_query_has_tokens(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    summary = {"main": MAIN, "scores": {MAIN: scores(0.1, 0.0, 0.2)}}
    (tmp_path / "eval" / "summary.json").write_text(json.dumps(summary))
    assert adapted(ABLATIONS["averaged"], tmp_path) == {"preference.beta": 0.75}
    assert adapted(ABLATIONS["solved"], tmp_path) == {}


def test_the_tables_have_a_row_for_each_stage() -> None:
    found = part(LOW, MIDDLE, HIGH)
    started = {"scores": {MAIN: scores(*LOW)}, "main": MAIN}
    changed = found | {"changed": {"pairs.pairing": "all"}}
    first, ablations = tables({"quick-42": found, START: started, "pairs-all": changed})
    assert f"| **{MAIN}** |" in first
    lines = ablations.splitlines()[4:]
    assert [line.split(" | ")[0] for line in lines] == [
        "| ",
        *["| nothing"] * 3,
        *["| pairs.pairing all"] * 3,
    ]
    assert lines[0].split(" | ")[1] == leret.BEFORE
    assert "0.600 [0.550, 0.650]" in lines[2]
    assert lines[3].split(" | ")[1] == END
    (genuine,) = tables({"real": found})
    assert "56.7/52.5" in genuine


def test_counters_are_summed_over_engines() -> None:
    text = (
        "# HELP vllm:prefix_cache_hits_total …\n"
        'vllm:prefix_cache_hits_total{engine="0",model_name="a b"} 30.0\n'
        'vllm:prefix_cache_hits_total{engine="1",model_name="a b"} 2.0\n'
        'vllm:prefix_cache_queries_total{engine="0"} 1e2\n'
    )
    assert counters(text) == (32.0, 100.0)
