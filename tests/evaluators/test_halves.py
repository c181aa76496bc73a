"""The questions that choose a checkpoint are others than those that are reported."""

from __future__ import annotations

import dataclasses

from ml_collections import ConfigDict

from qrag_jax.evaluators.eval_config import ALL, CHOOSING, REPORTED, drawn, report_on
from qrag_jax.systems.rlvr_config import EvalConfig

IDS = [f"q{number}" for number in range(40)]


def part(name: str, samples: int = 0, ids: list[str] = IDS) -> list[str]:
    found = drawn(ids, EvalConfig(part=name, samples=samples))
    return [ids[place] for place in found.places]


def test_halves_are_disjoint_and_together_all() -> None:
    one, other = part(CHOOSING), part(REPORTED)
    assert not {*one} & {*other}
    assert sorted([*one, *other]) == sorted(part(ALL)) == sorted(IDS)
    assert min(len(one), len(other)) >= 10
    assert {*part(CHOOSING, samples=3)} < {*one}
    # A question keeps its half in whatever data it stands.
    assert {*part(CHOOSING, ids=IDS[::-2])} < {*one}


def test_what_cannot_be_halved_does_both() -> None:
    for name in (CHOOSING, REPORTED):
        found = drawn(["alone"], EvalConfig(part=name))
        assert (found.places, found.choosing, found.apart) == ([0], 1, False)


def test_the_reported_half_is_scored_by_default() -> None:
    section = dataclasses.asdict(EvalConfig(samples=5))
    for given, others, wanted in (
        ({}, False, REPORTED), ({}, True, ALL), ({"part": ALL}, False, ALL),
    ):  # fmt: skip
        config = ConfigDict({"eval": section | given})
        assert report_on(config, 3, others=others) == 5
        assert (config.eval.part, config.eval.samples) == (wanted, 3)
    found = drawn(IDS, EvalConfig(part=REPORTED, samples=3)).summary(5, others=False)
    assert (found["choosing"], found["reported"], found["apart"]) == (5, 3, True)
