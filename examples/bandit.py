"""A whole system in one file: a linear bandit that takes one passage of a question.

    qrag train --config=examples/bandit.py --workdir=runs/bandit
    qrag evaluate --workdir=runs/bandit --system=examples/bandit.py

The policy is a softmax of w·φ(question, passage). REINFORCE (Williams, 1992) with the expected
reward as its baseline learns w. Batches depend on seed and step, so a resumed run is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from examples.worlds import records
from qrag_jax.evaluators.evaluation import Evaluation
from qrag_jax.runtime.config_fields import TrainConfig, check_value, section
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.systems import System

FEATURES = ("share of the question's words", "first words shared", "length / 30 words")


def get_config() -> ConfigDict:
    train = section(TrainConfig, steps=40, batch_size=16, log_every=5, eval_every=20)
    return ConfigDict({"system": "examples/bandit.py", "rate": 8.0, "seed": 42, "train": train})


def features(record: Mapping[str, Any]) -> np.ndarray:
    """φ of each passage of a question, float32 `[passages, features]`."""
    asked = {*record["question"].lower().rstrip("?").split()}
    rows = []
    for words in (passage.lower().split() for passage in record["chunks"]):
        shared = len(asked & {*words}) / len(asked)
        rows.append((shared, len(asked & {*words[:3]}) / 3, len(words) / 30))
    return np.array(rows, np.float32)


class Questions(NamedTuple):
    features: np.ndarray  # float32 `[question, passage, feature]`
    rewards: np.ndarray  # float32 `[question, passage]`

    @classmethod
    def read(cls, split: Any) -> Questions:
        rows = [row for row in records.tiny_own(split) if len(row["chunks"]) == 8]
        gold = [[float(place in row["support"]) for place in range(8)] for row in rows]
        return cls(np.stack([features(row) for row in rows]), np.array(gold, np.float32))


class State(NamedTuple):
    params: jax.Array  # w
    step: jax.Array


class Batches:  # a `rollouts.experience.Experience`
    def __init__(self, config: ConfigDict, questions: Questions, position: int) -> None:
        self.waited = {"input": 0.0}
        self.samples = np.zeros((config.train.batch_size, 2), np.int32)  # question and epoch
        self._config, self._questions, self._position = config, questions, position

    def next(self, state: State, number: int, stop: StopSignal) -> Any:
        stop.check()
        draw = np.random.default_rng((self._config.seed, number))
        chosen = draw.integers(len(self._questions.rewards), size=len(self.samples))
        self._position, self.samples[:, 0] = self._position + 1, chosen
        return jax.random.key(number), *(leaf[chosen] for leaf in self._questions)

    def prepare(self, state: State) -> None:
        pass

    def position(self) -> tuple[Any, list[Any]]:
        return self._position, []

    def counts(self) -> dict[str, float]:
        return {"episodes": float(self._position * len(self.samples))}


class Bandit(System):
    profile = 0
    data: dict[str, str] = {"records": "tiny_own"}  # noqa: RUF012
    provenance: dict[str, Any] = {}  # noqa: RUF012
    line = f"a bandit of {len(FEATURES)} features"

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        check_value(TrainConfig, config.train, "config.train")

    def __init__(self, config: ConfigDict) -> None:
        self.shown = {"reward": ".3f"}
        self.train = check_value(TrainConfig, config.train, "config.train")
        self._config = config
        self._dev = Questions.read("dev")

        def update(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
            key, phi, rewards = batch
            scores = phi @ state.params
            actions = jax.random.categorical(key, scores)[:, None]
            reward = jnp.take_along_axis(rewards, actions, axis=1)[:, 0]
            advantage = reward - (jax.nn.softmax(scores) * rewards).sum(axis=1)

            def loss(w: jax.Array) -> jax.Array:
                log_probs = jnp.take_along_axis(jax.nn.log_softmax(phi @ w), actions, axis=1)[:, 0]
                return -(advantage * log_probs).mean()

            value, gradient = jax.value_and_grad(loss)(state.params)
            new = State(state.params - config.rate * gradient, state.step + 1)
            return new, {"loss": value, "reward": reward.mean(), "skipped": jnp.float32(0)}

        self._update = jax.jit(update, donate_argnums=0)

    def names(self, numbers: Sequence[int], step: int) -> list[str]:
        return [f"question {number}" for number in numbers]

    def first_state(self) -> State:
        return State(jnp.zeros(len(FEATURES)), jnp.int32(0))

    def experience(self, run: Run, stop: StopSignal) -> Batches:
        return Batches(self._config, Questions.read("train"), run.progress.batches or 0)

    def update(self, state: State, episodes: Any) -> tuple[State, dict[str, jax.Array]]:
        return self._update(state, episodes)

    def evaluate(self, state: State, step: int, stop: StopSignal) -> Evaluation:
        """The share of questions whose best passage is a supporting one."""
        best = (self._dev.features @ np.asarray(state.params)).argmax(axis=1)
        hit = float(np.take_along_axis(self._dev.rewards, best[:, None], axis=1).mean())
        line = f"step {step}: {hit:.3f} of the best passages are supporting ones"
        return Evaluation({"eval/hit": hit}, {"untrained/hit": hit}, line, hit, {"hit": hit})

    def export(self, state: State, out: Path) -> None:
        weights = zip(FEATURES, np.asarray(state.params).tolist(), strict=True)
        (out / "weights.txt").write_text("".join(f"{name}: {w}\n" for name, w in weights))


SYSTEM = Bandit
