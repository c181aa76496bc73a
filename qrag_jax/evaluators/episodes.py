"""Plays greedy episodes over a set of samples in batches; gives retrieval-log rows and scores.

During training the scores are those of the supporting facts if they are known, and the returns
those of the rewards.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.algorithms.advantages import discounted_return
from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape, evaluation_batches
from qrag_jax.data.sample import LazySamples, Sample
from qrag_jax.data.tokens import TokenStore
from qrag_jax.evaluators.evaluation import Evaluation, lost_text, of_all_hosts, sampler
from qrag_jax.feedback.rewards import Rewards
from qrag_jax.learners.two_towers import Feedback
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics import answers, bootstrap
from qrag_jax.metrics.facts import fact_columns, score_columns, scored, until_found
from qrag_jax.metrics.row_log import RETRIEVALS, Row
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.embedding import Params
from qrag_jax.rollouts.chunks import Actor, Draws, rollout
from qrag_jax.runtime import hosts, interrupt, platform
from qrag_jax.runtime.mesh import BATCH_AXES, shard_batch


class Played(NamedTuple):
    """What was taken in B episodes of T steps."""

    taken: jax.Array  # `[B, T]`, index of the chunk taken
    valid: jax.Array  # `[B, T]`, whether the step took a chunk; STOP is not a chunk
    q: jax.Array  # `[B, T]`, Q of the chunk taken
    ret: jax.Array  # `[B]`, discounted return of the episode


# The same questions, played in several steps and by one look-up with the same encoder.
Episodes = tuple[Played, Played]
Play = Callable[[Params, EpisodeBatch], Episodes]


def make_play(
    mesh: Mesh, shardings: Params | Adapted, actor: Actor, feedback: Feedback, gamma: float
) -> Play:
    """Makes the jitted `(params, batch) → Episodes`, which plays greedily.

    The batch is split over the mesh's batch axes.

    Args:
        shardings: where the parameters live: two towers stacked on axis 0, or (`Adapted`) their
            adapters stacked, over one base.
        gamma: γ, the discount of the returns.
    """
    actor, config = actor.on(mesh), actor.config

    def play(params: Params, batch: EpisodeBatch) -> Episodes:
        chunks = batch.chunk_mask.shape[1]
        batch = actor.playable(batch)
        trajectory = rollout(actor, (params,), batch, Draws.greedy())
        # One look-up: the chunks that score highest for the question alone, best first.
        steps = min(config.max_steps, chunks)
        first_q, first = jax.lax.top_k(trajectory.first_q[:, :chunks], steps)
        present = jnp.take_along_axis(batch.chunk_mask, first, axis=1)
        looked_up = trajectory._replace(actions=first, valid=present)

        def returns(played):
            return jax.vmap(discounted_return, (0, None))(feedback(batch, played), gamma)

        took_chunk = trajectory.valid & (trajectory.actions < chunks)  # STOP is not a chunk
        return (
            Played(trajectory.actions, took_chunk, trajectory.q, returns(trajectory)),
            Played(first, present, first_q, returns(looked_up)),
        )

    by_episode = PartitionSpec(BATCH_AXES)
    return jax.jit(
        play,
        in_shardings=(shardings, NamedSharding(mesh, by_episode)),
        out_shardings=NamedSharding(mesh, by_episode),
        compiler_options=platform.compiler_options(mesh, adapters=isinstance(shardings, Adapted)),
    )


@dataclasses.dataclass(frozen=True)
class EpisodeEvaluator:
    play: Play
    mesh: Mesh
    samples: Sequence[Sample]
    store: TokenStore
    shape: EpisodeShape
    batch_size: int  # number of questions played at once
    indices: Sequence[int]  # indices of the samples that are played, in order
    # Whether returns are those of the supporting facts; then a question for which nobody knows them
    # has none
    by_facts: bool = True

    @property
    def shown(self) -> LazySamples:
        return LazySamples(len(self.indices), lambda i: self.samples[self.indices[i]])

    def rows(
        self, params: Params | Adapted, places: slice = slice(None)
    ) -> tuple[list[Row], list[Row]]:
        indices, size = self.indices[places], self.batch_size
        multi, single = list[Row](), list[Row]()
        shard = (jax.process_index(), jax.process_count()) if self.mesh.is_multi_process else (0, 1)
        parts = evaluation_batches(self.store, self.shape, size, indices, shard)
        played = (self.play(params, shard_batch(self.mesh, batch)) for batch in parts)
        # The device plays the next batch while the host makes the rows of this one.
        pairs = itertools.pairwise(itertools.chain(played, [None]))
        for number, (episodes, _) in enumerate(pairs):
            assert episodes is not None
            shown = [self.samples[i] for i in indices[number * size : (number + 1) * size]]
            for rows, took in zip((multi, single), hosts.of_all(episodes), strict=True):
                for i, sample in enumerate(shown):
                    taken, q = (np.asarray(x)[took.valid[i]] for x in (took.taken[i], took.q[i]))
                    ret = float(took.ret[i]) if sample.support or not self.by_facts else None
                    rows.append(make_row(sample, taken.tolist(), q.tolist(), ret))
        return multi, single


def play_columns(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Scores of the play by question, and of the same play cut where all facts are found.

    The cut changes neither EM nor recall, so these have no `_until_found` score. Scores that need
    the supporting facts are of the questions that have them; see `metrics.facts.score_columns`.
    """
    columns = score_columns(rows)
    if cut := [until_found(row) for row in rows if row.sf_idx]:
        cut_columns = fact_columns(cut)
        for name in ("fact_f1", "fact_precision", "steps"):
            columns[f"{name}_until_found"] = cut_columns[name]
        columns["return_until_found"] = [row.ret for row in cut if row.ret is not None]
    return columns


def make_row(sample: Sample, taken: list[int], q: list[float], ret: float | None) -> Row:
    """The retrieval log's row of one played episode; `ret` None: it has no return."""
    answer, *aliases = sample.answers or ("",)
    gold, read = ([sample.chunks[i] for i in indices] for indices in (sample.support, taken))
    length, support = sum(map(len, sample.chunks)), [*sample.support]
    row = Row(sample.id, sample.question, answer, support, taken, q, gold, read, ret, length)
    return scored(dataclasses.replace(row, aliases=aliases, source=sample.source))


# ---------------------------------------------------------------- during training


def q_spread(rows: Sequence[Row]) -> float | None:
    """The largest difference between two Q-values of a question's first step, over the largest |Q|.

    0.0 if all Q are 0; None if no question has two Q-values.
    """
    several = [row.q_values for row in rows if len(row.q_values) > 1]
    if not several:
        return None
    largest = max(abs(q) for values in several for q in values)
    spread = max(max(values) - min(values) for values in several)
    return spread / largest if largest else 0.0


@dataclasses.dataclass(frozen=True)
class TrainingScores:
    episodes: EpisodeEvaluator  # plays the questions
    best_by: str  # name of the score that chooses the best checkpoint
    gamma: float  # γ, the discount of returns from a language model's rewards
    stops_before: int  # T, actions per episode, if there is a STOP action; else 0

    def evaluate(
        self, params: Any, step: int, rewards: Rewards | None, stop: interrupt.StopSignal
    ) -> Evaluation:
        multi, single = self.episodes.rows(params)
        columns = play_columns(multi)
        scores, single_scores = bootstrap.means(columns), bootstrap.means(play_columns(single))
        if rewards is not None:
            columns["return"], broken = self._returns(multi, rewards, stop)
            scores |= {
                "return": float(np.mean(columns["return"])),
                "broken_share": broken / len(multi),
                "unscored_share": 1 - len(columns["return"]) / len(multi),
            }
            single_scores.pop("return", None)  # a language model is not asked about these
        lost = {"broken_share": "without an answer", "unscored_share": "without reward"}
        shown_scores = f"{_shown(scores)}return {scores['return']:.3f}{lost_text(scores, lost)}"
        line = f"step {step}: {shown_scores} on {len(multi)} questions"
        more: Any = {"episodes": sampler(RETRIEVALS, multi), "q_spread": q_spread(single)}
        scored = Evaluation.of(line, scores, self.best_by, columns, **more)
        for name, value in single_scores.items():
            scored.metrics[f"eval_single_step/{name}"] = value
            scored.baselines[f"single_step/{name}"] = value
        return scored

    def _returns(
        self, rows: Sequence[Row], asks: Rewards, stop: interrupt.StopSignal
    ) -> tuple[list[float], int]:
        """The returns of the questions that the model scored, in order.

        They are 0 where the model gave no answer; the second value counts these.
        """
        shown, size = self.episodes.shown, self.episodes.batch_size

        def actions(row: Row, sample: Sample) -> list[int]:
            """The chunks taken, and STOP if that ended the episode."""
            stopped = len(row.pred_idx) < self.stops_before
            return [*row.pred_idx, len(sample.chunks)] if stopped else row.pred_idx

        def ask(places: Sequence[int]) -> list[tuple[float, bool] | None]:
            """Returns, and whether there is no answer; None where the infrastructure failed."""
            samples = [shown[place] for place in places]
            taken = [actions(rows[place], shown[place]) for place in places]
            parts = range(0, len(samples), size)
            asked = [asks.begin(samples[at : at + size], taken[at : at + size]) for at in parts]
            returns = list[tuple[float, bool] | None]()
            for episode in (e for part in asked for e in asks.wait(part, stop)):
                if not isinstance(episode, Failure):
                    terms = (self.gamma**t * reward for t, reward in enumerate(episode.rewards))
                    returns.append((sum(terms), False))
                else:
                    returns.append(None if episode.cause in answers.INFRASTRUCTURE else (0.0, True))
            return returns

        scored = [r for r in of_all_hosts(len(rows), ask) if r is not None]
        return [ret for ret, _ in scored], sum(broken for _, broken in scored)


_NAMED = {  # on the screen
    **{"fact_em": "fact EM", "fact_f1": "F1", "fact_precision": "precision"},
    "fact_recall": "recall",
    "fact_f1_until_found": "by the answer key, until found: F1",
    "fact_precision_until_found": "precision",
    "answer_found": "answer found",
}


def _shown(scores: Mapping[str, float]) -> str:
    return "".join(f"{name} {scores[of]:.3f}, " for of, name in _NAMED.items() if of in scores)
