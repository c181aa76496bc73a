"""Measures how fast a server samples LeReT's tries: all at once, a prompt or a try at a time.

The prompts have examples, whose tokens are the same for all questions; vLLM's cache of prefixes
computes them once. Hits are read from the server's own metrics. It needs vLLM's environment
(`make sidecar-cpu`, or QRAG_SIDECAR_PYTHON) and SmolLM2-135M-Instruct (`make llm`): of a tiny model
the server's own work for each step would be measured.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Case
from configs.leret import get_config
from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.environments.query_writing.prompt import Example, QueryPrompt, Variant
from qrag_jax.environments.query_writing.state import QueryState
from qrag_jax.environments.tools.documents import document_text
from qrag_jax.models.smollm2 import find_smollm2
from qrag_jax.rollouts.token_episodes import TokenStart
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.systems import leret

PYTHON = os.environ.get("QRAG_SIDECAR_PYTHON", ".venv-vllm/bin/python")
PROMPTS, EXAMPLES, QUESTIONS, ROUNDS = 4, 3, 8, 2
LEAST_RATIO = 2.0
AT_ONCE, BY_PROMPT, SINGLY = "all at once", "one prompt at a time", "one try at a time"
HITS, ASKED = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


def cases() -> list[Case]:
    """Tries a second, and the share of prompt tokens that the cache had."""
    if not Path(PYTHON).exists():
        return [Case(f"tries by vLLM: no vLLM at {PYTHON}; make sidecar-cpu", None, "")]
    if find_smollm2(download=False) is None:
        return [Case("tries by vLLM: no SmolLM2-135M-Instruct; make llm", None, "")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = _config()
        with (
            Run.open(folder / "run", 0.0) as run,
            leret.open_system(config, run) as system,
        ):
            stop = StopSignal()
            system.experience(run, stop)
            play = system.play(system.first_state(), stop)
            bare = system.inputs.agent.prompt
            prompt = dataclasses.replace(bare, variants=few_shot(bare))
            states = [system.inputs.train[each] for each in system.asked]
            assert system.served is not None
            url = system.served._server.url.removesuffix("/v1")
            seconds: dict[str, list[float]] = {AT_ONCE: [], BY_PROMPT: [], SINGLY: []}
            shares: dict[str, list[float]] = {name: [] for name in seconds}
            for number in range(ROUNDS + 1):  # the first one warms up
                for way, (told, lists) in enumerate(seconds.items()):
                    # Questions of their own, or the cache would have the whole prompts.
                    first = (len(seconds) * number + way) * QUESTIONS
                    asked = _starts(states[first : first + QUESTIONS], number)
                    every = [start for own in asked for start in own]
                    together = {AT_ONCE: [every], BY_PROMPT: asked}
                    before, began = _cache(url), time.monotonic()
                    for starts in together.get(told, [[start] for start in every]):
                        play(prompt, starts)
                    lists.append(time.monotonic() - began)
                    hits, queried = (a - b for a, b in zip(_cache(url), before, strict=True))
                    shares[told].append(hits / max(queried, 1.0))
    count = PROMPTS * QUESTIONS
    once, *others = (float(np.median(each[1:])) for each in seconds.values())
    title = f"{count} tries of {PROMPTS} prompts with {EXAMPLES} examples by vLLM"
    return [
        *(
            Case(
                f"{title}: {AT_ONCE}, beside {told}",
                count / once,
                "tries/s",
                peer=count / slower,
                ratio=slower / once,
                target=f">= {LEAST_RATIO:g}",
                holds=slower / once >= LEAST_RATIO,
            )
            for told, slower in zip((BY_PROMPT, SINGLY), others, strict=True)
        ),
        *(
            Case(
                f"{title}: prompt tokens that the prefix cache had, {told}",
                float(np.median(each[1:])),
                "share",
                details={"s of each round": ", ".join(f"{one:.2f}" for one in seconds[told])},
            )
            for told, each in shares.items()
        ),
    ]


def few_shot(prompt: QueryPrompt) -> tuple[Variant, ...]:
    """Prompts with examples of the invented world: at the second hop, the bridge entity's name."""
    variants = []
    for number in range(PROMPTS):
        examples = []
        for place in range(EXAMPLES):
            question = bridge_question(1, "train", number * EXAMPLES + place)
            passage = question.supporting[0]
            text = document_text(passage.title, passage.text, clean=False)
            title = question.supporting[1].title
            examples.append(Example(question.question, (text,), title))
        variants.append(Variant(f"examples-{number}", tuple(examples)))
    return tuple(variants)


def _config() -> Any:
    config = get_config("quick").unlock()
    config.model.path = "smollm2"
    config.model.lora.update(rank=8)
    config.questions.update(bridge_train=3 * (ROUNDS + 1) * QUESTIONS, bridge_dev=4)
    config.questions.bridge_corpus = config.questions.bridge_train
    config.writing.query_tokens = 24
    config.styles.most_words = 4
    config.sampling.update(engine="server", room=1024)
    config.llm.server.update(
        python=str(Path(PYTHON).absolute()), cpu_cache_gib=1, arguments=("--enforce-eager",)
    )
    return config


def _starts(states: Sequence[QueryState], number: int) -> list[list[TokenStart]]:
    """By prompt, the tries of all questions."""
    return [
        [
            TokenStart(state.asked_by(variant), np.array([number, place], np.uint32))
            for place, state in enumerate(states)
        ]
        for variant in range(1, PROMPTS + 1)
    ]


def _cache(url: str) -> tuple[float, float]:
    """Prompt tokens that the cache had, and all that were looked up, so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:  # noqa: S310
        return counters(reply.read().decode())


def counters(text: str) -> tuple[float, float]:
    """The two counters in the text of Prometheus, summed over their labels."""
    found = {HITS: 0.0, ASKED: 0.0}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if (bare := name.partition("{")[0]) in found:
            found[bare] += float(value)
    return found[HITS], found[ASKED]
