"""The programs of a token policy in the suite gpu, from shapes alone: updates, and sampling.

GRPO's update has one block of 16,384 tokens a device: a group of episodes with a prompt in common,
half of whose own tokens are sampled. IPO's has 16 pairs of queries in such a block, each pair with
a prompt in common; PPO's, of policy and critic, 16 rewritten queries, half of whose tokens are
prompts. More blocks take the same memory and as many times longer.
Sampling has eight prompts a device, and eight turns of each side by side.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from benchmarks.memory_cases import RANK, REMAT
from benchmarks.report import Case
from qrag_jax.learners import placement
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule, make_optimizer
from qrag_jax.learners.policy_state import Parts, state_shapes, state_shardings
from qrag_jax.learners.ppo_config import TokenPPOConfig
from qrag_jax.learners.ppo_update import make_ppo_update, ppo_episodes, ppo_shardings
from qrag_jax.learners.preference_config import PreferenceConfig
from qrag_jax.learners.preference_update import MEMBERS as PAIR
from qrag_jax.learners.preference_update import (
    make_preference_update,
    pair_episodes,
    pair_shardings,
)
from qrag_jax.learners.token_config import TokenGRPOConfig
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.learners.token_update import episode_shardings, make_token_update, token_episodes
from qrag_jax.models.adapters import ALL_LINEAR, kernel_shapes, target_modules
from qrag_jax.models.compute.linear import LORA_A, LORA_B
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.precision import BFLOAT16, precision
from qrag_jax.models.heads.language_model import LanguageModel
from qrag_jax.models.pretrained_lm import table_of
from qrag_jax.models.trunks import qwen3_weights
from qrag_jax.models.trunks.qwen2 import Qwen2Config
from qrag_jax.models.trunks.qwen3 import Qwen3, Qwen3Config
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.rollouts.device_sampler import DeviceSampler
from qrag_jax.rollouts.token_blocks import BlockShape
from qrag_jax.rollouts.token_sampler import SamplingConfig
from qrag_jax.rollouts.trajectories import (
    DONE,
    SCORED,
    BatchRules,
    TokenTrajectory,
    Turn,
    token_batch,
)
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.targets import TPU

TOKENS, PAIRS, REWRITES, SAMPLING = PROGRAMS = "tokens", "pairs", "rewrites", "sampling"
UPDATES = TOKENS, PAIRS, REWRITES
MEMBERS, BLOCK, PROMPT, OWN = 8, 16384, 2048, 1536
SHAPE = BlockShape(BLOCK, PROMPT + OWN, 1, MEMBERS, MEMBERS * OWN // 2, PROMPT, OWN)
QUESTIONS, ASKED, QUERY = 16, 864, 80  # pairs of a block, and the tokens of prompt and query
PAIR_SHAPE = BlockShape(
    BLOCK, ASKED + QUERY, QUESTIONS, PAIR, QUESTIONS * PAIR * QUERY, ASKED, QUERY
)
REWRITTEN, HALF = 16, 512  # queries of a block; tokens of a prompt, and of an output
REWRITE_SHAPE = BlockShape(BLOCK, 2 * HALF, REWRITTEN, 1, REWRITTEN * HALF)
SHAPES = {TOKENS: SHAPE, PAIRS: PAIR_SHAPE, REWRITES: REWRITE_SHAPE}
ROOM, CHUNK = 4096, 512  # of sampling
TEMPERATURE = 0.5
_ARRAY = re.compile(r"\b(?:f32|bf16|f16|s32|u32|pred)\[([\d,]+)\]")


@dataclasses.dataclass(frozen=True)
class LanguageModelSize:
    """A published language model: its name, its family and its sizes."""

    name: str
    family: str
    config: Qwen3Config

    @property
    def own_head(self) -> bool:
        """Whether its head is not the word table."""
        return not self.config.tie_word_embeddings


def _qwen3(name: str, hidden: int, inner: int) -> LanguageModelSize:
    sizes = Qwen3Config(151936, hidden, 28, 16, 8, inner, rope_theta=1e6, tie_word_embeddings=True)
    return LanguageModelSize(name, "qwen3", sizes)


LANGUAGE_MODELS = (
    _qwen3("Qwen3-0.6B", 1024, 3072),
    _qwen3("Qwen3-1.7B", 2048, 6144),
    LanguageModelSize(
        "Qwen2.5-7B", "qwen2", Qwen2Config(152064, 3584, 28, 28, 4, 18944, rope_theta=1e6)
    ),
)
TINY_LANGUAGE_MODEL = LanguageModelSize(
    "tiny language model", "qwen3", Qwen3Config(1024, 192, 4, 6, 2, 512, head_dim=32)
)
# (name, whether adapters are trained) → GiB that one update may take on each of 8 devices.
MOST_MEMORY = {("Qwen2.5-7B", True): 74.0}


def tokens_program(
    model: LanguageModelSize, mesh: Mesh, lora: bool, name: str, *, values: bool = False
) -> Program:
    """One update by a block of episodes or pairs on each device, or the sampling of turns.

    Args:
        name: one of `PROGRAMS`.
        values: what is learned from has values, not only shapes; the devices are then here.
    """
    trunk = Qwen3(
        model.config,
        precision(BFLOAT16, Platform.of(mesh)),
        REMAT,
        not Platform.of(mesh).on_cpu,
        own_head=model.own_head,
    )
    params, rules = (
        jax.eval_shape(trunk.init_params, jax.random.key(0)),
        qwen3_weights.PARTITION_RULES,
    )
    base_shardings, base = None, []
    if lora:
        base_shardings = placement.base_shardings(mesh, rules, params)
        base = [placement.shapes_on(params, base_shardings)]
        params = adapter_shapes(model, trunk)
    optimizer = OptimizerConfig()
    critic = make_optimizer(optimizer) if name == REWRITES else None
    width = model.config.hidden_size
    parts = Parts(make_optimizer(optimizer), critic, name == REWRITES, width)
    shardings = state_shardings(mesh, rules, parts, params)
    if name == SAMPLING:
        own = placement.shapes_on(params, shardings.params)
        return _sampling(trunk, Adapted(base[0], own) if lora else own, mesh)
    algorithms: dict[str, Any] = {
        TOKENS: TokenGRPOConfig(members=MEMBERS),
        PAIRS: PreferenceConfig(),
        REWRITES: TokenPPOConfig(),
    }
    policy: TokenPolicy[Any] = TokenPolicy(
        mesh=mesh,
        shardings=shardings,
        trunk=trunk,
        vocabulary=Vocabulary(TEMPERATURE, products=jnp.dtype(jnp.bfloat16)),
        config=algorithms[name],
        weights=(1.0,),
        optimizer=parts.optimizer,
        schedule=learning_rate_schedule(optimizer),
        base_shardings=base_shardings,
        critic_optimizer=critic,
    )
    state = placement.shapes_on(state_shapes(parts, params), shardings)
    rows = int(mesh.shape["data"] * mesh.shape["fsdp"])
    placed: Any = jax.device_put if values else placement.shapes_on
    if name == PAIRS:
        count = QUESTIONS * rows
        none, ones = np.zeros(PAIR * count, np.float32), np.ones(count, np.float32)
        pairs = pair_episodes(policy, _pairs(count), PAIR_SHAPE, none, ones)
        of_pairs = placed(pairs, jax.tree.map(lambda _: pair_shardings(mesh), pairs))
        return Program(PAIRS, make_preference_update(policy), (state, of_pairs, *base))
    if name == REWRITES:
        rewrites = ppo_episodes(policy, _rewrites(REWRITTEN * rows), REWRITE_SHAPE)
        of_ppo = ppo_shardings(mesh)
        split = of_ppo._replace(blocks=jax.tree.map(lambda _: of_ppo.blocks, rewrites.blocks))
        shown: Any = placed(rewrites, split)
        return Program(REWRITES, make_ppo_update(policy), (state, shown, *base))
    episodes = token_episodes(policy, _batch(rows), SHAPE)
    by_block, replicated, *_ = episode_shardings(mesh)
    where = jax.tree.map(lambda _: replicated, episodes)
    where = where._replace(blocks=jax.tree.map(lambda _: by_block, episodes.blocks))
    given: Any = placed(episodes, where)
    return Program(TOKENS, make_token_update(policy), (state, given, *base))


def _sampling(trunk: Qwen3, params: Any, mesh: Mesh) -> Program:
    rows = MEMBERS * MEMBERS
    config = SamplingConfig(temperature=TEMPERATURE, room=ROOM, chunk=CHUNK, rows=rows)
    model = LanguageModel(trunk, stop_ids=(0,), max_positions=ROOM)
    sampler = DeviceSampler(model, config, mesh)
    given = sampler.given(rows * mesh.size, MEMBERS * mesh.size)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    where = jax.tree.map(lambda _: replicated, given)
    return Program(SAMPLING, sampler.program, (params, placement.shapes_on(given, where)))


def adapter_shapes(model: LanguageModelSize, trunk: Qwen3) -> Params:
    """Shapes of adapters for every kernel of the layers."""
    kernels, shapes = kernel_shapes(trunk), {}
    for place in target_modules(table_of(model.family), ALL_LINEAR):
        layers, width_in, width_out = kernels[place]
        shapes[*place, LORA_A] = jax.ShapeDtypeStruct((layers, width_in, RANK), jnp.float32)
        shapes[*place, LORA_B] = jax.ShapeDtypeStruct((layers, RANK, width_out), jnp.float32)
    return unflatten_dict(shapes)


def _batch(groups: int) -> Any:
    """A group for each device: a prompt, and for each member a turn, a tool's words, a turn."""
    quarter = OWN // 4
    prompt, words = np.zeros(PROMPT, np.int32), np.zeros(2 * quarter, np.int32)
    said, log_probs = np.zeros(quarter, np.int32), np.zeros(quarter, np.float32)
    turns = Turn(prompt, said, log_probs, "stop"), Turn(words, said, log_probs, "stop")
    trajectories = [
        TokenTrajectory(group, member, 1, (turns,), DONE, {"reward": float(member)})
        for group in range(groups)
        for member in range(MEMBERS)
    ]
    return token_batch(trajectories, BatchRules(MEMBERS, ("reward",), SCORED, PROMPT + OWN))


def _rewrites(count: int) -> Any:
    """Outputs, each behind a prompt of its own."""
    ids, log_probs = np.zeros(HALF, np.int32), np.zeros(HALF, np.float32)
    turn = Turn(ids, ids, log_probs, "stop")
    trajectories = [
        TokenTrajectory(number, 0, 1, ((turn,),), DONE, {"reward": float(number % 2)})
        for number in range(count)
    ]
    return token_batch(trajectories, BatchRules(1, ("reward",), SCORED, 2 * HALF))


def _pairs(count: int) -> Any:
    """Pairs of queries, each behind a prompt of its own."""
    prompt, log_probs = np.zeros(ASKED, np.int32), np.zeros(QUERY, np.float32)
    turn = Turn(prompt, np.zeros(QUERY, np.int32), log_probs, "stop")
    trajectories = [
        TokenTrajectory(pair, member, 1, ((turn,),), DONE)
        for pair in range(count)
        for member in range(PAIR)
    ]
    return token_batch(trajectories, BatchRules(PAIR, (), SCORED, ASKED + QUERY))


def arrays_of_logits(text: str, vocab: int, shape: BlockShape) -> int:
    """How many arrays a program names with a row of the vocabulary for each token of a block."""
    found = 0
    for each in _ARRAY.findall(text):
        sizes = [int(size) for size in each.split(",")]
        found += vocab in sizes and bool({shape.sampled, shape.tokens} & set(sizes))
    return found


def tokens_cases(name: str, row: dict[str, Any]) -> list[Case]:
    """Whether logits of all sampled tokens exist at a time; what drawing one token starts."""
    if row["program"] == SAMPLING:
        return _sampling_cases(name, row)
    if row["program"] not in UPDATES:
        return []
    return [
        Case(
            f"{name}: arrays of tokens × vocabulary",
            row["arrays_of_logits"],
            "arrays",
            target="0",
            holds=not row["arrays_of_logits"],
            details={"one of sampled tokens in float32, GiB": 4 * row["logits"] / 2**30},
        )
    ]


def _sampling_cases(name: str, row: dict[str, Any]) -> list[Case]:
    """The prompts are read by the first two loops; each other one draws tokens, one a round."""
    drawing = row["rounds"][2:]
    asked = max(each["host_loops"] + each["host_branches"] for each in drawing)
    started = [each["launches"] for each in drawing]
    return [
        Case(
            f"{name}: times that a token asks the host, but for the end",
            asked,
            "times",
            target="0",
            holds=None if row["platform"] == TPU else not asked,
        ),
        Case(
            f"{name}: kernels of a token, at most",
            max(started),
            "kernels",
            details={f"stage {number}": count for number, count in enumerate(started, 1)},
        ),
        *(
            Case(f"{name}: estimated time of a token, stage {number}", seconds * 1e3, "ms")
            for number, seconds in enumerate(row["round_seconds"][2:], 1)
        ),
    ]
