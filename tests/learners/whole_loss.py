"""The loss of an update as one plain function of the parameters, to take a gradient of.

Every row is written one token at a time and embedded next to the others, padded: nothing is packed,
no row is left out, and dropout's masks are laid over whole rows. It is slow and obvious.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.models.compute.dropout import TokenDropout, row_digests, token_digests, trunk_keys
from qrag_jax.models.compute.packing import padded_layout
from qrag_jax.models.embedding import LAST, TextEncoder
from qrag_jax.models.pretrained import LoraConfig, new_adapters
from qrag_jax.models.trunks.families import BERT_TABLE, Qwen3Config
from qrag_jax.models.trunks.transformer import WORDS, Transformer
from qrag_jax.rollouts.chunks import CHUNK, STATE, RolloutConfig, Trajectory
from tests import reference
from tests.episodes_maker import POSITIONS, SEP, VOCAB
from tests.rollouts import play_setup

SIZES: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
QWEN3 = TextEncoder(
    module=Transformer(Qwen3Config(VOCAB, **SIZES, max_position_embeddings=POSITIONS)),
    width=16,
    max_positions=POSITIONS,
    sep_id=SEP,
    pad_id=SEP,
    pooling=LAST,
    normalise=True,
    scale=1.5,
    state_opening=(7, 8),  # its chunks open with their own text
)
LORA = LoraConfig(rank=3, alpha=6.0)
ADAPTED = TextEncoder(**(vars(play_setup.ENCODER) | {"lora_scale": LORA.scale}))
# Fewer maps than all: fused maps of which some parts have an adapter and some have none.
TARGETS = ("query", "value", "intermediate.dense")


class Rows(NamedTuple):
    """The states and chosen chunks of all steps that happened, N of them."""

    states: tuple[np.ndarray, np.ndarray]  # tokens [N, L], lengths [N]
    chunks: tuple[np.ndarray, np.ndarray]
    positions: np.ndarray  # [N] of the chunks


def adapters(seed: int) -> dict[str, Any]:
    """Two different towers' adapters, stacked, B too far from zero."""
    rng, config = np.random.default_rng(seed), LoraConfig(3, 6.0, TARGETS)
    one = new_adapters(BERT_TABLE, ADAPTED.module, config, seed)
    return jax.tree.map(
        lambda leaf: 0.3 * rng.standard_normal((2, *leaf.shape)).astype(np.float32), one
    )


def rows_of(
    encoder: TextEncoder, config: RolloutConfig, batch: EpisodeBatch, played: Trajectory
) -> Rows:
    """Every state and chunk of the trajectory, made one token at a time."""
    opens = bool(encoder.chunk_opening)
    states, chunks = [], []
    for b, t in zip(*np.nonzero(played.valid)):
        taken = played.actions[b].tolist()
        # The reference opens rows with [CLS]; another encoder may have a prefix or nothing there.
        state = reference.state_row(batch, b, taken[:t], config)
        states.append(state if opens else [*encoder.state_opening, *state[1:]])
        most = config.max_chunk_tokens - (2 if opens else 1)
        chunk = [*reference.chunk(batch, b, taken[t], most), SEP]
        chunks.append([*encoder.chunk_opening, *chunk])
    width = max(map(len, states + chunks))
    both = reference.padded(states, width), reference.padded(chunks, width)
    return Rows(*both, np.asarray(played.positions[played.valid]))


Dropout = Callable[[jax.Array], TokenDropout]  # from the digests of tokens to their masks


def masks_of(encoder: TextEncoder, key: jax.Array) -> Dropout:
    """The masks of a tower that drops."""
    keys = trunk_keys(key, encoder.module.config.num_hidden_layers)
    shares: Any = {"hidden": encoder.dropout, "attention": encoder.attention_dropout}
    return partial(TokenDropout, keys=keys, adapters=encoder.lora_dropout, **shares)


def embed(
    encoder: TextEncoder,
    params: Any,
    rows: tuple[np.ndarray, np.ndarray],
    dropout: Dropout | None = None,
) -> jax.Array:
    """Rows padded side by side, `[N, D]`, each with its masks if there are any."""
    tokens, lengths = rows
    if dropout is None:
        return reference.embed(encoder, params, tokens, lengths)
    where, width = padded_layout(lengths, tokens.shape[1]), tokens.shape[1]
    digests = jnp.repeat(row_digests(jnp.asarray(tokens), jnp.asarray(lengths)), width)
    masks = dropout(token_digests(digests, where.position))
    prepared = encoder.module.prepare(params)
    words = prepared[WORDS][tokens.reshape(-1)]
    return encoder.embed_words(prepared, words, where._replace(dropout=masks))


def turned(embedded: jax.Array, positions: np.ndarray) -> jax.Array:
    """Rotated at the positions, half by half and pair by pair."""
    width = embedded.shape[-1] // 2
    angle = positions[:, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)[None]
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    halves = []
    for half in jnp.split(embedded, 2, axis=1):
        even, odd = half[:, 0::2], half[:, 1::2]
        pairs = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
        halves.append(pairs.reshape(half.shape))
    return jnp.concatenate(halves, axis=1)


def whole_loss(
    rows: Rows, goals: np.ndarray, embed_tower: Callable[[Any, int, tuple], jax.Array]
) -> Callable[[Any], tuple[jax.Array, tuple[jax.Array, jax.Array]]]:
    """From parameters to the summed loss, and the embeddings of states and chunks.

    Args:
        goals: `[N]`, the target of each step.
        embed_tower: `(params, STATE or CHUNK, rows)` → `[N, D]`.
    """

    def loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        states = embed_tower(params, STATE, rows.states)
        chunks = embed_tower(params, CHUNK, rows.chunks)
        half = states.shape[-1] // 2
        acted = turned(chunks, rows.positions)
        q_1 = (states[:, :half] * acted[:, :half]).sum(-1)
        q_2 = (states[:, half:] * acted[:, half:]).sum(-1)
        total = 0.5 * ((2 * q_1 - goals) ** 2).sum() + 0.5 * ((2 * q_2 - goals) ** 2).sum()
        return total, (states, chunks)

    return loss
