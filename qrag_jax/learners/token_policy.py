"""A token policy over the mesh: log-probabilities of sampled tokens, and gradients of losses.

Blocks of rows are computed one after the other, forward and backward, so memory holds one of them,
whatever the batch. Every device has the same number of blocks; so what devices send each other for
a block is sent by all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.learners.policy_state import PolicyState
from qrag_jax.learners.state import optimizer_step
from qrag_jax.learners.token_config import SFTConfig, TokenGRPOConfig
from qrag_jax.learners.token_losses import (
    BlockLoss,
    BlockSums,
    GrpoLoss,
    ImitationLoss,
    PerToken,
    Sums,
)
from qrag_jax.models.compute.group import Group, add_to_rows, look_up
from qrag_jax.models.compute.lora import Adapted, attach, detach
from qrag_jax.models.compute.precision import EXACT
from qrag_jax.models.compute.row_sums import take_rows
from qrag_jax.models.compute.sharing import shared_layout
from qrag_jax.models.trunks.qwen3 import HEAD
from qrag_jax.models.trunks.trunk import WORDS, Params, Trunk
from qrag_jax.policies.tokens import TokenScores, Vocabulary, token_scores
from qrag_jax.rollouts.token_blocks import TokenBlocks
from qrag_jax.runtime.mesh import AXES
from qrag_jax.runtime.platform import compiler_options
from qrag_jax.runtime.sharding import specs_of, sum_over_data

Scores = TypeVar("Scores", covariant=True)


class ValueHead(NamedTuple):
    """The linear map of a critic: weights float32 `[H]`, zeros at first, and a bias, scalar."""

    weights: jax.Array
    bias: jax.Array


class Readout(Protocol[Scores]):
    """Reads hidden states. It is hashable."""

    def __call__(
        self, hidden: jax.Array, head: jax.Array, further: Any, tokens: jax.Array
    ) -> Scores:
        """What is read, `[S]`.

        Args:
            hidden: `[S, H]`, the hidden states before the tokens.
            head: `[V, H]` of the language model, or this device's part of it.
            further: parameters that the language model does not have; a pytree.
            tokens: int32 `[S]`, the sampled ones.
        """


@dataclasses.dataclass(frozen=True)
class ReadTokens:
    """The scores of the sampled tokens; there are no further parameters."""

    vocabulary: Vocabulary

    def __call__(
        self, hidden: jax.Array, head: jax.Array, further: Any, tokens: jax.Array
    ) -> TokenScores:
        """See `Readout`."""
        return token_scores(self.vocabulary, hidden, head, tokens)


@dataclasses.dataclass(frozen=True)
class ReadValues:
    """The value of the state in which each token was sampled; `further` is a `ValueHead`."""

    def __call__(
        self, hidden: jax.Array, head: jax.Array, further: ValueHead, tokens: jax.Array
    ) -> jax.Array:
        """See `Readout`; float32."""
        weighed = jnp.einsum(
            "sh,h->s", hidden.astype(jnp.float32), further.weights, precision=EXACT
        )
        return weighed + further.bias


ROW_AXES = AXES[:2]  # devices along `tensor` compute the same rows
Config = TypeVar("Config", covariant=True)
Given = TypeVar("Given")
Summed = TypeVar("Summed", bound=BlockSums)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenPolicy(Generic[Config]):
    """A causal language model, or adapters on a frozen one, and how it learns.

    Attributes:
        shardings: where the training state lives (`policy_state.state_shardings`).
        trunk: maps tokens to hidden states; the head is its word table, or the leaf `HEAD`.
        vocabulary: how hidden states become log-probabilities.
        config: constants of the algorithm, of which the passes know the loss of a block.
        weights: of the parts of an episode's reward `[K]`.
        optimizer: of the policy.
        schedule: optimizer step → learning rate.
        base_shardings: where the frozen base of adapters lives; None if all weights are trained.
        lora_scale: factor on the product of an adapter's two matrices.
        critic_optimizer: of PPO's critic; None: there is no critic.
        rests_until: the policy learns nothing before this update, in which its critic warms up.
    """

    mesh: Mesh
    shardings: PolicyState
    trunk: Trunk
    vocabulary: Vocabulary
    config: Config
    weights: tuple[float, ...]
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    base_shardings: Params | None = None
    lora_scale: float = 1.0
    critic_optimizer: optax.GradientTransformation | None = None
    rests_until: int = 0

    def __post_init__(self) -> None:
        group = Group.of(self.mesh)
        object.__setattr__(self, "trunk", self.trunk.on(group))
        object.__setattr__(self, "vocabulary", self.vocabulary._replace(group=group))

    @property
    def row_devices(self) -> int:
        """Devices that rows are split over."""
        return math.prod(self.mesh.shape[axis] for axis in ROW_AXES)

    @property
    def is_fresh(self: TokenPolicy[TokenGRPOConfig | SFTConfig]) -> bool:
        """Whether a batch gives one update: then π_old is the policy that learns, at no cost."""
        return self.config.epochs == 1


class Learned(NamedTuple):
    """What a pass has gradients of.

    Attributes:
        params: of the model, or its adapters.
        further: what the language model does not have, such as the linear map of a critic; it is
            the same on every device. () if there is nothing.
    """

    params: Params
    further: Any = ()


_Used = tuple[Params, jax.Array, jax.Array]  # prepared parameters, words `[T, H]`, head


class BlockPasses(Generic[Given, Summed]):
    """Forward and backward passes over the mesh, of a loss of blocks.

    Args:
        read: what the loss is of; None: the scores of the sampled tokens.
        shardings: of the model's parameters; None: those of the policy.

    A pass takes the parameters of adapters with the base that they are on, or all weights with the
    base None.
    """

    def __init__(
        self,
        policy: TokenPolicy,
        loss: BlockLoss[Given, Summed],
        read: Readout[Any] | None = None,
        shardings: Any = None,
    ) -> None:
        self.policy, self.loss = policy, loss
        self.read = read or ReadTokens(policy.vocabulary)
        self._params = specs_of(policy.shardings.params if shardings is None else shardings)
        self._base = specs_of(policy.base_shardings)

    def gradient(
        self, params: Params, base: Params | None, blocks: TokenBlocks, given: Given
    ) -> tuple[Params, Summed]:
        """The gradient of the summed loss, and the sums."""
        gradient, sums = self.gradients(Learned(params), base, blocks, given)
        return gradient.params, sums

    def gradients(
        self, learned: Learned, base: Params | None, blocks: TokenBlocks, given: Given
    ) -> tuple[Learned, Summed]:
        """The gradients of the summed loss, and the sums."""

        def on_device(learned: Learned, base, blocks, given):
            params, further = learned
            whole = params if base is None else Adapted(base, params)
            pull = self._to_all if base is None else self._to_adapters
            (gradient, of_further), sums = pull(whole, further, blocks, given)
            # Devices along `tensor` compute the same rows, and may differ in the last bits.
            of_further = jax.lax.pmean(jax.lax.psum(of_further, ROW_AXES), AXES[2])
            gradient = sum_over_data(gradient, self._params)
            return Learned(gradient, of_further), sums.over(ROW_AXES)

        of_learned = self._of(learned)
        specs = of_learned, self._of_base(base)
        return self._mapped(on_device, specs, (of_learned, PartitionSpec()))(
            learned, base, blocks, given
        )

    def log_probs(self, params: Params, base: Params | None, blocks: TokenBlocks) -> jax.Array:
        """Log-probabilities `[B, S]` of the sampled tokens."""
        return self.found(Learned(params), base, blocks, lambda scores: scores.log_probs)

    def found(
        self,
        learned: Learned,
        base: Params | None,
        blocks: TokenBlocks,
        pick: Callable[[Any], jax.Array] = lambda scores: scores,
    ) -> jax.Array:
        """What is read of the sampled tokens, float32 `[B, S]`; `pick` takes a part of it."""

        def on_device(learned: Learned, base, blocks, _):
            trunk, (params, further) = self.policy.trunk, learned
            whole = self._attached(params if base is None else Adapted(base, params))
            prepared = trunk.prepare(trunk.for_use(whole), trunk.precision.products)
            table = prepared[WORDS]
            head = prepared.get(HEAD, table)

            def one(number: jax.Array, found: jax.Array) -> jax.Array:
                block = _at(blocks, number)
                words = look_up(table, block.tokens, trunk.config.hidden_size)
                scores = self._scores((prepared, words, head), further, block)
                return found.at[number].set(pick(scores))

            nothing = jnp.zeros(blocks.target.shape, jnp.float32)
            return jax.lax.fori_loop(0, _number(blocks), one, nothing)

        specs = self._of(learned), self._of_base(base)
        return self._mapped(on_device, specs, PartitionSpec(ROW_AXES))(
            learned, base, blocks, blocks.valid
        )

    def _of(self, learned: Learned) -> Any:
        """The specs of what is learned."""
        return Learned(self._params, jax.tree.map(lambda _: PartitionSpec(), learned.further))

    def _of_base(self, base: Params | None) -> Any:
        return None if base is None else self._base

    def _mapped(self, on_device: Callable[..., Any], specs: tuple[Any, Any], out: Any) -> Any:
        by_block = PartitionSpec(ROW_AXES)
        return jax.shard_map(
            on_device,
            mesh=self.policy.mesh,
            in_specs=(*specs, by_block, by_block),
            out_specs=out,
            check_vma=False,
        )

    def _attached(self, params: Params | Adapted) -> Params:
        """The parameters of the model, as a dictionary of its own."""
        if isinstance(params, Adapted):
            return attach(params, self.policy.lora_scale)
        return dict(params)

    def _scores(self, used: _Used, further: Any, block: TokenBlocks) -> Any:
        prepared, words, head = used
        layout = shared_layout(block.shared, block.lengths, len(block.tokens), block.longest)
        hidden = jnp.asarray(self.policy.trunk.apply({"params": prepared}, words, layout))
        before = take_rows(hidden, block.place)
        return self.read(before, head, further, block.target)

    def _loss(
        self, used: _Used, further: Any, block: TokenBlocks, given: Given
    ) -> tuple[jax.Array, Summed]:
        """The summed loss of one block, and the sums."""
        return self.loss(self._scores(used, further, block), block, given)

    def _to_all(
        self, params: Params, further: Any, blocks: TokenBlocks, given: Given
    ) -> tuple[Learned, Summed]:
        """The gradient with respect to all parameters."""
        trunk = self.policy.trunk
        width = trunk.config.hidden_size
        for_use, to_stored = jax.vjp(trunk.for_use, params)
        prepared = trunk.prepare(for_use)
        table, own_head = prepared.pop(WORDS), prepared.pop(HEAD, None)
        head = table if own_head is None else own_head

        def one(block: TokenBlocks, given: Given, total: Any) -> tuple[Any, Summed]:
            words = look_up(table, block.tokens, width)
            of_loss = partial(self._loss, block=block, given=given)
            _, back, sums = jax.vjp(of_loss, (prepared, words, head), further, has_aux=True)
            (gradient, of_words, of_head), more = back(jnp.float32(1.0))
            of_layers, of_table, of_own, of_further = total
            of_table = add_to_rows(of_table, block.tokens, of_words.astype(jnp.float32))
            if own_head is None:
                of_table += of_head
            else:
                of_own += of_head
            of_layers = jax.tree.map(jnp.add, of_layers, gradient)
            of_further = jax.tree.map(jnp.add, of_further, more)
            return (of_layers, of_table, of_own, of_further), sums

        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (prepared, table, own_head, further)
        )
        (of_layers, of_table, of_own, of_further), sums = _summed(one, zeros, blocks, given)
        of_tables = {WORDS: of_table} | ({} if own_head is None else {HEAD: of_own})
        gradient = to_stored(trunk.as_stored(of_layers | of_tables))[0]
        return Learned(gradient, of_further), sums

    def _to_adapters(
        self, params: Adapted, further: Any, blocks: TokenBlocks, given: Given
    ) -> tuple[Learned, Summed]:
        """The gradient with respect to adapters; the base is a constant."""
        trunk = self.policy.trunk

        def prepare(adapters: Params) -> tuple[Params, Params]:
            attached = attach(params._replace(adapters=adapters), self.policy.lora_scale)
            return detach(trunk.prepare(trunk.for_use(attached), trunk.precision.products))

        prepared, to_stored, frozen = jax.vjp(prepare, params.adapters, has_aux=True)
        table = frozen[WORDS,]
        head = frozen.get((HEAD,), table)

        def one(block: TokenBlocks, given: Given, total: Any) -> tuple[Any, Summed]:
            words = look_up(table, block.tokens, trunk.config.hidden_size)

            def of_loss(prepared: Params, further: Any) -> tuple[jax.Array, Summed]:
                used = unflatten_dict(frozen | prepared), words, head
                return self._loss(used, further, block, given)

            _, back, sums = jax.vjp(of_loss, prepared, further, has_aux=True)
            return jax.tree.map(jnp.add, total, back(jnp.float32(1.0))), sums

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (prepared, further))
        (gradient, of_further), sums = _summed(one, zeros, blocks, given)
        return Learned(to_stored(gradient)[0], of_further), sums


class TokenPasses(BlockPasses[PerToken, Sums]):
    """The passes of GRPO or of imitation."""

    def __init__(self, policy: TokenPolicy[TokenGRPOConfig | SFTConfig]) -> None:
        loss: BlockLoss[PerToken, Sums] = ImitationLoss()
        if isinstance(policy.config, TokenGRPOConfig):
            loss = GrpoLoss(policy.config)
        super().__init__(policy, loss)


def _summed(
    one: Callable[[TokenBlocks, Given, Any], tuple[Any, Summed]],
    zeros: Any,
    blocks: TokenBlocks,
    given: Given,
) -> tuple[Any, Summed]:
    """Runs over all blocks; returns the last total and the sums."""
    block, own = _at((blocks, given), 0)
    _, first = jax.eval_shape(one, block, own, zeros)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)

    def body(number: jax.Array, carry: tuple[Any, Summed]) -> tuple[Any, Summed]:
        total, sums = carry
        block, own = _at((blocks, given), number)
        total, more = one(block, own, total)
        return total, sums.plus(more)

    return jax.lax.fori_loop(0, _number(blocks), body, (zeros, nothing))


def _at(tree: Any, number: jax.Array | int) -> Any:
    return jax.tree.map(lambda leaf: leaf[number], tree)


def _number(blocks: TokenBlocks) -> jax.Array:
    """Blocks up to the last one that is not empty on any device: the same on all of them."""
    used = jnp.any(blocks.lengths > 0, axis=1)
    last = jnp.where(used, jnp.arange(1, len(used) + 1), 0).max()
    return jax.lax.pmax(last, AXES)


Metrics = dict[str, jax.Array]
Update = Callable[..., tuple[PolicyState, Metrics]]  # (state, episodes), then a base if any


def learn(
    policy: TokenPolicy,
    state: PolicyState,
    gradient: Params,
    loss: jax.Array,
    *,
    awake: jax.Array | bool = True,
) -> tuple[PolicyState, jax.Array, jax.Array]:
    """One optimizer step; nothing is learned if the loss or the gradient is not finite.

    Args:
        awake: else nothing is learned either.

    Returns:
        the state, whose counts are the old ones; the gradient's norm; whether both were finite.
    """
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    params, opt_state = optimizer_step(
        state.params, state.opt_state, gradient, policy.optimizer, finite & awake
    )
    return state._replace(params=params, opt_state=opt_state), norm, finite


def counted(state: PolicyState, tokens: jax.Array, metrics: Metrics) -> tuple[PolicyState, Metrics]:
    """The state after an update from so many sampled tokens, and the metrics with their sum."""
    env_steps = state.env_steps + tokens.astype(jnp.int32)
    state = state._replace(step=state.step + 1, env_steps=env_steps)
    return state, metrics | {"env_steps": env_steps.astype(jnp.float32)}


def jitted(policy: TokenPolicy, update: Callable[..., Any], episodes: Any) -> Update:
    """The program `(state, episodes) → (state, metrics)`; the state's buffers are donated.

    Args:
        update: takes a base, too, if the policy is adapters.
        episodes: shardings of what is learned from.
    """
    shardings, of_base = policy.shardings, policy.base_shardings
    placed = shardings, episodes
    return jax.jit(
        update,
        donate_argnums=0,
        in_shardings=placed if of_base is None else (*placed, of_base),
        out_shardings=(shardings, NamedSharding(policy.mesh, PartitionSpec())),
        compiler_options=compiler_options(policy.mesh, adapters=of_base is not None),
    )
