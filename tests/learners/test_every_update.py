"""What every update must do: any mesh alike, no trace of failures, adapters alone, only numbers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from qrag_jax.data.episodes import NO_FACT
from qrag_jax.learners.config import SFTConfig
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.models.compute.lora import Adapted, folded
from qrag_jax.rollouts.experience import Played, ScoredEpisodes
from qrag_jax.runtime import mesh as meshes
from qrag_jax.runtime.checkpoints import Checkpoints
from tests.learners import updates
from tests.learners.updates import Learning, assert_close, hops, one_row_each, pairs, questions
from tests.learners.whole_loss import LORA
from tests.rollouts.play_setup import CONFIG
from tests.rollouts.token_setup import CUT_OFF, VOCAB, made_batch

# Smaller blocks, or larger ones: never those of the whole batch on one device.
OTHER = {"shape": updates.BLOCKS._replace(tokens=40, groups=2, sampled=30), "scanned": True}


def scored_episodes() -> tuple[ScoredEpisodes]:
    """Episodes of the first chunks there are, some without rewards, one cut at its first step."""
    batch, draw = questions(), np.random.default_rng(4)
    count = batch.chunk_mask.sum(axis=1)
    actions = np.tile(np.arange(CONFIG.max_steps, dtype=np.int32), (len(count), 1))
    valid = actions < np.minimum(count, CONFIG.max_steps)[:, None]
    score = draw.random(valid.shape).astype(np.float32)
    scored = valid & (np.arange(len(count)) % 3 != 1)[:, None]
    scored[0, 1:] = False
    return (ScoredEpisodes(batch, Played(actions, valid, np.ones_like(score)), score, scored),)


# ------------------------------------------------------------------------ failures


def failed_tokens(batch: Any) -> None:
    """Of an episode without a reward all but its prompt is another one, and not finite."""
    rest = batch.tokens[4, batch.shared[4] :]
    rest[:] = rest % (VOCAB - 1) + 1
    batch.sampler_log_probs[4] = batch.rewards[4] = np.nan


def failed_pairs(batch: Any, reference: np.ndarray) -> None:
    both = slice(2 * CUT_OFF, 2 * CUT_OFF + 2)
    batch.tokens[both] = batch.tokens[both] % (VOCAB - 1) + 1
    reference[both] = np.nan


def failed_hops(batch: Any) -> None:
    lost = ~batch.scored
    batch.tokens[lost] = batch.tokens[lost] % 7 + 5
    for array in (batch.log_probs, batch.episode_rewards, batch.hop_rewards):
        array[lost] = np.nan


def failed_questions(batch: Any) -> None:
    """Rows that fill up the batch have texts."""
    empty = ~batch.chunk_mask.any(axis=1)
    batch.question[empty], batch.chunks[empty] = 11, 12


def failed_scores(episodes: ScoredEpisodes) -> None:
    """What is not scored has no score, and where nothing is scored another one's question."""
    question, lost = episodes.batch.question, ~episodes.scored.any(axis=1)
    question[lost] = question[::-1][lost]
    episodes.score[~episodes.scored] = np.nan


# ------------------------------------------------------------------------ all updates


class Kind(NamedTuple):
    """An update, what a step of it takes, and what changes that in place."""

    start: Callable[..., Learning]  # `(where, params, **how)`
    given: Callable[[], tuple[Any, ...]]
    failed: Callable[..., None]  # changes what failed
    nothing: Callable[..., None]  # leaves nothing that can be learned from
    poisoned: Callable[..., None] | None = None  # what is not finite; None: a weight is
    split: dict[str, Any] | None = None  # how it computes in parts, if it is asked
    adapted: bool = False  # whether it is asked to learn adapters


def changed(change: Callable[..., None], given: tuple[Any, ...]) -> tuple[Any, ...]:
    again = copy.deepcopy(given)
    change(*again)
    return again


def set_to(value: float, name: str | int, place: Any = ...) -> Callable[..., None]:
    """Sets an array of the batch, or what is given with it, to the value: here, or all of it."""

    def change(*given: Any) -> None:
        array = given[name] if isinstance(name, int) else getattr(given[0], name)
        array[place] = value

    return change


def bad_sampler(batch: Any) -> None:
    batch.sampler_log_probs[batch.loss_mask] = np.nan


PARTS = {"accumulation": 2}
OF_TOWERS: dict[str, Any] = {"given": lambda: (questions(),), "failed": failed_questions}
OF_HOPS: dict[str, Any] = {
    "given": lambda: (hops(),),
    "failed": failed_hops,
    "poisoned": set_to(np.inf, "episode_rewards", 0),
    "nothing": set_to(False, "scored"),
}
OF_TOKENS: dict[str, Any] = {"given": lambda: (made_batch(),), "failed": failed_tokens}
OF_PPO: dict[str, Any] = {
    "given": lambda: (one_row_each(),),
    "failed": failed_tokens,
    "poisoned": set_to(np.inf, "rewards", 0),
    "nothing": set_to(False, "loss_mask"),
}
OF_PAIRS: dict[str, Any] = {
    "given": pairs,
    "failed": failed_pairs,
    "poisoned": set_to(np.nan, 1),
    "nothing": set_to(False, "loss_mask"),
}
# Rounding grows with each step, so these are small; without a reference, which PPO has.
IN_MINIBATCHES = dataclasses.replace(updates.PPO, epochs=2, minibatches=2, kl=0.0)
KINDS = {
    "PQN": Kind(
        start=partial(updates.towers, updates.FUSED),
        **OF_TOWERS,
        nothing=set_to(False, "chunk_mask"),
        split=PARTS,
    ),
    "PQN, rewards later": Kind(
        start=partial(updates.towers, updates.LATER),
        given=scored_episodes,
        failed=failed_scores,
        poisoned=set_to(np.inf, "score", 0),
        nothing=set_to(False, "scored"),
    ),
    "imitation": Kind(
        start=partial(updates.towers, updates.IMITATED),
        **OF_TOWERS,
        nothing=set_to(NO_FACT, "rank"),
    ),
    "HARR's GRPO": Kind(
        start=partial(updates.searches, updates.HARR_GRPO), **OF_HOPS, split={"longest": 24}
    ),
    "HARR's PPO": Kind(start=partial(updates.searches, updates.HARR_PPO), **OF_HOPS, adapted=True),
    "GRPO": Kind(
        start=partial(updates.tokens, updates.GRPO),
        **OF_TOKENS,
        poisoned=bad_sampler,
        nothing=set_to(False, "scored"),
        adapted=True,
    ),
    "SFT": Kind(
        start=partial(updates.tokens, SFTConfig(), tied=False),
        **OF_TOKENS,
        nothing=set_to(False, "loss_mask"),
    ),
    "PPO": Kind(start=partial(updates.tokens, updates.PPO), **OF_PPO, adapted=True),
    "PPO in minibatches": Kind(
        start=partial(updates.tokens, IN_MINIBATCHES, rate=0.05), **OF_PPO, split=OTHER
    ),
    "IPO": Kind(start=partial(updates.tokens, updates.IPO, tied=False), **OF_PAIRS, split=OTHER),
}


def those(chosen: Callable[[Kind], Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if chosen(kind)])


@pytest.fixture(scope="module", autouse=True)
def small_arrays_are_in_parts() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "LEAST_SPLIT", 1)
        yield


def check_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name != "padding_share":  # blocks are filled differently
            assert found[name] == pytest.approx(value, rel=2e-4, abs=2e-5, nan_ok=True), name


@those(lambda kind: kind.split is not None)
def test_devices_and_parts_change_no_number(name: str) -> None:
    kind = KINDS[name]
    one, other = kind.start(), kind.start(updates.SPLIT, **kind.split)
    given = kind.given()
    leaves = jax.tree.leaves(other.state.params)
    assert sum(leaf.nbytes > leaf.addressable_shards[0].data.nbytes for leaf in leaves) > 4
    check_metrics(other.step(*given), one.step(*given))
    assert_close(other.learned, one.learned, 3e-5)
    if kind.poisoned:  # by what a single device has
        before = other.learned
        assert other.step(*changed(kind.poisoned, given))["skipped"] == 1.0
        jax.tree.map(np.testing.assert_array_equal, other.learned, before)


@pytest.mark.parametrize("name", KINDS)
def test_what_failed_leaves_no_trace(name: str) -> None:
    kind, learned = KINDS[name], []
    given = kind.given()
    for each in (given, changed(kind.failed, given)):
        learning = kind.start()
        metrics = learning.step(*each)
        learned.append((learning.learned, metrics))
        assert metrics["skipped"] == 0.0
    assert_close(learned[1][0], learned[0][0], 1e-6)
    check_metrics(learned[1][1], learned[0][1])


@pytest.mark.parametrize("name", KINDS)
def test_nothing_and_what_is_not_finite_teach_nothing_and_the_next_step_goes_on(name: str) -> None:
    kind = KINDS[name]
    given, learning = kind.given(), kind.start()
    before = learning.learned
    metrics = learning.step(*changed(kind.nothing, given))
    assert_close(learning.learned, before, 1e-7)
    assert (metrics["skipped"], metrics["grad_norm"]) == (0.0, 0.0)
    assert int(learning.state.env_steps) == 0 or name.startswith("HARR")
    good = learning.state
    if kind.poisoned:
        before, bad = learning.learned, changed(kind.poisoned, given)
    else:
        params, bad = dict(good.params), given
        words = params["word_embeddings"]
        params["word_embeddings"] = words.at[..., 5:12, 3].set(np.inf)
        learning.state = good._replace(params=params)
        before = learning.learned
    assert learning.step(*bad)["skipped"] == 1.0
    jax.tree.map(np.testing.assert_array_equal, learning.learned, before)
    assert int(learning.state.step) == 2
    if not kind.poisoned:
        healed = learning.state.params | {"word_embeddings": words}
        learning.state = learning.state._replace(params=healed)
    before = learning.learned
    metrics = learning.step(*given)
    assert metrics["skipped"] == 0.0
    assert np.isfinite([*metrics.values()]).all()
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), learning.learned, before)
    assert max(jax.tree.leaves(moved["params"])) > 1e-4


@those(lambda kind: kind.adapted)
def test_adapters_move_by_the_gradient_of_merged_weights_and_nothing_else_moves(name: str) -> None:
    """Of W + s·A·B: the gradient of A is s·G·Bᵀ, and of B s·Aᵀ·G, with G that of the whole map.

    Adapters of two towers: tests/learners/test_pqn.py.
    """
    kind = KINDS[name]
    parts = OTHER if name == "GRPO" else kind.split or {}
    learning = kind.start(updates.SPLIT, adapted=True, **parts)
    policy, base = learning.program.learner, jax.device_get(learning.program.base[0])
    scale = 1.0 if isinstance(policy, TokenPolicy) else LORA.scale
    before, given = learning.learned, kind.given()
    start = jax.tree.map(np.asarray, folded(Adapted(base, before["params"]), scale))
    whole = kind.start(updates.ALONE, start)
    at_first = whole.learned
    found, expected = learning.step(*given), whole.step(*given)
    for metrics in (found, expected):
        for other in [key for key in metrics if "grad_norm" in key]:
            del metrics[other]
    check_metrics(found, expected)
    moved = jax.tree.map(np.subtract, learning.learned, before)
    of_whole = jax.tree.map(np.subtract, whole.learned, at_first)
    trees = [(moved["params"], of_whole["params"])]
    if moved["critic"] is not None:
        trees.append((moved["critic"].tower, of_whole["critic"].tower))
        assert_close(moved["critic"][1:], of_whole["critic"][1:])
    for own, theirs in trees:
        of_kernels = {n: theirs["layers"][n]["kernel"] for n in own["layers"]}
        largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(of_kernels))
        assert largest > 1e-4
        for layer, leaves in before["params"]["layers"].items():
            a, b, g = leaves["lora_a"], leaves["lora_b"], of_kernels[layer]
            expected = {"lora_a": scale * g @ b.swapaxes(-1, -2)}
            expected["lora_b"] = scale * a.swapaxes(-1, -2) @ g
            assert own["layers"][layer].keys() == expected.keys()
            for leaf, value in expected.items():
                atol = 5e-5 * max(1.0, largest)
                np.testing.assert_allclose(own["layers"][layer][leaf], value, atol=atol)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(learning.program.base[0]), base)


def test_a_run_may_change_its_mesh(tmp_path: Path) -> None:
    kind = KINDS["PQN"]
    one, other, given = kind.start(), kind.start(updates.SPLIT, **PARTS), kind.given()
    one.step(*given)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_last(1, one.state, {})
    checkpoints.wait()
    restored = Checkpoints(tmp_path).restore_last(other.state)[0]
    for ours, where in zip(
        jax.tree.leaves(restored), jax.tree.leaves(other.program.learner.shardings)
    ):
        assert ours.sharding == where
    other.state = restored
    check_metrics(other.step(*given), one.step(*given))
    assert_close(other.learned, one.learned)
