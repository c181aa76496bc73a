"""Our side of Q-RAG's cases, built from the parts that train.py and evaluate.py use."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape, EpisodeSource, stack
from qrag_jax.data.loading import load_split
from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import TextTokenizer, TokenStore
from qrag_jax.errors import InputError
from qrag_jax.feedback.facts import fact_feedback
from qrag_jax.learners.optimizers import learning_rate_schedule, make_optimizer
from qrag_jax.learners.state import Parts
from qrag_jax.learners.two_towers import PQNGradient, TwoTowers, make_update
from qrag_jax.models.compute.precision import precision
from qrag_jax.models.first_encoder import (
    OF_MINILM,
    UNNORMALISED_SCALE,
    ScratchConfig,
    load_encoder,
    make_scratch_folder,
)
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.models.trunks.families import BertConfig
from qrag_jax.models.trunks.transformer import Transformer
from qrag_jax.rollouts.block_shapes import choose_block_shapes
from qrag_jax.rollouts.chunks import Actor
from qrag_jax.runtime.mesh import ALL_SPLIT, make_mesh, shard_batch
from qrag_jax.runtime.platform import Platform
from qrag_jax.systems.q_rag_config import QRagConfig

DATA = Path(os.environ.get("QRAG_DATA", "../shared/data"))
SCHEDULED = 1000  # optimizer steps for which the peer gets learning rates

MINILM, SMALL = BertConfig(30522, 384, 6, 12, 1536), BertConfig(30522, 32, 1, 2, 64)
INVENTED = "examples/worlds/records.py:large_hotpotqa"


@dataclasses.dataclass(frozen=True)
class Texts:
    """Tokenised questions under a config; `origin` says in words where they come from."""

    config: QRagConfig
    samples: Sequence[Sample]
    store: TokenStore
    shape: EpisodeShape
    origin: str

    def batch(self, number: int, size: int) -> EpisodeBatch:
        """The `number`-th batch of `size` questions; the first question follows the last one."""
        source = EpisodeSource(self.store, self.shape)
        start = number * size
        return stack([source.episode(i % len(source)) for i in range(start, start + size)])


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A text encoder, the weights of one tower, and its name in words."""

    encoder: TextEncoder
    params: Params
    name: str

    def towers(self) -> Params:
        """Both towers at the start of training: the same weights twice, stacked on axis 0."""
        return jax.tree.map(lambda leaf: np.stack([leaf, leaf]), self.params)


def read_texts(
    config: ConfigDict, name: str, questions: int, cache: Path
) -> tuple[QRagConfig, Sequence[Sample], str]:
    """Reads records of the data set `name`, or invents questions if the records are not there.

    Returns:
        The config with these data (on a GPU in bfloat16), the samples, and their origin in words.
    """
    with config.unlocked():
        config.data.cache = str(cache)
        config.data.limit = questions
        config.data.path = str(DATA / name) if (DATA / name).exists() else INVENTED
        config.encoder.dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    taken = QRagConfig.of(config)
    samples = load_split(taken.data, "train", hold_out=True).all[:questions]
    origin = "invented questions" if taken.data.path == INVENTED else name
    return taken, samples, f"{origin}, {len(samples)} questions"


def load_texts(
    config: QRagConfig, samples: Sequence[Sample], origin: str, tokenizer: TextTokenizer
) -> Texts:
    """Tokenises samples."""
    store = config.data.tokenised(samples, tokenizer)
    return Texts(config, samples, store, EpisodeShape.holding([store]), origin)


def load_tokenizer(minilm: Path | None, samples: Sequence[Sample], folder: Path) -> TextTokenizer:
    """MiniLM's tokenizer, or without MiniLM one that is trained on the samples."""
    if minilm is None:
        texts = (text for s in samples for text in (s.question, *s.chunks))
        make_scratch_folder(folder, texts, ScratchConfig(1, 32, 2, 8000, 512), 0)
    return TextTokenizer.load(minilm or folder)


def genuine_minilm(folder: Path, config: QRagConfig) -> Encoder:
    """The pretrained MiniLM."""
    loaded = load_encoder(folder, dataclasses.replace(config.encoder, **OF_MINILM))
    return Encoder(loaded.encoder, loaded.params, "genuine all-MiniLM-L6-v2")


def random_encoder(
    sizes: BertConfig, name: str, tokenizer: TextTokenizer, config: QRagConfig
) -> Encoder:
    """A BERT of these sizes with random weights."""
    encoder = TextEncoder(
        module=Transformer(
            sizes, precision(config.encoder.dtype, Platform.of()), config.encoder.remat
        ),
        width=sizes.hidden_size,
        max_positions=sizes.max_position_embeddings,
        opening_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
        pad_id=tokenizer.pad_id,
        scale=config.encoder.scale or UNNORMALISED_SCALE,
    )
    rng = np.random.default_rng(0)

    def fill(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        noise = 0.02 * rng.standard_normal(leaf.shape, np.float32)
        return noise + 1 if path[-1].key == "scale" else noise

    shapes = jax.eval_shape(encoder.module.init_params, jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(fill, shapes)
    return Encoder(encoder, params, f"{name} (random weights)")


class Training:
    """The training step as train.py builds it, with its state."""

    def __init__(self, texts: Texts, encoder: Encoder) -> None:
        config = texts.config
        self.mesh = make_mesh()
        parts = Parts(make_optimizer(config.optimizer), has_targets=True)
        stores, shape = [texts.store], texts.shape
        blocks = choose_block_shapes(
            config.encoder, config.rollout, encoder.encoder, shape, stores, platform=Platform.of()
        )
        rules = ALL_SPLIT
        towers = TwoTowers(
            mesh=self.mesh,
            shardings=parts.shardings(self.mesh, rules, encoder.params),
            parts=parts,
            actor=Actor(encoder.encoder, blocks, config.rollout),
            config=config.pqn,
            schedule=learning_rate_schedule(config.optimizer),
            peak=config.optimizer.learning_rate,
        )
        feedback = fact_feedback(config.reward, stop_action=config.env.stop_action)
        self.program = make_update(towers, PQNGradient(towers.actor, config.pqn, feedback))
        self.state = towers.first_state(encoder.params, 42)

    def step(self, batch: EpisodeBatch) -> dict[str, float]:
        """One update on a batch of NumPy arrays; returns its metrics when it is done."""
        self.state, metrics = self.program(self.state, shard_batch(self.mesh, batch))
        return jax.tree.map(float, jax.device_get(jax.block_until_ready(metrics)))


def peer_settings(texts: Texts, encoder: Encoder) -> Any:
    """The settings of the peer (`tests.support.torch_pqn`), from the config of our training.

    Raises:
        InputError: the config has a step cost, which the peer does not compute.
    """
    from tests.support.torch_pqn import Settings

    config = texts.config
    if config.reward.step_cost:
        raise InputError(
            f"config.reward.step_cost is {config.reward.step_cost}, but the PyTorch peer computes "
            "no step cost; set it to 0."
        )
    schedule = learning_rate_schedule(config.optimizer)
    rates = np.asarray(jax.vmap(schedule)(jnp.arange(SCHEDULED)))
    return Settings(
        encoder=encoder.encoder,
        rollout=config.rollout,
        pqn=config.pqn,
        optimizer=config.optimizer,
        learning_rates=tuple(rates.tolist()),
        penalize_extra_steps=config.reward.penalize_extra_steps,
        per_fact_reward=config.reward.per_fact_reward,
    )
