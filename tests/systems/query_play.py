"""A small LeReT run, and a stand-in for its model that writes given queries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from qrag_jax.environments.query_writing.agent import QueryAgent
from qrag_jax.environments.query_writing.state import QueryState
from qrag_jax.environments.tools.episode import Look, Said, Speak
from qrag_jax.rollouts.corpus_library import CorpusLibrary
from qrag_jax.rollouts.scripted_tokens import Talk, encoded
from qrag_jax.rollouts.token_episodes import Speech, TokenEpisode, TokenStart
from qrag_jax.runtime.run import Run
from qrag_jax.systems import leret
from qrag_jax.systems.leret import Leret
from qrag_jax.systems.leret_config import default_config

SCRIPT_STEPS, SFT_STEPS, PAIR_STEPS = 12, 2, 2


def small(**fields: Any) -> ConfigDict:
    """The config of a run of seconds; fields are named as `section__field`."""
    config = default_config()
    config.model.tiny.update(layers=1, hidden=32, heads=2, key_heads=1, head_dim=16)
    config.model.tiny.update(copies=False, intermediate=32, vocab=420, positions=256)
    config.model.block_tokens = 1024
    config.questions.update(bridge_train=6, bridge_dev=3, bridge_corpus=6)
    config.search.update(stemmer="", stop_words="", gold_by="passage")
    config.writing.update(prompt="bare_query", k=4, passage_words=8, query_tokens=40)
    config.styles.most_words = 4
    config.pairs.degenerate = ("[1]",)
    config.tries.update(prompts=2, samples=4, questions=3)
    config.sampling.update(room=256, chunk=64, rows=32)
    config.script.update(steps=SCRIPT_STEPS, batch_size=4, learning_rate=2e-2)
    config.sft.update(steps=SFT_STEPS, batch_size=4)
    config.preference.update(steps=PAIR_STEPS, batch_size=4)
    config.train.update(eval_every=100, checkpoint_every=1, log_every=1)
    config.optimizer.warmup_steps = 1
    config.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in fields.items()}
    )
    return config


@contextlib.contextmanager
def opened(config: ConfigDict, workdir: Path) -> Iterator[Leret]:
    """The system of a run in `workdir`."""
    with Run.open(workdir, 0.0) as run, leret.open_system(config, run) as system:
        yield system


def said(
    agent: QueryAgent, library: CorpusLibrary, speech: Speech, start: TokenStart, text: str
) -> TokenEpisode:
    """The episode of a model that writes `text`."""
    play = agent.play(start.task)
    asked: Any = next(play)
    assert isinstance(asked, Speak)
    messages = asked.messages
    reply: Any = Said(text, "stop")
    try:
        while True:
            asked = play.send(reply)
            assert isinstance(asked, Look)
            (reply,) = library.look([(start.task, asked)])
    except StopIteration as end:
        return encoded(Talk(end.value, ((messages, text),)), speech)


Writes = Callable[[QueryState, np.ndarray], str]  # (state, key) → query


def play_by(system: Any, writes: Writes) -> Callable[..., list[TokenEpisode]]:
    """A stand-in for `system.play`: plays tries by a rule, asked by a prompt."""

    def play(prompt: Any, starts: Sequence[TokenStart]) -> list[TokenEpisode]:
        inputs = system.inputs
        agent = QueryAgent(prompt, inputs.agent.k, inputs.agent.stop)
        return [
            said(agent, inputs.library, inputs.speech, each, writes(each.task, each.key))
            for each in starts
        ]

    return play
