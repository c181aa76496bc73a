"""Ten training steps under many meshes of eight devices, and what was found of each.

`sharded_steps OUT ADDRESS PROCESS`, as a program, is one of two processes that share eight devices
and run one case each way of splitting.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.evaluators import episodes as evaluation
from qrag_jax.learners import placement
from qrag_jax.learners.state import TrainState
from qrag_jax.learners.step import make_train_step
from qrag_jax.models.heads.embedding import LAST, TextEncoder
from qrag_jax.models.trunks import bert_weights, gte_weights, qwen3_weights
from qrag_jax.models.trunks.bert import Bert, BertConfig
from qrag_jax.models.trunks.gte import Gte, GteConfig
from qrag_jax.models.trunks.qwen3 import Qwen3, Qwen3Config
from qrag_jax.rollouts.chunks import Actor
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.mesh import shard_batch
from qrag_jax.runtime.sharding import BATCH_AXES
from tests.devices import mesh_of
from tests.episodes_maker import CLS, PAD, SEP, random_episodes, tower
from tests.learners.three_steps import two_towers
from tests.rollouts.play_setup import CHUNK_COUNTS, CONFIG, ONE_BUCKET, SHAPE, feedback

STEPS = 10
# Wide enough that kernels and word embeddings are split under the rules of real runs.
ENCODER = TextEncoder(
    Bert(
        BertConfig(
            vocab_size=320,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=256,
            max_position_embeddings=32,
        )
    ),
    *(128, 32, CLS, SEP, PAD),
)
QWEN3 = TextEncoder(
    Qwen3(
        Qwen3Config(
            vocab_size=320,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            intermediate_size=256,
            head_dim=16,
            max_position_embeddings=32,
        )
    ),
    *(128, 32, None, SEP, PAD),
    pooling=LAST,
)
GTE = TextEncoder(
    Gte(
        GteConfig(
            vocab_size=320,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=256,
        )
    ),
    *(128, 32, CLS, SEP, PAD),
)
RARE = 255  # a word in no episode
FAMILIES = {
    "bert": (ENCODER, bert_weights.PARTITION_RULES),
    "qwen3": (QWEN3, qwen3_weights.PARTITION_RULES),
    "new": (GTE, gte_weights.PARTITION_RULES),
}


class Case(NamedTuple):
    data: int
    fsdp: int
    accumulation: int
    tensor: int = 1
    family: str = "bert"

    @property
    def name(self) -> str:
        mesh = f"data{self.data}-fsdp{self.fsdp}-tensor{self.tensor}"
        return f"{self.family}-{mesh}-accumulation{self.accumulation}"


WHOLE = Case(1, 1, 1)
CASES = [Case(1, 8, 1)]
SLOW_CASES = [Case(8, 1, 2), Case(2, 4, 1), Case(8, 1, 1), Case(1, 8, 2), Case(2, 4, 2)]
TENSOR_CASES = [Case(1, 2, 2, 4, "qwen3")]
SLOW_TENSOR_CASES = [Case(2, 2, 1, 2), Case(1, 4, 2, 2), Case(2, 2, 1, 2, "qwen3")]
SKIPS = (Case(8, 1, 2), Case(2, 4, 1))
SHARED = (Case(1, 8, 1), Case(2, 4, 1))  # by two processes
MOVED = (Case(1, 8, 1), Case(2, 4, 1), WHOLE)  # a run that changes its mesh twice


def batch(seed: int) -> EpisodeBatch:
    """16 episodes, of which a process of several gets its part."""
    rows = random_episodes(seed, CHUNK_COUNTS * 2, SHAPE)
    size = len(rows.sample) // jax.process_count()
    start = jax.process_index() * size
    return EpisodeBatch(*(leaf[start : start + size] for leaf in rows))


def host(tree: Any) -> dict[str, np.ndarray]:
    """Whole arrays by their path, as NumPy."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if jax.process_count() > 1:
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = np.asarray(leaf)
    return found


class Training:
    """One case: its mesh, where its state lives, and its compiled step."""

    def __init__(self, case: Case) -> None:
        self.mesh = mesh_of(case.data, case.fsdp, case.tensor)
        encoder, rules = FAMILIES[case.family]
        self.tower = tower(encoder, 0)
        actor, split = Actor(encoder, ONE_BUCKET, CONFIG), case.accumulation
        self.towers = two_towers(self.mesh, self.tower, actor, rules=rules, accumulation=split)
        self.shardings = self.towers.shardings
        step = make_train_step(self.towers, feedback)
        self.program = step.lower(self.start(), shard_batch(self.mesh, batch(0))).compile()  # type: ignore[attr-defined]

    def start(self) -> TrainState:
        return self.towers.first_state(self.tower, 42)

    def steps(self, state: TrainState, numbers: range) -> tuple[TrainState, list[float]]:
        losses = []
        for number in numbers:
            episodes = shard_batch(self.mesh, batch(number))
            with jax.transfer_guard("disallow"):
                state, metrics = self.program(state, episodes)
            losses.append(float(metrics["loss"]))
        return state, losses


class Found(NamedTuple):
    """What ten steps left: arrays and losses, the program, bytes and shapes of every array."""

    arrays: dict[str, np.ndarray]  # by path, with the losses
    program: str  # HLO
    held: dict[str, tuple[int, int]]  # bytes of the whole array, and on one device
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]  # the whole array's, and of a part


@cache
def training(case: Case) -> Training:
    return Training(case)


@cache
def ten_steps(case: Case) -> tuple[TrainState, Found]:
    """The state after ten steps, for tests that go on, and what was found."""
    state, losses = training(case).steps(training(case).start(), range(STEPS))
    held, shapes = {}, {}
    for name, leaf in named(state):
        part = leaf.addressable_shards[0].data
        held[name] = leaf.nbytes, part.nbytes
        shapes[name] = leaf.shape, part.shape
    arrays = host(state) | {"losses": np.array(losses)}
    return state, Found(arrays, training(case).program.as_text(), held, shapes)


def found(case: Case) -> Found:
    return ten_steps(case)[1]


def forget() -> None:
    """Lets go of states and programs, for the modules that follow."""
    training.cache_clear()
    ten_steps.cache_clear()


def skipped_step(case: Case) -> tuple[list[str], list[float]]:
    """One step more, in which a single device meets a word whose embedding is infinite.

    Returns:
        the arrays of the state that changed, and what each device says of `skipped`.
    """
    run = training(case)
    state = jax.tree.map(jnp.copy, ten_steps(case)[0])  # steps take the buffers of their state
    params = dict(state.params)
    params["word_embeddings"] = params["word_embeddings"].at[:, RARE].set(np.inf)
    state = jax.device_put(state._replace(params=params), run.shardings)
    before, episodes = host(state), batch(0)
    episodes.question[0, 0] = RARE
    state, metrics = run.program(state, shard_batch(run.mesh, episodes))
    after = host(state)
    changed = [path for path in before if before[path].tobytes() != after[path].tobytes()]
    return changed, [float(part.data) for part in metrics["skipped"].addressable_shards]


def moved(folder: Path) -> dict[str, np.ndarray]:
    """Ten steps, saved and restored onto another mesh after the third and the seventh."""
    first, second, last = map(training, MOVED)
    state, losses = first.steps(first.start(), range(3))
    for run, numbers in ((second, range(3, 7)), (last, range(7, STEPS))):
        checkpoints = Checkpoints(folder)
        checkpoints.save_last(numbers.start, state, {})
        checkpoints.wait()
        state = Checkpoints(folder).restore_last(run.start()).state
        placed = jax.tree.map(lambda leaf, where: leaf.sharding == where, state, run.shardings)
        assert all(jax.tree.leaves(placed))
        state, more = run.steps(state, numbers)
        losses += more
    return host(state) | {"losses": np.array(losses)}


def played(case: Case) -> dict[str, np.ndarray]:
    """Plays with parameters as this training places them, and as an evaluation builds them."""
    run = training(case)
    mesh, shardings = run.mesh, run.shardings.params
    player = evaluation.Player(mesh, shardings, ENCODER, CONFIG, feedback, 0.9)
    program = evaluation.make_play(player, ONE_BUCKET)
    params = placement.both_towers(shardings, run.tower)
    for ours, trained in zip(jax.tree.leaves(params), jax.tree.leaves(run.start().params)):
        assert ours.sharding == trained.sharding
    return host(program(params, shard_batch(mesh, batch(0))))


def may_be_sent(case: Case) -> dict[str, set[tuple[int, ...]]]:
    """Shapes of float32 arrays that a step may send, by the kind of sending.

    They are sums of gradients; whole kernels of one layer, maps that are computed as one joined,
    and their parts; embeddings and their cotangents; and words of a block, and their parts.
    """
    encoder, f, t = FAMILIES[case.family][0], case.fsdp, case.tensor
    parts = {part for _, part in found(case).shapes.values()}
    one_tower = {shape[1:] for shape in parts} | {shape[2:] for shape in parts}
    allowed: dict[str, set[tuple[int, ...]]] = {"all-reduce": parts | one_tower}
    blocks, width = ONE_BUCKET, encoder.width
    words = {size for kind in blocks for size in kind.tokens}
    if t > 1:
        allowed["all-reduce"] |= {(size, width) for size in words}
    if f == 1:
        return allowed
    maps = encoder.module.SPLIT
    layers = found(case).shapes
    kernels: dict[str, tuple[int, ...]] = {
        name.split("/")[-2]: (part[-2] * f, part[-1])
        if name.split("/")[-2] in maps.columns
        else (part[-2], part[-1] * f)
        for name, (_, part) in layers.items()
        if name.startswith("params/") and name.endswith("kernel")
    }
    joined = [kernels[name] for name in maps.columns[:3]]
    whole = {*kernels.values(), (joined[0][0], sum(o for _, o in joined))}
    if case.family == "qwen3":
        whole |= {(kernels["gate"][0], 2 * kernels["gate"][1])}
    of_kernels = whole | {(i // f, o) for i, o in whole} | {(i, o // f) for i, o in whole}
    # Rows given on a device: the states of a step, those of all steps, all chunks.
    rows = {16 * n // (8 * case.accumulation) for n in (1, CONFIG.max_steps, SHAPE.chunks)}
    given = {(n, width) for n in rows}
    dealt = {(n * t, k, width) for n in rows for k in (1, f)}
    allowed["all-gather"] = of_kernels | given | {(n * f * t, width) for n in rows} | dealt
    allowed["reduce-scatter"] = of_kernels
    allowed["all-to-all"] = {(size, width // f) for size in words}
    return allowed


def bad_programs() -> dict[str, str]:
    """Two programs that send the batch to every device, and keep their inputs."""
    mesh = mesh_of(2, 4)
    by_episode, everywhere = PartitionSpec(BATCH_AXES), PartitionSpec()

    def copied(tokens: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(tokens, NamedSharding(mesh, everywhere)) + 1

    def gathered(values: jax.Array) -> jax.Array:
        return jax.lax.all_gather(values, BATCH_AXES, tiled=True).sum(0)

    over_mesh = jax.shard_map(
        gathered, mesh=mesh, in_specs=by_episode, out_specs=everywhere, check_vma=False
    )
    chunks = shard_batch(mesh, batch(0).chunks)
    embeddings = shard_batch(mesh, np.ones((16, 6, 128), np.float32))
    return {
        "copied": jax.jit(copied).lower(chunks).compile().as_text(),
        "gathered": jax.jit(over_mesh).lower(embeddings).compile().as_text(),
    }


def named(state: TrainState) -> list[tuple[str, jax.Array]]:
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]


def main() -> None:
    out = Path(sys.argv[1])
    jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
    for case in SHARED:
        arrays, program = found(case)[:2]
        if jax.process_index() == 0:
            np.savez(out / f"{case.name}.npz", **arrays)
            (out / f"{case.name}.hlo").write_text(program)


if __name__ == "__main__":
    main()
