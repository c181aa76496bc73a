"""The smallest possible system: it fits a line to points that the host draws at every step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from qrag_jax.evaluators.evaluation import Evaluation
from qrag_jax.runtime.config_fields import fill, section
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.saved_config import TrainConfig, save_config
from qrag_jax.runtime.step_log import LogText


class State(NamedTuple):
    params: jax.Array
    step: jax.Array


def get_config() -> ConfigDict:
    train = section(TrainConfig, steps=12, log_every=2, eval_every=4, checkpoint_every=4)
    return ConfigDict({"system": "line_fit", "rate": 0.5, "train": train})


def check(config: ConfigDict) -> None:
    fill(TrainConfig, config.train, "train")


def before_devices(config: ConfigDict, *, dry: bool = False, described: bool = False) -> None:
    """It needs nothing."""


@contextlib.contextmanager
def open_system(
    config: ConfigDict, run: Run, *, dry: bool = False, devices: Any = None
) -> Iterator[LineFit]:
    if not run.has_begun:
        save_config(config, run.config_path)
    yield LineFit(config)


class Points:
    """Points on the line y = 2x + 1; the host draws new points at every step."""

    def __init__(self, position: int) -> None:
        self.waited = {"input": 0.0}
        self.samples = np.zeros((1, 2), np.int32)
        self._position = position

    def next(self, state: State, number: int, stop: StopSignal) -> tuple[jax.Array, jax.Array]:
        stop.check()
        assert self._position == number
        x = np.random.default_rng(number).standard_normal(8).astype(np.float32)
        self._position += 1
        self.samples[:] = number
        return jnp.asarray(x), jnp.asarray(2 * x + 1)

    def prepare(self, state: State) -> None:
        pass

    def position(self) -> tuple[Any, list[Any]]:
        return self._position, []

    def counts(self) -> dict[str, float]:
        return {"points/drawn": 8.0 * self._position}


class LineFit:
    """See `systems.System`."""

    profile = 0
    data: dict[str, str] = {"points": "2x+1"}  # noqa: RUF012
    provenance: dict[str, Any] = {}  # noqa: RUF012
    line = "a line"

    def __init__(self, config: ConfigDict) -> None:
        self.train = fill(TrainConfig, config.train, "train")
        self.log_text = LogText(
            lambda numbers: [f"points {n}" for n in numbers], {"loss": ".3f"}, ""
        )
        rate = config.rate

        def update(state: State, points: tuple[jax.Array, jax.Array]) -> tuple[State, dict]:
            def loss(params: jax.Array) -> jax.Array:
                return jnp.square(params[0] * points[0] + params[1] - points[1]).mean()

            value, gradient = jax.value_and_grad(loss)(state.params)
            new = State(state.params - rate * gradient, state.step + 1)
            return new, {"loss": value, "skipped": jnp.float32(0)}

        self._update = jax.jit(update, donate_argnums=0)

    def first_state(self) -> State:
        return State(jnp.zeros(2), jnp.int32(0))

    def experience(self, run: Run, stop: StopSignal) -> Points:
        return Points(run.progress.batches or 0)

    def update(self, state: State, episodes: Any) -> tuple[State, dict[str, Any]]:
        return self._update(state, episodes)

    def evaluate(self, state: State, step: int, stop: StopSignal) -> Evaluation:
        error = float(jnp.abs(state.params - jnp.array([2.0, 1.0])).max())
        scores = {"error": error}
        metrics = {"eval/error": error}
        return Evaluation(metrics, {"untrained/error": error}, f"step {step}", -error, scores)

    def export(self, state: State, out: Path) -> None:
        (out / "line.txt").write_text(f"{float(state.params[0])} {float(state.params[1])}")
