"""LeReT: what each stage of a finished run learned from, its tries, its prompts with examples."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from examples.worlds.scripts import bridge_question
from qrag_jax.environments.episode import Document, Ended, Failed, Look
from qrag_jax.environments.queries import (
    BY_PASSAGE,
    EMPTY,
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
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text import prompts
from qrag_jax.metrics.rows import Hop
from qrag_jax.rollouts.token_episodes import Episode, Speech, Start
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.systems.config import load_config
from qrag_jax.systems.leret import Leret, LessonExperience
from qrag_jax.systems.leret_config import LeretConfig
from qrag_jax.systems.leret_tries import (
    Asked,
    Iteration,
    kept_prompts,
    search_hops,
    states_of,
    try_of,
)
from tests.entry_points import COURSES, metric_lines
from tests.environments.trying import BERG, LATER, OSLO, RAIN, STATE, tiny_speech
from tests.systems.corpora import tree
from tests.systems.small_runs import opened, said, small_leret

SCRIPT_STEPS, SFT_STEPS, PAIR_STEPS, STEPS = 12, 2, 2, COURSES["leret"].steps
FIRST_SFT, FIRST_PAIRS = SCRIPT_STEPS, SCRIPT_STEPS + SFT_STEPS
PERIOD = SFT_STEPS + PAIR_STEPS
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


def batch_of(system: Leret, step: int) -> Any:
    """What a step of the run learned from; its tries are there, so no weights are needed."""
    return jax.device_get(LessonExperience(system).next(None, step, STOP))


def params_at(system: Leret, step: int) -> Any:
    """The weights with which a stage began."""
    template = jax.device_get(system.first_state().params)
    params = Checkpoints(system.workdir, read_only=True).restore_params_of(step, template)
    assert params is not None
    return params


def metrics_of(system: Leret) -> list[dict[str, float]]:
    """Those of each step."""
    return [line for line in metric_lines(system.workdir) if "train/loss" in line]


def first_of(blocks: Any) -> Any:
    """The blocks of the first minibatch."""
    return jax.tree.map(lambda leaf: leaf[0], blocks)


def test_demonstrations_come_first(system: Leret) -> None:
    blocks = first_of(batch_of(system, 0).blocks)
    shown = [
        system.inputs.speech.text(blocks.target[blocks.valid & (blocks.episode == each)])
        for each in {*blocks.episode[blocks.valid].tolist()}
    ]
    assert len(shown) == 2 * system.config.script.batch_size  # hops
    assert all(query.split() for query in shown)
    losses = [line["train/loss"] for line in metrics_of(system)]
    assert losses[SCRIPT_STEPS - 1] < losses[0] - 1


# ---------------------------------------------------------------- what tries teach


def learned(system: Leret, iteration: int) -> tuple[list[StatePairs], Iteration]:
    """The pairs and targets of all states, from the tries of an iteration."""
    found = system.tries.iteration(iteration, None, STOP)
    return states_of(system.config, found), found


def bare(system: Leret, found: Iteration, at: StateKey) -> tuple[int, ...]:
    """The tokens that ask for a query at a state, by the prompt without a style."""
    messages = system.inputs.agent.prompt.messages(found.states[at].asked_by(0))
    return tuple(map(int, system.inputs.speech.scaffold.opening(messages)))


def rows_of(blocks: Any) -> list[tuple[int, ...]]:
    """The tokens of the rows of all blocks, shared ones included."""
    rows = []
    members = blocks.lengths.shape[1] // blocks.shared.shape[1]
    for number in range(len(blocks.tokens)):
        at = 0
        for group, shared in enumerate(blocks.shared[number]):
            prompt = blocks.tokens[number, at : at + shared].tolist()
            at += shared
            for length in blocks.lengths[number, group * members : (group + 1) * members]:
                if length:
                    rest = blocks.tokens[number, at : at + length - shared].tolist()
                    rows.append((*prompt, *rest))
                    at += length - shared
    return rows


def test_the_best_queries_are_imitated_behind_the_bare_prompt(system: Leret) -> None:
    for iteration in (1, 2):
        states, found = learned(system, iteration)
        best = {  # row → tokens of its query
            (*bare(system, found, each.at), *query): len(query)
            for each in states
            if each.target is not None
            for query in [each.queries[each.target].sampled]
        }
        first = FIRST_SFT + (iteration - 1) * PERIOD
        for number in range(first, first + SFT_STEPS):
            blocks = first_of(batch_of(system, number).blocks)
            rows = rows_of(blocks)
            assert len(rows) == system.config.sft.batch_size
            assert {*rows} <= best.keys()
            assert int(blocks.learned.sum()) == sum(best[row] for row in rows)


def test_pairs_have_the_winner_first_and_one_prompt(system: Leret) -> None:
    states, found = learned(system, 1)
    every = set()
    for each in states:
        opening = bare(system, found, each.at)
        for pair in each.pairs:
            winner, loser = each.queries[pair.winner], each.queries[pair.loser]
            assert winner.reward > loser.reward  # type: ignore[operator]
            every.add(((*opening, *winner.sampled), (*opening, *loser.sampled)))
    for number in range(FIRST_PAIRS, FIRST_PAIRS + PAIR_STEPS):
        rows = rows_of(batch_of(system, number).blocks)
        assert len(rows) == 2 * system.config.preference.batch_size
        assert set(zip(rows[::2], rows[1::2])) <= every


def test_the_reference_is_the_log_probability_of_each_query(system: Leret) -> None:
    folder = system.workdir / "tries" / "iteration-1"
    states, found = learned(system, 1)
    kept = json.loads((folder / "reference.json").read_text())["log_probs"]
    params, expected = params_at(system, FIRST_PAIRS), []
    rows = [
        (bare(system, found, each.at), each.queries[place].sampled)
        for each in states
        for pair in each.pairs
        for place in pair[:2]
    ]
    width = max(len(opening) + len(query) for opening, query in rows)
    tokens = np.zeros((len(rows), width), np.int32)
    for row, (opening, query) in zip(tokens, rows, strict=True):
        row[: len(opening) + len(query)] = [*opening, *query]
    lengths = jnp.array([len(opening) + len(query) for opening, query in rows])
    logits = system.inputs.model.model.logits(params, jnp.asarray(tokens), lengths)
    scores = np.asarray(jax.nn.log_softmax(logits))
    for row, (opening, query) in zip(scores, rows, strict=True):
        places = len(opening) - 1 + np.arange(len(query))
        expected.append(row[places, list(query)].sum())
    assert len(kept) == len(expected) >= 2
    np.testing.assert_allclose(kept, expected, atol=2e-3)
    # The policy has not moved yet, so all margins are 0, and the loss is that of h = 0.
    first, beta = metrics_of(system)[FIRST_PAIRS], system.config.preference.beta
    assert first["train/margin"] == pytest.approx(0, abs=1e-3)
    assert first["train/loss"] == pytest.approx((1 / (2 * beta)) ** 2, rel=1e-3)


# ---------------------------------------------------------------- what is lost or broken off


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("hop-1.jsonl", FIRST_SFT + 1),
        ("hop-2.jsonl", FIRST_PAIRS),
        ("reference.json", FIRST_PAIRS + 1),
    ],
)
def test_lost_files_are_named(system: Leret, tmp_path: Path, name: str, number: int) -> None:
    shutil.copytree(system.workdir, tmp_path, dirs_exist_ok=True)
    experience = LessonExperience(dataclasses.replace(system, workdir=tmp_path))
    (tmp_path / "tries" / "iteration-1" / name).unlink()
    with pytest.raises(InputError, match=name):
        experience.next(None, number, STOP)


@pytest.mark.parametrize("hop", [1, 2])
def test_tries_that_were_broken_off_go_on(system: Leret, tmp_path: Path, hop: int) -> None:
    maker, calls, parts = dataclasses.replace(system.tries, workdir=tmp_path), list[int](), 8
    stop_at = 2 if hop == 1 else parts + 1
    params = jax.device_put(params_at(system, FIRST_SFT), system.param_shardings)

    def stopped(starts: Sequence[Any]) -> list[Episode]:
        calls.append(len(starts))
        if len(calls) == stop_at:
            raise Stopped("SIGTERM")
        return system.play(params, starts, STOP)

    with pytest.raises(Stopped):
        maker.iteration(1, stopped, STOP)
    with pytest.raises(InputError, match=r"hop-\d\.jsonl"):  # without weights
        maker.iteration(1, None, STOP)
    maker.iteration(1, stopped, STOP)
    assert len(calls) == 1 + 2 * parts  # only the one that was broken off is repeated
    played, whole = tree(tmp_path / "tries"), tree(system.workdir / "tries")
    for name in ("iteration-1/hop-1.jsonl", "iteration-1/hop-2.jsonl"):
        assert played[name] == whole[name]


# ---------------------------------------------------------------- tries, hop by hop

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
CONFIG = LeretConfig.of(small_leret(seed=3, writing__k=2, search__gold_by=BY_PASSAGE))
PROMPT = QueryPrompt(prompts.load("bare_query"), (Variant("one", mark="style: one"),))
AGENT = QueryAgent(PROMPT, 2, stop="enough")


@pytest.fixture(scope="module")
def speech() -> Speech:
    return tiny_speech()


def model(
    speech: Speech, *queries: Sequence[str]
) -> tuple[Callable[..., list[Episode]], list[list[Start]]]:
    """Writes these queries, hop by hop; and what it was asked."""
    asked: list[list[Start]] = []

    def play(starts: Sequence[Start]) -> list[Episode]:
        asked.append([*starts])
        texts = queries[len(asked) - 1]
        return [
            Episode(Failed("timeout", "no reply."), (), 1)
            if text == "fails"
            else said(AGENT, LIBRARY, speech, start.task, text)
            for start, text in zip(starts, texts, strict=True)
        ]

    return play, asked


def by_hop(*played: Any) -> list[list[Hop]]:
    """All hops of played questions."""
    rows, _ = search_hops(CONFIG, LIBRARY, *played)
    return [[*hops] for hops in zip(*(row.hops for row in rows), strict=True)]


def pools(hops: Sequence[Hop]) -> list[list[str]]:
    return [[*hop.pool] for hop in hops]


def test_pools_grow_hop_by_hop(speech: Speech) -> None:
    play, asked = model(speech, ["ada berg", "rain"], ["oslo", "oslo"])
    first, second = by_hop([STATE, OTHER], play, 1)
    assert pools(first) == [["a", "c"], ["c"]]
    assert pools(second) == [["a", "c", "b"], ["c", "b", "a"]]
    assert [row.scores["recall"] for row in (*first, *second)] == [0.5, 0.0, 1.0, 1.0]
    assert second[0].scores["ap"] == pytest.approx((1 / 1 + 2 / 3) / 2)
    assert second[1].scores["ap_min"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert [hop.query for hop in second] == ["oslo", "oslo"]
    hops = [[start.task.hop for start in each] for each in asked]  # type: ignore[attr-defined]
    assert hops == [[1, 1], [2, 2]]
    opening = speech.scaffold.opening(PROMPT.messages(STATE))
    assert (first[0].read, second[0].read > len(opening)) == (len(opening), True)
    assert first[0].sampled > 1


def test_nothing_is_found_without_a_query_and_the_next_hop_asks_again(speech: Speech) -> None:
    play, asked = model(speech, ["", "fails", "broken"], ["ada berg", "oslo", "oslo"])
    first, second = by_hop([STATE] * 3, play, 1)
    assert pools(first) == [[], [], []]
    assert [hop.outcome for hop in first] == ["no_query", "timeout", "timeout"]
    assert [row.scores["recall"] for row in first] == [0, 0, 0]
    assert pools(second) == [["a", "c"], ["b", "a"], ["b", "a"]]
    assert [start.task.hop for start in asked[1]] == [2, 2, 2]  # type: ignore[attr-defined]


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
    without = [Searched(answer="", outcome=outcome) for outcome in (EMPTY, TOO_LONG)]
    for ended in (*without, Failed("timeout", "no reply")):
        item = tried(ended)
        assert (item.reward, item.scores, item.pool) == (None, {}, ("a", "c"))


# ---------------------------------------------------------------- prompts with examples

QUESTIONS = [bridge_question(0, "train", number) for number in range(6)]


def few_shot_config() -> ConfigDict:
    """Of two rounds of examples, which need longer prompts."""
    sizes = {"candidates": 3, "demonstrations": 1, "bootstrap_questions": 2, "rank_questions": 1}
    return small_leret(
        tries__ways="few_shot",
        tries__with_bare=True,
        tries__samples=1,
        model__tiny__positions=1024,
        sampling__room=512,
        few_shot__rounds=2,
        **{f"few_shot__{name}": count for name, count in sizes.items()},
    )


def prompts_of(system: Leret, workdir: Path, stop_at: int = 0) -> tuple[tuple[Variant, ...], int]:
    """The prompts of a model that knows what to write; how often it played."""
    calls, inputs = [], system.inputs

    def play(prompt: QueryPrompt, starts: Sequence[Start]) -> list[Episode]:
        calls.append(prompt)
        if len(calls) == stop_at:
            raise Stopped("SIGTERM")
        agent = QueryAgent(prompt, inputs.agent.k, inputs.agent.stop)
        tasks: list[Any] = [start.task for start in starts]
        return [said(agent, inputs.library, inputs.speech, task, knowing(task)) for task in tasks]

    workdir.mkdir(exist_ok=True)
    assert system.maker is not None
    return system.maker.prompts(workdir, play), len(calls)


def knowing(state: QueryState) -> str:
    """The entity, then the bridge."""
    (question,) = (each for each in QUESTIONS if each.id == state.id)
    return question.entity if state.hop == 1 else question.bridge


def test_prompts_with_examples_are_made_once_round_by_round(tmp_path: Path) -> None:
    config = few_shot_config()
    with opened(config, tmp_path / "run") as system:
        variants, calls = prompts_of(system, system.workdir)
        with pytest.raises(Stopped):
            prompts_of(system, tmp_path / "broken", stop_at=calls)
        again, left = prompts_of(system, tmp_path / "broken")
        assert again == variants
        assert 0 < left < calls  # the first round is not played again
        assert system.variants == (0, 1, 2)
        assert len(variants) == 2
        tried = [system.inputs.train[number].question for number in system.asked]
        shown = {example.question for each in variants for example in each.examples}
        assert len(tried) == 3
        assert shown
        assert not shown & {*tried}
        assert [each.question for each in system.tries.questions] == tried
    with opened(config, system.workdir) as other:  # nothing plays
        assert other.prompt.variants == variants
    saved = json.loads((system.workdir / "few_shot.json").read_text())
    for change in ({"template": "another"}, {"kept": []}):
        (tmp_path / "few_shot.json").write_text(json.dumps(saved | change))
        with pytest.raises(InputError, match="few_shot"):
            kept_prompts(tmp_path, system.inputs.agent.prompt)
