"""Few-shot prompts out of a model's tries: what may be shown, how sets are drawn and ranked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from qrag_jax.environments import few_shot
from qrag_jax.environments.few_shot import Candidate
from qrag_jax.environments.queries import BY_PASSAGE, Example, Pool, QueryPrompt, QueryState, grown
from qrag_jax.errors import InputError
from qrag_jax.llm.text.prompts import load
from tests.environments.trying import BERG, LATER, OSLO, QUESTION, RAIN, STATE

CONFIG = few_shot.FewShotConfig(bootstrap_questions=10, rank_questions=5)
BARE_PROMPT = QueryPrompt(load("bare_query"))


def a_try(state: QueryState, query: str, found: Pool, reward: float | None) -> few_shot.Tried:
    return few_shot.Tried(state, query, grown(state.pool, found, "hop"), reward)


def queries(*tries: few_shot.Tried, hops: int = 2) -> list[str]:
    return [each.query for each in few_shot.full_credit(tries, hops, BY_PASSAGE)]


def solved(question: int, hop: int = 1, query: str = "") -> Example:
    passages = tuple(f"passage {place}" for place in range(hop - 1))
    return Example(f"question {question}?", passages, query or f"query {question} {hop}", hop)


def ranks(*scores: float, name: str = "few_shot_1", query: str = "") -> tuple[Candidate, ...]:
    return tuple(
        Candidate(f"{name}_{place}", (solved(place, query=query),), score)
        for place, score in enumerate(scores, 1)
    )


BEST = a_try(STATE, "Ada Berg", (BERG, RAIN), 0.5)  # half of the gold pages after half of the hops
MASKED = few_shot.Tried(STATE, "", (), None)


def test_a_first_hop_with_full_credit() -> None:
    (found,) = few_shot.full_credit([BEST], 2, BY_PASSAGE)
    assert found == Example(QUESTION, (), "Ada Berg")
    # Found, but another try at the state did better: gold later in the order, or fewer pages.
    later = a_try(STATE, "birthplace", (RAIN, BERG), 0.25)
    assert queries(BEST, later, MASKED) == ["Ada Berg"]
    both = a_try(STATE, "Ada Berg Oslo", (BERG, OSLO), 1.0)
    assert queries(BEST, later, both) == ["Ada Berg Oslo"]
    # Equally good ones are all shown, an equal query once.
    other = a_try(STATE, "Berg, Ada", (BERG,), 0.5)
    assert queries(BEST, BEST, other) == ["Ada Berg", "Berg, Ada"]


def test_a_last_hop_needs_all_gold_pages() -> None:
    """From [Berg, Bergen]: with Oslo third, AP is (1 + 2/3) / 2."""
    all_found = a_try(LATER, "Oslo", (OSLO,), 5 / 6)
    (found,) = few_shot.full_credit([all_found], 2, BY_PASSAGE)
    assert (found.hop, found) == (2, Example(QUESTION, (BERG.text, RAIN.text), "Oslo"))
    assert queries(all_found, a_try(LATER, "Ada Berg", (BERG,), 0.5)) == ["Oslo"]  # nothing new
    half = a_try(STATE.after(()), "Oslo", (OSLO,), 0.5)
    assert queries(half, hops=4) == ["Oslo"]  # half of the pages at hop 2 of 4 is on course
    nothing_left = a_try(STATE.after((BERG, OSLO)), "Oslo", (OSLO,), 1.0)
    for none in (half, nothing_left, MASKED):
        with pytest.raises(InputError, match=r"config\.few_shot\.bootstrap_questions"):
            queries(none)


def test_sets_are_drawn_of_different_questions_and_of_both_hops() -> None:
    split = few_shot.split_questions(16, CONFIG)
    assert sorted([*split.bootstrap, *split.rank, *split.training]) == [*range(16)]
    assert list(map(len, split)) == [10, 5, 1]
    assert split == few_shot.split_questions(16, CONFIG)
    assert split != few_shot.split_questions(16, dataclasses.replace(CONFIG, seed=1))
    tries = [solved(number, hop) for number in range(8) for hop in (1, 2)]
    candidates = few_shot.drawn_candidates(tries, CONFIG, 1)
    assert len({frozenset(each.shown) for each in candidates}) == len(candidates) == 12
    for each in candidates:
        assert len({shown.question for shown in each.shown}) == 3
        assert {shown.hop for shown in each.shown} == {1, 2}
    for refused, named in (
        (lambda: few_shot.drawn_candidates(tries[:4], CONFIG, 1), "demonstrations"),
        (lambda: few_shot.split_questions(15, CONFIG), "rank_questions"),
        (lambda: few_shot.kept_variants([()], BARE_PROMPT, 3), "prompts"),
    ):
        with pytest.raises(InputError, match=named):
            refused()


def test_prompts_are_ranked_and_the_best_of_all_rounds_are_kept(tmp_path: Path) -> None:
    rewards = [[0.5, 0.0], [1.0, None], [None, None, 1.0], [0.25, 0.25]]
    found = few_shot.ranked(ranks(0, 0, 0, 0), rewards)
    # Equal ones as drawn; of the third, fewer than half are scored.
    assert [(each.name[-1], each.score) for each in found] == [("2", 1), ("1", 0.25), ("4", 0.25)]
    # A later round may draw the same set again.
    rounds = (ranks(0.4, 0.2), ranks(0.6, 0.1, name="few_shot_2"))
    kept = few_shot.kept_variants(rounds, BARE_PROMPT, 3)
    assert [each.name for each in kept] == ["few_shot_2_1", "few_shot_1_2"]
    path, template = tmp_path / few_shot.NAME, BARE_PROMPT.prompt.fingerprint
    rounds = (ranks(1 / 3, 0.7, query='"Bø" \u2028'),)
    prompts = few_shot.FewShotPrompts(template, rounds)
    few_shot.write_few_shot(path, prompts)
    assert few_shot.read_few_shot(path, template) == prompts
    with pytest.raises(InputError, match="another prompt"):
        few_shot.read_few_shot(path, "0")
