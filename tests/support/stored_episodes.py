"""Plays stored episodes in two ways: by our own loop, and over verifiers.

The episodes are texts of scripts with flaws, a turn each; a stand-in for the sampler says them, so
rewards must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoTokenizer

from examples.worlds.demonstrations import Demonstration, draw_choices, scripted_talk
from examples.worlds.scripts import bridge_question
from qrag_jax.environments.episode import Closed, ToolTask
from qrag_jax.environments.tasks import bridge_task
from qrag_jax.environments.tools import ToolAgent
from qrag_jax.feedback.rubric import Rubric, score
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.scaffolds import ChatRenderer, scaffold_of
from qrag_jax.llm.text.tool_calls import HERMES
from qrag_jax.models.first_language_model import TinyLMConfig, write_tiny_lm
from qrag_jax.retrieval.own_documents import OwnRetriever
from qrag_jax.rollouts.environment_play import (
    EnvironmentPlay,
    EnvironmentProcess,
    PlaySettings,
    Scored,
)
from qrag_jax.rollouts.libraries import OwnLibrary
from qrag_jax.rollouts.token_episodes import AgentRollout, Counts, Speech, Start
from qrag_jax.runtime.interrupt import StopSignal
from tests.machine import PYTHON
from tests.rollouts.token_setup import ScriptedSampler

PROMPT, TURNS, DOCUMENTS, SEED = "bare_question", 4, 1, 0
ROOM, TURN, SIDE_BY_SIDE = 4000, 1000, 16


class Story(NamedTuple):
    """A stored episode: its question, and what is said in each turn."""

    task: ToolTask
    texts: tuple[str, ...]


def stories(count: int) -> list[Story]:
    """Stored episodes, of different ends: answers right and wrong, calls that cannot be read."""
    agent = _agent()
    library, found = OwnLibrary(OwnRetriever("bm25")), []
    for number in range(count):
        question = bridge_question(SEED, "train", number)
        choices = draw_choices(SEED, number)
        talk = scripted_talk(
            agent, bridge_task(question), Demonstration(question, choices, HERMES), library
        )
        found.append(Story(bridge_task(question), tuple(said for _, said in talk.turns)))
    return found


def story_sampler(tokenizer: Any, episodes: Sequence[Story]) -> ScriptedSampler:
    """Says what the stories have; it knows them by their questions."""
    texts = {story.task.question: story.texts for story in episodes}

    def say(text: str) -> str:
        turn = text.count("<|im_start|>assistant\n") - 1
        return next(own[turn] for asked, own in texts.items() if asked in text)

    return ScriptedSampler(tokenizer, say)


def stored(folder: Path, episodes: Sequence[Story], *, verifiers: bool = False) -> list[float]:
    """Rewards of the stored episodes, played by our own loop, or over verifiers."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = (text for story in episodes for text in (story.task.question, *story.texts))
    sizes = TinyLMConfig(layers=2, hidden=32, heads=2, key_heads=1, intermediate=32, vocab=600)
    write_tiny_lm(folder / "model", texts, sizes, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    if verifiers:
        return _over_verifiers(folder, tokenizer, episodes)
    return [
        Rubric().reward(score(ended, story.task), story.task.hops)
        for ended, story in zip(closed_in_process(tokenizer, episodes), episodes, strict=True)
    ]


def _agent() -> ToolAgent:
    return ToolAgent(
        prompts.load(PROMPT), form=HERMES, max_turns=TURNS, top_n=DOCUMENTS, most=DOCUMENTS
    )


def closed_in_process(tokenizer: Any, episodes: Sequence[Story]) -> list[Closed]:
    """How the stories end, played by our own loop."""
    speech = Speech(tokenizer, scaffold_of(tokenizer), TURN, ROOM)
    sampler, library = story_sampler(tokenizer, episodes), OwnLibrary(OwnRetriever("bm25"))
    rollout = AgentRollout(
        _agent(), stop=StopSignal(), sampler=sampler, speech=speech, library=library
    )
    starts = [Start(story.task, np.zeros(2, np.uint32)) for story in episodes]
    closed = []
    for first in range(0, len(starts), SIDE_BY_SIDE):
        for episode in rollout.play(starts[first : first + SIDE_BY_SIDE]):
            assert isinstance(episode.ended, Closed)
            closed.append(episode.ended)
    return closed


def _over_verifiers(folder: Path, tokenizer: Any, episodes: Sequence[Story]) -> list[float]:
    limits: dict[str, Any] = {"turn": TURN, "room": ROOM, "tokens": 0}
    tasks = len(episodes)
    arguments = {
        **{"count": tasks, "seed": SEED, "top_n": DOCUMENTS, "most": DOCUMENTS},
        **{"max_turns": TURNS, "prompt": PROMPT},
    }
    fields = {
        **{"id": "musique-multihop", "arguments": arguments, "model": "policy", "tasks": tasks},
        **{"harness": "direct"},
        "limits": {"seconds": 120.0, "turns": TURNS, "tokens": 0, "turn_tokens": TURN},
    }
    process = EnvironmentProcess(PYTHON, folder / "verifiers.log", fields)
    starts = [Start(number, np.array([number, 0], np.uint32)) for number in range(tasks)]
    settings = PlaySettings(
        **limits,
        temperature=1.0,
        seconds=120.0,
        side_by_side=SIDE_BY_SIDE,
        renderer=ChatRenderer(tokenizer, HERMES),
    )
    try:
        play = EnvironmentPlay(process, settings, Counts())
        played = play.play(starts, story_sampler(tokenizer, episodes), StopSignal())
    finally:
        process.end()
    found = []
    for episode in played:
        assert isinstance(episode.ended, Scored), episode.ended
        found.append(episode.ended.reward)
    return found
