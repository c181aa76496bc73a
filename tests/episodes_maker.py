"""Small random encoders, towers, episodes and token stores that the tests of training share."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape, empty_episode, stack
from qrag_jax.data.tokens import TokenStore
from qrag_jax.models.compute.precision import Precision
from qrag_jax.models.embedding import Params, TextEncoder
from qrag_jax.models.trunks.families import BertConfig
from qrag_jax.models.trunks.transformer import Transformer

PAD, CLS, SEP, FIRST_WORD = 0, 2, 3, 5
VOCAB, POSITIONS = 40, 48


@functools.cache
def tiny_encoder(
    layers: int = 1,
    hidden: int = 16,
    precision: Precision = Precision(),  # noqa: B008
) -> TextEncoder:
    """A real BERT of a few thousand parameters."""
    sizes = {"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 2 * hidden}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": 2}
    config = BertConfig(max_position_embeddings=POSITIONS, **sizes)
    trunk, opening = Transformer(config, precision), (CLS,)
    how = {"state_opening": opening, "chunk_opening": opening}
    return TextEncoder(trunk, hidden, POSITIONS, SEP, PAD, **how)


def tower(encoder: TextEncoder, seed: int) -> Params:
    """Parameters of one tower, large enough that texts embed far from each other."""
    rng = np.random.default_rng(seed)

    def fill(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        noise = rng.standard_normal(leaf.shape)
        if path[-1].key == "kernel":
            noise = noise / np.sqrt(leaf.shape[-2])
        elif path[-1].key == "scale":
            noise = 1 + 0.2 * noise
        else:
            noise = 0.3 * noise
        return noise.astype(np.float32)

    # Shapes from the encoder, values from NumPy: nothing has to be compiled.
    return jax.tree_util.tree_map_with_path(fill, _shapes(encoder))


@functools.cache
def _shapes(encoder: TextEncoder) -> Params:
    return jax.eval_shape(encoder.module.init_params, jax.random.key(0))


def towers(encoder: TextEncoder, seed: int) -> Params:
    """Two different towers stacked on axis 0, as NumPy arrays."""
    pair = tower(encoder, 2 * seed), tower(encoder, 2 * seed + 1)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *pair)


def words(rng: np.random.Generator, count: int) -> list[int]:
    """Token ids of a text of `count` ordinary tokens."""
    return [int(token) for token in rng.integers(FIRST_WORD, VOCAB, count)]


def random_episodes(
    seed: int, chunk_counts: Sequence[int], shape: EpisodeShape, facts: int = 2
) -> EpisodeBatch:
    """One episode for each count; a count of 0 makes a row that fills up a batch.

    Chunk lengths run from 0 (a chunk without tokens) to the shape's. Up to `facts` chunks are
    supporting facts.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for number, count in enumerate(chunk_counts):
        row = empty_episode(shape)
        if count:
            length = int(rng.integers(1, shape.question_tokens + 1))
            row.question[:length] = words(rng, length)
            for chunk in range(count):
                size = int(rng.integers(0, shape.chunk_tokens + 1))
                row.chunks[chunk, :size] = words(rng, size)
                row.chunk_lengths[chunk] = size
            row.chunk_mask[:count] = True
            row.rank[rng.choice(count, min(facts, count), replace=False)] = 0
            row = row._replace(question_length=np.int32(length), sample=np.int32(number))
        rows.append(row)
    return stack(rows)


def random_store(seed: int, samples: int, first_token: int = 1000) -> TokenStore:
    """Tokens of `samples` made-up samples; question i begins with the token `first_token + i`."""
    rng = np.random.default_rng(seed)
    texts, chunk_counts, support = [], [], []
    for sample in range(samples):
        chunk_counts.append(int(rng.integers(2, 6)))
        texts.append([first_token + sample, *words(rng, int(rng.integers(0, 5)))])
        texts += [words(rng, int(rng.integers(1, 8))) for _ in range(chunk_counts[-1])]
        support.append(sorted(rng.choice(chunk_counts[-1], 2, replace=False)))
    return TokenStore(
        tokens=np.concatenate(texts).astype(np.int32),
        text_starts=np.cumsum([0, *map(len, texts)]).astype(np.int64),
        sample_starts=np.cumsum([0, *(1 + count for count in chunk_counts)]).astype(np.int64),
        support=np.concatenate(support).astype(np.int32),
        support_starts=np.arange(samples + 1, dtype=np.int64) * 2,
        truncated_questions=0,
        truncated_chunks=0,
    )
