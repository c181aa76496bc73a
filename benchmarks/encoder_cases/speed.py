"""Measures forward pass and training step of BERT, XLM-R and Qwen3 against Hugging Face's models.

Both sides compute the same ragged rows. The loss is Σ <vector, random numbers>; its gradient needs
one forward and one backward pass. Both sides end the step with AdamW on all parameters, without
clipping. Theirs runs in two ways: all rows in one padded batch (on a GPU in mini-batches), and rows
sorted by length. The faster way is the peer's figure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from transformers import AutoConfig, AutoModel

from benchmarks.encoder_cases.peer import (
    BETAS,
    DECAY,
    EPS,
    LEARNING_RATE,
    Batch,
    Peer,
    mini_batches,
    model_options,
)
from benchmarks.encoder_cases.small_models import numpy_tensors
from benchmarks.matmul import measure_peaks
from benchmarks.measure import Work, details, forward_flops, interleave, ratio
from benchmarks.report import Case
from benchmarks.speed_cases.setting import Setting, verdict
from qrag_jax.models.compute.packing import choose_blocks
from qrag_jax.models.compute.precision import precision
from qrag_jax.models.compute.ragged import TokenRows, count_tokens, embed_rows, pull_back
from qrag_jax.models.files.weight_names import params_from_tensors
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.models.pretrained import family_of
from qrag_jax.rollouts.block_shapes import ACCELERATOR_BLOCK_TOKENS, CPU_BLOCK_TOKENS
from qrag_jax.runtime.platform import Platform

TRAIN_SHARE = 0.40  # target of Qwen3-Embedding-0.6B on a GPU, of the measured matmul peak
PADDED, SORTED = "padded", "length-sorted"


@dataclasses.dataclass(frozen=True)
class Model:
    """A model by the fields of its `config.json`; `least_share` of the peak is its GPU target."""

    name: str
    fields: Mapping[str, Any]
    least_share: float | None = None

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
XLM_R_BASE = Model(
    "XLM-R base",
    {
        **BERT_BASE.fields,
        "model_type": "xlm-roberta",
        "vocab_size": 250002,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
    },
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
    TRAIN_SHARE,
)
ON_GPU = (BERT_BASE, XLM_R_BASE, QWEN3)
ON_CPU = (
    BERT_BASE,
    XLM_R_BASE.cut(", 6 of 12 layers, 30,000 words", num_hidden_layers=6, vocab_size=30000),
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


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows that both sides compute.

    Attributes:
        tokens: `[N, L]`.
        lengths: `[N]`.
        padded_size: rows per mini-batch of the peer, unsorted.
        sorted_size: rows per mini-batch of the peer, sorted by length.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    padded_size: int
    sorted_size: int

    @property
    def name(self) -> str:
        """The rows in words."""
        return f"{len(self.lengths)} rows of {self.lengths.min()} to {self.lengths.max()} tokens"


def speed_cases(quick: bool, gpu: bool) -> Iterator[Case]:
    """Every model in every dtype that this device computes in hardware."""
    dtypes = ["bfloat16"] if gpu else ["float32"]
    if (
        not (gpu or quick)
        and precision("auto", Platform.here()).products
        != precision("float32", Platform.here()).products
    ):
        dtypes.append("bfloat16")
    rounds = 2 if quick else 5
    for dtype in dtypes:
        peaks, case = measure_peaks(rounds, dtype)
        yield case
        setting = Setting(quick, gpu, rounds, 2 if gpu else 1, peaks)
        for model in QUICK if quick else ON_GPU if gpu else ON_CPU:
            yield from _model_cases(setting, model, dtype)


def _rows(setting: Setting, vocab: int) -> Rows:
    """Random rows; their lengths are evenly spread and shuffled."""
    longest, count, padded, sorted_size = (512, 256, 32, 32) if setting.gpu else (128, 16, 16, 8)
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.linspace(longest // 8, longest, count).astype(np.int32))
    tokens = rng.integers(10, vocab, (count, longest)).astype(np.int32)
    return Rows(tokens, lengths, padded, sorted_size)


class Ours:
    """The encoder as a training uses it: rows packed in blocks, parameters in float32."""

    def __init__(self, encoder: TextEncoder, params: Params, rows: Rows, setting: Setting) -> None:
        room = ACCELERATOR_BLOCK_TOKENS if setting.gpu else CPU_BLOCK_TOKENS
        histogram = np.bincount(rows.lengths, minlength=rows.tokens.shape[1] + 1)
        # As many lengths and sizes as `EncoderConfig` has; quick: one shape to compile.
        lengths, sizes = (1, 1) if setting.quick else (3, 2)
        blocks = choose_blocks(histogram, room, lengths, sizes)
        of_gradients = choose_blocks(histogram, room, max(lengths - 1, 1), sizes)
        self.rows = TokenRows(jnp.asarray(rows.tokens), jnp.asarray(rows.lengths))
        self.params = jax.device_put(params)
        optimizer = optax.adamw(LEARNING_RATE, *BETAS, EPS, weight_decay=DECAY)
        self.state = jax.jit(optimizer.init)(self.params)
        self.embed_rows = jax.jit(partial(embed_rows, encoder, blocks))
        counts = jax.jit(count_tokens, static_argnums=0)
        self.computed, self.computed_in_step = (
            float(counts(shapes, self.rows).computed) for shapes in (blocks, of_gradients)
        )

        def update(params: Params, state: Any, target: jax.Array) -> tuple[Params, Any]:
            gradient, _ = pull_back(encoder, of_gradients, params, self.rows, target)
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
    trunk = family.trunk(
        family.read_config(fields, model.name), precision(dtype, Platform.here()), "none"
    )
    params = params_from_tensors(family.table, trunk, numpy_tensors(theirs), model.name)
    encoder = TextEncoder(
        module=trunk,
        width=trunk.config.hidden_size,
        max_positions=trunk.config.longest_row,
        opening_id=0,
        sep_id=2,
        pad_id=1,
        scale=1.0,
        pooling=family.pooling,
        normalise=family.normalise,
    )
    return theirs, encoder, params


def _model_cases(setting: Setting, model: Model, dtype: str) -> Iterator[Case]:
    theirs, encoder, params = build(model, dtype)
    config: Any = encoder.module.config
    rows = _rows(setting, config.vocab_size)
    ours = Ours(encoder, params, rows, setting)
    peer = Peer(theirs, encoder, setting.device, dtype == "bfloat16")
    ways = {
        PADDED: mini_batches(
            rows.tokens, rows.lengths, rows.padded_size, setting.device, sort=False
        ),
        SORTED: mini_batches(
            rows.tokens, rows.lengths, rows.sorted_size, setting.device, sort=True
        ),
    }
    flops = forward_flops(config, rows.lengths)
    title = f"{model.name}, {dtype}"
    found: dict[str, np.ndarray] = {}

    def embed(name: str, program: Callable[[], np.ndarray], _: int) -> None:
        found[name] = program()

    programs: dict[str, Any] = {"ours": partial(embed, "ours", ours.embed)}
    programs |= {
        name: partial(embed, name, partial(peer.embed, batches)) for name, batches in ways.items()
    }
    case, _ = _case(setting, f"{title}: forward", rows, programs, ways, ours.computed, flops)
    difference = float(np.abs(found["ours"] - found[PADDED]).max())
    yield dataclasses.replace(
        case, details={**case.details, "largest difference of vectors": difference}
    )

    target = np.random.default_rng(1).normal(size=found[PADDED].shape).astype(np.float32)
    ours_target, their_target = jnp.asarray(target), torch.from_numpy(target).to(setting.device)
    programs = {"ours": lambda _: ours.step(ours_target)}
    programs |= {
        name: partial(_step, peer, batches, their_target) for name, batches in ways.items()
    }
    case, rate = _case(
        setting,
        f"{title}: train step with AdamW",
        rows,
        programs,
        ways,
        ours.computed_in_step,
        3 * flops,
    )
    yield case
    share = rate / setting.peaks.jax
    least = model.least_share if setting.gpu and not setting.quick else None
    name = f"{title}: train step with AdamW, share of matmul peak"
    yield Case(name, share, "share", **verdict(share, least))


def _step(peer: Peer, batches: list[Batch], target: torch.Tensor, _: int) -> None:
    peer.step(batches, target)


def _case(
    setting: Setting,
    name: str,
    rows: Rows,
    programs: Mapping[str, Any],
    ways: Mapping[str, list[Batch]],
    computed: float,
    flops: float,
) -> tuple[Case, float]:
    """The case, and our FLOP/s."""
    timings = interleave(programs, setting.rounds, setting.warmups)
    text = float(rows.lengths.sum())
    faster = min(ways, key=lambda way: timings[way].median)
    mine, peer = timings["ours"], timings[faster]
    theirs = float(sum(batch.tokens.numel() for batch in ways[faster]))
    works = Work(text, computed, flops), Work(text, theirs, flops)
    case = Case(
        name,
        text / mine.median,
        "text tokens/s",
        peer=text / peer.median,
        ratio=ratio(mine, peer),
        details={
            "rows": rows.name,
            "peer": f"Hugging Face, sdpa, {faster}",
            **{f"text tokens/s, {way}": text / timings[way].median for way in ways},
            **details((works[0], mine), (works[1], peer), setting.peaks.jax),
        },
    )
    return case, flops / mine.median
