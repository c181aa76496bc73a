"""HARR put together: data, index, agent, rewards and updates of a small run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.retrieval.protocol import NONE
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.systems import harr, harr_scoring
from qrag_jax.systems.harr import Harr
from qrag_jax.systems.harr_config import default_config, with_scratch
from qrag_jax.systems.harr_player import HarrPlayer

pytestmark = pytest.mark.long

MEMBERS = 4


def small(algorithm: str = "grpo", **fields: Any) -> ConfigDict:
    config = default_config(algorithm, "synthetic")
    with_scratch(config, layers=1, hidden=16, heads=2, vocab=300, positions=160)
    config.data.path = "synthetic"
    config.data.max_chunk_tokens = 64
    config.data.synthetic.update(hops=(2,), comparison=0.0, chunks=8, train=24, dev=8)
    config.state.update(max_tokens=96, instruction=False)
    config.encoder.update(pooling="mean", length_buckets=1, block_sizes=1, dtype="float32")
    config.policy.update(pool=10, passages=2)
    config.agent.max_hops = 3
    config[algorithm].members = MEMBERS
    config.reward.mixture = "f1=1,recall=1,novelty=0.2"
    config.optimizer.learning_rate = 1e-3
    config.train.update(steps=4, batch_size=2, eval_every=2, checkpoint_every=2)
    config.eval.samples = 6
    for name, value in fields.items():
        section, _, field = name.partition("__")
        config[section][field] = value
    return config


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harr]:
    config = small()
    harr.check(config)
    with (
        Run.open(tmp_path_factory.mktemp("harr") / "run", 0.0) as run,
        harr.open_system(config, run) as made,
    ):
        yield made


def batch_of(system: Harr, run: Any, step: int = 0) -> Any:
    experience = system.experience(run, StopSignal())
    return experience.next(system.first_state(), step, StopSignal())


class NewRun:
    """The progress of a run that has done nothing yet."""

    def __init__(self, batches: int | None = None) -> None:
        self.progress = self
        self.batches = batches
        self.pending: list[Any] = []


def test_groups_are_played_by_the_policy_and_rewarded(system: Harr) -> None:
    batch = jax.tree.map(np.asarray, batch_of(system, NewRun()))
    episodes = 2 * MEMBERS
    assert batch.tokens.shape == (episodes, 3, 96)
    assert batch.pool.shape == (episodes, 3, 10, 16)
    assert batch.scored.all()
    searched = batch.lengths > 0
    assert searched[:, 0].all()
    assert batch.present[searched].all()
    # What is stored of the acting policy is what its own weights say.
    params = jax.tree.map(np.asarray, system.first_state().params)
    encoder = system.inputs.encoder.encoder
    for row, hop in zip(*np.nonzero(searched), strict=True):
        tokens, length = batch.tokens[row, hop][None], batch.lengths[row, hop][None]
        vector = np.asarray(encoder.embed(params, tokens, length))[0]
        logits = (batch.pool[row, hop] @ vector) / system.config.policy.tau
        left, log_prob = list(range(10)), 0.0
        for action in batch.actions[row, hop]:
            log_prob += logits[action] - np.logaddexp.reduce(logits[left])
            left.remove(int(action))
        assert batch.log_probs[row, hop] == pytest.approx(log_prob, abs=1e-3)
    rewards = batch.episode_rewards.reshape(2, MEMBERS, 2)
    assert ((rewards >= 0) & (rewards <= 1)).all()
    assert batch.hop_rewards[:, 0, 0] == pytest.approx(1.0)  # all passages are new at first


def test_a_resumed_run_plays_the_same_batch(system: Harr) -> None:
    experience = system.experience(NewRun(), StopSignal())
    state, stop = system.first_state(), StopSignal()
    experience.next(state, 0, stop)
    second = experience.next(state, 1, stop)
    resumed = system.experience(NewRun(batches=1), StopSignal()).next(state, 1, stop)
    for one, other in zip(second, resumed, strict=True):
        np.testing.assert_array_equal(one, other)
    assert experience.position() == (2, [])


def test_updates_and_evaluations(system: Harr) -> None:
    state, stop = system.first_state(), StopSignal()
    before = system.evaluate(state, 0, stop)
    assert {"eval/em", "eval/f1", "eval/recall", "eval/hops"} <= before.metrics.keys()
    assert before.score == before.scores["f1"]
    experience = system.experience(NewRun(), stop)
    first = jax.tree.map(np.asarray, state.params)
    for step in range(2):
        state, metrics = system.update(state, experience.next(state, step, stop))
        assert float(metrics["largest_ratio"]) == 1.0
        assert float(metrics["replay_gap"]) < 1e-3
        assert float(metrics["skipped"]) == 0.0
    moved = [
        np.abs(np.asarray(after) - before).max()
        for after, before in zip(jax.tree.leaves(state.params), jax.tree.leaves(first), strict=True)
    ]
    assert max(moved) > 1e-4
    assert experience.counts()["searches_per_batch"] >= 4


def test_gold_passages_are_in_the_corpus_of_all_questions(system: Harr) -> None:
    assert all(len(each.gold.relevant) == 2 for each in system.inputs.train)
    corpus = system.inputs.index.corpus
    assert len(corpus) == len({passage.text for passage in corpus.passages(range(len(corpus)))})


@pytest.mark.parametrize("fields", [{"ppo__kl": 0.01, "state__stateful": False}])
def test_ppo_without_a_history(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = small("ppo", **fields)
    with Run.open(tmp_path / "run", 0.0) as run, harr.open_system(config, run) as system:
        batch = batch_of(system, NewRun())
        text = system.inputs.encoder.tokenizer.backend.decode(
            np.asarray(batch.tokens)[0, 0, : int(batch.lengths[0, 0])].tolist()
        )
        assert "istory" not in text
        state, metrics = system.update(system.first_state(), batch)
    assert float(metrics["value_loss"]) > 0
    assert float(metrics["kl"]) == pytest.approx(0.0, abs=1e-3)  # the policy is the reference yet
    assert np.abs(np.asarray(state.critic.weights)).max() > 0


def test_programs_are_listed_with_their_shapes(system: Harr) -> None:
    (program,) = system.programs()
    state, metrics = jax.eval_shape(program.function, *program.arguments)
    assert {"loss", "return", "skipped", "flat_groups"} <= metrics.keys()
    assert state.step.shape == ()


def test_a_pool_of_a_small_corpus_is_not_full(tmp_path: Path) -> None:
    config = small(policy__pool=300, data__limit=2)
    config.data.synthetic.dev = 2
    with Run.open(tmp_path / "run", 0.0) as run, harr.open_system(config, run) as system:
        batch = batch_of(system, NewRun())
        count = len(system.inputs.index.corpus)
        assert count < 300
        assert np.asarray(batch.present)[:, 0].sum(axis=-1).tolist() == [count] * 8
        assert NONE == -1
        _, metrics = system.update(system.first_state(), batch)
    assert np.isfinite(float(metrics["loss"]))


def test_passages_are_embedded_with_the_titles_joined_as_in_the_data(tmp_path: Path) -> None:
    texts = [f"the river {word} is long" for word in ("Ouse", "Wear", "Tees", "Swale")]
    joined = [{"id": str(n), "text": f"Rivers. {text}"} for n, text in enumerate(texts)]
    titled = [{"id": str(n), "title": "Rivers", "text": text} for n, text in enumerate(texts)]
    vectors = {}
    for name, records, separator in (
        ("joined", joined, ""),
        ("titled", titled, ". "),
        ("usual", titled, ""),
    ):
        corpus = tmp_path / f"{name}.jsonl"
        corpus.write_text("\n".join(map(json.dumps, records)))
        config = small(
            data__title_separator=separator,
            corpus__path=str(corpus),
            policy__pool=4,
            reward__mixture="f1=1",
        )
        with Run.open(tmp_path / name, 0.0) as run, harr.open_system(config, run) as system:
            vectors[name] = system.inputs.index.vectors(range(len(texts)))
    np.testing.assert_array_equal(vectors["titled"], vectors["joined"])
    assert np.abs(vectors["usual"] - vectors["joined"]).max() > 1e-3


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"agent__name": "act"}, "config.agent.name is 'act'; use one of scripted, react"),
        ({"reward__mixture": "f2=1"}, "config.reward.mixture has 'f2'; use one of f1"),
        ({"policy__passages": 40}, "config.policy.passages is 40, but they are drawn from"),
        ({"train__accumulation": 2}, "config.train.accumulation is 2;"),
        ({"grpo__minibatches": 3}, "8 episodes, which do not split into"),
        ({"eval__best_by": "return"}, "config.eval.best_by is 'return'; use one of f1"),
    ],
)
def test_refusals(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        harr.check(small(**fields))
    assert told in str(caught.value)


def test_unknown_fields() -> None:
    config = small()
    with config.unlocked():
        config.critic = ConfigDict()
    with pytest.raises(InputError, match=r"config\.critic"):
        harr.check(config)


def test_questions_of_all_parts_of_an_evaluation_have_draws_of_their_own(
    system: Harr, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, play = list[bytes](), HarrPlayer.play

    def seen(player: HarrPlayer, params: Any, starts: Any, stop: Any, *, is_greedy: bool = False):
        drawn.extend(start.key.tobytes() for start in starts if not is_greedy)
        return play(player, params, starts, stop, is_greedy=is_greedy)

    monkeypatch.setattr(HarrPlayer, "play", seen)
    monkeypatch.setattr(harr_scoring, "AT_ONCE", 2)
    params = system.player.here(system.first_state().params)
    rows = harr_scoring.played_rows(system, params, tmp_path / "log.jsonl", 4, StopSignal())
    assert len(rows) == len(system.inputs.dev) > 2
    assert len(drawn) == len(set(drawn)) == 4 * len(rows)


def test_a_batch_is_played_while_eight_devices_learn(tmp_path: Path) -> None:
    """Programs of both threads send between the devices; a wrong order would never end."""
    config = small(agent__staleness=1, train__steps=6, train__batch_size=4)
    harr.check(config)
    with Run.open(tmp_path / "run", 0.0) as run, harr.open_system(config, run) as system:
        assert system.mesh.size == 8
        state, stop = system.first_state(), StopSignal()
        experience = system.experience(NewRun(), stop)
        for step in range(6):
            state, metrics = system.update(state, experience.next(state, step, stop))
            assert np.isfinite(float(metrics["loss"]))
    assert experience.position() == (6, [])
