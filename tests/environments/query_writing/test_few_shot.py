"""Few-shot prompts: which tries are shown, how prompts are drawn, ranked, kept and written."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.environments.query_writing.few_shot import (
    Candidate,
    FewShotConfig,
    Ranked,
    Solved,
    Tried,
    drawn_candidates,
    full_credit,
    kept_variants,
    ranked,
    split_questions,
)
from qrag_jax.environments.query_writing.few_shot_file import (
    FORMAT,
    NAME,
    FewShotPrompts,
    read_few_shot,
    write_few_shot,
)
from qrag_jax.environments.query_writing.prompt import Example, QueryPrompt
from qrag_jax.environments.query_writing.state import BY_PASSAGE, BY_TITLE, Pool, QueryState, grown
from qrag_jax.environments.tools.episode import Document
from qrag_jax.errors import InputError
from qrag_jax.llm.text.prompts import load
from tests.environments.query_writing.trying import BERG, LATER, OSLO, QUESTION, RAIN, STATE

CONFIG = FewShotConfig(bootstrap_questions=10, rank_questions=5)
PROMPT = QueryPrompt(load("bare_query"))


def tried(state: QueryState, query: str, found: Pool, reward: float | None) -> Tried:
    return Tried(state, query, grown(state.pool, found, "hop"), reward)


def queries(*tries: Tried, hops: int = 2, key: str = BY_PASSAGE) -> list[str]:
    return [each.example.query for each in full_credit(tries, hops, key)]


def solved(question: int, hop: int = 1, query: str = "") -> Solved:
    passages = tuple(f"passage {place}" for place in range(hop - 1))
    example = Example(f"question {question}?", passages, query or f"query {question} {hop}")
    return Solved(f"q{question}", hop, 0.5, example)


def ranks(*scores: float, name: str = "few_shot_1", query: str = "") -> tuple[Ranked, ...]:
    return tuple(
        Ranked(Candidate(f"{name}_{place}", (solved(place, query=query),)), score, 5, 0)
        for place, score in enumerate(scores, 1)
    )


def test_a_first_hop_with_full_credit() -> None:
    """Half of the gold pages after half of the hops; AP of [Berg, Bergen] is 1/2."""
    best = tried(STATE, "Ada Berg", (BERG, RAIN), 0.5)
    (found,) = full_credit([best], 2, BY_PASSAGE)
    assert found == Solved("q", 1, 0.5, Example(QUESTION, (), "Ada Berg"))
    # Found, but another try at the state did better: gold later in the order, or fewer pages.
    later = tried(STATE, "birthplace", (RAIN, BERG), 0.25)
    assert queries(best, later) == ["Ada Berg"]
    both = tried(STATE, "Ada Berg Oslo", (BERG, OSLO), 1.0)
    assert queries(best, later, both) == ["Ada Berg Oslo"]
    # By other prompts, too: these are asked of the same state.
    asked = dataclasses.replace(both, state=STATE.asked_by(2))
    assert queries(best, asked) == ["Ada Berg Oslo"]
    # Equally good ones are all shown, an equal query once.
    other = tried(STATE, "Berg, Ada", (BERG,), 0.5)
    assert queries(best, best, other) == ["Ada Berg", "Berg, Ada"]


def test_a_last_hop_needs_all_gold_pages() -> None:
    """From [Berg, Bergen]: with Oslo third, AP is (1 + 2/3) / 2."""
    all_found = tried(LATER, "Oslo", (OSLO,), 5 / 6)
    (found,) = full_credit([all_found], 2, BY_PASSAGE)
    assert found.hop == 2
    assert found.example == Example(QUESTION, (BERG.text, RAIN.text), "Oslo")
    nothing_new = tried(LATER, "Ada Berg", (BERG,), 0.5)
    assert queries(all_found, nothing_new) == ["Oslo"]
    # The best of the state, and new, but not all.
    from_nothing = STATE.after(())
    half = tried(from_nothing, "Oslo", (OSLO,), 0.5)
    with pytest.raises(InputError):
        queries(half)
    assert queries(half, hops=4) == ["Oslo"]  # half of the pages at hop 2 of 4 is on course


def test_what_is_shown_of_masked_solved_and_other_states() -> None:
    best = tried(STATE, "Ada Berg", (BERG,), 0.5)
    masked = Tried(STATE, "", (), None)  # counts for nothing
    assert queries(masked, best) == ["Ada Berg"]
    solved_state = tried(STATE.after((BERG, OSLO)), "Oslo", (OSLO,), 1.0)
    for nothing in (masked, solved_state):
        with pytest.raises(InputError, match=r"config\.few_shot\.bootstrap_questions"):
            full_credit([nothing], 2, BY_PASSAGE)
    good = tried(LATER, "Oslo", (OSLO,), 5 / 6)
    better = tried(STATE.after((BERG,)), "Oslo now", (OSLO,), 1.0)
    assert queries(good, better) == ["Oslo", "Oslo now"]  # other pools are other states
    # Pages are known by title where they have several passages.
    state = dataclasses.replace(STATE, pages=("ada berg", "oslo"))
    second = Document("d", "ada  BERG", "More.", True)
    assert queries(tried(state, "Ada", (second,), 0.5), key=BY_TITLE) == ["Ada"]
    with pytest.raises(InputError):  # another passage of a page that is there is nothing new
        queries(tried(state.after((BERG,)), "Ada", (second,), 0.5), hops=4, key=BY_TITLE)


def test_questions_are_split_once() -> None:
    split = split_questions(40, CONFIG)
    assert (len(split.bootstrap), len(split.rank), len(split.training)) == (10, 5, 25)
    assert sorted([*split.bootstrap, *split.rank, *split.training]) == [*range(40)]
    assert split.training == tuple(sorted(split.training))
    assert split == split_questions(40, CONFIG)
    assert split != split_questions(40, dataclasses.replace(CONFIG, seed=1))
    assert len(split_questions(16, CONFIG).training) == 1
    with pytest.raises(InputError, match="15 of them"):
        split_questions(15, CONFIG)


def test_candidates_are_different_sets_of_different_questions() -> None:
    tries = [solved(number, hop) for number in range(8) for hop in (1, 2)]
    candidates = drawn_candidates(tries, CONFIG, 1)
    assert len({frozenset(each.shown) for each in candidates}) == len(candidates) == 12
    for each in candidates:
        assert len({shown.question_id for shown in each.shown}) == 3
        hops = [shown.hop for shown in each.shown]
        assert hops == sorted(hops)
        assert set(hops) == {1, 2}  # both are shown
    # Either hop has the second example now and then.
    assert {sum(shown.hop == 1 for shown in each.shown) for each in candidates} == {1, 2}
    assert candidates == drawn_candidates(tries, CONFIG, 1)
    assert candidates != drawn_candidates(tries, CONFIG, 2)
    assert candidates != drawn_candidates(tries, dataclasses.replace(CONFIG, seed=1), 1)
    # Fewer sets are all of them; a hop without examples is not waited for.
    four = [solved(number) for number in range(4)]
    assert len(drawn_candidates(four, CONFIG, 1)) == math.comb(4, 3)
    with pytest.raises(InputError, match=r"config\.few_shot\.demonstrations"):
        drawn_candidates([*four[:2], solved(0, query="again")], CONFIG, 1)


def test_prompts_are_ranked_by_the_mean_of_scored_tries() -> None:
    candidates = [each.candidate for each in ranks(0, 0, 0, 0)]
    rewards = [[0.5, 0.0], [1.0, None], [None, None, 1.0], [0.25, 0.25]]
    found = ranked(candidates, rewards)
    assert [(each.candidate.name, each.score) for each in found] == [
        ("few_shot_1_2", 1.0),
        ("few_shot_1_1", 0.25),  # equal ones as they were drawn
        ("few_shot_1_4", 0.25),
    ]
    assert [(each.scored, each.masked) for each in found] == [(1, 1), (2, 0), (2, 0)]
    assert ranked(candidates[:1], [[]]) == ()


def test_the_best_prompts_of_all_rounds_are_kept_once() -> None:
    rounds = [ranks(0.4, 0.2), ranks(0.6, 0.4, name="few_shot_2", query="other")]
    names = [each.name for each in kept_variants(rounds, PROMPT, 3)]
    assert names == ["few_shot_2_1", "few_shot_1_1", "few_shot_2_2"]
    # A later round may draw the same set again.
    rounds = [ranks(0.4, 0.2), ranks(0.6, 0.1, name="few_shot_2")]
    kept = kept_variants(rounds, PROMPT, 3)
    assert [each.name for each in kept] == ["few_shot_2_1", "few_shot_1_2"]
    QueryPrompt(load("bare_query"), kept)  # refuses equal ones
    with pytest.raises(InputError, match="prompts"):
        kept_variants([()], PROMPT, 3)
    for given in ({"bootstrap_questions": 2}, {"candidates": 2}):
        with pytest.raises(InputError, match=rf"config\.few_shot\.{next(iter(given))}"):
            FewShotConfig(**given)


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


def _prompt(said: Any) -> Any:
    return said["rounds"][0][0]


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write_few_shot(path, PROMPTS)
    sound = path.read_text(encoding="utf-8")
    changes: list[Callable[[Any, Any], Any]] = [
        lambda said, first: said.update(format=2),
        lambda said, first: said.update(template="0"),
        lambda said, first: said.update(more=1),
        lambda said, first: said.update(kept=["x"]),
        lambda said, first: said["rounds"].append(said["rounds"][0]),
        lambda said, first: first.update(score=float("nan")),
        lambda said, first: first.update(scored=True),
        lambda said, first: first["examples"][0].pop("query"),
        lambda said, first: first["examples"][0].update(passages=[1]),
    ]
    for change in changes:
        said = json.loads(sound)
        change(said, said["rounds"][0][0])
        for text in (json.dumps(said), sound[:-3]):
            path.write_text(text)
            with pytest.raises(InputError, match=re.escape(str(path))) as caught:
                read_few_shot(path, TEMPLATE)
            assert "\n" not in str(caught.value)
