"""A token policy over the mesh: log-probabilities of sampled tokens, and gradients of losses.

Blocks of rows are computed one after the other, forward and backward, so memory holds one of them,
whatever the batch. Every device has the same number of blocks; so what devices send each other for
a block is sent by all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import PartitionSpec

from qrag_jax.learners.state import Critic
from qrag_jax.learners.update import Learner, added, over_devices
from qrag_jax.models.compute.group import Group, add_to_rows, look_up
from qrag_jax.models.compute.lora import Leaves, attach, merge, trainable
from qrag_jax.models.compute.precision import EXACT
from qrag_jax.models.compute.ragged import TokenCount
from qrag_jax.models.compute.row_sums import take_rows
from qrag_jax.models.compute.sharing import shared_layout
from qrag_jax.models.trunks.qwen3 import HEAD
from qrag_jax.models.trunks.trunk import WORDS, Params, Trunk
from qrag_jax.policies.tokens import Vocabulary, token_scores
from qrag_jax.rollouts.token_blocks import TokenBlocks
from qrag_jax.runtime.mesh import AXES, specs_of, sum_over_data

ROW_AXES = AXES[:2]  # devices along `tensor` compute the same rows
Config = TypeVar("Config", covariant=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenPolicy(Learner, Generic[Config]):
    """A causal language model, or adapters on a frozen one, and how it learns.

    Attributes:
        trunk: maps tokens to hidden states; the head is its word table, or the leaf `HEAD`.
        vocabulary: how hidden states become log-probabilities.
        config: constants of the algorithm.
        weights: of the parts of an episode's reward `[K]`.
        lora_scale: factor on the product of an adapter's two matrices.
        rests_until: the policy learns nothing before this update, in which its critic warms up.
    """

    trunk: Trunk
    vocabulary: Vocabulary
    config: Config
    weights: tuple[float, ...]
    lora_scale: float = 1.0
    rests_until: int = 0

    def __post_init__(self) -> None:
        group = Group.of(self.mesh)
        object.__setattr__(self, "trunk", self.trunk.on(group))
        object.__setattr__(self, "vocabulary", self.vocabulary._replace(group=group))

    @property
    def row_devices(self) -> int:
        """Devices that rows are split over."""
        return math.prod(self.mesh.shape[axis] for axis in ROW_AXES)


# (what is read of each sampled token `[S]`, block, what it is learned with) → the summed loss, of
# which the gradient is taken, and the sums (`update.added`)
BlockLoss = Callable[[Any, TokenBlocks, Any], tuple[jax.Array, Any]]
_Head = tuple[Any, Any]  # of a critic: weights and bias, or None
_Used = tuple[Params, jax.Array, jax.Array]  # prepared parameters, words `[T, H]`, head `[V, H]`


class BlockPasses:
    """Forward and backward passes over the mesh, of a loss of blocks.

    What is read of a sampled token are its `TokenScores`; by a critic, the value of the state in
    which it was sampled.

    Args:
        shardings: of the model's parameters; None: those of the policy.

    A pass takes the parameters of adapters with the base that they are on, or all weights with the
    base None.
    """

    def __init__(self, policy: TokenPolicy, loss: BlockLoss, shardings: Any = None) -> None:
        self.policy, self.loss = policy, loss
        self._params = specs_of(policy.shardings.params if shardings is None else shardings)

    def gradient(
        self, learned: Critic, base: Params | None, blocks: TokenBlocks, given: Any
    ) -> tuple[Critic, Any]:
        """The gradient of the summed loss, and the sums."""

        def on_device(learned: Critic, base, blocks, given):
            gradient, of_head, sums = self._pull(learned, base, blocks, given)
            # Devices along `tensor` compute the same rows, and may differ in the last bits.
            of_head = jax.lax.pmean(jax.lax.psum(of_head, ROW_AXES), AXES[2])
            gradient = sum_over_data(gradient, self._params)
            return Critic(gradient, *of_head), over_devices(sums, ROW_AXES)

        specs, by_row = self._specs(learned), PartitionSpec(ROW_AXES)
        out = specs, PartitionSpec()
        mapped = self.policy.over_mesh(on_device, specs, out, by_row, by_row)
        return mapped(learned, base, blocks, given)

    def read(self, learned: Critic, base: Params | None, blocks: TokenBlocks) -> jax.Array:
        """Log-probabilities `[B, S]` of the sampled tokens, or a critic's values."""

        def on_device(learned: Critic, base, blocks):
            trunk = self.policy.trunk
            whole = attach(merge(learned.tower, base), self.policy.lora_scale)
            prepared = trunk.prepare(trunk.for_use(whole), trunk.precision.products)
            table = prepared[WORDS]
            head = prepared.get(HEAD, table)

            def one(number: jax.Array, found: jax.Array) -> jax.Array:
                block = _at(blocks, number)
                words = look_up(table, block.tokens, trunk.config.hidden_size)
                read = self._read((prepared, words, head), learned[1:], block)
                return found.at[number].set(read.log_probs if learned.weights is None else read)

            nothing = jnp.zeros(blocks.target.shape, jnp.float32)
            return jax.lax.fori_loop(0, _number(blocks), one, nothing)

        by_row = PartitionSpec(ROW_AXES)
        mapped = self.policy.over_mesh(on_device, self._specs(learned), by_row, by_row)
        return mapped(learned, base, blocks)

    def _specs(self, learned: Critic) -> Any:
        return Critic(self._params, *jax.tree.map(lambda _: PartitionSpec(), learned[1:]))

    def _read(self, used: _Used, critic: _Head, block: TokenBlocks) -> Any:
        """What is read of the sampled tokens `[S]`."""
        (prepared, words, head), (weights, bias) = used, critic
        layout = shared_layout(block.shared, block.lengths, len(block.tokens), block.longest)
        hidden = jnp.asarray(self.policy.trunk.apply({"params": prepared}, words, layout))
        before = take_rows(hidden, block.place)
        if weights is None:
            return token_scores(self.policy.vocabulary, before, head, block.target)
        return jnp.einsum("sh,h->s", before.astype(jnp.float32), weights, precision=EXACT) + bias

    def _pull(
        self, learned: Critic, base: Params | None, blocks: TokenBlocks, given: Any
    ) -> tuple[Params, _Head, Any]:
        """The gradients of model and critic's head, and the sums."""
        trunk, whole = self.policy.trunk, merge(learned.tower, base)
        trained, frozen, to_stored = trainable(trunk, whole, self.policy.lora_scale)
        # The gradient of words is added up row by row, that of a head of its own beside it.
        tables = {path: trained.pop(path) for path in ((WORDS,), (HEAD,)) if path in trained}
        every = frozen | tables
        table = every[WORDS,]
        head = every.get((HEAD,), table)

        def one(block: TokenBlocks, given: Any, total: Any) -> tuple[Any, Any]:
            words = look_up(table, block.tokens, trunk.config.hidden_size)

            def of_loss(layers: Leaves, lookups: Any, critic: _Head) -> Any:
                used = unflatten_dict(frozen | layers), *(lookups or (words, head))
                return self.loss(self._read(used, critic, block), block, given)

            lookups = (words, head) if tables else None
            _, back, sums = jax.vjp(of_loss, trained, lookups, learned[1:], has_aux=True)
            of_layers, of_lookups, of_critic = back(jnp.float32(1.0))
            layers, of_tables, critic = total
            if of_lookups is not None:
                of_words, of_head = of_lookups
                summed = add_to_rows(of_tables[WORDS,], block.tokens, of_words.astype(jnp.float32))
                of_tables = of_tables | {(WORDS,): summed}
                owner = (HEAD,) if (HEAD,) in tables else (WORDS,)
                of_tables[owner] += of_head
            layers = jax.tree.map(jnp.add, layers, of_layers)
            return (layers, of_tables, jax.tree.map(jnp.add, critic, of_critic)), sums

        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (trained, tables, learned[1:])
        )
        (of_layers, of_tables, of_critic), sums = _summed(one, zeros, blocks, given)
        return to_stored(of_layers | of_tables), of_critic, sums


def token_count(block: TokenBlocks) -> TokenCount:
    """The tokens of a block, those that rows share counted once, and its places."""
    by_group = block.lengths.reshape(len(block.shared), -1)
    alone = jnp.where(by_group > 0, by_group - block.shared[:, None], 0).sum()
    real = (alone + block.shared.sum()).astype(jnp.float32)
    return TokenCount(real, jnp.float32(len(block.tokens)))


def _summed(
    one: Callable[[TokenBlocks, Any, Any], tuple[Any, Any]],
    zeros: Any,
    blocks: TokenBlocks,
    given: Any,
) -> tuple[Any, Any]:
    """Runs over all blocks; returns the last total and the sums."""
    block, own = _at((blocks, given), 0)
    _, first = jax.eval_shape(one, block, own, zeros)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)

    def body(number: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        total, sums = carry
        block, own = _at((blocks, given), number)
        total, more = one(block, own, total)
        return total, added(sums, more)

    return jax.lax.fori_loop(0, _number(blocks), body, (zeros, nothing))


def _at(tree: Any, number: jax.Array | int) -> Any:
    return jax.tree.map(lambda leaf: leaf[number], tree)


def _number(blocks: TokenBlocks) -> jax.Array:
    """Blocks up to the last one that is not empty on any device: the same on all of them."""
    used = jnp.any(blocks.lengths > 0, axis=1)
    last = jnp.where(used, jnp.arange(1, len(used) + 1), 0).max()
    return jax.lax.pmax(last, AXES)
