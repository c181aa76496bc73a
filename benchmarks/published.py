"""Checks our configs of published runs: their constants, and models of their real shapes.

All are compared with `published_constants`. Of configs/published.py (Q-RAG) each training step is
then built for an encoder with the real widths and layer counts. The weights are random; no model is
read. With `--quick` the encoder embeds a short row, else the longest state and the longest chunk.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.published_constants import RUNS, Constant, value
from benchmarks.report import Case, print_table
from configs import published
from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape
from qrag_jax.environments.chunks import state_width
from qrag_jax.feedback.ground_truth import fact_feedback
from qrag_jax.learners import placement
from qrag_jax.learners.deferred import make_learn_step
from qrag_jax.learners.optimizers import learning_rate_schedule, make_optimizer
from qrag_jax.learners.step import make_train_step
from qrag_jax.learners.two_towers import TwoTowers
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.precision import precision
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.pretrained import FAMILIES
from qrag_jax.rollouts.chunks import Actor
from qrag_jax.rollouts.experience import Played, ScoredEpisodes
from qrag_jax.rollouts.limits import check_fit
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.platform import Platform
from qrag_jax.systems.q_rag_config import QRagConfig

# The sizes in each model's config.json, by the model's name on the hub.
MODELS: dict[str, dict[str, Any]] = {
    "facebook/contriever": {
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    },
    "intfloat/multilingual-e5-large": {
        "model_type": "xlm-roberta",
        "vocab_size": 250002,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
        "hidden_act": "gelu",
    },
    "Qwen/Qwen3-Embedding-0.6B": {
        "model_type": "qwen3",
        "vocab_size": 151669,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 32768,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    },
    "Alibaba-NLP/gte-multilingual-base": {
        "model_type": "new",
        "vocab_size": 250048,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-12,
        "layer_norm_type": "layer_norm",
        "pad_token_id": 1,
        "hidden_act": "gelu",
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "rope_theta": 20000,
        "rope_scaling": {"type": "ntk", "factor": 8.0},
        "logn_attention_scale": False,
    },
}
QUICK_ROW = 32  # tokens
CHUNKS = 16  # per document in the built step; only the time to build it depends on this


@dataclasses.dataclass(frozen=True)
class Built:
    """The result of building a run: parameters of a tower, seconds, and why it was not built."""

    parameters: int = 0
    seconds: float = 0.0
    skipped: str = ""


def run(quick: bool) -> list[Case]:
    """One case per published run."""
    return [_case(name, quick) for name in RUNS]


def compared(name: str) -> list[tuple[Constant, Any]]:
    """The constants of a run, each with our value."""
    file, _, variant = name.partition(":")
    config = importlib.import_module(f"configs.{file}").get_config(variant)
    return [(constant, value(config, constant.name)) for constant in RUNS[name]]


def _case(name: str, quick: bool) -> Case:
    """That an update of the other systems is built is what the suite gpu shows."""
    pairs = compared(name)
    _show(name, pairs)
    file, _, variant = name.partition(":")
    if file != "published":
        return _judged(name, pairs, {}, built=True)
    built = build(QRagConfig.of(published.get_config(variant)), quick)
    details: dict[str, float | str] = {}
    if built.skipped:
        details["not built"] = built.skipped
    else:
        details["parameters of a tower, millions"] = built.parameters / 1e6
        details["built in, s"] = built.seconds
    return _judged(name, pairs, details, built=not built.skipped)


def _judged(
    name: str, pairs: list[tuple[Constant, Any]], details: dict[str, float | str], *, built: bool
) -> Case:
    equal = sum(ours == constant.theirs for constant, ours in pairs)
    unexplained = [each for each, ours in pairs if ours != each.expected]
    differ: dict[str, float | str] = {
        f"differs: {each.name}, theirs {each.theirs}, ours {ours}": each.why or "unexplained"
        for each, ours in pairs
        if ours != each.theirs
    }
    return Case(
        name,
        equal,
        "constants equal",
        peer=len(pairs),
        ratio=equal / len(pairs),
        target="others differ with a reason; the model is built",
        holds=not unexplained and built,
        details=differ | details,
    )


def _show(name: str, pairs: list[tuple[Constant, Any]]) -> None:
    lines = [("constant", "theirs", "ours", "equal", "their file")]
    for constant, ours in pairs:
        equal = "yes" if ours == constant.theirs else "NO" if not constant.why else "differs"
        lines.append((constant.name, _text(constant.theirs), _text(ours), equal, constant.source))
    print(f"\n{name}")
    print_table(lines)


def _text(constant: Any) -> str:
    return repr(constant) if isinstance(constant, str) else f"{constant}"


def build(config: QRagConfig, quick: bool) -> Built:
    """Builds the encoder and the training step of a run, with the model's real shape."""
    began = time.monotonic()
    model = MODELS[config.encoder.path]
    if model["model_type"] not in FAMILIES:
        return Built(skipped=f"models of type {model['model_type']!r} are not known here yet")
    encoder = encoder_of(config, model)
    tower = jax.eval_shape(encoder.init, jax.random.key(0))
    _trace_step(config, encoder, tower)
    rows = (QUICK_ROW,) if quick else (_state_row(config, encoder), config.data.max_chunk_tokens)
    _embed(encoder, rows)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(tower))
    return Built(parameters, time.monotonic() - began)


def encoder_of(config: QRagConfig, model: dict[str, Any]) -> TextEncoder:
    """The run's encoder without weights; the ids of its special tokens are made up."""
    family = FAMILIES[model["model_type"]]
    sizes = family.read_config(model, config.encoder.path)
    settings = config.encoder
    assert settings.scale is not None  # for mypy: every published run sets both
    assert settings.normalise is not None
    encoder = TextEncoder(
        module=family.trunk(sizes, precision(settings.dtype, Platform.here()), settings.remat),
        width=sizes.hidden_size,
        max_positions=sizes.longest_row,
        opening_id=2 if family.opens_rows else None,
        sep_id=3,
        pad_id=0,
        scale=settings.scale,
        pooling=settings.pooling,
        normalise=settings.normalise,
    )
    check_fit(config.rollout, encoder, _shape(config), {})
    return encoder


def _shape(config: QRagConfig) -> EpisodeShape:
    data = config.data
    return EpisodeShape(data.max_question_tokens, data.max_chunk_tokens, CHUNKS)


def _state_row(config: QRagConfig, encoder: TextEncoder) -> int:
    data, opening = config.data, len(encoder.state_opening)
    in_state, steps = data.max_chunk_tokens_in_state, config.env.max_steps
    return state_width(opening, data.max_question_tokens, in_state, steps - 1)


def _trace_step(config: QRagConfig, encoder: TextEncoder, tower: Any) -> None:
    """Traces the whole training step for one micro-batch on one device; raises its errors."""
    chunk_row, state_row = config.data.max_chunk_tokens, _state_row(config, encoder)
    chunks = Blocks((8192,), (chunk_row,), (chunk_row,))
    states = Blocks((8192,), (max(state_row, chunk_row),), (state_row,))
    mesh, optimizer = make_mesh((1, 1, 1), jax.devices()[:1]), make_optimizer(config.optimizer)
    towers = TwoTowers(
        mesh=mesh,
        shardings=placement.state_shardings(mesh, (), tower, optimizer),
        actor=Actor(encoder, BlockShapes(chunks, states, states), config.rollout),
        config=config.pqn,
        optimizer=optimizer,
        schedule=learning_rate_schedule(config.optimizer),
        peak=config.optimizer.learning_rate,
    )
    batch: Any = _batch(config, config.train.batch_size // config.train.accumulation)
    if config.is_ground_truth:
        feedback = fact_feedback(config.reward, stop_action=config.env.stop_action)
        step = make_train_step(towers, feedback)
    else:
        step = make_learn_step(towers)
        steps = (batch.sample.shape[0], config.env.max_steps)
        kinds = jnp.int32, jnp.bool_, jnp.float32
        shapes: list[Any] = [jax.ShapeDtypeStruct(steps, kind) for kind in kinds]
        whole, truth, real = shapes
        batch = ScoredEpisodes(batch, Played(whole, truth, real), real, truth)
    jax.eval_shape(step, placement.state_shapes(tower, optimizer), batch)


def _random_weights(tower: Any) -> Any:
    """Random weights in the shapes of one tower, uniform in ±0.035.

    They come from a multiplicative hash of their places (Knuth, TAOCP 3, 6.4): half a billion draws
    by jax.random would take a minute.
    """

    def leaf_of(shape: jax.ShapeDtypeStruct) -> jax.Array:
        place = jnp.arange(math.prod(shape.shape), dtype=jnp.uint32)
        mixed = (place ^ (place >> 15)) * jnp.uint32(2_654_435_761)
        drawn = (mixed >> 8).astype(jnp.float32) * 2.0**-24 - 0.5
        return (0.07 * drawn).reshape(shape.shape).astype(shape.dtype)

    return jax.tree.map(leaf_of, tower)


def _batch(config: QRagConfig, count: int) -> EpisodeBatch:
    shape = _shape(config)

    def of(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *sizes), dtype)

    return EpisodeBatch(
        question=of(shape.question_tokens),
        question_length=of(),
        chunks=of(shape.chunks, shape.chunk_tokens),
        chunk_lengths=of(shape.chunks),
        chunk_mask=of(shape.chunks, dtype=jnp.bool_),
        rank=of(shape.chunks),
        sample=of(),
        epoch=of(),
    )


@functools.cache  # several runs share an encoder
def _embed(encoder: TextEncoder, rows: tuple[int, ...]) -> None:
    """Embeds a row of each of these lengths with random weights."""
    tower = jax.eval_shape(encoder.init, jax.random.key(0))

    @jax.jit
    def embedded(tokens: jax.Array) -> jax.Array:
        return encoder.embed(_random_weights(tower), tokens, jnp.array([tokens.shape[1]]))

    for length in rows:
        found = np.asarray(embedded(np.random.default_rng(0).integers(5, 1000, (1, length))))
        if found.shape != (1, encoder.width) or not np.isfinite(found).all():
            raise RuntimeError(f"{length} tokens are not embedded")
