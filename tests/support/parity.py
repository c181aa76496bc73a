"""Compares an encoder with Hugging Face's model of the same folder, layer by layer in float32.

Rows are random tokens of unequal lengths. Beyond the end of a row our encoder gets other tokens and
theirs gets padding: equal results show that tokens beyond the end change nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModel

from qrag_jax.models.compute.packing import Blocks, choose_blocks
from qrag_jax.models.compute.precision import Precision
from qrag_jax.models.compute.ragged import TokenRows, embed_rows, pull_back
from qrag_jax.models.files.model_folder import read_config, read_safetensors
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.pretrained import LoadedEncoder, family_of
from qrag_jax.models.trunks.trunk import LAYERS
from qrag_jax.systems.towers_export import Tower
from tests.support.torch_encoder import embed_rows as their_embed_rows
from tests.support.torch_encoder import model_options

EQUAL = 1e-4  # for hidden states and vectors; for gradients relative to their largest entry
SAME = 1e-5  # for a vector among other rows: only the order of sums changes
LONGEST = 40  # tokens of the longest row, unless the model takes fewer
HALF = jnp.dtype(jnp.bfloat16)
DRIFT_ANGLE, DRIFT_LENGTH = 1e-3, 5e-2  # 1 - cosine; difference over the vector's length
# Differences of a small gradient are relative to this share of the model's largest gradient. BERT's
# key biases need this: their gradient is 0 in exact arithmetic, so that it is only rounding.
SMALLEST_GRADIENT = 1e-3
RENAMED = ("nomic_bert",)  # whose parameters have other names in transformers than in files


_embed = jax.jit(TextEncoder.embed, static_argnums=0)
_embed_rows = jax.jit(embed_rows, static_argnums=(0, 1))
_pull_back = jax.jit(pull_back, static_argnums=(0, 1))


@dataclasses.dataclass(frozen=True)
class Figure:
    """One largest difference.

    Attributes:
        name: what is compared.
        value: the largest difference.
        limit: the largest allowed value.
        peer: the same figure of torch's model alone.
        details: further figures of the comparison.
    """

    name: str
    value: float
    limit: float
    peer: float | None = None
    details: Mapping[str, float | str] = dataclasses.field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the value is within the limit; False for NaN."""
        return self.value <= self.limit


class Rows(NamedTuple):
    """tokens `[B, L]`, none of them padding; the first `lengths[i]` tokens are row i."""

    tokens: np.ndarray
    lengths: np.ndarray

    @property
    def inside(self) -> np.ndarray:
        """Which tokens belong to their row, `[B, L]`."""
        return np.arange(self.tokens.shape[1]) < self.lengths[:, None]


def hugging_face(folder: Path) -> Any:
    """The folder's trunk in torch, float32."""
    options = model_options(read_config(folder)["model_type"])
    model = AutoModel.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, **options
    )
    return model.eval()


def equality(model: Any, loaded: LoadedEncoder) -> Iterator[Figure]:
    """How far ours is from Hugging Face's: hidden states, vectors, gradients.

    Args:
        model: see `hugging_face`.
        loaded: our encoder of the same folder, in float32.
    """
    rows = _random_rows(loaded)
    with torch.no_grad():
        states, vectors = _theirs(model, loaded, rows)
    yield _hidden_states(loaded, rows, states)
    yield Figure("pooled vector", _largest(_ours(loaded, rows) - vectors), EQUAL)
    yield _gradients(model, loaded, rows)


def stability(model: Any, loaded: LoadedEncoder) -> Iterator[Figure]:
    """How much a vector changes with bfloat16, the side of the padding, and other rows."""
    rows = _random_rows(loaded)
    ours = _ours(loaded, rows)
    with torch.no_grad():
        right, left = (_theirs(model, loaded, rows, side)[1] for side in ("right", "left"))
    yield from _drift(model, loaded, rows, ours, right)
    yield Figure(
        "pooled vector, theirs padded on the left",
        _largest(ours - left),
        EQUAL,
        details={"theirs: left beside right": _largest(left - right)},
    )
    yield _company(loaded, rows, ours)


def _random_rows(loaded: LoadedEncoder) -> Rows:
    rng = np.random.default_rng(0)
    longest = min(LONGEST, loaded.encoder.max_positions)
    lengths = np.array([longest, 1, longest // 3, 2, longest - 1], np.int32)
    return Rows(_random_tokens(loaded, rng, (len(lengths), longest)), lengths)


def _random_tokens(
    loaded: LoadedEncoder, rng: np.random.Generator, shape: tuple[int, ...]
) -> np.ndarray:
    """Random tokens, none of them padding."""
    vocab, pad = loaded.encoder.module.config.vocab_size, loaded.encoder.pad_id
    return ((pad + 1 + rng.integers(vocab - 1, size=shape)) % vocab).astype(np.int32)


def _ours(loaded: LoadedEncoder, rows: Rows) -> np.ndarray:
    return np.asarray(_embed(loaded.encoder, loaded.params, *rows))


def _theirs(
    model: Any, loaded: LoadedEncoder, rows: Rows, side: str = "right"
) -> tuple[list[np.ndarray], np.ndarray]:
    """Hidden states `[B, L, H]` after each layer (first: before all), and vectors `[B, D]`."""
    tokens = np.where(rows.inside, rows.tokens, loaded.encoder.pad_id)
    states, vectors = their_embed_rows(model, loaded.encoder, tokens, rows.lengths, side)
    return [state.float().numpy() for state in states], vectors.float().numpy()


def _largest(differences: np.ndarray) -> float:
    return float(np.abs(differences).max())


def _hidden_states(loaded: LoadedEncoder, rows: Rows, states: list[np.ndarray]) -> Figure:
    """Compares hidden states; ours after n layers come from a trunk cut to n layers."""
    trunk, params = loaded.encoder.module, loaded.params
    assert len(states) == trunk.config.num_hidden_layers + 1
    reached = {}
    for depth, expected in enumerate(states):
        config: Any = trunk.config
        shallow = trunk.clone(config=dataclasses.replace(config, num_hidden_layers=depth))
        cut = params | {LAYERS: jax.tree.map(lambda leaf, n=depth: leaf[:n], params[LAYERS])}
        found = np.asarray(shallow.hidden_states(cut, *rows))
        name = f"after layer {depth}" if depth else "embeddings"
        reached[name] = _largest((found - expected)[rows.inside])
    return Figure("hidden states, worst layer", max(reached.values()), EQUAL, details=reached)


def _gradients(model: Any, loaded: LoadedEncoder, rows: Rows) -> Figure:
    """Compares gradients of Σ <vector, random numbers> with respect to every parameter.

    Ours are pulled back in blocks, as in a training.
    """
    rng = np.random.default_rng(1)
    target = rng.normal(size=(len(rows.lengths), loaded.encoder.width)).astype(np.float32)
    tokens = np.where(rows.inside, rows.tokens, loaded.encoder.pad_id)
    model.zero_grad()
    _, vectors = their_embed_rows(model, loaded.encoder, tokens, rows.lengths)
    (vectors * torch.from_numpy(target)).sum().backward()
    expected = gradients_in_files(model)

    gradient, _ = _pull_back(
        loaded.encoder, _blocks(rows), loaded.params, TokenRows(*map(jnp.asarray, rows)), target
    )
    found = tensors_from_params(family_of(loaded.model_config, "").table, gradient)
    assert set(found) == set(expected), set(found) ^ set(expected)
    largest = {name: _largest(wanted) for name, wanted in expected.items()}
    least = SMALLEST_GRADIENT * max(largest.values())
    reached = {
        name: _largest(found[name] - wanted) / max(largest[name], least)
        for name, wanted in expected.items()
    }
    worst = max(reached, key=lambda name: reached[name])
    return Figure(
        "gradients, relative to each one's largest",
        max(reached.values()),
        EQUAL,
        details={"parameters": len(reached), "worst": worst},
    )


def gradients_in_files(model: Any) -> dict[str, np.ndarray]:
    """The gradients of a model's parameters, by the names that the parameters have in files.

    transformers splits and renames some models' parameters as it reads them; so it writes these
    gradients as if they were weights.
    """
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if model.config.model_type not in RENAMED:
        return {name: gradient.numpy() for name, gradient in named.items()}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=named)
        return read_safetensors(Path(folder) / "model.safetensors")


def _blocks(rows: Rows) -> Blocks:
    """Blocks with room for two of the longest rows, so that several blocks are needed."""
    longest = rows.tokens.shape[1]
    return choose_blocks(np.bincount(rows.lengths, minlength=longest + 1), 2 * longest, 2, 1)


def _drift(
    model: Any, loaded: LoadedEncoder, rows: Rows, exact: np.ndarray, their_exact: np.ndarray
) -> Iterator[Figure]:
    """How much bfloat16 changes our vectors, beside how much it changes torch's."""

    def half(activations: jnp.dtype) -> np.ndarray:
        module = loaded.encoder.module.clone(precision=Precision(activations, HALF))
        encoder = dataclasses.replace(loaded.encoder, module=module)
        return np.asarray(_embed(encoder, loaded.params, *rows))

    with torch.no_grad():
        theirs = _theirs(copy.deepcopy(model).to(torch.bfloat16), loaded, rows)[1]
    everything, products = half(HALF), half(jnp.dtype(jnp.float32))
    for name, limit, measure in (
        ("bfloat16: 1 - cosine", DRIFT_ANGLE, _angle),
        ("bfloat16: difference over length", DRIFT_LENGTH, _shift),
    ):
        yield Figure(
            name,
            measure(everything, exact),
            limit,
            peer=measure(theirs, their_exact),
            details={
                "peer": "torch's model in bfloat16 beside itself in float32",
                "in products alone, as on CPU": measure(products, exact),
            },
        )


def _angle(found: np.ndarray, exact: np.ndarray) -> float:
    """The largest 1 - cosine between a row `[B, D]` of one array and of the other."""
    found, exact = found.astype(np.float64), exact.astype(np.float64)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(exact, axis=1)
    return float((1 - (found * exact).sum(axis=1) / lengths).max())


def _shift(found: np.ndarray, exact: np.ndarray) -> float:
    """The largest |difference| of an entry, divided by the length of its row's vector."""
    return _largest((found - exact) / np.linalg.norm(exact, axis=1, keepdims=True))


def _company(loaded: LoadedEncoder, rows: Rows, together: np.ndarray) -> Figure:
    """How much a vector changes if its row is alone, among other rows, wider, or in a block."""
    embed = partial(_embed, loaded.encoder, loaded.params)
    rng = np.random.default_rng(2)
    alone, others = [], []
    for i, length in enumerate(rows.lengths):
        one = slice(i, i + 1)
        alone.append(np.asarray(embed(rows.tokens[one], rows.lengths[one]))[0])
        tokens = _random_tokens(loaded, rng, rows.tokens.shape)
        lengths = rng.permutation(rows.lengths)
        tokens[i], lengths[i] = rows.tokens[i], length
        others.append(np.asarray(embed(tokens, lengths))[i])
    wider = np.pad(rows.tokens, ((0, 0), (0, 8)), constant_values=loaded.encoder.pad_id)
    found = {
        "alone": np.stack(alone),
        "among other rows": np.stack(others),
        "in wider rows": embed(wider, rows.lengths),
        "packed into blocks": _embed_rows(
            loaded.encoder, _blocks(rows), loaded.params, TokenRows(*map(jnp.asarray, rows))
        )[0],
    }
    reached = {name: _largest(np.asarray(vectors) - together) for name, vectors in found.items()}
    return Figure("a vector in other company", max(reached.values()), SAME, details=reached)


def our_vectors(
    loaded: LoadedEncoder, params: Any, tower: Tower, texts: Sequence[Sequence[str]]
) -> np.ndarray:
    """Embeddings `[len(texts), D]` of rows that are joined from parts, as in training.

    Args:
        loaded: the encoder and its tokenizer.
        params: parameters of both towers, stacked on axis 0.
        tower: the tower that embeds the rows.
        texts: the parts of each row.
    """
    encoder = loaded.encoder
    rows = []
    for parts in texts:
        row = list(tower.opening)
        for ids in loaded.tokenizer.encode(list(parts)):
            row += [*ids, encoder.sep_id]
        rows.append(row)
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.full((len(rows), max(lengths)), encoder.pad_id, np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    return np.asarray(
        encoder.embed(
            encoder.tower(params, tower.number), jnp.asarray(tokens), jnp.asarray(lengths)
        )
    )
