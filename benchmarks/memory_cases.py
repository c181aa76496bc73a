"""Bytes per device of a training step, from its compiled program: nothing is allocated or run.

`python -m benchmarks.memory_cases [--quick] [--h100]` prints one JSON object per case, for H100s
that are not here or for this process's devices. `memory` starts this module.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs import hotpotqa
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.environments.chunks import state_width
from qrag_jax.feedback.ground_truth import fact_feedback
from qrag_jax.learners import placement
from qrag_jax.learners.optimizers import learning_rate_schedule, make_optimizer
from qrag_jax.learners.step import make_train_step
from qrag_jax.learners.two_towers import TwoTowers
from qrag_jax.models.adapters import ALL_LINEAR, kernel_shapes, target_modules
from qrag_jax.models.compute.linear import LORA_A, LORA_B
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.precision import BFLOAT16, PRODUCTS, Precision, precision
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.models.pretrained import FAMILIES, Family
from qrag_jax.models.trunks.bert import BertConfig
from qrag_jax.models.trunks.gte import GteConfig
from qrag_jax.models.trunks.modernbert import GLOBAL, LOCAL, ModernBertConfig
from qrag_jax.models.trunks.mpnet import MpnetConfig
from qrag_jax.models.trunks.nomic_bert import NomicBertConfig
from qrag_jax.models.trunks.qwen3 import Qwen3Config
from qrag_jax.models.trunks.trunk import TrunkConfig
from qrag_jax.models.trunks.xlm_roberta import XlmRobertaConfig
from qrag_jax.rollouts.chunks import Actor
from qrag_jax.runtime.mesh import AXES
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.targets import described_devices
from qrag_jax.systems.q_rag_config import QRagConfig

H100 = "h100"
RANK = 16
REMAT = "layers"  # gradients compute all again except the inputs of layers
QUESTIONS = 8  # per device in a batch
CHUNKS, STEPS = 10, 2  # as in HotpotQA
QUESTION_TOKENS, ROW_TOKENS, MEAN_TOKENS = 64, 220, 130
BLOCK_TOKENS = 8192  # as in a training on accelerators
HALF = jnp.dtype(jnp.bfloat16)
COMPILER_OPTIONS = {
    # XLA settles computations and buffers before LLVM runs: LLVM's optimisations change neither.
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    # Unlike a GPU's compiler, the CPU's removes the barrier between a layer's first computation and
    # its recomputation, and merges the two: all values would be kept, as without remat.
    "xla_disable_hlo_passes": "cse_barrier_expander",
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A published encoder: its name, its family and its sizes."""

    name: str
    family: str
    config: TrunkConfig

    @property
    def parts(self) -> Family:
        """The parts of the model's family."""
        return FAMILIES[self.family]


def _qwen3(name: str, vocab: int, hidden: int, layers: int, heads: int, inner: int) -> Model:
    sizes = Qwen3Config(vocab, hidden, layers, heads, 8, inner, head_dim=128, rope_theta=1e6)
    return Model(f"Qwen3-Embedding-{name}", "qwen3", sizes)


TINY = Model("tiny BERT", "bert", BertConfig(512, 64, 2, 2, 128))
MINILM = Model("MiniLM", "bert", BertConfig(30522, 384, 6, 12, 1536))
BERT_BASE = Model("BERT-base", "bert", BertConfig(30522, 768, 12, 12, 3072))
E5_LARGE = Model(
    "multilingual-e5-large",
    "xlm-roberta",
    XlmRobertaConfig(250002, 1024, 24, 16, 4096, 514, 1, 1e-5),
)
GTE = Model(
    "gte-multilingual-base",
    "new",
    GteConfig(250048, 768, 12, 12, 3072, 8192, rope_theta=2e4, rope_factor=8.0),
)
QWEN3 = (
    _qwen3("0.6B", 151669, 1024, 28, 16, 3072),
    _qwen3("4B", 151665, 2560, 36, 32, 9728),
    _qwen3("8B", 151665, 4096, 36, 32, 12288),
)
MODERNBERT = Model(
    "ModernBERT-base",
    "modernbert",
    ModernBertConfig(50368, 768, 22, 12, 1152, layer_types=(GLOBAL, LOCAL, LOCAL) * 7 + (GLOBAL,)),
)
MPNET = Model(
    "all-mpnet-base-v2", "mpnet", MpnetConfig(30527, 768, 12, 12, 3072, 514, layer_norm_eps=1e-5)
)
NOMIC = Model(
    "nomic-embed-text-v1.5", "nomic_bert", NomicBertConfig(30528, 768, 12, 12, 3072, 8192)
)
MODELS = (BERT_BASE, GTE, E5_LARGE, *QWEN3)
FURTHER = (MODERNBERT, MPNET, NOMIC)
MESHES = (1, 1, 1), (1, 8, 1)  # data, fsdp, tensor
OTHER_MESH = (1, 4, 2)  # for the smallest model alone


class Step:
    """A training step of one model on one mesh, built from shapes alone.

    Attributes:
        arguments: the state, a batch and (with LoRA) the base, as shapes with their shardings.
        program: the jitted step.
        mesh, towers, feedback: what it was built from.
    """

    def __init__(self, model: Model, mesh: Mesh, lora: bool) -> None:
        config = QRagConfig.of(hotpotqa.get_config())
        family, platform = model.parts, Platform.of(mesh)
        self._options = COMPILER_OPTIONS if platform.on_cpu else {}
        encoder = encoder_of(model, platform)
        tower = jax.eval_shape(encoder.init, jax.random.key(0))
        base_shardings: Params | None = None
        base: list[Params] = []
        if lora:
            base_shardings = placement.base_shardings(mesh, family.rules, tower)
            base = [placement.shapes_on(tower, base_shardings)]
            tower = adapter_shapes(model, encoder, RANK)
        optimizer = make_optimizer(config.optimizer)
        shardings = placement.state_shardings(mesh, family.rules, tower, optimizer)
        towers = TwoTowers(
            mesh=mesh,
            shardings=shardings,
            actor=Actor(encoder, block_shapes_for(encoder), config.rollout),
            config=config.pqn,
            optimizer=optimizer,
            schedule=learning_rate_schedule(config.optimizer),
            peak=config.optimizer.learning_rate,
            base_shardings=base_shardings,
        )
        feedback = fact_feedback(config.reward, stop_action=config.env.stop_action)
        self.mesh, self.towers, self.feedback = mesh, towers, feedback
        self.program = make_train_step(towers, feedback)
        state = placement.shapes_on(placement.state_shapes(tower, optimizer), shardings)
        self.arguments = (state, batch_shapes(mesh), *base)

    def compile(self) -> Any:
        """The compiled program."""
        lowered = self.program.lower(*self.arguments)  # type: ignore[attr-defined]
        return lowered.compile(compiler_options=self._options)


def whole_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of a whole array, as if it were on one device."""
    return int(np.prod(leaf.shape, dtype=np.int64)) * _itemsize(leaf)


def part_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array's part on each device."""
    part = leaf.sharding.shard_shape(leaf.shape)
    return int(np.prod(part, dtype=np.int64)) * _itemsize(leaf)


def _itemsize(leaf: jax.ShapeDtypeStruct) -> int:
    # A threefry key has two words of 4 bytes.
    return 8 if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize


def encoder_of(model: Model, platform: Platform) -> TextEncoder:
    """The encoder as a training with `REMAT` computes it there, without parameters."""
    family, sizes = model.parts, model.config
    computed_in = Precision(HALF, HALF, PRODUCTS)  # as a CPU with matrix units might
    if not platform.on_cpu:
        computed_in = precision(BFLOAT16, platform)
    return TextEncoder(
        family.trunk(sizes, computed_in, REMAT, not platform.on_cpu),
        sizes.hidden_size,
        sizes.longest_row,
        opening_id=2 if family.opens_rows else None,
        sep_id=3,
        pad_id=0,
        pooling=family.pooling,
        normalise=family.normalise,
    )


def adapter_shapes(model: Model, encoder: TextEncoder, rank: int) -> Params:
    """Shapes of adapters for every kernel of the layers."""
    kernels = kernel_shapes(encoder.module)
    shapes = {}
    for place in target_modules(model.parts.table, ALL_LINEAR):
        layers, width_in, width_out = kernels[place]
        shapes[*place, LORA_A] = jax.ShapeDtypeStruct((layers, width_in, rank), jnp.float32)
        shapes[*place, LORA_B] = jax.ShapeDtypeStruct((layers, rank, width_out), jnp.float32)
    return unflatten_dict(shapes)


def block_shapes_for(encoder: TextEncoder) -> BlockShapes:
    """As many shapes as a training has: two sizes; three lengths of chunks and two of states."""
    opening, in_state = len(encoder.state_opening), ROW_TOKENS
    state_row = min(
        state_width(opening, QUESTION_TOKENS, in_state, STEPS - 1), encoder.max_positions
    )

    def blocks(longest: int, count: int) -> Blocks:
        lengths = sorted({-(-longest * i // (8 * count)) * 8 for i in range(1, count + 1)})
        means = [min(MEAN_TOKENS, length) for length in lengths]
        return Blocks((BLOCK_TOKENS // 2, BLOCK_TOKENS), tuple(lengths), tuple(map(float, means)))

    chunks, states = blocks(ROW_TOKENS, 3), blocks(state_row, 2)
    return BlockShapes(chunks, states, states)


def batch_shapes(mesh: Mesh) -> EpisodeBatch:
    """Shapes of a batch of `QUESTIONS` per device with `CHUNKS` chunks each."""
    count = QUESTIONS * mesh.size
    by_episode = NamedSharding(mesh, PartitionSpec(AXES))

    def shape(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *sizes), dtype, sharding=by_episode)

    return EpisodeBatch(
        question=shape(QUESTION_TOKENS),
        question_length=shape(),
        chunks=shape(CHUNKS, ROW_TOKENS - 2),
        chunk_lengths=shape(CHUNKS),
        chunk_mask=shape(CHUNKS, dtype=jnp.bool_),
        rank=shape(CHUNKS),
        sample=shape(),
        epoch=shape(),
    )


def mesh_of(shape: tuple[int, int, int], described: str = "") -> Mesh:
    """A mesh of the first devices, or of devices such as "h100" that are not here."""
    count = int(np.prod(shape))
    if described:
        devices = described_devices(f"{described}x{count}").devices
    else:
        devices = jax.devices()[:count]
    return Mesh(np.array(devices).reshape(shape), AXES)


def measure(
    model: Model, shape: tuple[int, int, int], lora: bool, described: str = ""
) -> dict[str, Any]:
    """Compiles one case; returns the bytes on each device by their use."""
    step, began = Step(model, mesh_of(shape, described), lora), time.monotonic()
    stats = step.compile().memory_analysis()
    return {
        "model": model.name,
        "lora": lora,
        "mesh": shape,
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "seconds": time.monotonic() - began,
    }


def cases(quick: bool) -> Iterator[tuple[Model, tuple[int, int, int], bool]]:
    """Every model, in full and with LoRA, on one device and on eight; quick: MiniLM alone."""
    for model in (MINILM,) if quick else MODELS:
        for lora in (False, True):
            for shape in MESHES:
                yield model, shape, lora
    if not quick:
        yield BERT_BASE, OTHER_MESH, False


def main() -> None:
    """Prints the cases."""
    described = H100 if f"--{H100}" in sys.argv[1:] else ""
    for case in cases("--quick" in sys.argv[1:]):
        print(json.dumps(measure(*case, described)), flush=True)


if __name__ == "__main__":
    main()
