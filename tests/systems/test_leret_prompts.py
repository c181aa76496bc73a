"""Prompts with examples, made by a stand-in for the model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.environments.query_writing.agent import QueryAgent
from qrag_jax.environments.query_writing.few_shot import FewShotConfig, Split
from qrag_jax.environments.query_writing.prompt import QueryPrompt
from qrag_jax.environments.query_writing.state import BY_HOP, BY_PASSAGE, QueryState
from qrag_jax.environments.tools.episode import Document, Look
from qrag_jax.errors import InputError
from qrag_jax.feedback.pool_scores import PoolScores, QueryRewardConfig
from qrag_jax.llm.text import prompts
from qrag_jax.rollouts.query_tries import Scoring
from qrag_jax.rollouts.token_episodes import Speech, TokenEpisode, TokenStart
from qrag_jax.runtime.interrupt import Stopped
from qrag_jax.systems.leret_hops import HopPlayer
from qrag_jax.systems.leret_prompts import PromptMaker, kept_prompts
from tests.environments.query_writing.trying import tiny_speech
from tests.systems.query_play import said

COUNT = 8
BARE = QueryPrompt(prompts.load("bare_query"))
DOCUMENTS = {
    f"{part}{n}": Document(f"{part}{n}", "", f"text {part}{n}", True, 1.0)
    for part in "ab"
    for n in range(COUNT)
}
STATES = [
    QueryState(f"q{n}", f"Question {n}?", ("x",), hops=2, gold_ids=gold, pages=gold)
    for n in range(COUNT)
    for gold in [(f"a{n}", f"b{n}")]
]


class Shelf:
    """A query is the name of what it finds."""

    def look(self, asked: Sequence[tuple[Any, Look]]) -> list[tuple[Document, ...]]:
        return [self.named(None, [step.query]) for _, step in asked]

    def named(self, _: Any, names: Sequence[str]) -> tuple[Document, ...]:
        return tuple(DOCUMENTS[name] for name in names if name in DOCUMENTS)


LIBRARY: Any = Shelf()
SCORING = Scoring(PoolScores(1, 2), QueryRewardConfig(), BY_HOP, BY_PASSAGE)
CONFIG = FewShotConfig(
    candidates=4, demonstrations=1, bootstrap_questions=3, rank_questions=2, kept=2
)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    return tiny_speech(tmp_path_factory.mktemp("lm") / "model")


class Model:
    """Knows what to write, the better the more its prompt shows of question 1; may be stopped."""

    def __init__(self, speech: Speech, stop_at: int = 0) -> None:
        self.speech, self.stop_at, self.calls = speech, stop_at, list[tuple[str, list[str]]]()

    def __call__(self, prompt: QueryPrompt, starts: Sequence[TokenStart]) -> list[TokenEpisode]:
        self.calls.append((prompt.names[-1], [start.task.id for start in starts]))
        if len(self.calls) == self.stop_at:
            raise Stopped("SIGTERM")
        agent = QueryAgent(prompt, 1)
        texts = [self._query(prompt, start.task) for start in starts]
        return [
            said(agent, LIBRARY, self.speech, start, text)
            for start, text in zip(starts, texts, strict=True)
        ]

    def _query(self, prompt: QueryPrompt, state: Any) -> str:
        number = int(state.id[1:])
        shown = [each.question for one in prompt.variants for each in one.examples]
        if state.hop == 1:
            return f"a{number}"
        knows = not prompt.variants or "Question 1?" in shown
        return f"b{number}" if knows else "nothing"


def maker(config: FewShotConfig = CONFIG) -> PromptMaker:
    split = Split((0, 1, 2), (3, 4), (5, 6, 7))
    hops = HopPlayer(2, 1, LIBRARY, SCORING, seed=0)
    return PromptMaker(config, BARE, STATES, split, hops, BY_PASSAGE)


def test_the_best_prompts_on_questions_held_out_are_kept(speech: Speech, tmp_path: Path) -> None:
    model = Model(speech)
    found = maker().prompts(tmp_path, model)
    assert model.calls[0] == ("bare", ["q0", "q1", "q2"])
    assert model.calls[1] == ("bare", ["q0", "q1", "q2"])
    assert all(ids == ["q3", "q4"] for _, ids in model.calls[2:])
    assert len(model.calls) == 2 + 2 * 4
    assert len(found) == 2
    assert [each.question for each in found[0].examples] == ["Question 1?"]
    saved = json.loads((tmp_path / "few_shot.json").read_text())
    scores = [each["score"] for each in saved["rounds"][0]]
    # AP after hop 1 is 1/2 for all; after hop 2 it is 1 for those that know, else 1/2.
    assert scores[0] == pytest.approx(0.75)
    assert scores[-1] == pytest.approx(0.5)
    assert saved["kept"] == [each.name for each in found]


def test_they_are_read_again(speech: Speech, tmp_path: Path) -> None:
    found = maker().prompts(tmp_path, Model(speech))
    again = Model(speech)
    assert maker().prompts(tmp_path, again) == found == kept_prompts(tmp_path, BARE)
    assert again.calls == []


def test_a_later_round_is_played_by_the_best_prompt(speech: Speech, tmp_path: Path) -> None:
    two = maker(dataclasses.replace(CONFIG, rounds=2))
    whole, made_in = Model(speech), tmp_path / "whole"
    made_in.mkdir()
    found = two.prompts(made_in, whole)
    name, ids = whole.calls[10]
    assert (name, ids) == (found[0].name, ["q0", "q1", "q2"])
    broken = Model(speech, stop_at=13)
    with pytest.raises(Stopped):
        two.prompts(tmp_path, broken)
    with pytest.raises(InputError, match=r"few_shot\.json are not finished, and the weights that"):
        kept_prompts(tmp_path, BARE)
    again = Model(speech)
    assert two.prompts(tmp_path, again) == found
    assert again.calls == whole.calls[10:]  # the first round is not played again


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"few_shot\.json cannot be read"):
        kept_prompts(tmp_path, BARE)


class Silent(Model):
    """Writes nothing where it is shown examples, so its tries are masked."""

    def _query(self, prompt: QueryPrompt, state: Any) -> str:
        return "" if prompt.variants else super()._query(prompt, state)


def test_a_round_that_leaves_no_prompt_is_not_kept(speech: Speech, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fewer than two different prompts"):
        maker().prompts(tmp_path, Silent(speech))
    assert not (tmp_path / "few_shot.json").exists()
    assert len(maker().prompts(tmp_path, Model(speech))) == 2
