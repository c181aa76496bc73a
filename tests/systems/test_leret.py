"""LeReT: what each stage of a finished run learned from, its tries, its prompts with examples."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from examples.worlds.scripts import bridge_question
from qrag_jax.environments.episode import Document, Ended, Failed, Look
from qrag_jax.environments.queries import (
    BY_PASSAGE,
    BY_TITLE,
    STOPPED,
    TOO_LONG,
    QueryAgent,
    QueryPrompt,
    QueryState,
    Searched,
    Variant,
)
from qrag_jax.errors import InputError
from qrag_jax.feedback.pairs import StateKey, StatePairs, Try
from qrag_jax.llm.text import prompts
from qrag_jax.metrics.row_log import Hop
from qrag_jax.rollouts.token_episodes import Episode, Speech
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.systems.config import load_config
from qrag_jax.systems.leret.config import LeretConfig
from qrag_jax.systems.leret.system import Leret
from qrag_jax.systems.leret.tries import Asked, search_hops, searched_row, states_of, try_of
from tests.entry_points import metric_lines
from tests.environments.trying import BERG, LATER, OSLO, RAIN, STATE, tiny_speech
from tests.systems.corpora import tree
from tests.systems.small_runs import opened, said, small_leret

SCRIPT_STEPS, SFT_STEPS, PAIR_STEPS = 12, 2, 2  # of `entry_points.COURSES`
FIRST_SFT, FIRST_PAIRS = SCRIPT_STEPS, SCRIPT_STEPS + SFT_STEPS
STOP = StopSignal()


@pytest.fixture(scope="module")
def system(
    trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Leret]:
    """That of a run that went through all stages."""
    workdir = tmp_path_factory.mktemp("leret") / "run"
    shutil.copytree(trained("leret"), workdir)
    with opened(load_config(workdir / "config.json"), workdir) as system:
        yield system


def rows_of(system: Leret, step: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What a step of the run learned from: prompts and what was sampled behind them.

    Its tries are there, so any weights will do.
    """
    system.prepare(system.first_state(), step, STOP)
    numbers = system.questions(step)[:, 0].tolist()
    segments = [each.segments[0][0] for each in system.playing().play(None, numbers, step, STOP)]
    return [(tuple(t.observed.tolist()), tuple(t.sampled.tolist())) for t in segments]


# ---------------------------------------------------------------- what tries teach


def learned(system: Leret, iteration: int) -> tuple[list[StatePairs], Any]:
    """The pairs and targets of all states, from the tries of an iteration, and the states."""
    tries, states = system.trying.iteration(iteration, None, STOP)
    return states_of(system.config, tries), states


def bare(system: Leret, shown: Any, at: StateKey) -> tuple[int, ...]:
    """The tokens that ask for a query at a state, by the prompt without a style."""
    messages = system.inputs.agent.prompt.messages(shown[at].asked_by(0))
    return tuple(map(int, system.inputs.speech.scaffold.opening(messages)))


def test_the_best_queries_are_imitated_behind_the_bare_prompt(system: Leret) -> None:
    states, found = learned(system, 1)
    best = [each for each in states if each.target is not None]
    rows = {(bare(system, found, s.at), s.queries[s.target].sampled) for s in best}
    for number in range(FIRST_SFT, FIRST_SFT + SFT_STEPS):
        shown = rows_of(system, number)
        assert len(shown) == system.config.sft.batch_size
        assert {*shown} <= rows


def test_pairs_have_the_winner_first_and_one_prompt(system: Leret) -> None:
    states, found = learned(system, 1)
    every = set()
    for each in states:
        opening = bare(system, found, each.at)
        for pair in each.pairs:
            winner, loser = (each.queries[place] for place in pair)
            assert winner.reward > loser.reward  # type: ignore[operator]
            every.add(((opening, winner.sampled), (opening, loser.sampled)))
    for number in range(FIRST_PAIRS, FIRST_PAIRS + PAIR_STEPS):
        rows = rows_of(system, number)
        assert len(rows) == 2 * system.config.preference.batch_size
        assert set(zip(rows[::2], rows[1::2])) <= every


def test_the_reference_is_the_policy_before_it_learns_pairs(system: Leret) -> None:
    """So all margins are 0 at first, and the loss is that of h = 0."""
    first = [line for line in metric_lines(system.workdir) if "train/loss" in line][FIRST_PAIRS]
    assert first["train/margin"] == pytest.approx(0, abs=1e-3)
    beta = system.config.preference.beta
    assert first["train/loss"] == pytest.approx((1 / (2 * beta)) ** 2, rel=1e-3)


# ---------------------------------------------------------------- what is lost or broken off


def test_tries_that_were_broken_off_go_on(system: Leret, tmp_path: Path) -> None:
    """In the second hop, behind its first part: only what was broken off is repeated."""
    maker, calls, parts = dataclasses.replace(system.trying, workdir=tmp_path), list[int](), 8
    template = jax.device_get(system.first_state().params)
    kept = Checkpoints(system.workdir, read_only=True).restore_params_of(FIRST_SFT, template)
    params = jax.device_put(kept, system.param_shardings)

    def stopped(_: QueryPrompt, starts: Sequence[Any]) -> list[Episode]:
        calls.append(len(starts))
        if len(calls) == parts + 2:
            raise Stopped("SIGTERM")
        return system.play(params, starts, STOP)

    with pytest.raises(Stopped):
        maker.iteration(1, stopped, STOP)
    with pytest.raises(InputError, match=r"hop-2\.jsonl"):  # without weights
        maker.iteration(1, None, STOP)
    maker.iteration(1, stopped, STOP)
    assert len(calls) == 1 + 2 * parts
    played, whole = tree(tmp_path / "tries"), tree(system.workdir / "tries")
    for name in ("iteration-1/hop-1.jsonl", "iteration-1/hop-2.jsonl"):
        assert played[name] == whole[name]


# ---------------------------------------------------------------- tries, hop by hop

FOUND = {"ada berg": (BERG, RAIN), "oslo": (OSLO, BERG), "rain": (RAIN,)}
OTHER = dataclasses.replace(STATE, id="r", question="Where does it rain?")


class Shelf:
    """Finds what is written above."""

    def look(self, asked: Sequence[tuple[Any, Look]]) -> list[tuple[Document, ...]]:
        return [FOUND.get(step.query, ())[: step.most] for _, step in asked]

    def named(self, names: Sequence[str]) -> tuple[Document, ...]:
        every = {each.id: each for each in (BERG, OSLO, RAIN)}
        return tuple(every[name]._replace(score=0.0) for name in names)


LIBRARY: Any = Shelf()
CONFIG = LeretConfig.of(small_leret(seed=3, writing__k=2, search__gold_by=BY_PASSAGE))
PROMPT = QueryPrompt(prompts.load("bare_query"), (Variant("one", mark="style: one"),))
AGENT = QueryAgent(PROMPT, 2, stop="enough")


@pytest.fixture(scope="module")
def speech() -> Speech:
    return tiny_speech()


def model(speech: Speech, *queries: Sequence[str]) -> tuple[Any, list[list[Any]]]:
    """Writes these queries, hop by hop; and what it was asked."""
    asked: list[list[Any]] = []

    def play(starts: Sequence[Any]) -> list[Episode]:
        asked.append([*starts])
        texts = zip(starts, queries[len(asked) - 1], strict=True)
        return [said(AGENT, LIBRARY, speech, start.task, text) for start, text in texts]

    return play, asked


def by_hop(*played: Any) -> list[list[Hop]]:
    """All hops of played questions."""
    rows, _ = search_hops(CONFIG, LIBRARY, *played)
    return [[*hops] for hops in zip(*(row.hops for row in rows), strict=True)]


def test_pools_grow_hop_by_hop(speech: Speech) -> None:
    play, asked = model(speech, ["ada berg", "rain"], ["oslo", "oslo"])
    first, second = by_hop([STATE, OTHER], play, 1)
    assert [hop.pool for hop in first] == [("a", "c"), ("c",)]
    assert [hop.pool for hop in second] == [("a", "c", "b"), ("c", "b", "a")]
    assert [hop.scores["recall"] for hop in (*first, *second)] == [0.5, 0.0, 1.0, 1.0]
    assert second[0].scores["ap"] == pytest.approx((1 / 1 + 2 / 3) / 2)
    assert [[start.task.hop for start in each] for each in asked] == [[1, 1], [2, 2]]
    opening = speech.scaffold.opening(PROMPT.messages(STATE))
    assert (first[0].read, second[0].read > len(opening)) == (len(opening), True)


def test_a_gold_page_has_its_passage_that_was_found_first() -> None:
    """Else the first of all; the row has the texts of these and of the pool."""
    other = BERG._replace(id="d", text="# Ada Berg\nShe is a smith.")
    state = dataclasses.replace(STATE, gold_ids=("a", "b"), pages=("ada berg", "oslo"))
    search = dataclasses.replace(CONFIG.search, gold_by=BY_TITLE)
    by_title = dataclasses.replace(CONFIG, search=search)
    for pool, gold in (((), ("a", "b")), ((RAIN, other, BERG), ("d", "b"))):
        row = searched_row(by_title, LIBRARY, state, pool, [])
        assert row.gold == gold
        shown = {each.id: each.text for each in (BERG, OSLO, *pool)}
        assert row.texts == {name: shown[name] for name in {*gold, *(p.id for p in pool)}}


def test_draws_depend_on_stream_hop_and_question_alone(speech: Speech) -> None:
    def keys(states: Sequence[QueryState], stream: int) -> list[bytes]:
        play, asked = model(speech, *[["rain"] * len(states)] * 2)
        by_hop(states, play, stream)
        return [start.key.tobytes() for each in asked for start in each]

    one, two = keys([STATE, OTHER], 1), keys([STATE, OTHER], 2)
    assert len({*one, *two}) == 8
    assert keys([STATE], 1) == one[::2]


def tried(ended: Ended) -> Try:
    asked = Asked(StateKey(4, LATER.hop), LATER.asked_by(2), 3)
    return try_of(CONFIG, asked, Episode(ended, (), 1))


def test_to_stop_has_a_reward_and_what_is_no_query_has_none() -> None:
    item = tried(Searched(answer="oslo", seen=("b", "a"), found=(OSLO, BERG)))
    assert (item.at, item.variant, item.draw) == ((4, 2), 2, 3)
    assert (item.pool, item.found) == (("a", "c", "b"), (("b", 7.0), ("a", 5.0)))
    assert item.reward == item.scores["ap"] == pytest.approx((1 / 1 + 2 / 3) / 2)
    stop = tried(Searched(answer="DONE", outcome=STOPPED))
    assert (stop.pool, stop.reward) == (("a", "c"), 0.5)
    for ended in (Searched(answer="", outcome=TOO_LONG), Failed("timeout", "no reply")):
        item = tried(ended)
        assert (item.reward, item.scores, item.pool) == (None, {}, ("a", "c"))


# ---------------------------------------------------------------- prompts with examples

QUESTIONS = {each.id: each for each in (bridge_question(0, "train", n) for n in range(6))}


def prompts_of(system: Leret, workdir: Path, stop_at: int = 0) -> tuple[tuple[Variant, ...], int]:
    """The prompts of a model that knows what to write; how often it played."""
    calls, inputs = [], system.inputs

    def play(prompt: QueryPrompt, starts: Sequence[Any]) -> list[Episode]:
        calls.append(prompt)
        if len(calls) == stop_at:
            raise Stopped("SIGTERM")
        agent, output = QueryAgent(prompt, inputs.agent.k, inputs.agent.stop), list[Episode]()
        for task in (start.task for start in starts):
            known: Any = QUESTIONS[task.id]
            text = known.supporting[task.hop > 1].title
            output.append(said(agent, inputs.library, inputs.speech, task, text))
        return output

    workdir.mkdir(exist_ok=True)
    trying = dataclasses.replace(system.trying, workdir=workdir)
    return trying.prompt(play).variants, len(calls)


def test_prompts_with_examples_are_made_once_round_by_round(tmp_path: Path) -> None:
    sizes = {"candidates": 3, "demonstrations": 1, "bootstrap_questions": 2, "rank_questions": 1}
    config = small_leret(
        tries__ways="few_shot",
        tries__with_bare=True,
        tries__samples=1,
        model__tiny__positions=1024,  # examples need longer prompts
        sampling__room=512,
        **{f"few_shot__{name}": count for name, count in (sizes | {"rounds": 2}).items()},
    )
    with opened(config, tmp_path / "run") as system:
        variants, calls = prompts_of(system, system.workdir)
        with pytest.raises(Stopped):
            prompts_of(system, tmp_path / "broken", stop_at=calls)
        again, left = prompts_of(system, tmp_path / "broken")
        assert again == variants
        assert 0 < left < calls  # the first round is not played again
        tried = {system.inputs.train[number].question for number in system.trying.asked}
        shown = {example.question for each in variants for example in each.examples}
        assert len(variants) == 2
        assert shown
        assert not shown & tried
    with opened(config, system.workdir) as other:  # nothing plays
        assert other.prompt.variants == variants
        saved = json.loads((system.workdir / "few_shot.json").read_text())
        (tmp_path / "few_shot.json").write_text(json.dumps(saved | {"template": "another"}))
        with pytest.raises(InputError, match="few_shot"):
            dataclasses.replace(other.trying, workdir=tmp_path).prompt()
