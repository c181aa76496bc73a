"""The file of few-shot prompts: a round trip to the last bit, and files that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.environments.query_writing.few_shot import Candidate, Ranked, Solved, kept_variants
from qrag_jax.environments.query_writing.few_shot_file import (
    FORMAT,
    NAME,
    FewShotPrompts,
    read_few_shot,
    write_few_shot,
)
from qrag_jax.environments.query_writing.prompt import Example, QueryPrompt
from qrag_jax.errors import InputError
from qrag_jax.llm.text.prompts import load

PROMPT = QueryPrompt(load("bare_query"))
TEMPLATE = PROMPT.prompt.fingerprint


def candidate(name: str, query: str) -> Candidate:
    first = Solved("q1", 1, 0.5, Example('Who "is"\nit?', (), query))
    second = Solved("q2", 2, 0.1 + 0.2, Example("Où?", ("# Bø\nText.", ""), "Bø \u2028"))
    return Candidate(name, (first, second))


ROUNDS = (
    (Ranked(candidate("few_shot_1_1", "a"), 1 / 3, 9, 1),),
    (
        Ranked(candidate("few_shot_2_1", "b"), 0.7, 10, 0),
        Ranked(candidate("few_shot_2_2", "c"), 0.1, 5, 5),
    ),
)
PROMPTS = FewShotPrompts(TEMPLATE, ROUNDS, ("few_shot_2_1", "few_shot_1_1"))


@pytest.mark.parametrize(
    "prompts", [PROMPTS, FewShotPrompts(TEMPLATE), FewShotPrompts(TEMPLATE, ROUNDS[:1])]
)
def test_a_round_trip(tmp_path: Path, prompts: FewShotPrompts) -> None:
    write_few_shot(tmp_path / NAME, prompts)
    assert read_few_shot(tmp_path / NAME, TEMPLATE) == prompts
    said = json.loads((tmp_path / NAME).read_text(encoding="utf-8"))
    assert said["format"] == FORMAT
    assert [*tmp_path.iterdir()] == [tmp_path / NAME]


def test_kept_prompts_are_ways_to_ask() -> None:
    kept = kept_variants(PROMPTS.rounds, PROMPT, 2)
    assert PROMPTS.variants == kept
    assert [each.examples[0].query for each in kept] == ["b", "a"]


def _prompt(said: Any) -> Any:
    return said["rounds"][0][0]


def _example(said: Any) -> Any:
    return _prompt(said)["examples"][0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda said: said.update(format=2), "has the format 2 (field format), and this version"),
        (lambda said: said.pop("format"), "has the format None"),
        (lambda said: said.update(template="0"), "has examples for another prompt than the one"),
        (lambda said: said.pop("kept"), "is damaged (its file needs the fields format,"),
        (lambda said: said.update(more=1), "is damaged (its file needs the fields format,"),
        (lambda said: said.update(kept=["x"]), "is damaged (the names of its prompts do not fit)"),
        (lambda said: said["rounds"].append(said["rounds"][0]), "is damaged (the names of its"),
        (lambda said: said["rounds"].append({}), "is damaged (a round is no list)"),
        (lambda said: _prompt(said).update(score="1"), "(the field score of a prompt is '1')"),
        (lambda said: _prompt(said).update(score=float("nan")), "(the field score of a prompt is"),
        (lambda said: _prompt(said).update(scored=True), "(the field scored of a prompt is True)"),
        (lambda said: _example(said).pop("query"), "(its example needs the fields question_id,"),
        (lambda said: _example(said).update(query=" "), "(an example has no query)"),
        (lambda said: _example(said).update(passages=[1]), "(an example has a passage that is no"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: Callable[[Any], None], told: str) -> None:
    path = tmp_path / NAME
    write_few_shot(path, PROMPTS)
    said = json.loads(path.read_text(encoding="utf-8"))
    change(said)
    path.write_text(json.dumps(said))
    with pytest.raises(InputError) as caught:
        read_few_shot(path, TEMPLATE)
    assert told in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).count(". ") == 0


@pytest.mark.parametrize("text", ["", "[]", "{'format': 1}", '{"format": 1'])
def test_no_json_and_no_file(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(InputError, match="is damaged"):
        read_few_shot(tmp_path / NAME, TEMPLATE)
    with pytest.raises(InputError, match=r"none\.json"):
        read_few_shot(tmp_path / "none.json", TEMPLATE)
