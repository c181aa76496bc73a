"""How two towers learn: by PQN, with λ-returns and twin soft Q-values (Gallici et al., arXiv
2407.04811; Q-RAG, 2511.07328), and by imitation.

Where rewards are computed on the device, ONE program plays whole episodes with the current weights,
scores them, forms λ-returns with the values of the target towers, and regresses both critics on
them. The loss depends on the towers only through the embeddings, so its gradient with respect to
these is pulled back through each tower in blocks: only the states and the chosen chunks are encoded
with gradients.

Where rewards come from outside, one program plays, and another one learns K batches later, by the
current weights: states and chunks are encoded again. With K = 0 and the same rewards both ways are
equal (tested).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from qrag_jax.algorithms import two_towers as losses
from qrag_jax.algorithms.advantages import ends_of, gae
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.environments.chunks import NOT_TAKEN
from qrag_jax.learners import update
from qrag_jax.learners.config import ImitateConfig, PQNConfig
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule, make_optimizer
from qrag_jax.learners.state import TrainState, dropout_key, episode_keys
from qrag_jax.models.compute.attention import rotate
from qrag_jax.models.compute.lora import Adapted, merge, of_tower
from qrag_jax.models.compute.ragged import TokenRows, embed_rows, first_of_its_kind, pull_back
from qrag_jax.models.embedding import Params
from qrag_jax.policies import soft_q
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor, Draws, Trajectory, positions_of, rollout
from qrag_jax.rollouts.experience import Played
from qrag_jax.runtime.mesh import BATCH_AXES

_BY_EPISODE = PartitionSpec(BATCH_AXES)
# (batch, trajectory, of which it reads `actions` and `valid`) → rewards `[B, T]`
Feedback = Callable[[EpisodeBatch, Any], jax.Array]


class Towers(NamedTuple):
    """Online and target parameters: two towers stacked on axis 0, or adapters over one base."""

    online: Params | Adapted
    target: Params | Adapted


@dataclasses.dataclass(frozen=True)
class PQNGradient:
    """The gradient of the SUMMED loss of a batch, with the sums to divide by.

    With a feedback the batch is `EpisodeBatch`, and played and scored by the current weights.
    Without one it is `ScoredEpisodes`, whose states and chosen chunks are encoded again.
    """

    actor: Actor
    config: PQNConfig
    feedback: Feedback | None = None
    imitation: ImitationGradient | None = None  # whose loss is added, by its `pqn_weight`

    def __call__(self, towers: Towers, episodes: Any, draws: Draws) -> tuple[Params, update.Sums]:
        """The gradient of the online towers, or of their adapters, and the sums.

        Play and learning use the same dropout masks, so the policy acts on the same embeddings that
        are regressed, and dropout adds to its exploration. Target towers have masks of their own,
        as in Q-RAG, where all towers stay in torch's training mode; target adapters drop nothing.
        With τ = 1 and no dropout the target towers are the online ones, and encode nothing.

        Args:
            draws: of scored episodes, with the keys that they were played with.
        """
        actor, config, scored, dropout = self.actor, self.config, None, draws.dropout
        if self.feedback is None:
            scored, batch = episodes, actor.playable(episodes.batch)
            of_target = draws._replace(dropout=dropout[1:])
            played = rollout(actor, towers[1:], batch, of_target, scored.played.actions)
            valid = played.valid & scored.scored
            rewards = jnp.where(valid, scored.score, 0.0)
        else:
            batch = actor.playable(episodes)
            same = config.tau == 1 and dropout[0] is None
            played = rollout(actor, towers[:1] if same else towers, batch, draws)
            rewards, valid = self.feedback(batch, played), played.valid
        discounts = config.gamma, config.lambda_
        _, target = gae(rewards, played.values, valid, ends_of(valid), discounts)
        steps = jax.tree.map(update.flattened, (played.positions, target, valid))
        last = actor.config.last_position(batch.chunk_mask.shape[1])

        def loss_of(states: jax.Array, chunks: jax.Array, steps: tuple) -> jax.Array:
            positions, target, valid = steps
            return losses.pqn_loss(states, rotate(chunks, positions, last), target, valid)

        if scored is None:
            embedded = (
                update.flattened(played.state_embeddings),
                update.flattened(played.chunk_embeddings),
            )
            cotangents: Any = jax.grad(loss_of, (0, 1))(*embedded, steps)
            rows = tower_rows(played.states, played.chunks)
            gradient, used = pull_back_both(actor, towers.online, rows, cotangents, dropout[0])
        else:
            online = towers.online, dropout[0]
            gradient, embedded, used = self._encoded_again(*online, played, steps, loss_of)
            q = (embedded[0] * rotate(embedded[1], steps[0], last)).sum(axis=-1)
            entropy = scored.played.entropy
            played = played._replace(valid=valid, q=q.reshape(valid.shape), entropy=entropy)
        total, means = loss_of(*embedded, steps), means_of(batch, played, rewards, target)
        means["loss"] = total, valid.sum().astype(jnp.float32)
        if scored is not None:
            present = scored.batch.chunk_mask.any(axis=1)
            lost = (present & ~scored.scored.any(axis=1)).sum().astype(jnp.float32)
            means["unscored_share"] = lost, present.sum().astype(jnp.float32)
        used += played.tokens
        if self.imitation is not None:
            questions = episodes if scored is None else scored.batch
            of_labels, labelled = self.imitation(towers, questions, draws)
            weight = self.imitation.config.pqn_weight
            names = {"imitation_loss": "loss", "accuracy": "accuracy"}
            gradient = jax.tree.map(lambda one, more: one + weight * more, gradient, of_labels)
            total, used = total + weight * labelled.loss, used + labelled.tokens
            means |= {name: labelled.means[of] for name, of in names.items()}
        return gradient, update.Sums(total, means, {}, used)

    def _encoded_again(
        self, params: Params | Adapted, keys: Any, played: Trajectory, steps: tuple, loss_of: Any
    ) -> tuple[Params, tuple[jax.Array, jax.Array], jax.Array]:
        """The gradient of the towers, the embeddings `[N, D]` of both, and the tokens `[2]`.

        Chunks are embedded first. Then the cotangent of a state is known as soon as the state is
        embedded, so states are encoded once, and only the chosen chunks twice.
        """
        encoder, blocks = self.actor.encoder, self.actor.block_shapes.gradients
        of_states, of_chunks = of_tower(params, STATE), of_tower(params, CHUNK)
        state_key, chunk_key = (None, None) if keys is None else keys
        state_rows, chunk_rows = (
            TokenRows(rows.flat.tokens, jnp.where(steps[-1], rows.flat.lengths, 0))
            for rows in (played.states, played.chunks)
        )
        alone = encoder.alone(of_chunks)
        chunks, used = embed_rows(encoder, blocks, alone, chunk_rows, chunk_key)

        def of_block(states: jax.Array, values: tuple) -> jax.Array:
            return jax.grad(loss_of)(states, *values)

        options: Any = {"dropout_key": state_key, "of_rows": (chunks, steps)}
        state_gradient, states, more = pull_back(
            encoder, blocks, of_states, state_rows, of_block, **options
        )
        cotangents = jax.grad(loss_of, 1)(states, chunks, steps)
        chunk_gradient, _, again = pull_back(
            encoder, blocks, of_chunks, chunk_rows, cotangents, dropout_key=chunk_key
        )
        gradient = jax.tree.map(lambda *both: jnp.stack(both), state_gradient, chunk_gradient)
        return gradient, (states, chunks), used + more + again


def means_of(
    batch: EpisodeBatch, trajectory: Trajectory, rewards: jax.Array, target: jax.Array
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Sums over valid steps or over episodes with any, and their number; as `Sums.means`."""
    present = batch.chunk_mask.any(axis=1) & trajectory.valid.any(axis=1)
    unsolved = batch.support.at[
        jnp.arange(present.shape[0])[:, None],
        jnp.where(trajectory.valid, trajectory.actions, batch.support.shape[1]),
    ].set(False, mode="drop")

    def over_transitions(values: jax.Array) -> jax.Array:
        return jnp.where(trajectory.valid, values, 0.0).sum()

    transitions = trajectory.valid.sum().astype(jnp.float32)
    episodes = present.sum().astype(jnp.float32)
    solved = (present & ~unsolved.any(axis=1)).sum().astype(jnp.float32)
    return {
        "mean_q": (over_transitions(trajectory.q), transitions),
        "mean_target": (over_transitions(target), transitions),
        "td_error": (over_transitions(jnp.abs(trajectory.q - target)), transitions),
        "entropy": (over_transitions(trajectory.entropy), transitions),
        "return": (over_transitions(rewards), episodes),
        "fact_em": (solved, episodes),
    }


def over_towers(
    compute: Callable[[tuple], Any], params: Params | Adapted, rows: tuple[Any, ...]
) -> Any:
    """Calls `compute((tower, *rows))` for each of two towers; all are stacked on axis 0."""
    varying = params._replace(base=None) if isinstance(params, Adapted) else params

    def of_one(tower: tuple) -> Any:
        one, *rest = tower
        if isinstance(params, Adapted):
            one = one._replace(base=params.base)
        return compute((one, *rest))

    return jax.lax.map(of_one, (varying, *rows))


def pull_back_both(
    actor: Actor,
    params: Params | Adapted,
    rows: TokenRows,
    cotangents: tuple[jax.Array, jax.Array],
    keys: jax.Array | None,
) -> tuple[Params, jax.Array]:
    """The gradient of both towers from those of the states' and chunks' embeddings, `[..., D]`."""
    most = rows.lengths.shape[1]
    flat = [leaf.reshape(-1, leaf.shape[-1]) for leaf in cotangents]
    stacked = jnp.stack([jnp.pad(leaf, ((0, most - len(leaf)), (0, 0))) for leaf in flat])

    def of_one(tower: tuple) -> tuple[Params, jax.Array]:
        *params_of_tower, key = tower
        blocks = actor.block_shapes.gradients
        gradient, _, used = pull_back(actor.encoder, blocks, *params_of_tower, dropout_key=key)
        return gradient, used

    gradient, used = over_towers(of_one, params, (rows, stacked, keys))
    return gradient, used.sum(axis=0)


def tower_rows(states: TokenRows, chunks: TokenRows) -> TokenRows:
    """States and chunks as as many rows of one width: tokens `[2, N, L]`, lengths `[2, N]`.

    The fewer rows are filled up with absent ones.
    """
    width = max(states.tokens.shape[-1], chunks.tokens.shape[-1])
    count = max(states.lengths.size, chunks.lengths.size)

    def filled(rows: TokenRows) -> TokenRows:
        tokens, lengths = rows.flat
        more = count - len(lengths)
        widened = jnp.pad(tokens, ((0, more), (0, width - tokens.shape[1])))
        return TokenRows(widened, jnp.pad(lengths, (0, more)))

    return jax.tree.map(lambda *both: jnp.stack(both), filled(states), filled(chunks))


# ------------------------------------------------------------------------ imitation
# Both towers learn from the labels which passages each state needs next. The states of a question
# are the question alone, the question with supporting facts already taken and, as an option, what
# the towers' own greedy search reaches (DAgger, Ross et al., arXiv 1011.0686). Q / temperature are
# the logits of a softmax over all passages not taken yet.


class States(NamedTuple):
    """What a batch learns in; S states of each question. The first T follow the facts' own path."""

    taken: jax.Array  # `[B, S, T]`, passages in the order taken, `NOT_TAKEN` for steps to come
    # `[B, S]`, whether the state is learned in. No state of a question is there twice.
    valid: jax.Array
    available: jax.Array  # `[B, S, C]`, passages that may be taken
    needed: jax.Array  # `[B, S, C]`, those that should be; of a state that needs none, STOP


@dataclasses.dataclass(frozen=True)
class ImitationGradient:
    """The gradient of the SUMMED loss of a batch, with the sums to divide by."""

    actor: Actor
    config: ImitateConfig  # of the stage
    alpha: float  # the policy's temperature, by which Q is divided unless the config has another

    def __call__(
        self, towers: Towers, batch: EpisodeBatch, draws: Draws
    ) -> tuple[Params, update.Sums]:
        """The gradient of the online towers (or of their adapters), and sums over states.

        Args:
            draws: its keys order facts whose order is not known.
        """
        actor, params, keys = self.actor, towers.online, draws.dropout[0]
        batch = actor.playable(batch)
        states = self.states(params, batch, draws)
        where = positions_of(actor.config, batch, draws.keys)
        # Nothing is taken in a first state: it has all passages that the loss is over.
        batch = batch._replace(chunk_mask=states.available[:, 0])
        tokens, lengths = jax.vmap(partial(actor.state_rows, batch), 1, 1)(states.taken)
        state_rows = TokenRows(tokens, jnp.where(states.valid, lengths, 0))
        rows = tower_rows(state_rows, actor.chunk_rows(batch))

        def embed(tower: tuple) -> tuple[jax.Array, jax.Array]:
            one, rows, key = tower
            blocks = actor.block_shapes.gradients
            return embed_rows(actor.encoder, blocks, actor.encoder.alone(one), rows, key)

        (of_states, of_chunks), used = over_towers(embed, params, (rows, keys))
        embedded = (
            of_states[: states.valid.size].reshape(*states.valid.shape, -1),
            of_chunks[: batch.chunk_mask.size].reshape(*batch.chunk_mask.shape, -1),
        )
        learn = partial(self._loss, batch=batch, where=where, states=states, rows=rows)
        (total, by_state), cotangents = jax.value_and_grad(learn, (0, 1), has_aux=True)(*embedded)
        gradient, again = pull_back_both(actor, params, rows, cotangents, keys)
        number = states.valid.sum().astype(jnp.float32)
        means = {name: (value, number) for name, value in ({"loss": total} | by_state).items()}
        return gradient, update.Sums(total, means, {}, used.sum(axis=0) + again)

    def states(self, params: Params | Adapted, batch: EpisodeBatch, draws: Draws) -> States:
        """The states of a batch: of two orders of the facts, and of the own search if asked for.

        Facts of equal rank come in a random order and in its reverse, which for two facts are all
        orders there are. Where the order is known the second one is the first, and drops out.
        """
        steps, stop = self.actor.config.max_steps, self.actor.config.stop_action
        support = batch.support
        facts = support.sum(axis=1)
        noise = _noise(draws, 2**31 - 2, support)
        place, column = jnp.arange(steps)[None], jnp.arange(support.shape[1])[None, None]
        paths = []
        for tie in (noise, 1 - noise):
            # The noise orders facts of equal rank alone.
            order = jnp.lexsort((tie, batch.rank, ~support), axis=1)[:, :steps]
            order = jnp.pad(order, ((0, 0), (0, steps - order.shape[1])))
            order = jnp.where(place < facts[:, None], order, NOT_TAKEN)
            paths.append((order, place <= facts[:, None]))
        if self.config.own_states:
            greedy = Draws.greedy()._replace(dropout=draws.dropout)
            trajectory = rollout(self.actor, (params,), batch, greedy)
            paths.append((trajectory.actions, trajectory.valid))
        # State t of a path has the first t of its passages. All paths have the start in common.
        before = jnp.tri(steps, k=-1, dtype=bool)[None]
        of_paths = [(jnp.where(before, path[:, None], NOT_TAKEN), valid) for path, valid in paths]
        parts = [of_paths[0], *((taken[:, 1:], valid[:, 1:]) for taken, valid in of_paths[1:])]
        taken, valid = (jnp.concatenate(leaves, axis=1) for leaves in zip(*parts, strict=True))
        was_taken = (taken[..., None] == column[None]).any(axis=2)
        available = self._shown(batch, draws)[:, None] & ~was_taken
        needed = losses.needed_next(batch.rank[:, None], available)
        if stop:
            known = (facts > 0)[:, None, None] & ~needed.any(axis=-1, keepdims=True)
            needed |= known & (column == support.shape[1] - 1)
        valid &= needed.any(axis=-1)
        same = jnp.sort(taken, axis=-1) if self.actor.config.sort_by_index else taken
        twice = (same[:, :, None] == same[:, None]).all(axis=-1) & valid[:, None]
        twice &= jnp.tri(taken.shape[1], k=-1, dtype=bool)[None]
        return States(taken, valid & ~twice.any(axis=-1), available, needed)

    def _shown(self, batch: EpisodeBatch, draws: Draws) -> jax.Array:
        """`[B, C]`, the facts, STOP and the distractors of each question that the loss is over."""
        wrong = batch.chunk_mask & ~batch.support
        if self.actor.config.stop_action:
            wrong = wrong.at[:, -1].set(False)
        noise = jnp.where(wrong, _noise(draws, 2**31 - 3, wrong), 2.0)
        place = jnp.argsort(jnp.argsort(noise, axis=1), axis=1)
        most = self.config.distractors or wrong.shape[1]
        return batch.chunk_mask & (~wrong | (place < most))

    def _loss(
        self,
        of_states: jax.Array,
        of_chunks: jax.Array,
        *,
        batch: EpisodeBatch,
        where: Callable[[jax.Array], jax.Array],
        states: States,
        rows: TokenRows,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The summed loss of embeddings `[B, S, D]` and `[B, C, D]`, and sums over states."""
        config, last = self.config, self.actor.config.last_position(batch.chunk_mask.shape[1])

        def scores(state: tuple[jax.Array, jax.Array]) -> jax.Array:
            embedding, taken = state
            return soft_q.twin_q(embedding, rotate(of_chunks, where(taken), last)).sum(-1)

        # One state of each question at a time: chunks are rotated again for each.
        by_state = jnp.moveaxis(of_states, 1, 0), jnp.moveaxis(states.taken, 1, 0)
        q = jnp.moveaxis(jax.lax.map(scores, by_state), 0, 1)  # [B, S, C]
        logits, needed, available = q, states.needed, states.available
        if config.shared_by > 1:
            others, known = self._of_others(of_states, of_chunks, batch, rows)
            shape = (*logits.shape[:2], known.shape[-1])
            logits = jnp.concatenate([logits, others], axis=-1)
            available = jnp.concatenate(
                [available, jnp.broadcast_to(known[:, None], shape)], axis=-1
            )
            needed = jnp.concatenate([needed, jnp.zeros(shape, bool)], axis=-1)
        logits = logits / (config.temperature or self.alpha)
        total = losses.imitation_loss(logits, needed, available, states.valid)
        best = jnp.where(states.available, q, soft_q.MASKED)
        hit = jnp.take_along_axis(states.needed, best.argmax(-1)[..., None], -1)[..., 0]
        mean = jnp.where(states.valid, best.max(-1), 0.0).sum()
        right = (hit & states.valid).sum().astype(jnp.float32)
        return total, {"accuracy": right, "mean_q": mean}

    def _of_others(
        self, of_states: jax.Array, of_chunks: jax.Array, batch: EpisodeBatch, rows: TokenRows
    ) -> tuple[jax.Array, jax.Array]:
        """Q of the other questions' passages, and which of them a question does not have itself.

        `[B, S, G·C]` and `[B, G·C]` bool, for groups of G questions in a row: a batch in parts has
        the same groups.
        """
        questions, group = len(of_chunks), self.config.shared_by
        shared = of_chunks.reshape(questions // group, -1, of_chunks.shape[-1])
        shared = jnp.repeat(shared, group, axis=0)
        of_chunk_rows = TokenRows(*(leaf[CHUNK] for leaf in rows))
        text = first_of_its_kind(*of_chunk_rows)[: batch.chunk_mask.size]
        text = text.reshape(batch.chunk_mask.shape)
        texts, there = (
            jnp.repeat(leaf.reshape(questions // group, -1), group, axis=0)
            for leaf in (text, batch.chunk_mask)
        )
        # STOP has the same text in all questions.
        is_own_passage = (texts[:, :, None] == text[:, None]).any(axis=-1)
        return soft_q.twin_q(of_states, shared[:, None]).sum(-1), there & ~is_own_passage


def _noise(draws: Draws, time: int, like: jax.Array) -> jax.Array:
    """Uniform float32 `[B, C]` of each question, by a time at which no action is drawn."""
    assert draws.keys is not None
    keys = jax.vmap(jax.random.fold_in, (0, None))(draws.keys, time)
    return jax.vmap(lambda key: jax.random.uniform(key, like.shape[1:]))(keys)


# ------------------------------------------------------------------------ learner, programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowers(update.Learner):
    """Two towers, or adapters on one frozen base, and how they learn."""

    actor: Actor  # plays; its encoder is that of the mesh
    config: PQNConfig  # constants of PQN
    peak: float  # the highest learning rate
    accumulation: int = 1  # number of micro-batches in a step, on each device

    def __post_init__(self) -> None:
        # The encoder computes on the mesh, with the parts of parameters that lie there.
        object.__setattr__(self, "actor", self.actor.on(self.mesh))

    def imitating(self, optimizer: OptimizerConfig) -> TwoTowers:
        """As they learn in a first stage, without targets of their own."""
        return dataclasses.replace(
            self,
            config=dataclasses.replace(self.config, tau=1.0),
            parts=self.parts._replace(optimizer=make_optimizer(optimizer)),
            schedule=learning_rate_schedule(optimizer),
            peak=optimizer.learning_rate,
        )

    @property
    def params_shardings(self) -> Params | Adapted:
        """Where the parameters live, the frozen base included."""
        return merge(self.shardings.params, self.base_shardings)

    def draws(self, state: TrainState, number: jax.Array, episodes: int) -> Draws:
        """The draws of a batch, whose keys depend on the number of the step that learns from it.

        The first environment steps of a run act uniformly at random. Each tower has a dropout key
        of its own; target adapters get none and drop nothing.
        """
        dropout: tuple[Any, Any] = None, None
        adapted, encoder = self.base_shardings is not None, self.actor.encoder
        of_trunk = encoder.dropout or encoder.attention_dropout
        if encoder.lora_dropout if adapted else of_trunk:
            online, target = jax.random.split(dropout_key(state), (2, 2))
            dropout = online, None if adapted else target
        return Draws(
            episode_keys(state, number, episodes),
            losses.alpha_at(self.config.alpha, self.schedule(state.step), self.peak),
            state.env_steps < 2 * self.config.learning_start,
            dropout,
        )


def make_update(
    towers: TwoTowers, gradient_of: Callable[..., tuple[Params, update.Sums]]
) -> update.Update:
    """The program `(state, episodes) → (state, metrics)`; see `Learner.update`.

    The batch is split over the mesh and, on each device, into `accumulation` micro-batches. Losses
    are sums with their counts, every episode has its own PRNG key, and dropout masks depend on the
    step and the content of rows, so any split gives the same numbers as the whole batch.

    A kernel that is split over `fsdp` is gathered when its layer is computed, forward and backward;
    the optimizer and the target towers work on parts alone (Rajbhandari et al., arXiv 1910.02054,
    ZeRO stage 3). Layers that are split over `tensor` are computed where they are.

    Metrics are those of the gradient, `grad_norm`, `learning_rate`, `alpha`, `padding_share`,
    `env_steps` and `skipped`.

    Args:
        gradient_of: `PQNGradient` or `ImitationGradient`: `(towers, episodes, draws)` → the
            gradient of the summed loss, and sums, of which the mean `loss` counts the transitions.
    """
    accumulation = towers.accumulation

    def gradient(parts: Towers, episodes: Any, draws: Draws):
        def micro(episodes, keys):
            return gradient_of(parts, episodes, draws._replace(keys=keys))

        def add(total, micro_batch):
            return update.added(total, micro(*micro_batch)), None

        if accumulation == 1:
            return micro(episodes, draws.keys)
        devices = towers.mesh.size

        def split(leaf: jax.Array) -> jax.Array:
            """A part of the episodes of every device for each micro-batch."""
            rest = leaf.shape[1:]
            of_devices = leaf.reshape(devices, accumulation, -1, *rest).swapaxes(0, 1)
            parts = of_devices.reshape(accumulation, -1, *rest)
            placed = towers.on_mesh(PartitionSpec(None, BATCH_AXES))
            return jax.lax.with_sharding_constraint(parts, placed)

        micro_batches = jax.tree.map(split, (episodes, draws.keys))
        shapes = jax.eval_shape(micro, *jax.tree.map(lambda leaf: leaf[0], micro_batches))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.scan(add, zeros, micro_batches)[0]

    def train_step(state: TrainState, episodes: Any, base: Params | None = None):
        learning_rate = towers.schedule(state.step)
        draws = towers.draws(state, state.step, jax.tree.leaves(episodes)[0].shape[0])
        parts = Towers(merge(state.params, base), merge(state.target_params, base))
        of_online, sums = gradient(parts, episodes, draws)
        transitions = sums.means["loss"][1]
        divisor, tau = jnp.maximum(transitions, 1.0), towers.config.tau
        state, learned = towers.learn(state, (of_online, None), sums.loss, divisor, tau=tau)
        metrics = sums.metrics() | learned | update.padding_share(sums.tokens)
        metrics |= {"learning_rate": learning_rate, "alpha": draws.alpha}
        return update.counted(state, transitions, metrics)

    return towers.update(train_step, towers.on_mesh(_BY_EPISODE))


def make_play_step(towers: TwoTowers) -> Callable[..., Played]:
    """The program `(state, batch, number) → Played`, split over the mesh as the training step.

    `number`, an int32 scalar on the device, is that of the step that will learn from the batch. It
    determines the draws. Temperature, random acting and dropout are those of `state`.
    """
    actor = towers.actor

    def play(
        state: TrainState, batch: EpisodeBatch, number: jax.Array, base: Params | None = None
    ) -> Played:
        draws = towers.draws(state, number, batch.sample.shape[0])
        params = merge(state.params, base)
        trajectory = rollout(actor, (params,), actor.playable(batch), draws)
        return Played(trajectory.actions, trajectory.valid, trajectory.entropy)

    split = towers.on_mesh(_BY_EPISODE)
    return towers.program(play, (towers.shardings, split, towers.on_mesh(update.REPLICATED)), split)
