"""The tiny trainings whose numbers are pinned, and how they are run.

A training is a config of `configs/` with a few steps, run by `qrag_jax.train` in this process. What
is kept of it are its logged metrics at every step (loss, gradient norm, reward, return) and its
scores after the last one; times, memory and counts of compiles are not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from configs import hotpotqa
from qrag_jax import train
from qrag_jax.data.sample import Sample
from tests.entry_points import metric_lines
from tests.llm.model_server import ModelServer, supported_answers
from tests.pinned.pieces import Numbers
from tests.systems.parts import samples_of

MEASURED = ("train/", "eval/")  # keys that are kept
LEFT_OUT = "train/padding_share"  # differs by the number of devices; nothing else does


class Pinned(NamedTuple):
    """A training: its config file and variant, the fields that make it short, its stages."""

    config: str
    fields: Mapping[str, Any]
    server: Callable[[], AbstractContextManager[Any]] | None = None
    left_out: str = LEFT_OUT


_EVERY_STEP = {"train.log_every": 1, "train.checkpoint_every": 1000}
_Q_RAG = _EVERY_STEP | {"train.steps": 12, "train.eval_every": 12}
_HARR = _EVERY_STEP | {"train.steps": 10, "train.eval_every": 10, "policy.passages": 5}
# Few and short tries, so that none flips by rounding.
_LERET = _EVERY_STEP | {
    "iterations": 1,
    "questions.bridge_train": 8,
    "script.steps": 12,
    "sft.steps": 3,
    "preference.steps": 4,
    "writing.query_tokens": 32,
    "optimizer.matrices": "adam",
}


def _llm() -> AbstractContextManager[Any]:
    """A server that answers if all supporting facts are in its prompt."""
    config = hotpotqa.get_config("tiny")
    samples = [*samples_of(config, "train").all, *samples_of(config, "dev").all]
    answers: dict[str, Sample] = {sample.question: sample for sample in samples}
    return ModelServer(supported_answers(answers))


TRAININGS: Mapping[str, Pinned] = {
    "q_rag": Pinned("hotpotqa:tiny", _Q_RAG),
    "q_rag_imitate_pqn": Pinned(
        "two_wiki:tiny", _Q_RAG | {"stages": ("imitate", "pqn"), "imitate.steps": 6}
    ),
    "q_rag_stop_answers": Pinned(
        "own:tiny", _Q_RAG | {"reward.name": "answer_in_chunk", "env.stop_action": True}
    ),
    "q_rag_llm": Pinned(
        "hotpotqa:tiny",
        _Q_RAG | {"reward.name": "answer_em", "reward.penalize_extra_steps": False},
        _llm,
    ),
    "harr_grpo": Pinned("harr_grpo:tiny", _HARR),
    "harr_ppo": Pinned("harr_ppo:tiny", _HARR),
    # No answer is right yet, so that GRPO's groups are flat: it pins imitation and the sampler.
    "rlvr": Pinned("rlvr:tiny", _EVERY_STEP | {"sft.steps": 8, "train.steps": 3}),
    # Pairs are learned from their reference on, where a margin is 0 but for rounding, so the share
    # of those above 0 says nothing.
    "leret": Pinned("leret:tiny", _LERET, left_out=f"{LEFT_OUT} train/accuracy"),
    "deepretrieval": Pinned("deepretrieval:tiny", _EVERY_STEP | {"script.steps": 12}),
}


def run(name: str, workdir: Path) -> Numbers:
    """Trains, and returns the numbers of all logged steps, oldest first."""
    pinned = TRAININGS[name]
    file, _, variant = pinned.config.partition(":")
    config = importlib.import_module(f"configs.{file}").get_config(variant).unlock()
    with pinned.server() if pinned.server else nullcontext() as server:
        config.update_from_flattened_dict(dict(pinned.fields))
        if server is not None:
            config.llm.update(url=server.url, model="tiny")
        assert train.train(config.lock(), workdir) == 0
    numbers: Numbers = {}
    for line in metric_lines(workdir):
        for key, value in line.items():
            if key.startswith(MEASURED) and key not in pinned.left_out.split():
                numbers.setdefault(key, []).append(value)
    return numbers
