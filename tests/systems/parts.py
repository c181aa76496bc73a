"""Makes single parts of a config's system for tests: samples, encoder, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from configs import common
from qrag_jax.data.loading import LoadedSamples, load_split, sources_section
from qrag_jax.data.sample import Sample, Split
from qrag_jax.models.first_encoder import prepare_encoder
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.systems.config import load_config
from qrag_jax.systems.q_rag_config import QRagConfig
from qrag_jax.systems.saved_run import SavedRun


def only_source(config: ConfigDict, name: str) -> None:
    """Replaces all sources of a config by one."""
    with config.unlocked():
        config.data.sources = sources_section([name])
        config.data.path = common.invented(config)


def samples_of(config: ConfigDict, split: Split, *, hold_out: bool = True) -> LoadedSamples:
    """The samples of a split."""
    taken = QRagConfig.of(config)
    data = taken.data if split == "train" else taken.dev_data
    return load_split(data, split, hold_out=hold_out and not config.eval.path)


def prepared(config: ConfigDict, workdir: Path, samples: Sequence[Sample] = ()) -> LoadedEncoder:
    """The encoder that a run starts from."""
    taken = QRagConfig.of(config)
    texts = (text for s in samples for text in (s.question, *s.chunks))
    kept = (workdir / "config.json").exists()
    return prepare_encoder(taken.encoder, workdir, texts, taken.seed, is_kept=kept)


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
