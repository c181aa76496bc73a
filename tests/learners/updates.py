"""One small encoder and one small decoder, and every update of them on any mesh.

Equal learners share their programs, in whichever file they are asked for. All learn by plain
descent, so that what moved is a rate times the gradient.
"""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.learners import placement
from qrag_jax.learners.config import (
    NONE,
    ImitateConfig,
    PPOConfig,
    PreferenceConfig,
    SearchGRPOConfig,
    TokenGRPOConfig,
    TokenPPOConfig,
)
from qrag_jax.learners.imitation import ImitationGradient
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule, make_optimizer
from qrag_jax.learners.preference_update import make_preference_update, pair_episodes
from qrag_jax.learners.query_encoder import QueryEncoder, make_query_update
from qrag_jax.learners.state import Parts, TrainState
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.learners.token_update import make_token_update, token_episodes
from qrag_jax.learners.two_towers import TwoTowers, make_learn_step, make_step, make_train_step
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.models.trunks.families import Bert
from qrag_jax.models.trunks.qwen3 import HEAD, Qwen3, Qwen3Config
from qrag_jax.policies.plackett_luce import PlackettLuceConfig, log_prob, pool_logits
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.retrieval.protocol import NONE as NO_PASSAGE
from qrag_jax.rollouts.chunks import Actor
from qrag_jax.rollouts.pool_search import Drawn, HopBatch, HopShape, Rewarded, hop_batch
from qrag_jax.rollouts.token_blocks import BlockShape
from qrag_jax.rollouts.trajectories import TokenBatch
from qrag_jax.runtime.mesh import RuntimeConfig, shard_batch, shardings_of
from tests.devices import mesh_of
from tests.episodes_maker import FIRST_WORD, random_episodes, tiny_encoder, tower
from tests.episodes_maker import VOCAB as WORDS
from tests.episodes_maker import towers as both_towers
from tests.learners.whole_loss import LORA
from tests.learners.whole_loss import adapters as stacked_adapters
from tests.rollouts.play_setup import CHUNK_COUNTS, ONE_BUCKET_ACTOR, PQN, SHAPE, feedback
from tests.rollouts.token_setup import (
    GROUPS,
    MEMBERS,
    NO_WEIGHT,
    PAIRS,
    VOCAB,
    made_batch,
    made_pairs,
)

ALONE, SPLIT = (1, 1, 1), (2, 2, 2)
RATE, CRITIC_RATE = 0.5, 0.02
STATES_RATE, HOP_RATE = 0.05, 0.3  # of two towers, and of the query encoder
RULES = Bert.partition_rules()
OPTIMIZER_CONFIG = OptimizerConfig(
    learning_rate=1e-3,
    weight_decay=0.01,
    beta1=0.9,
    beta2=0.98,
    eps=1e-6,
    clip_norm=0.2,
    schedule="linear",
    final_ratio=0.0,
    warmup_steps=2,
    total_steps=10,
)
OPTIMIZER, SCHEDULE = make_optimizer(OPTIMIZER_CONFIG), learning_rate_schedule(OPTIMIZER_CONFIG)
PEAK = OPTIMIZER_CONFIG.learning_rate


class Learning:
    """A learner at its beginning, and its state after the steps that it was asked for."""

    def __init__(self, program: Any, params: Params) -> None:
        self.program = program
        self.state: TrainState = program.begin(params)

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


# ------------------------------------------------------------------------ decoder

DECODER = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    head_dim=8,
)
BLOCKS = BlockShape(tokens=64, length=24, groups=3, members=2, sampled=48)
TEMPERATURE, WEIGHTS = 0.7, (0.8, 0.3)
QUESTION_MEMBERS = 4  # of the query encoder's groups
GRPO = TokenGRPOConfig(members=MEMBERS, aggregation="grpo", scaled=True, beta=0.3, longest=16)
PPO = TokenPPOConfig(kl=0.05, lambda_=0.9, gamma=0.97)
HARR_GRPO = SearchGRPOConfig(
    members=QUESTION_MEMBERS,
    clip_low=0.05,
    clip_high=0.1,
    beta=0.3,
    entropy=0.1,
    aggregation="bnpo",
    epochs=2,
    minibatches=2,
)
HARR_PPO = PPOConfig(kl=0.1, gamma=0.9, lambda_=0.8, value_clip=9.0)
IPO, DPO = PreferenceConfig(beta=0.2), PreferenceConfig("dpo", beta=0.5, label_smoothing=0.2)


@cache
def model(*, tied: bool = True) -> Params:
    """Random parameters with logits that differ."""
    params = dict(Qwen3(DECODER).init_params(jax.random.key(0)))
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
    batch = made_batch()
    batch.loss_mask[GROUPS * MEMBERS] = False
    return batch


def pairs() -> tuple[Any, ...]:
    """A batch, log-probabilities by a reference that is not the policy, and weights."""
    draw = np.random.default_rng(6)
    weights = draw.random(PAIRS).astype(np.float32) + 0.2
    weights[NO_WEIGHT] = 0.0
    return made_pairs(), draw.normal(-30, 3, 2 * PAIRS).astype(np.float32), weights


def log_probs(params: Params, batch: TokenBatch) -> jax.Array:
    """Log-probabilities `[R, L]` of each row's tokens, without packing; 0 for its first."""
    return _log_probs(params, jnp.asarray(batch.tokens), jnp.asarray(batch.lengths))


@jax.jit
def _log_probs(params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    params = dict(params)
    head = params.pop(HEAD, params["word_embeddings"])
    hidden = Qwen3(DECODER).hidden_states(params, tokens, lengths)
    logits = jnp.einsum("rld,vd->rlv", hidden, head, precision="highest") / TEMPERATURE
    every = jax.nn.log_softmax(logits)[:, :-1]
    chosen = jnp.take_along_axis(every, tokens[:, 1:, None], axis=2)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


class DecoderProgram:
    """An update of the decoder, by the kind of its config."""

    def __init__(
        self,
        config: Any,
        where: tuple[int, int, int],
        *,
        adapted: bool,
        tied: bool,
        shape: BlockShape,
        scanned: bool,
        rests_until: int,
        rate: float,
    ) -> None:
        mesh, whole = mesh_of(*where), model(tied=tied)
        trained = adapters() if adapted else whole
        is_ppo, self.config, self.shape = isinstance(config, TokenPPOConfig), config, shape
        is_grpo = isinstance(config, TokenGRPOConfig)
        keeps = (is_ppo and config.kl > 0) or (is_grpo and config.beta > 0)
        of_critic = optax.sgd(CRITIC_RATE) if is_ppo and config.critic != NONE else None
        parts = Parts(optax.sgd(rate), of_critic, bool(keeps), DECODER.hidden_size)
        rules = RuntimeConfig().rules(Qwen3.partition_rules())
        shardings = parts.shardings(mesh, rules, trained)
        of_base = shardings_of(mesh, rules, whole, whole) if adapted else None
        self.base = (jax.device_put(whole, of_base),) if adapted else ()
        self.policy: TokenPolicy[Any] = TokenPolicy(
            mesh=mesh,
            shardings=shardings,
            trunk=Qwen3(DECODER, scanned=scanned, own_head=not tied),
            vocabulary=Vocabulary(TEMPERATURE, numbers=10 * shape.sampled),
            config=config,
            weights=WEIGHTS,
            parts=parts,
            schedule=optax.constant_schedule(rate),
            base_shardings=of_base,
            rests_until=rests_until,
        )
        prefers = isinstance(config, PreferenceConfig)
        make = make_preference_update if prefers else make_token_update
        self.update: Any = make(self.policy)
        self.begin = _beginning(parts, shardings)

    def episodes(self, batch: TokenBatch, *given: Any) -> Any:
        """What the update takes of a batch; of pairs also the reference and the weights."""
        if isinstance(self.config, PreferenceConfig):
            return pair_episodes(self.policy, batch, self.shape, *given)
        return token_episodes(self.policy, batch, self.shape)


def _beginning(parts: Parts, shardings: TrainState) -> Any:
    """The first state of given parameters; a critic's linear map is not zero."""

    def begin(params: Params) -> TrainState:
        state = parts.build(params, jax.random.key(42))
        if state.critic is None:
            return state
        weights = 0.3 * jax.random.normal(jax.random.key(9), state.critic.weights.shape)
        return state._replace(critic=state.critic._replace(weights=weights))

    return jax.jit(begin, out_shardings=shardings)


_tokens = cache(DecoderProgram)


def tokens(
    config: Any,
    where: tuple[int, int, int] = ALONE,
    params: Params | None = None,
    *,
    adapted: bool = False,
    tied: bool = True,
    shape: BlockShape = BLOCKS,
    scanned: bool = False,
    rests_until: int = 0,
    rate: float = RATE,
) -> Learning:
    """The decoder, or adapters on it, that begins with these parameters."""
    how = {"adapted": adapted, "tied": tied, "shape": shape, "scanned": scanned}
    program = _tokens(config, where, **how, rests_until=rests_until, rate=rate)
    own = adapters() if adapted else model(tied=tied)
    return Learning(program, own if params is None else params)


# ------------------------------------------------------------------------ query encoder

POLICY = PlackettLuceConfig(tau=0.5, pool=5, passages=2)
ENCODER = dataclasses.replace(tiny_encoder(), scale=1.0, normalise=True)
HOPS = HopShape(hops=3, tokens=12, width=ENCODER.width, episode_rewards=1, hop_rewards=1)
HOP_WEIGHTS = ((0.8,), (0.5,))
FLAT = 1  # a group whose episodes have equal rewards


@cache
def hop_tower() -> Params:
    return tower(ENCODER, 0)


def hop_episodes(count: int = 16, seed: int = 0) -> list[Rewarded]:
    """Played episodes of 1 to 3 searches, some of them without rewards, and a flat group."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        searches = []
        for _ in range(rng.integers(1, HOPS.hops + 1)):
            places = POLICY.pool - int(rng.integers(0, 2))  # some pools are not full
            pool = np.where(np.arange(POLICY.pool) < places, 7, NO_PASSAGE)
            vectors = rng.normal(size=(POLICY.pool, HOPS.width)).astype(np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            row = rng.integers(FIRST_WORD, WORDS, rng.integers(3, 13)).astype(np.int32)
            actions = rng.permutation(places)[: POLICY.passages].astype(np.int32)
            vectors[places:] = 0
            drawn = Drawn(row, pool, vectors, actions, float(rng.normal(-2.5, 0.1)), 0.0, (), False)
            searches.append(drawn)
        hops = [[float(each)] for each in rng.random(len(searches)).astype(np.float32)]
        reward = [float(rng.random())] if number % 5 != 3 else None
        if number // QUESTION_MEMBERS == FLAT:
            reward, hops = reward and [0.5], [[0.25]] * len(searches)
        made.append(Rewarded(searches, reward, hops))
    return made


def hops(count: int = 16, seed: int = 0) -> HopBatch:
    return hop_batch(hop_episodes(count, seed), HOPS, POLICY)


@jax.jit
def embedded(params: Params, given: HopBatch) -> jax.Array:
    """The embeddings `[N, T, D]` without packing."""
    flat = jnp.asarray(given.tokens).reshape(-1, HOPS.tokens)
    vectors = ENCODER.embed(params, flat, jnp.asarray(given.lengths).reshape(-1))
    return vectors.reshape(*given.lengths.shape, -1)


def logits_of(params: Params, given: HopBatch) -> jax.Array:
    """Of each search's pool, `[N, T, K]`."""
    return pool_logits(embedded(params, given), given.pool, given.present, POLICY.tau)


def hop_log_probs(params: Params, given: HopBatch) -> jax.Array:
    """Log-probabilities `[N, T]` of the draws."""
    return log_prob(logits_of(params, given), jnp.asarray(given.actions))


class HopsProgram:
    """An update of the query encoder."""

    def __init__(
        self,
        config: Any,
        where: tuple[int, int, int],
        *,
        adapted: bool,
        longest: int,
        is_fresh: bool,
    ) -> None:
        self.mesh, is_ppo = mesh_of(*where), isinstance(config, PPOConfig)
        trained = tower_adapters(3) if adapted else hop_tower()
        of_critic = optax.sgd(HOP_RATE) if is_ppo else None
        keeps = (config.kl if is_ppo else config.beta) > 0
        parts = Parts(optax.sgd(HOP_RATE), of_critic, keeps, ENCODER.width)
        shardings = parts.shardings(self.mesh, RULES, trained)
        of_base = shardings_of(self.mesh, RULES, hop_tower(), hop_tower()) if adapted else None
        self.base = (jax.device_put(hop_tower(), of_base),) if adapted else ()
        self.update = make_query_update(
            QueryEncoder(
                mesh=self.mesh,
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
        )
        self.begin = _beginning(parts, shardings)

    def episodes(self, given: HopBatch) -> HopBatch:
        """The batch on the mesh."""
        return shard_batch(self.mesh, given)


_hops = cache(HopsProgram)


def tower_adapters(seed: int) -> Params:
    """Adapters of one tower."""
    return jax.tree.map(lambda leaf: leaf[0], stacked_adapters(seed))


def searches(
    config: SearchGRPOConfig | PPOConfig,
    where: tuple[int, int, int] = ALONE,
    params: Params | None = None,
    *,
    adapted: bool = False,
    longest: int = 48,
    is_fresh: bool = True,
) -> Learning:
    """The query encoder, or adapters on it, that begins with these parameters."""
    program = _hops(config, where, adapted=adapted, longest=longest, is_fresh=is_fresh)
    own = tower_adapters(3) if adapted else hop_tower()
    return Learning(program, own if params is None else params)


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
    rules: Any = RULES,
    config: Any = PQN,
) -> TwoTowers:
    """How towers like this one, or adapters on a base, are trained in these tests."""
    mesh, parts = mesh_of(*where), Parts(optimizer, has_targets=True)
    of_base = None if base is None else placement.base_shardings(mesh, rules, base)
    return TwoTowers(
        mesh=mesh,
        shardings=parts.shardings(mesh, rules, one),
        parts=parts,
        actor=actor,
        config=config,
        schedule=SCHEDULE,
        peak=PEAK,
        accumulation=accumulation,
        base_shardings=of_base,
        base=None if base is None else jax.device_put(base, of_base),
    )


class TowersProgram:
    """A training step of two towers."""

    def __init__(
        self,
        kind: str,
        where: tuple[int, int, int],
        *,
        encoder: TextEncoder,
        adapted: bool,
        accumulation: int,
    ) -> None:
        actor, base = dataclasses.replace(ONE_BUCKET_ACTOR, encoder=encoder), tower(encoder, 0)
        one, how = base, {"accumulation": accumulation, "config": ACTS}
        if adapted:
            one, how["base"] = tower_adapters(0), base
        towers = two_towers(where, one, actor, optimizer=optax.sgd(STATES_RATE), **how)
        if kind == IMITATED:
            of_stage = towers.imitating(OPTIMIZER_CONFIG)
            towers = dataclasses.replace(of_stage, parts=towers.parts)
            learns = ImitationGradient(towers.actor, ImitateConfig(temperature=0.3), ACTS, feedback)
            self.update = make_step(towers, learns)
        elif kind == LATER:
            self.update = make_learn_step(towers)
        else:
            self.update = make_train_step(towers, feedback)
        self.mesh, self.towers = towers.mesh, towers
        self.base = () if towers.base is None else (towers.base,)
        build = partial(towers.parts.build, key=jax.random.key(42))
        self.begin = jax.jit(lambda params: build(params), out_shardings=towers.shardings)

    def episodes(self, given: Any) -> Any:
        """The batch on the mesh."""
        return shard_batch(self.mesh, given)


_towers = cache(TowersProgram)


def towers(
    kind: str,
    where: tuple[int, int, int] = ALONE,
    params: Params | None = None,
    *,
    encoder: TextEncoder = ONE_BUCKET_ACTOR.encoder,
    adapted: bool = False,
    accumulation: int = 1,
) -> Learning:
    """Two towers, or adapters on a base, that begin with these parameters."""
    how = {"encoder": encoder, "adapted": adapted, "accumulation": accumulation}
    program = _towers(kind, where, **how)
    if params is None:
        params = stacked_adapters(0) if adapted else both_towers(encoder, 0)
    return Learning(program, params)


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
