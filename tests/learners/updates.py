"""One small encoder and one small decoder, and every update of them on any mesh.

Equal learners share their programs, in whichever file they are asked for. All learn by plain
descent, so that what moved is a rate times the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.learners import config as configs
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule, make_optimizer
from qrag_jax.learners.query_encoder import QueryEncoder, make_query_update
from qrag_jax.learners.state import Parts, TrainState
from qrag_jax.learners.token_policy import (
    TokenPolicy,
    make_token_update,
    pair_episodes,
    token_episodes,
)
from qrag_jax.learners.two_towers import ImitationGradient, PQNGradient, TwoTowers, make_update
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.embedding import Params
from qrag_jax.models.trunks.families import BertConfig, Qwen3Config
from qrag_jax.models.trunks.transformer import HEAD, Transformer
from qrag_jax.policies.plackett_luce import PlackettLuceConfig, log_prob, pool_logits
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.retrieval.protocol import NONE as NO_PASSAGE
from qrag_jax.rollouts.chunks import Actor
from qrag_jax.rollouts.pool_search import Drawn, HopBatch, HopShape, Rewarded, hop_batch
from qrag_jax.rollouts.trajectories import BlockShape, TokenBatch
from qrag_jax.runtime.mesh import shard_batch, shardings_of, split_rules
from tests import reference
from tests.devices import mesh_of
from tests.episodes_maker import FIRST_WORD, random_episodes, tiny_encoder, tower
from tests.episodes_maker import VOCAB as WORDS
from tests.episodes_maker import towers as both_towers
from tests.learners.whole_loss import LORA, SIZES
from tests.learners.whole_loss import adapters as stacked_adapters
from tests.rollouts import token_setup
from tests.rollouts.play_setup import CHUNK_COUNTS, ONE_BUCKET_ACTOR, PQN, SHAPE, feedback
from tests.rollouts.token_setup import MEMBERS, PAIRS, VOCAB

ALONE, SPLIT = (1, 1, 1), (2, 2, 2)
RATE, CRITIC_RATE = 0.5, 0.02
STATES_RATE, HOP_RATE = 0.05, 0.3  # of two towers, and of the query encoder
RULES = split_rules(BertConfig.COLUMNS, BertConfig.ROWS)
OPTIMIZER_CONFIG = OptimizerConfig(
    1e-3, 0.01, clip_norm=0.2, schedule="linear", final_ratio=0.0, warmup_steps=2, total_steps=10
)
OPTIMIZER, SCHEDULE = make_optimizer(OPTIMIZER_CONFIG), learning_rate_schedule(OPTIMIZER_CONFIG)
PEAK = OPTIMIZER_CONFIG.learning_rate


class Program(NamedTuple):
    """A compiled update."""

    learner: Any  # what it was made of
    update: Any  # `(state, episodes, *base)` → the state and the metrics
    begin: Any  # parameters → the first state
    episodes: Callable[..., Any]  # of a batch → what the update takes
    params: Params  # the first ones if there are no others
    base: tuple[Params, ...]  # of adapters, or nothing


class Learning:
    """A learner at its beginning, and its state after the steps that it was asked for."""

    def __init__(self, program: Program, params: Params | None = None) -> None:
        self.program = program
        self.state: TrainState = program.begin(program.params if params is None else params)

    @property
    def learned(self) -> dict[str, Any]:
        """All that learns, as NumPy arrays."""
        names = ("params", "critic", "target_params")
        found = {name: getattr(self.state, name, None) for name in names}
        return jax.tree.map(np.array, found)

    def step(self, *given: Any) -> dict[str, float]:
        """One update; returns its metrics."""
        program = self.program
        self.state, metrics = program.update(self.state, program.episodes(*given), *program.base)
        return {name: float(value) for name, value in metrics.items()}


def _learnings(program_of: Callable[..., Program]) -> Callable[..., Learning]:
    """`(what, where, params, **how)` → a learner; those of equal settings share a program."""
    known = cache(program_of)

    def begun(what: Any, where: Any = ALONE, params: Params | None = None, **how: Any) -> Learning:
        return Learning(known(what, where, **how), params)

    return begun


def _beginning(parts: Parts, shardings: TrainState) -> Any:
    """The first state of given parameters; a critic's linear map is not zero."""

    def begin(params: Params) -> TrainState:
        state = parts.build(params, jax.random.key(42))
        if state.critic is None:
            return state
        weights = 0.3 * jax.random.normal(jax.random.key(9), state.critic.weights.shape)
        return state._replace(critic=state.critic._replace(weights=weights))

    return jax.jit(begin, out_shardings=shardings)


def _placed(mesh: Mesh, rules: Any, whole: Params, adapted: bool) -> tuple[Any, tuple[Params, ...]]:
    """Where the base of adapters lies, and the base; without adapters there is none."""
    if not adapted:
        return None, ()
    shardings = shardings_of(mesh, rules, whole)
    return shardings, (jax.device_put(whole, shardings),)


# ------------------------------------------------------------------------ decoder

DECODER = Qwen3Config(VOCAB, **SIZES)
BLOCKS = BlockShape(tokens=64, length=24, groups=3, members=2, sampled=48)
TEMPERATURE = 0.7
QUESTION_MEMBERS = 4  # of the query encoder's groups
_GROUPS: dict[str, Any] = {"members": MEMBERS, "longest": 16}
GRPO = configs.TokenGRPOConfig(aggregation="grpo", scaled=True, beta=0.3, **_GROUPS)
PPO = configs.TokenPPOConfig(kl=0.05, lambda_=0.9, gamma=0.97)
_TWICE: dict[str, Any] = {"epochs": 2, "minibatches": 2, "aggregation": "bnpo", "entropy": 0.1}
HARR_GRPO = configs.SearchGRPOConfig(
    members=QUESTION_MEMBERS, clip_low=0.05, clip_high=0.1, beta=0.3, **_TWICE
)
HARR_PPO = configs.PPOConfig(kl=0.1, gamma=0.9, lambda_=0.8, value_clip=9.0)
IPO = configs.PreferenceConfig(beta=0.2)


@cache
def model(*, tied: bool = True) -> Params:
    """Random parameters with logits that differ."""
    params = dict(Transformer(DECODER).init_params(jax.random.key(0)))
    params["word_embeddings"] = 8 * params["word_embeddings"]
    if not tied:
        params[HEAD] = 0.3 * jax.random.normal(jax.random.key(1), params["word_embeddings"].shape)
    return jax.tree.map(np.asarray, params)


def adapters() -> Params:
    """Adapters of some kernels whose products are far from zero."""
    draw = np.random.default_rng(3)
    sizes = {"query": (16, 32), "value": (16, 16), "down": (24, 16)}

    def one(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32) / 4

    layers = {n: {"lora_a": one(2, i, 2), "lora_b": one(2, 2, o)} for n, (i, o) in sizes.items()}
    return {"layers": layers}


def one_row_each() -> TokenBatch:
    """The batch as PPO takes it: the second row of an episode is not learned from."""
    batch = token_setup.made_batch()
    batch.loss_mask[token_setup.GROUPS * MEMBERS] = False
    return batch


def pairs() -> tuple[Any, ...]:
    """A batch, and log-probabilities by a reference that is not the policy."""
    draw = np.random.default_rng(6)
    return token_setup.made_pairs(), draw.normal(-30, 3, 2 * PAIRS).astype(np.float32)


@jax.jit
def log_probs_and_entropy(params: Params, batch: TokenBatch) -> tuple[jax.Array, jax.Array]:
    """Of each row's tokens `[R, L]`, without packing; 0 for its first."""
    params, tokens = dict(params), jnp.asarray(batch.tokens)
    head = params.pop(HEAD, params["word_embeddings"])
    logits = jnp.einsum("rld,vd->rlv", hidden(params, batch), head, precision="highest")
    every = jax.nn.log_softmax(logits / TEMPERATURE)[:, :-1]
    chosen = jnp.take_along_axis(every, tokens[:, 1:, None], axis=2)[..., 0]
    entropy = -(jnp.exp(every) * every).sum(axis=2)
    return jnp.pad(chosen, ((0, 0), (1, 0))), jnp.pad(entropy, ((0, 0), (1, 0)))


def hidden(params: Params, batch: TokenBatch) -> jax.Array:
    """States `[R, L, D]`, row by row."""
    rows = jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)
    return Transformer(DECODER).hidden_states(params, *rows)


def log_probs(params: Params, batch: TokenBatch) -> jax.Array:
    return log_probs_and_entropy(params, batch)[0]


@_learnings
def tokens(
    config: Any,
    where: tuple[int, int, int],
    *,
    adapted: bool = False,
    tied: bool = True,
    shape: BlockShape = BLOCKS,
    scanned: bool = False,
    rests_until: int = 0,
    rate: float = RATE,
) -> Program:
    mesh, whole = mesh_of(*where), model(tied=tied)
    trained = adapters() if adapted else whole
    is_ppo = isinstance(config, configs.TokenPPOConfig)
    is_grpo = isinstance(config, configs.TokenGRPOConfig)
    keeps = (is_ppo and config.kl > 0) or (is_grpo and config.beta > 0)
    of_critic = optax.sgd(CRITIC_RATE) if is_ppo and config.critic != configs.NONE else None
    parts = Parts(optax.sgd(rate), of_critic, bool(keeps), DECODER.hidden_size)
    rules = split_rules(Qwen3Config.COLUMNS, Qwen3Config.ROWS)
    shardings = parts.shardings(mesh, rules, trained)
    of_base, base = _placed(mesh, rules, whole, adapted)
    policy: TokenPolicy = TokenPolicy(
        mesh=mesh,
        shardings=shardings,
        trunk=Transformer(DECODER, scanned=scanned, own_head=not tied),
        vocabulary=Vocabulary(TEMPERATURE, numbers=10 * shape.sampled),
        config=config,
        parts=parts,
        schedule=optax.constant_schedule(rate),
        base_shardings=of_base,
        rests_until=rests_until,
    )
    is_of_pairs = isinstance(config, configs.PreferenceConfig)
    episodes: Callable[..., Any] = pair_episodes if is_of_pairs else token_episodes

    def of_batch(batch: TokenBatch, *given: Any) -> Any:
        return episodes(policy, batch, shape, *given)

    begin = _beginning(parts, shardings)
    return Program(policy, make_token_update(policy), begin, of_batch, trained, base)


# ------------------------------------------------------------------------ query encoder

POLICY = PlackettLuceConfig(tau=0.5, pool=5, passages=2)
ENCODER = dataclasses.replace(tiny_encoder(), scale=1.0, normalise=True)
HOPS = HopShape(hops=3, tokens=12, width=ENCODER.width, episode_rewards=1, hop_rewards=1)
HOP_WEIGHTS = ((0.8,), (0.5,))
FLAT = 1  # a group whose episodes have equal rewards


HOP_TOWER = tower(ENCODER, 0)


def hops() -> HopBatch:
    """16 episodes of 1 to 3 searches, some of them without rewards, and a flat group."""
    rng, played = np.random.default_rng(0), []
    for number in range(16):
        searches = []
        for _ in range(rng.integers(1, HOPS.hops + 1)):
            places = POLICY.pool - int(rng.integers(0, 2))  # some pools are not full
            pool = np.where(np.arange(POLICY.pool) < places, 7, NO_PASSAGE)
            vectors = rng.normal(size=(POLICY.pool, HOPS.width)).astype(np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            row = rng.integers(FIRST_WORD, WORDS, rng.integers(3, 13)).astype(np.int32)
            actions = rng.permutation(places)[: POLICY.passages].astype(np.int32)
            vectors[places:] = 0
            drawn = Drawn(row, pool, vectors, actions, float(rng.normal(-2.5, 0.1)), ())
            searches.append(drawn)
        hops = [[float(each)] for each in rng.random(len(searches)).astype(np.float32)]
        reward = [float(rng.random())] if number % 5 != 3 else None
        if number // QUESTION_MEMBERS == FLAT:
            reward, hops = reward and [0.5], [[0.25]] * len(searches)
        played.append(Rewarded(searches, reward, hops))
    return hop_batch(played, HOPS, POLICY)


@jax.jit
def embedded(params: Params, given: HopBatch) -> jax.Array:
    """The embeddings `[N, T, D]` without packing."""
    flat = jnp.asarray(given.tokens).reshape(-1, HOPS.tokens)
    vectors = reference.embed(ENCODER, params, flat, jnp.asarray(given.lengths).reshape(-1))
    return vectors.reshape(*given.lengths.shape, -1)


def logits_of(params: Params, given: HopBatch) -> jax.Array:
    """Of each search's pool, `[N, T, K]`."""
    return pool_logits(embedded(params, given), given.pool, given.present, POLICY.tau)


def hop_log_probs(params: Params, given: HopBatch) -> jax.Array:
    """Log-probabilities `[N, T]` of the draws."""
    return log_prob(logits_of(params, given), jnp.asarray(given.actions))


def tower_adapters(seed: int) -> Params:
    """Adapters of one tower."""
    return jax.tree.map(lambda leaf: leaf[0], stacked_adapters(seed))


@_learnings
def searches(
    config: configs.SearchGRPOConfig | configs.PPOConfig,
    where: tuple[int, int, int],
    *,
    adapted: bool = False,
    longest: int = 48,
    is_fresh: bool = True,
) -> Program:
    mesh, is_ppo = mesh_of(*where), isinstance(config, configs.PPOConfig)
    trained = tower_adapters(3) if adapted else HOP_TOWER
    keeps = (config.kl if isinstance(config, configs.PPOConfig) else config.beta) > 0
    of_critic = optax.sgd(HOP_RATE) if is_ppo else None
    parts = Parts(optax.sgd(HOP_RATE), of_critic, keeps, ENCODER.width)
    shardings = parts.shardings(mesh, RULES, trained)
    of_base, base = _placed(mesh, RULES, HOP_TOWER, adapted)
    encoder = QueryEncoder(
        mesh=mesh,
        shardings=shardings,
        encoder=dataclasses.replace(ENCODER, lora_scale=LORA.scale),
        blocks=Blocks((longest,), (12,), (8.0,)),
        config=config,
        tau=POLICY.tau,
        weights=HOP_WEIGHTS,
        parts=parts,
        schedule=optax.constant_schedule(HOP_RATE),
        base_shardings=of_base,
        is_fresh=is_fresh,
    )
    update, begin = make_query_update(encoder), _beginning(parts, shardings)
    return Program(encoder, update, begin, partial(shard_batch, mesh), trained, base)


# ------------------------------------------------------------------------ two towers

FUSED, LATER, IMITATED = "fused", "later", "imitated"
ACTS = dataclasses.replace(PQN, learning_start=0)


def questions(seed: int = 0) -> EpisodeBatch:
    """16 episodes, four of them rows that fill up the batch."""
    return random_episodes(seed, CHUNK_COUNTS * 2, SHAPE)


def two_towers(
    where: tuple[int, int, int],
    one: Params,
    actor: Actor = ONE_BUCKET_ACTOR,
    *,
    accumulation: int = 1,
    base: Params | None = None,
    optimizer: Any = OPTIMIZER,
    config: Any = PQN,
) -> TwoTowers:
    """How towers like this one, or adapters on a base, are trained in these tests."""
    mesh, parts = mesh_of(*where), Parts(optimizer, has_targets=True)
    return TwoTowers(
        mesh=mesh,
        shardings=parts.shardings(mesh, RULES, one),
        parts=parts,
        actor=actor,
        config=config,
        schedule=SCHEDULE,
        peak=PEAK,
        accumulation=accumulation,
        base_shardings=shardings_of(mesh, RULES, base),
    )


def fused_update(towers: TwoTowers, reward: Any = feedback) -> Any:
    """The update that plays, scores and learns."""
    return make_update(towers, PQNGradient(towers.actor, towers.config, reward))


@_learnings
def towers(kind: str, where: tuple[int, int, int], *, accumulation: int = 1) -> Program:
    encoder = ONE_BUCKET_ACTOR.encoder
    how: dict[str, Any] = {"accumulation": accumulation, "config": ACTS}
    towers = two_towers(where, tower(encoder, 0), optimizer=optax.sgd(STATES_RATE), **how)
    learns: Any = PQNGradient(towers.actor, ACTS, feedback)
    if kind == IMITATED:
        towers = dataclasses.replace(towers.imitating(OPTIMIZER_CONFIG), parts=towers.parts)
        config = configs.ImitateConfig(temperature=0.3)
        learns = ImitationGradient(towers.actor, config, ACTS.alpha)
    elif kind == LATER:
        learns = PQNGradient(towers.actor, ACTS)
    update = make_update(towers, learns)
    begin = _beginning(towers.parts, towers.shardings)
    place = partial(shard_batch, towers.mesh)
    return Program(towers, update, begin, place, both_towers(encoder, 0), ())


def check_moved(after: Any, before: Any, gradient: Any, *, rate: float, rtol: float = 1e-5) -> None:
    """A step of plain descent by this gradient."""
    moves = jax.tree.map(lambda a, b: (np.asarray(b) - np.asarray(a)) / rate, after, before)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
    assert largest > 1e-3
    for ours, theirs in zip(jax.tree.leaves(moves), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=rtol * largest + 2e-6)


def assert_close(ours: Any, theirs: Any, atol: float = 2e-5) -> None:
    """Every array of one tree is near that of the other."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5 if atol else 0, atol=atol)
