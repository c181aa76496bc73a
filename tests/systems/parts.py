"""Parts of a run of Q-RAG for tests: its samples, their chunks, the run in float32."""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from qrag_jax.data.loading import LoadedSamples, load_split
from qrag_jax.data.sample import Split
from qrag_jax.runtime.config_fields import CONFIG_NAME
from qrag_jax.systems.config import load_config
from qrag_jax.systems.q_rag.config import QRagConfig
from qrag_jax.systems.q_rag.run import SavedRun


def samples_of(config: ConfigDict, split: Split) -> LoadedSamples:
    """The samples of a split."""
    taken = QRagConfig.of(config)
    data = taken.data if split == "train" else taken.dev_data
    return load_split(data, split, hold_out=not config.eval.path)


def chunks_of(workdir: Path, question: str, cache: str) -> list[str]:
    """The chunks of a run's evaluation question; `cache` keeps tokens and corpora."""
    config = load_config(workdir / CONFIG_NAME)
    config.data.cache = cache
    for sample in samples_of(config, "dev").all:
        if sample.question == question:
            return list(sample.chunks)
    raise AssertionError(f"no sample of {question!r}")


def opened(workdir: Path) -> SavedRun:
    """A run that computes in float32, as torch does."""
    config = load_config(workdir / CONFIG_NAME)
    config.encoder.dtype = "float32"
    return SavedRun.open(workdir, config)
