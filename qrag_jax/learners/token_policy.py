"""A token policy over the mesh: log-probabilities of sampled tokens, and gradients of losses.

Blocks of rows are computed one after the other, forward and backward, on each device one at a time,
so memory holds one of them, whatever the batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from qrag_jax.algorithms.policy_gradient import (
    clipped_value_loss,
    dpo_loss,
    ipo_loss,
    margins,
    weighted_sum,
)
from qrag_jax.learners.config import (
    IPO,
    PreferenceConfig,
    SFTConfig,
    TokenGRPOConfig,
    TokenPPOConfig,
)
from qrag_jax.learners.policy import PerAction, PolicyLearner, action_loss
from qrag_jax.learners.state import Critic
from qrag_jax.learners.update import Sums, added, over_axis
from qrag_jax.models.compute.lora import Leaves, attach, merge, trainable
from qrag_jax.models.compute.packing import add_rows, shared_layout, take_rows
from qrag_jax.models.compute.precision import EXACT
from qrag_jax.models.compute.ragged import TokenCount
from qrag_jax.models.trunks.transformer import HEAD, WORDS, Params, Transformer
from qrag_jax.policies.tokens import TokenScores, Vocabulary, token_scores
from qrag_jax.rollouts.token_blocks import TokenBlocks
from qrag_jax.runtime.mesh import (
    AXES,
    DATA,
    FSDP,
    by_device,
    everywhere,
    on_each,
    row_devices,
    zeros_like,
)

ROW_AXES = AXES[:2]  # devices along `tensor` compute the same rows
Config = TypeVar("Config", covariant=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenPolicy(PolicyLearner, Generic[Config]):
    """A causal language model, or adapters on a frozen one, and how it learns.

    What is read of a sampled token are its `TokenScores`; by a critic, the value of the state in
    which it was sampled. A pass takes the parameters of adapters with the base that they are on, or
    all weights with the base None.
    """

    # maps tokens to hidden states; the head is its word table, or the leaf `HEAD`
    trunk: Transformer
    vocabulary: Vocabulary  # how hidden states become log-probabilities
    config: Config  # constants of the algorithm
    lora_scale: float = 1.0  # factor on the product of an adapter's two matrices
    # the policy learns nothing before this update, in which its critic warms up
    rests_until: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "trunk", self.trunk.clone(mesh=self.mesh))

    @property
    def row_devices(self) -> int:
        """Devices that rows are split over."""
        return math.prod(row_devices(self.mesh))

    def gradient(self, learned: Critic, base: Params | None, part: Any) -> tuple[Critic, Sums]:
        """See `PolicyLearner`; a part is `TokenBlocks` and what their tokens are learned with."""
        whole, config = merge(learned.tower, base), self.config
        of_pairs = isinstance(config, PreferenceConfig)
        loss: Callable[..., Sums] = pair_loss if of_pairs else token_loss
        trained, frozen, to_stored = trainable(self.trunk, whole, self.lora_scale)
        # The gradient of words is added up row by row, that of a head of its own next to it.
        tables = {path: trained.pop(path) for path in ((WORDS,), (HEAD,)) if path in trained}
        every = frozen | tables
        table = every[WORDS,]
        head = every.get((HEAD,), table)

        def of_replica(block: TokenBlocks, targets: Any, *total: Any) -> tuple[Any, Any]:
            words = self._words(table, block)

            def of_loss(layers: Leaves, lookups: Any, critic: tuple[Any, Any]) -> Any:
                used = unflatten_dict(frozen | layers), *(lookups or (words, head))
                read = self._read(used, critic, block)
                sums = over_axis(on_each(FSDP, partial(loss, config), read, block, targets))
                return sums.loss, sums

            lookups = (words, head) if tables else None
            _, back, sums = jax.vjp(of_loss, trained, lookups, learned[1:], has_aux=True)
            of_layers, of_lookups, of_critic = back(jnp.float32(1.0))
            layers, of_tables, critic = total
            if of_lookups is not None:
                of_words, of_head = of_lookups
                of_words = of_words.reshape(-1, of_words.shape[-1]).astype(jnp.float32)
                summed = add_rows(of_tables[WORDS,], block.tokens.reshape(-1), of_words)
                of_tables = of_tables | {(WORDS,): summed}
                owner = (HEAD,) if (HEAD,) in tables else (WORDS,)
                of_tables[owner] += of_head
            layers = jax.tree.map(jnp.add, layers, of_layers)
            return (layers, of_tables, jax.tree.map(jnp.add, critic, of_critic)), sums

        def one(block: tuple[TokenBlocks, Any], total: Any) -> tuple[Any, Any]:
            total, sums = on_each(DATA, of_replica, *block, *total)
            return total, over_axis(sums)

        zeros = zeros_like(self.mesh, (trained, tables, learned[1:]))
        total, sums = _summed(one, zeros, _by_device(self.mesh, part))
        of_layers, of_tables, of_critic = jax.tree.map(lambda leaf: leaf.sum(axis=0), total)
        return Critic(to_stored(of_layers | of_tables), *of_critic), sums

    def read(self, learned: Critic, base: Params | None, blocks: TokenBlocks) -> jax.Array:
        """Log-probabilities `[B, S]` of the sampled tokens, or a critic's values."""
        whole = attach(merge(learned.tower, base), self.lora_scale)
        prepared = self.trunk.prepare(whole, self.trunk.precision.products)
        table = prepared[WORDS]
        head = prepared.get(HEAD, table)
        of_devices = _by_device(self.mesh, blocks)

        def of_replica(block: TokenBlocks) -> jax.Array:
            used = prepared, self._words(table, block), head
            read = self._read(used, learned[1:], block)
            return read.log_probs if learned.weights is None else read

        def one(number: jax.Array, found: jax.Array) -> jax.Array:
            return found.at[:, :, number].set(on_each(DATA, of_replica, _at(of_devices, number)))

        nothing = jnp.zeros(of_devices.target.shape, jnp.float32)
        found = jax.lax.fori_loop(0, _number(of_devices), one, nothing)
        return found.reshape(blocks.target.shape)

    def _words(self, table: jax.Array, block: TokenBlocks) -> jax.Array:
        """The rows `[fsdp, T, H]` of the word table, which is never whole anywhere."""
        return on_each(FSDP, lambda own: everywhere(self.mesh, table[own]), block.tokens)

    def _read(
        self, used: tuple[Params, jax.Array, jax.Array], critic: tuple[Any, Any], block: TokenBlocks
    ) -> Any:
        """What is read of the sampled tokens `[fsdp, S]` of one block of each device.

        Args:
            used: prepared parameters, words `[fsdp, T, H]`, head `[V, H]`.
            critic: its weights and bias, or None.
        """
        (prepared, words, head), (weights, bias) = used, critic

        def hidden_before(words: jax.Array, block: TokenBlocks) -> jax.Array:
            layout = shared_layout(block.shared, block.lengths, len(block.tokens), block.longest)
            hidden = jnp.asarray(self.trunk.apply({"params": prepared}, words, layout))
            return take_rows(hidden, block.place)

        before = on_each(FSDP, hidden_before, words, block)  # [fsdp, S, H]
        if weights is None:
            # Together, so that a block of the head is used once for all devices.
            devices, sampled, width = before.shape
            vocabulary = self.vocabulary._replace(numbers=self.vocabulary.numbers * devices)
            flat = before.reshape(-1, width), head, block.target.reshape(-1)
            scores = token_scores(vocabulary, *flat)
            return jax.tree.map(lambda leaf: leaf.reshape(devices, sampled), scores)
        states = before.astype(jnp.float32)
        return jnp.einsum("fsh,h->fs", states, weights, precision=EXACT) + bias


# ------------------------------------------------------------------------ losses of a block


def token_loss(
    config: SFTConfig | TokenGRPOConfig | TokenPPOConfig,
    read: TokenScores | jax.Array,
    block: TokenBlocks,
    targets: PerAction,
) -> Sums:
    """The loss of a block's sampled tokens, or of a critic's values."""
    tokens = token_count(block)
    if not isinstance(read, TokenScores):
        assert isinstance(config, TokenPPOConfig)
        each = clipped_value_loss(read, targets.value, targets.returns, config.value_clip)
        return Sums(weighted_sum(each, targets.weight), tokens, {}, {})
    rows = jnp.arange(len(block.lengths))[:, None] == block.row[None]
    # If a batch gives one step, its tokens are of the policy that learns.
    how: dict[str, Any] = {"is_fresh": config.updates_per_batch == 1, "sampler": block.sampler}
    return action_loss(config, read, targets, tokens=tokens, rows=rows, **how)


def pair_loss(
    config: PreferenceConfig,
    scores: TokenScores,
    block: TokenBlocks,
    targets: tuple[jax.Array, jax.Array],
) -> Sums:
    """IPO or DPO of a block of pairs.

    Args:
        block: the first row of a group is the winner, the second the loser.
        targets: `pairs` of `token_update.TokenEpisodes`, the reference and the weights.
    """
    reference, weight = targets
    rows = jnp.arange(len(block.lengths))[:, None] == block.row[None]
    rows = rows & block.learned[None]
    # Log-probabilities `[R]` of sequences, from those of tokens `[S]`; 0 where no row is.
    total = jnp.where(rows, scores.log_probs[None], 0.0).sum(axis=1)
    total = total / jnp.maximum(rows.sum(axis=1), 1) if config.averaged else total
    policy = total.reshape(-1, 2)
    h = margins(policy, reference)
    if config.loss == IPO:
        loss = ipo_loss(h, weight, config.beta)
    else:
        loss = dpo_loss(h, weight, config.beta, config.label_smoothing)
    of_pairs = {
        "margin": h,
        "accuracy": h > 0,
        "log_prob_winner": policy[:, 0],
        "log_prob_loser": policy[:, 1],
    }
    pairs = (weight > 0).sum().astype(jnp.float32)
    means = {
        name: (jnp.where(weight > 0, each, 0.0).sum(), pairs) for name, each in of_pairs.items()
    }
    return Sums(loss, token_count(block), means, {})


def token_count(block: TokenBlocks) -> TokenCount:
    """The tokens of a block, those that rows share counted once, and its places."""
    by_group = block.lengths.reshape(len(block.shared), -1)
    alone = jnp.where(by_group > 0, by_group - block.shared[:, None], 0).sum()
    real = (alone + block.shared.sum()).astype(jnp.float32)
    return TokenCount(real, jnp.float32(len(block.tokens)))


def _summed(
    one: Callable[[tuple[TokenBlocks, Any], Any], tuple[Any, Any]],
    zeros: Any,
    parts: tuple[TokenBlocks, Any],
) -> tuple[Any, Any]:
    """Runs over all blocks; returns the last total and the sums."""
    _, first = jax.eval_shape(one, _at(parts, 0), zeros)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)

    def body(number: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        total, sums = carry
        total, more = one(_at(parts, number), total)
        return total, added(sums, more)

    return jax.lax.fori_loop(0, _number(parts[0]), body, (zeros, nothing))


def _by_device(mesh: Mesh, tree: Any) -> Any:
    """Leaves `[B, …]` → `[data, fsdp, B / devices, …]`."""
    sizes = row_devices(mesh)
    split = jax.tree.map(lambda leaf: leaf.reshape(*sizes, -1, *leaf.shape[1:]), tree)
    return by_device(mesh, split)


def _at(tree: Any, number: jax.Array | int) -> Any:
    return jax.tree.map(lambda leaf: leaf[:, :, number], tree)


def _number(blocks: TokenBlocks) -> jax.Array:
    """Blocks up to the last one that is not empty on any device."""
    used = jnp.any(blocks.lengths > 0, axis=(0, 1, 3))
    return jnp.where(used, jnp.arange(1, len(used) + 1), 0).max()
