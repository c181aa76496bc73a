"""Ten training steps under many meshes, as a program over eight devices; leaves what it found.

`sharded_steps OUT` runs what `make test` looks at, `sharded_steps OUT tensor` the same of the axis
`tensor`; with `slow` behind it either runs the other cases. `sharded_steps OUT ADDRESS PROCESS` is
one of two processes that share eight devices and run one case each way of splitting.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
from qrag_jax.runtime.mesh import AXES, shard_batch
from qrag_jax.runtime.sharding import BATCH_AXES
from tests.episodes_maker import CLS, PAD, SEP, random_episodes, tower
from tests.learners.three_steps import two_towers
from tests.rollouts.play_setup import CHUNK_COUNTS, CONFIG, ONE_BUCKET, SHAPE, feedback

STEPS = 10
# Wide enough that kernels and word embeddings are split under the rules of real runs.
ENCODER = TextEncoder(
    Bert(
        BertConfig(
            vocab_size=256,
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
            vocab_size=256,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=256,
            head_dim=32,
            max_position_embeddings=32,
        )
    ),
    *(128, 32, None, SEP, PAD),
    pooling=LAST,
)
GTE = TextEncoder(
    Gte(
        GteConfig(
            vocab_size=256,
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
CASES = [Case(8, 1, 2), Case(1, 8, 1), Case(2, 4, 1)]
SLOW_CASES = [Case(8, 1, 1), Case(1, 8, 2), Case(2, 4, 2)]
TENSOR_CASES = [
    Case(2, 2, 1, 2),
    Case(1, 2, 2, 4, "qwen3"),
    Case(1, 2, 2, 4, "new"),
]
SLOW_TENSOR_CASES = [Case(1, 2, 2, 4), Case(2, 2, 1, 2, "qwen3")]
SKIPS = (Case(8, 1, 2), Case(2, 4, 1))
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
        devices = np.array(jax.devices()[: case.data * case.fsdp * case.tensor])
        self.mesh = Mesh(devices.reshape(case.data, case.fsdp, case.tensor), AXES)
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


def run(case: Case, out: Path) -> Training:
    """Ten steps; writes the state, the losses, the program and what a device holds."""
    training = Training(case)
    state, losses = training.steps(training.start(), range(STEPS))
    arrays = host(state) | {"losses": np.array(losses)}
    if jax.process_index() == 0:
        np.savez(out / f"{case.name}.npz", **arrays)
        (out / f"{case.name}.hlo").write_text(training.program.as_text())
        held = {
            name: [leaf.nbytes, leaf.addressable_shards[0].data.nbytes]
            for name, leaf in _named(state)
        }
        parts = [list(leaf.addressable_shards[0].data.shape) for _, leaf in _named(state)]
        shapes = [list(leaf.shape) for _, leaf in _named(state)]
        found = {"bytes": held, "parts": parts, "shapes": shapes}
        (out / f"{case.name}.json").write_text(json.dumps(found))
        if case in SKIPS and jax.process_count() == 1:  # else the other one would have to step too
            skip(training, state, out, case.name)
    return training


def skip(training: Training, state: TrainState, out: Path, name: str) -> None:
    """One step more, in which a single device meets a word whose embedding is infinite."""
    params = dict(state.params)
    params["word_embeddings"] = params["word_embeddings"].at[:, RARE].set(np.inf)
    state = jax.device_put(state._replace(params=params), training.shardings)
    before, episodes = host(state), batch(0)
    episodes.question[0, 0] = RARE
    state, metrics = training.program(state, shard_batch(training.mesh, episodes))
    after = host(state)
    changed = [path for path in before if before[path].tobytes() != after[path].tobytes()]
    of_devices = [float(part.data) for part in metrics["skipped"].addressable_shards]
    found = {"changed": changed, "skipped": of_devices}
    (out / f"{name}-skipped.json").write_text(json.dumps(found))


def move(trainings: dict[Case, Training], out: Path) -> None:
    """Ten steps, saved and restored onto another mesh after the third and the seventh."""
    first, second, last = (trainings[case] for case in MOVED)
    state, losses = first.steps(first.start(), range(3))
    for training, numbers in ((second, range(3, 7)), (last, range(7, STEPS))):
        checkpoints = Checkpoints(out / "moved")
        checkpoints.save_last(numbers.start, state, {})
        checkpoints.wait()
        state = Checkpoints(out / "moved").restore_last(training.start()).state
        placed = jax.tree.map(lambda leaf, where: leaf.sharding == where, state, training.shardings)
        assert all(jax.tree.leaves(placed))
        state, more = training.steps(state, numbers)
        losses += more
    np.savez(out / "moved.npz", **host(state), losses=np.array(losses))


def play(training: Training, out: Path) -> None:
    """Plays with parameters as this training places them, and as an evaluation builds them."""
    mesh, shardings = training.mesh, training.shardings.params
    player = evaluation.Player(mesh, shardings, ENCODER, CONFIG, feedback, 0.9)
    program = evaluation.make_play(player, ONE_BUCKET)
    params = placement.both_towers(shardings, training.tower)
    for ours, trained in zip(jax.tree.leaves(params), jax.tree.leaves(training.start().params)):
        assert ours.sharding == trained.sharding
    played = program(params, shard_batch(mesh, batch(0)))
    parts = mesh.shape["data"], mesh.shape["fsdp"]
    np.savez(out / "played-{}-{}.npz".format(*parts), **host(played))


def bad_programs(out: Path) -> None:
    """Two programs that send the batch to every device, and keep their inputs."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4, 1), AXES)
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
    for name, program, values in (("copied", copied, chunks), ("gathered", over_mesh, embeddings)):
        (out / f"{name}.hlo").write_text(jax.jit(program).lower(values).compile().as_text())


def _named(state: TrainState) -> list[tuple[str, jax.Array]]:
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]


def main() -> None:
    out = Path(sys.argv[1])
    whole = [Case(1, 1, 1, family=family) for family in FAMILIES]
    alone = {
        "slow": SLOW_CASES,
        "tensor": [*whole, *TENSOR_CASES],
        "tensor slow": SLOW_TENSOR_CASES,
    }
    if " ".join(sys.argv[2:]) in alone:
        for case in alone[" ".join(sys.argv[2:])]:
            run(case, out)
        return
    if len(sys.argv) > 2:
        jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
        for case in (Case(1, 8, 1), Case(2, 4, 1)):
            run(case, out)
        return
    assert len(jax.devices()) == 8
    bad_programs(out)
    trainings = {case: run(case, out) for case in (WHOLE, *CASES)}
    move(trainings, out)
    for case in (WHOLE, Case(2, 4, 1)):
        play(trainings[case], out)


if __name__ == "__main__":
    main()
