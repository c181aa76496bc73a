"""A small DeepRetrieval run: its config, and its system."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.runtime.run import Run
from qrag_jax.systems import deepretrieval
from qrag_jax.systems.deepretrieval import DeepRetrieval
from qrag_jax.systems.deepretrieval_config import default_config

SCRIPT_STEPS, RL_STEPS = 2, 2


def small(**fields: Any) -> ConfigDict:
    """The config of a run of seconds; fields are named as `section__field`."""
    config = default_config()
    config.model.tiny.update(layers=1, hidden=32, heads=2, key_heads=1, head_dim=16)
    config.model.tiny.update(copies=False, intermediate=32, vocab=420, positions=512)
    config.model.block_tokens = 1024
    config.queries.update(made_train=6, made_test=4, held_out=3, made_corpus=25, clauses=1)
    config.writing.update(prompt="bare_rewrite", query_tokens=24)
    config.sampling.update(temperature=1.0, room=448, chunk=64, rows=32)
    config.script.update(steps=SCRIPT_STEPS, batch_size=4, learning_rate=2e-3)
    config.ppo.kl = 0.01
    config.grpo.update(members=2, longest=24)
    config.train.update(steps=RL_STEPS, batch_size=4)
    config.train.update(eval_every=100, checkpoint_every=1, log_every=1)
    config.optimizer.learning_rate = 1e-3
    config.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in fields.items()}
    )
    return config


@contextlib.contextmanager
def opened(config: ConfigDict, workdir: Path) -> Iterator[DeepRetrieval]:
    """The system of a run in `workdir`."""
    with Run.open(workdir, 0.0) as run, deepretrieval.open_system(config, run) as system:
        yield system
