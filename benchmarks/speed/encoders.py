"""Encoders against Hugging Face's: forward pass and training step of the same rows and weights.

The loss is Σ <vector, random numbers>; its gradient needs one forward and one backward pass. Both
sides end the step with AdamW on all parameters, without clipping. Theirs computes mini-batches of
rows sorted by length, as sentence-transformers does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from transformers import AutoConfig, AutoModel

from benchmarks.report import Case
from benchmarks.speed.measure import OURS, Setting, beside, calling, equal
from qrag_jax.models.compute.packing import choose_blocks
from qrag_jax.models.compute.precision import precision
from qrag_jax.models.compute.ragged import TokenRows, embed_rows, pull_back
from qrag_jax.models.embedding import Params, TextEncoder
from qrag_jax.models.files.weight_names import stored_params
from qrag_jax.models.trunks.families import family_of
from qrag_jax.models.trunks.transformer import Transformer
from qrag_jax.rollouts.text_table import ACCELERATOR_BLOCK_TOKENS, CPU_BLOCK_TOKENS
from qrag_jax.runtime.platform import Platform
from tests.support.small_models import numpy_tensors
from tests.support.torch_encoder import (
    BETAS,
    DECAY,
    EPS,
    LEARNING_RATE,
    Peer,
    mini_batches,
    model_options,
)

EQUAL = 1e-4  # of vectors
THEIRS = "Hugging Face"


@dataclasses.dataclass(frozen=True)
class Model:
    """A model by the fields of its `config.json`."""

    name: str
    fields: Mapping[str, Any]

    def cut(self, name: str, **fields: int) -> Model:
        """The model with other sizes; `name` is added to its name."""
        return Model(f"{self.name}{name}", {**self.fields, **fields})


BERT_BASE = Model(
    "BERT-base",
    {
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
    },
)
MINILM = Model("MiniLM", {**BERT_BASE.fields, "hidden_size": 384, "num_hidden_layers": 6}).cut(
    "", intermediate_size=1536
)
QWEN3 = Model(
    "Qwen3-Embedding-0.6B",
    {
        "model_type": "qwen3",
        "vocab_size": 151669,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
        "use_cache": False,
    },
)
ON_CPU = (
    MINILM,
    BERT_BASE,
    QWEN3.cut("'s widths, 4 of 28 layers, 30,000 words", num_hidden_layers=4, vocab_size=30000),
)
QUICK = (
    QWEN3.cut(
        ", 1 layer of a quarter of its width, 8,000 words",
        num_hidden_layers=1,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=768,
        vocab_size=8000,
    ),
)


class Rows(NamedTuple):
    """Rows that both sides compute: tokens `[N, L]`, lengths `[N]`; those of a mini-batch."""

    tokens: np.ndarray
    lengths: np.ndarray
    together: int

    @property
    def name(self) -> str:
        """The rows in words."""
        return f"{len(self.lengths)} rows of {self.lengths.min()} to {self.lengths.max()} tokens"


def encoder_cases(setting: Setting) -> Iterator[Case]:
    """Every model, in bfloat16 on a GPU, else in float32."""
    gpu = setting.device == "cuda"
    models = QUICK if setting.quick else (MINILM, BERT_BASE, QWEN3) if gpu else ON_CPU
    longest, count, together = (512, 256, 32) if gpu else (128, 16, 8)
    for model in models:
        rng = np.random.default_rng(0)
        lengths = rng.permutation(np.linspace(longest // 8, longest, count).astype(np.int32))
        tokens = rng.integers(10, model.fields["vocab_size"], (count, longest)).astype(np.int32)
        rows = Rows(tokens, lengths, together)
        yield from _model_cases(setting, model, "bfloat16" if gpu else "float32", rows)


class Ours:
    """The encoder as a training uses it: rows packed in blocks, parameters in float32."""

    def __init__(self, encoder: TextEncoder, params: Params, rows: Rows, *, quick: bool) -> None:
        platform = jax.default_backend()
        room = CPU_BLOCK_TOKENS if platform == "cpu" else ACCELERATOR_BLOCK_TOKENS
        histogram = np.bincount(rows.lengths, minlength=rows.tokens.shape[1] + 1)
        # As many lengths and sizes as `EncoderConfig` has; quick: one shape to compile.
        lengths, sizes = (1, 1) if quick else (3, 2)
        blocks = choose_blocks(histogram, room, lengths, sizes)
        of_gradients = choose_blocks(histogram, room, max(lengths - 1, 1), sizes)
        self.rows = TokenRows(jnp.asarray(rows.tokens), jnp.asarray(rows.lengths))
        self.params = jax.device_put(params)
        optimizer = optax.adamw(LEARNING_RATE, *BETAS, EPS, weight_decay=DECAY)
        self.state = jax.jit(optimizer.init)(self.params)
        self.embed_rows = jax.jit(partial(embed_rows, encoder, blocks))

        def update(params: Params, state: Any, target: jax.Array) -> tuple[Params, Any]:
            gradient, *_ = pull_back(encoder, of_gradients, params, self.rows, target)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        self.update = jax.jit(update, donate_argnums=(0, 1))

    def embed(self) -> np.ndarray:
        """Vectors `[N, D]`."""
        return np.asarray(self.embed_rows(self.params, self.rows)[0])

    def step(self, target: jax.Array) -> None:
        """One update on Σ <vector, target `[N, D]`>."""
        updated = self.update(self.params, self.state, target)
        self.params, self.state = jax.block_until_ready(updated)


def build(model: Model, dtype: str) -> tuple[Any, TextEncoder, Params]:
    """Their model with random float32 weights; our encoder with these weights, in `dtype`."""
    fields = dict(model.fields)
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(0)
    options = model_options(fields["model_type"])
    theirs = AutoModel.from_config(config, attn_implementation="sdpa", **options).eval()
    family = family_of(fields, model.name)
    sizes = family.config.from_dict(fields, model.name)
    trunk = Transformer(sizes, precision(dtype, Platform.of()))
    params = jax.tree.map(
        np.asarray, stored_params(family, trunk, numpy_tensors(theirs), model.name)
    )
    encoder = TextEncoder(
        module=trunk,
        width=trunk.config.hidden_size,
        max_positions=trunk.config.longest_row,
        sep_id=2,
        pad_id=1,
        scale=1.0,
        pooling="last" if family.config.CAUSAL else "mean",
        normalise=family.config.CAUSAL,
    )
    return theirs, encoder, params


def _model_cases(setting: Setting, model: Model, dtype: str, rows: Rows) -> Iterator[Case]:
    theirs, encoder, params = build(model, dtype)
    ours = Ours(encoder, params, rows, quick=setting.quick)
    peer = Peer(theirs, encoder, setting.device, dtype == "bfloat16")
    batches = mini_batches(rows.tokens, rows.lengths, rows.together, setting.device)
    title = f"encoder, {model.name}, {dtype}"
    measured = partial(beside, setting, amount=float(rows.lengths.sum()), unit="tokens/s")
    details: dict[str, float | str] = {"rows": rows.name}
    forward = {OURS: calling(ours.embed), THEIRS: calling(peer.embed, batches)}
    yield measured(name=f"{title}: forward", programs=forward, details=details)
    vectors = ours.embed()
    if dtype == "float32":
        away = float(np.abs(vectors - peer.embed(batches)).max())
        yield equal(f"{title}: difference of the vectors", away, EQUAL)
    target = np.random.default_rng(1).normal(size=vectors.shape).astype(np.float32)
    on_device, their_target = jnp.asarray(target), torch.from_numpy(target).to(setting.device)
    step = {OURS: calling(ours.step, on_device), THEIRS: calling(peer.step, batches, their_target)}
    yield measured(name=f"{title}: training step with AdamW", programs=step, details=details)
