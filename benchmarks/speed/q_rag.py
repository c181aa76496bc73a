"""Q-RAG's update against PyTorch: same questions, weights, optimizer.

Our side is the training that train.py opens. HotpotQA's records come from the folder QRAG_DATA;
without them, and in quick sizes, questions are invented. The peer (`tests.support.torch_pqn`)
computes whole batches, chunks in mini-batches sorted by length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import DATA, INVENTED
from benchmarks.report import Case
from benchmarks.speed.measure import OURS, Setting, beside
from configs import hotpotqa
from qrag_jax import systems
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from tests.support.torch_pqn import BatchedPeer

STOP = StopSignal()


def update_cases(setting: Setting) -> Iterator[Case]:
    """States that PQN learns from in a second, by MiniLM; quick: by one tiny layer."""
    gpu, quick = setting.device == "cuda", setting.quick
    questions, name = 2 if quick else 256 if gpu else 16, "tiny" if quick else "MiniLM"
    config = hotpotqa.get_config(name.lower())
    with config.unlocked():
        config.stages = ("pqn",)
        # As PyTorch's towers.
        config.encoder.update(normalise=False, scale=0.1, **setting.blocks)
        config.encoder.dtype = "bfloat16" if gpu else "float32"
        if not quick:
            downloaded = (DATA / "hotpotqa").exists()
            config.data.path = str(DATA / "hotpotqa") if downloaded else INVENTED
        config.data.update(cache=str(setting.folder), limit=128 if quick else 2048)
        config.train.update(batch_size=questions, accumulation=1)
    kind = systems.check(config)
    system: Any  # Q-RAG's, with its data and its encoder
    with Run.open(setting.folder / "q_rag", 0.0) as run, kind.open_system(config, run) as system:
        state, experience = system.first_state(), system.experience(run, STOP)
        taken, params = system.config, jax.tree.map(np.asarray, state.params)
        peer = BatchedPeer(
            system.inputs.model.encoder,
            params,
            *(taken.rollout, taken.pqn, taken.optimizer, taken.reward),
            device=setting.device,
        )
        batches = [experience.next(state, n, STOP) for n in range(2 + setting.rounds)]
        arrays = [jax.tree.map(np.array, batch) for batch in batches]
        learned: dict[str, list[float]] = {OURS: [], "PyTorch": []}

        def ours(number: int) -> None:
            nonlocal state
            state, metrics = system.update(state, batches[number])
            learned[OURS].append(float(metrics["env_steps"]))

        def theirs(number: int) -> None:
            learned["PyTorch"].append(peer.step(arrays[number]).transitions)

        def amount() -> float:
            """States of a batch; `env_steps` counts from the first batch on."""
            states = np.diff([0.0, *learned[OURS]])
            if not np.array_equal(states, learned["PyTorch"]):
                raise ValueError("both sides do not learn from the same states")
            return float(states.mean())

        yield beside(
            setting,
            f"Q-RAG, PQN step, {name}, {questions} questions",
            amount,
            "transitions/s",
            {OURS: ours, "PyTorch": theirs},
            least=1.3,
            details={"data": taken.data.path},
        )
