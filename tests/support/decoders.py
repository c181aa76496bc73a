"""A small random decoder that both sides read, its learner, and how near both must be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from qrag_jax.learners.state import Parts
from qrag_jax.learners.token_policy import TokenEpisodes, TokenPolicy, grpo_tokens
from qrag_jax.learners.update import PerAction
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.first_language_model import load_language_model
from qrag_jax.models.pretrained import LoadedLanguageModel
from qrag_jax.models.trunks.families import DECODERS
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.rollouts.trajectories import TokenBlocks
from qrag_jax.runtime.mesh import make_mesh

EQUAL_LOSS, EQUAL_GRADIENT = 1e-5, 1e-4  # differences allowed; of gradients: over the largest one
TEMPERATURE, RATE = 0.9, 1e-5


class Size(NamedTuple):
    """A decoder of 192 numbers a token."""

    vocab: int = 1024
    layers: int = 4


def decoder(folder: Path, size: Size) -> LoadedLanguageModel:
    """A random Qwen3 in `folder`, in Hugging Face's layout, with a tokenizer."""
    from tests.support.small_models import torch_decoder, write_bpe_tokenizer

    sizes = {"vocab_size": size.vocab, "num_hidden_layers": size.layers, "hidden_size": 192}
    sizes |= {"num_attention_heads": 6, "head_dim": 32, "intermediate_size": 512}
    sizes |= {"max_position_embeddings": 1024, "eos_token_id": None}
    torch_decoder("qwen3", noise=0.0, initializer_range=0.1, **sizes).save_pretrained(folder)
    write_bpe_tokenizer(folder)
    return load_language_model(folder)


def policy_of(
    loaded: LoadedLanguageModel, config: Any, temperature: float = TEMPERATURE
) -> TokenPolicy:
    """The learner of a decoder on one device, by AdamW at `RATE` without decay."""
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    parts = Parts(optax.adamw(RATE, weight_decay=0.0), width=loaded.model.trunk.config.hidden_size)
    return TokenPolicy(
        mesh=mesh,
        shardings=parts.shardings(mesh, loaded.trunk.partition_rules(), loaded.params),
        trunk=loaded.model.trunk,
        vocabulary=Vocabulary(temperature),
        config=config,
        parts=parts,
        schedule=optax.constant_schedule(RATE),
    )


def given_tokens(
    policy: TokenPolicy, episodes: TokenEpisodes
) -> tuple[TokenBlocks, PerAction, jax.Array]:
    """The blocks of a batch, what GRPO or imitation learns from each token, and the divisor."""
    nothing = np.zeros(episodes.blocks.target.shape, np.float32)
    given, divisors, _ = grpo_tokens(policy.config, episodes, PerAction(*[nothing] * 6))
    return jax.tree.map(lambda leaf: leaf[0], (episodes.blocks, given, divisors))


def by_name(params: Any) -> dict[str, np.ndarray]:
    """A decoder's parameters, or their gradient, by Hugging Face's names."""
    return tensors_from_params(DECODERS["qwen3"], jax.tree.map(np.asarray, params))


def differences(
    ours: tuple[float, Mapping[str, np.ndarray]], theirs: tuple[float, Mapping[str, np.ndarray]]
) -> tuple[float, float]:
    """How far apart two losses and two gradients are.

    Returns:
        The difference of the losses, over theirs if that is above 1; and the largest difference of
        the gradients, over their largest entry.
    """
    loss = abs(ours[0] - theirs[0]) / max(1.0, abs(theirs[0]))
    largest = max(float(np.abs(each).max()) for each in theirs[1].values())
    most = max(float(np.abs(ours[1][name] - each).max()) for name, each in theirs[1].items())
    return loss, most / largest
