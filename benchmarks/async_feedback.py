"""Training steps a second with a language model that takes seconds to answer, beside steps whose
rewards come from the supporting facts, in turns in one process."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from benchmarks.llm_client import echo_server
from benchmarks.report import Case
from configs import quickstart
from qrag_jax import experiment, train
from qrag_jax.data.episodes import training_batches
from qrag_jax.deferred_steps import DeferredSteps
from qrag_jax.feedback.service import open_rewards
from qrag_jax.learners import placement
from qrag_jax.learners.optimizers import make_optimizer
from qrag_jax.learners.pqn import TrainState
from qrag_jax.programs import Programs
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.steps import Batches, FusedSteps, Steps

# Answers that take so long, with so many batches in flight that they may.
SECONDS, STALENESS, ROUNDS, STEPS = 2.0, 1, 9, 6
QUICK_SECONDS, QUICK_STALENESS, QUICK_ROUNDS, QUICK_STEPS = 0.2, 16, 3, 20


class Side:
    """One way to step, with a state of its own."""

    def __init__(self, steps: Steps, state: TrainState) -> None:
        self.steps, self.state, self.number = steps, state, 0
        self.steps.begin([])

    def go(self, count: int) -> float:
        """Seconds for so many steps."""
        before = time.perf_counter()
        for _ in range(count):
            stepped = self.steps.step(self.state, self.number, StopSignal())
            assert stepped is not None
            self.state, metrics = stepped
            self.number += 1
        jax.block_until_ready(metrics)
        return time.perf_counter() - before


def cases(quick: bool) -> list[Case]:
    """The share of the steps a second that is kept."""
    seconds, staleness = (QUICK_SECONDS, QUICK_STALENESS) if quick else (SECONDS, STALENESS)
    rounds, count = (QUICK_ROUNDS, QUICK_STEPS) if quick else (ROUNDS, STEPS)
    with echo_server(seconds) as url, tempfile.TemporaryDirectory() as folder:
        config = quickstart.get_config("tiny" if quick else "").unlock()
        config.reward.update(name="answer_f1", staleness=staleness)
        config.llm.update(url=url, model="echo", cache="", concurrency=1024)
        config.train.steps = 10_000
        if not quick:
            config.data.synthetic.train = 1000
        return _measured(config, Path(folder), rounds, count, seconds)


def _measured(
    config: ConfigDict, workdir: Path, rounds: int, count: int, answers: float
) -> list[Case]:
    mesh = make_mesh(config.runtime.mesh)
    inputs = train.load_inputs(config, workdir)
    optimizer, tower = make_optimizer(experiment.optimizer_config(config)), inputs.encoder.trained
    shardings = placement.state_shardings(mesh, (), tower, optimizer)
    programs = Programs(config, mesh, shardings, inputs)

    def batches() -> Batches:
        weights = experiment.mixture_shares(config, inputs.stores)
        size = config.train.batch_size
        settings: dict[str, Any] = {"batch_size": size, "seed": config.seed}
        return Batches(mesh, training_batches(inputs.stores, weights, inputs.shape, **settings))

    def state() -> TrainState:
        return placement.first_state(shardings, tower, optimizer, config.seed)

    with open_rewards(config, workdir, print) as opening:
        rewards = opening.ready(StopSignal())
        assert rewards is not None
        deferred = DeferredSteps(
            mesh,
            programs.play_step,
            programs.learn_step,
            batches(),
            inputs.train_samples,
            rewards,
            config.reward.staleness,
            config.train.steps,
        )
        facts, model = Side(FusedSteps(programs.step, batches()), state()), Side(deferred, state())
        facts.go(2), model.go(2)  # compilation
        times: list[tuple[float, float]] = []
        waited = 0.0
        for turn in range(rounds):
            pair = {}
            for side in (facts, model) if turn % 2 else (model, facts):
                if side is model:
                    side.go(config.reward.staleness + 1)  # what was answered meanwhile is used up
                before = side.steps.waited.get("feedback", 0.0)
                pair[side] = side.go(count)
                waited += side.steps.waited.get("feedback", 0.0) - before
            times.append((pair[facts], pair[model]))
        unscored = rewards.counts()["llm/failures"]
    kept = statistics.median(facts / model for facts, model in times)
    tiny = not config.encoder.path
    return [
        Case(
            f"steps/s with answers that take {answers:g} s, K = {config.reward.staleness} "
            f"({'tiny encoder' if tiny else 'MiniLM'}); peer: rewards from the supporting facts",
            count / statistics.median(model for _, model in times),
            "steps/s",
            peer=count / statistics.median(facts for facts, _ in times),
            ratio=kept,
            # A tiny encoder's steps are over before the client has sent their questions.
            target=None if tiny else "ratio >= 0.9",
            holds=None if tiny else kept >= 0.9,
            details={
                "ratio by round": ", ".join(f"{facts / model:.2f}" for facts, model in times),
                "seconds waited for answers": waited,
                "failed calls": unscored,
                "steps by round": float(count),
            },
        )
    ]
