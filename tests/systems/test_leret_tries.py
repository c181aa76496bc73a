"""Tries of LeReT: hop by hop, their prompts, lessons of them, a play that is broken off."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.environments.episode import Document, Failed, Look
from qrag_jax.environments.few_shot import FewShotConfig, Split
from qrag_jax.environments.queries import (
    BY_HOP,
    BY_PASSAGE,
    QueryAgent,
    QueryPrompt,
    QueryState,
    Variant,
)
from qrag_jax.errors import InputError
from qrag_jax.feedback.tries import PoolScores, QueryRewardConfig
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text import prompts
from qrag_jax.rollouts.query_tries import Scoring
from qrag_jax.rollouts.token_episodes import Speech, TokenEpisode, TokenStart
from qrag_jax.runtime.interrupt import Stopped
from qrag_jax.systems.leret_tries import TRIES, HopPlayer, PromptMaker, TryMaker, kept_prompts
from tests.environments.trying import BERG, OSLO, RAIN, STATE, tiny_speech
from tests.systems.leret_run import (
    FIRST_SFT,
    STOP,
    Trained,
    said,
    tries_of,
    weights_of,
)

FOUND = {"ada berg": (BERG, RAIN), "oslo": (OSLO, BERG), "rain": (RAIN,)}


OTHER = dataclasses.replace(STATE, id="r", question="Where does it rain?")


class Shelf:
    """Finds what is written above."""

    def look(self, asked: Sequence[tuple[Any, Look]]) -> list[tuple[Document, ...] | Failure]:
        return [self._found(step) for _, step in asked]

    def _found(self, step: Look) -> tuple[Document, ...] | Failure:
        if step.query == "broken":
            return Failure("timeout", "no reply.")
        return FOUND.get(step.query, ())[: step.most]

    def named(self, _: Any, names: Sequence[str]) -> tuple[Document, ...]:
        every = {each.id: each for each in (BERG, OSLO, RAIN)}
        return tuple(every[name]._replace(score=0.0) for name in names)


LIBRARY: Any = Shelf()


SCORING = Scoring(PoolScores(2, 3), QueryRewardConfig(), BY_HOP, BY_PASSAGE)


PLAYER = HopPlayer(2, 2, LIBRARY, SCORING, seed=3)


PROMPT = QueryPrompt(prompts.load("bare_query"), (Variant("one", mark="style: one"),))


AGENT = QueryAgent(PROMPT, 2, stop="enough")


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    return tiny_speech(tmp_path_factory.mktemp("lm") / "model")


def model(
    speech: Speech, *queries: Sequence[str]
) -> tuple[Callable[..., list[TokenEpisode]], list[list[TokenStart]]]:
    """Writes these queries, hop by hop; and what it was asked."""
    asked: list[list[TokenStart]] = []

    def play(starts: Sequence[TokenStart]) -> list[TokenEpisode]:
        asked.append([*starts])
        texts = queries[len(asked) - 1]
        return [
            TokenEpisode(Failed("timeout", "no reply."), (), 1)
            if text == "fails"
            else said(AGENT, LIBRARY, speech, start, text)
            for start, text in zip(starts, texts, strict=True)
        ]

    return play, asked


def pools(rows: Sequence[Any]) -> list[list[str]]:
    return [[each.id for each in row.after.pool] for row in rows]


def test_pools_grow_hop_by_hop(speech: Speech) -> None:
    play, asked = model(speech, ["ada berg", "rain"], ["oslo", "oslo"])
    first, second = PLAYER.by_model([STATE, OTHER], play, stream=1)
    assert pools(first) == [["a", "c"], ["c"]]
    assert pools(second) == [["a", "c", "b"], ["c", "b", "a"]]
    assert [row.scores["recall"] for row in (*first, *second)] == [0.5, 0.0, 1.0, 1.0]
    assert second[0].scores["ap"] == pytest.approx((1 / 1 + 2 / 3) / 2)
    assert second[1].scores["ap_min"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert [row.query for row in second] == ["oslo", "oslo"]
    assert first[0].before.hop == 1
    hops = [[start.task.hop for start in each] for each in asked]  # type: ignore[attr-defined]
    assert hops == [[1, 1], [2, 2]]
    opening = speech.scaffold.opening(PROMPT.messages(STATE))
    assert (first[0].read, second[0].read > len(opening)) == (len(opening), True)
    assert first[0].made is not None
    assert len(first[0].made.sampled) > 1


def test_nothing_is_found_without_a_query_and_the_next_hop_asks_again(speech: Speech) -> None:
    play, asked = model(speech, ["", "fails", "broken"], ["ada berg", "oslo", "oslo"])
    first, second = PLAYER.by_model([STATE] * 3, play, stream=1)
    assert pools(first) == [[], [], []]
    assert [row.made.outcome for row in first if row.made] == ["no_query", "timeout", "timeout"]
    assert [row.scores["recall"] for row in first] == [0, 0, 0]
    assert pools(second) == [["a", "c"], ["b", "a"], ["b", "a"]]
    assert [start.task.hop for start in asked[1]] == [2, 2, 2]  # type: ignore[attr-defined]


def test_a_search_that_ended_is_not_asked_again(speech: Speech) -> None:
    play, asked = model(speech, ["enough", "rain"], ["oslo"])
    second = PLAYER.by_model([STATE, OTHER], play, stream=1)[1]
    assert [len(each) for each in asked] == [2, 1]
    assert asked[1][0].task.id == "r"
    assert second[0].made is None
    assert (second[0].query, second[0].read, pools(second)[0]) == ("", 0, [])
    assert second[0].scores["ap"] == 0
    play, asked = model(speech, ["enough"])
    rows = PLAYER.by_model([STATE], play, stream=1)
    assert (len(asked), len(rows)) == (1, 2)


def test_draws_depend_on_stream_hop_and_question_alone(speech: Speech) -> None:
    def keys(states: Sequence[QueryState], stream: int) -> list[tuple[int, ...]]:
        queries = [["rain"] * len(states)] * 2
        play, asked = model(speech, *queries)
        PLAYER.by_model(states, play, stream)
        return [tuple(start.key.tolist()) for each in asked for start in each]

    one, two = keys([STATE, OTHER], 1), keys([STATE, OTHER], 2)
    assert len({*one, *two}) == 8
    assert keys([STATE], 1) == one[::2]
    assert np.asarray(one).shape == (4, 2)


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


class Shelf_prompts:
    """A query is the name of what it finds."""

    def look(self, asked: Sequence[tuple[Any, Look]]) -> list[tuple[Document, ...]]:
        return [self.named(None, [step.query]) for _, step in asked]

    def named(self, _: Any, names: Sequence[str]) -> tuple[Document, ...]:
        return tuple(DOCUMENTS[name] for name in names if name in DOCUMENTS)


LIBRARY_PROMPTS: Any = Shelf_prompts()


SCORING_PROMPTS = Scoring(PoolScores(1, 2), QueryRewardConfig(), BY_HOP, BY_PASSAGE)


CONFIG = FewShotConfig(
    candidates=4, demonstrations=1, bootstrap_questions=3, rank_questions=2, kept=2
)


class Model:
    """Knows what to write, the better the more its prompt shows of question 1; may be stopped."""

    def __init__(self, speech: Speech, stop_at: int = 0) -> None:
        self.speech, self.stop_at, self.calls = (
            speech,
            stop_at,
            list[tuple[str, list[str]]](),
        )

    def __call__(self, prompt: QueryPrompt, starts: Sequence[TokenStart]) -> list[TokenEpisode]:
        self.calls.append((prompt.names[-1], [start.task.id for start in starts]))
        if len(self.calls) == self.stop_at:
            raise Stopped("SIGTERM")
        agent = QueryAgent(prompt, 1)
        texts = [self._query(prompt, start.task) for start in starts]
        return [
            said(agent, LIBRARY_PROMPTS, self.speech, start, text)
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
    hops = HopPlayer(2, 1, LIBRARY_PROMPTS, SCORING_PROMPTS, seed=0)
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
    with pytest.raises(InputError, match=r"few_shot\.json"):
        kept_prompts(tmp_path, BARE)
    again = Model(speech)
    assert two.prompts(tmp_path, again) == found
    assert again.calls == whole.calls[10:]  # the first round is not played again


def test_the_next_states_grow_from_tries(leret_trained: Trained) -> None:
    system = leret_trained.system
    found = system.tries.iteration(1, None, weights_of(leret_trained, FIRST_SFT), STOP)
    assert [TRIES.to_json(each) for each in found.tries] == [
        TRIES.to_json(each) for each in tries_of(system, 1)
    ]
    assert len([at for at in found.states if at.hop == 1]) == 6
    later = [at for at in found.states if at.hop == 2]
    assert later
    by_key = {each.key: each for each in found.tries}
    for at in later:
        parent = by_key[found.grown_from[at]]
        state = found.states[at]
        assert (parent.question, parent.hop, state.hop) == (at.question, 1, 2)
        assert tuple(each.id for each in state.pool) == parent.pool
        assert [each.score for each in state.pool] == [score for _, score in parent.found]
    # Each try is what its query finds, whoever searches.
    each = next(each for each in found.tries if each.hop == 2 and each.searched)
    state = found.states[each.at]
    (searched,) = system.inputs.library.look([(state, Look(each.query, 4))])
    assert not isinstance(searched, Exception)
    assert tuple((one.id, one.score) for one in searched) == each.found  # type: ignore[union-attr]


def maker_in(leret_trained: Trained, workdir: Path) -> TryMaker:
    return dataclasses.replace(leret_trained.system.tries, workdir=workdir)


def player(leret_trained: Trained, calls: list[int], stop_at: int = 0) -> Callable[..., Any]:
    """Plays by the weights of the first tries; is told to stop in call number `stop_at`."""
    system, state = leret_trained.system, leret_trained.states[FIRST_SFT]
    play = system.by_device(jax.device_put(state.params, system.param_shardings), STOP)

    def counted(starts: Sequence[Any]) -> list[TokenEpisode]:
        calls.append(len(starts))
        if len(calls) == stop_at:
            raise Stopped("SIGTERM")
        return play(starts)

    return counted


@pytest.mark.parametrize("stop_at", [2, 3])
def test_tries_that_were_broken_off_go_on(
    leret_trained: Trained, tmp_path: Path, stop_at: int
) -> None:
    maker, weights = maker_in(leret_trained, tmp_path), weights_of(leret_trained, FIRST_SFT)
    calls: list[int] = []
    with pytest.raises(Stopped):
        maker.iteration(1, player(leret_trained, calls, stop_at), weights, STOP)
    found = maker.iteration(1, player(leret_trained, calls), weights, STOP)
    assert len(calls) == 1 + 4  # parts of 3 questions; only the one that was broken off is repeated
    assert [TRIES.to_json(each) for each in found.tries] == [
        TRIES.to_json(each) for each in tries_of(leret_trained.system, 1)
    ]
    kept = tmp_path / "tries" / "iteration-1" / "hop-2.jsonl"
    own = leret_trained.system.workdir / "tries" / "iteration-1" / "hop-2.jsonl"
    assert kept.read_bytes() == own.read_bytes()


def test_tries_of_other_settings_are_refused(leret_trained: Trained, tmp_path: Path) -> None:
    shutil.copytree(leret_trained.system.workdir / "tries", tmp_path / "tries")
    maker, weights = maker_in(leret_trained, tmp_path), weights_of(leret_trained, FIRST_SFT)
    for name in ("model", "corpus", "search", "prompts"):
        other = dataclasses.replace(maker, record={**maker.record, name: "another"})
        with pytest.raises(InputError, match=f"with another {name}; bring that back, or bring"):
            other.iteration(1, None, weights, STOP)
    path = tmp_path / "tries" / "iteration-1" / "hop-1.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(InputError, match=r"hop-1.jsonl has other tries than were asked for; bring"):
        maker.iteration(1, None, weights, STOP)
    path.write_text("".join(lines[:25]))
    with pytest.raises(InputError, match="--workdir"):
        maker.iteration(1, None, weights, STOP)
    path.unlink()
    with pytest.raises(InputError, match=r"hop-1.jsonl is missing; bring the file back"):
        maker.iteration(1, None, weights, STOP)
