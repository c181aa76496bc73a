"""What a config means: its data, its encoder, and which values and changes are refused."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
import pytest

from configs import hotpotqa, hotpotqa_musique, own
from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.generators import synthetic
from qrag_jax.data.generators.synthetic import SyntheticConfig
from qrag_jax.data.lazy_samples import LazySamples
from qrag_jax.data.sample import fingerprint
from qrag_jax.data.sources.registry import SOURCES
from qrag_jax.environments.positions import check_chunks
from qrag_jax.errors import InputError
from qrag_jax.evaluators.lengths import documents_of_length
from qrag_jax.feedback.ground_truth import fact_feedback
from qrag_jax.rollouts.limits import check_fit
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.saved_config import check_same_config, save_config
from qrag_jax.systems.q_rag import open_system
from qrag_jax.systems.q_rag_config import (
    FREE_FIELDS,
    QRagConfig,
    load_config,
)
from qrag_jax.systems.q_rag_inputs import load_inputs
from tests.systems.parts import only_source, prepared, samples_of, tokenised


@pytest.fixture
def config(tmp_path: Path) -> ml_collections.ConfigDict:
    result = hotpotqa.get_config("tiny")
    result.data.cache = str(tmp_path / "cache")
    result.data.synthetic.train = 20
    result.data.synthetic.dev = 6
    return result


def with_model(config: ml_collections.ConfigDict) -> None:
    """The rewards are a language model's."""
    config.reward.name = "answer_em"
    config.llm.update(url="http://127.0.0.1:9/v1", model="any")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("env.max_steps", -1, "config.env.max_steps is -1; it must be at least 0."),
        ("data.max_chunk_tokens", 2, "config.data.max_chunk_tokens is 2; it must be at least 3."),
        ("data.limit", -1, "config.data.limit is -1; it must be at least 0."),
        ("train.accumulation", 0, "config.train.accumulation is 0"),
        ("train.log_every", 0, "config.train.log_every is 0"),
        ("train.eval_every", 0, "config.train.eval_every is 0"),
        ("train.checkpoint_every", 0, "config.train.checkpoint_every is 0"),
        ("eval.batch_size", 0, "config.eval.batch_size is 0"),
        ("eval.samples", -1, "config.eval.samples is -1; it must be at least 0."),
        ("encoder.length_buckets", 0, "config.encoder.length_buckets is 0"),
        ("policy.alpha", 0.0, "config.policy.alpha is 0.0; it must be above 0."),
        ("policy.alpha", float("nan"), "config.policy.alpha is nan; give a number."),
        ("optimizer.learning_rate", -1e-3, "config.optimizer.learning_rate is -0.001"),
        ("data.mixture", "even", "config.data.mixture is 'even'; use one of weights, size."),
        ("optimizer.schedule", "step", "use one of constant, linear, cosine, quarter_cosine."),
        (
            "reward.name",
            "f1",
            "'f1'; use one of ground_truth, gt, answer_in_chunk, answer_em, answer_f1,",
        ),
        ("reward.staleness", -1, "is -1; it must be at least 0."),
        ("reward.max_failure_share", 1.0, "is 1.0; use a share of 0 or more and below 1."),
        ("runtime.sharding", ((".*", "fdsp"),), "config.runtime.sharding holds the unknown"),
    ],
)
def test_senseless_values(
    config: ml_collections.ConfigDict, field: str, value: Any, says: str
) -> None:
    if field.startswith("reward.") and field != "reward.name":
        with_model(config)
    QRagConfig.of(config)
    config.update_from_flattened_dict({field: value})
    with pytest.raises(InputError) as caught:
        QRagConfig.of(config)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def fit(config: ml_collections.ConfigDict, workdir: Path, max_positions: int) -> None:
    samples = samples_of(config, "train").all
    encoder = prepared(config, workdir, samples)
    store = tokenised(config, encoder.tokenizer, samples)
    shape = EpisodeShape.holding([store])
    text_encoder = dataclasses.replace(encoder.encoder, max_positions=max_positions)
    check_fit(QRagConfig.of(config).rollout, text_encoder, shape, {"hotpotqa": store})


def test_settings_that_no_episode_fits(config: ml_collections.ConfigDict, tmp_path: Path) -> None:
    fit(config, tmp_path / "run", 256)
    with pytest.raises(InputError, match=r"a state can reach \d+ tokens .* has 40 positions"):
        fit(config, tmp_path / "run", 40)
    config.env.max_steps = 1  # then the state is the question alone, and chunks are the longest
    with pytest.raises(InputError, match=r"a chunk row has up to 48 tokens, .* 40 positions"):
        fit(config, tmp_path / "run", 40)
    config.env.max_steps = 9
    with pytest.raises(InputError, match=r"max_steps is 9, but no hotpotqa .* at most 8"):
        fit(config, tmp_path / "run", 4096)


def test_unknown_source_and_path(config: ml_collections.ConfigDict) -> None:
    config.data.path = "/no/such/folder"
    with pytest.raises(InputError, match="/no/such/folder does not exist"):
        samples_of(config, "train")
    only_source(config, "squad")
    for path in ("synthetic", "/no/such/folder"):
        config.data.path = path
        with pytest.raises(InputError, match=r"'squad'.* hotpotqa, musique, two_wiki, .*synthetic"):
            samples_of(config, "train")


def test_evaluation_path_goes_before_the_data_path(
    config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    written = next((tmp_path / "cache").glob("synthetic/*"), None)
    assert written is None
    made = samples_of(config, "train").all
    (folder,) = (tmp_path / "cache").glob("synthetic/*")
    config.data.path = str(folder / "train.jsonl")
    kept = samples_of(config, "train").all
    held = samples_of(config, "dev").all
    assert 0 < len(held) < len(kept)
    assert {s.id for s in kept} | {s.id for s in held} == {s.id for s in made}
    assert not {s.id for s in kept} & {s.id for s in held}
    config.eval.path = str(folder / "dev.jsonl")
    assert samples_of(config, "train").all == made
    assert len(samples_of(config, "dev", hold_out=False).all) == 6


def test_limit_is_for_training_alone(config: ml_collections.ConfigDict) -> None:
    config.data.limit = 4
    assert len(samples_of(config, "train").all) == 4
    assert len(samples_of(config, "dev").all) == 6


@pytest.mark.parametrize(("source", "words"), [("babilong", "Where is"), ("niah", "What are all")])
def test_documents_made_on_access_become_tokens(
    config: ml_collections.ConfigDict, tmp_path: Path, source: str, words: str
) -> None:
    only_source(config, source)
    config.data.sources[source].update(chunks=14, train=30, dev=6)
    samples = samples_of(config, "train").all
    assert isinstance(samples, LazySamples)
    assert all(sample.question.startswith(words) for sample in samples)
    assert len(samples_of(config, "dev").all) == 6
    encoder = prepared(config, tmp_path / "run", samples)
    store = tokenised(config, encoder.tokenizer, samples)
    assert store.chunk_counts.tolist() == [14] * 30
    assert tuple(store.support_of(7)) == samples[7].support
    text = encoder.tokenizer.encode([samples[7].chunks[3]])[0]
    assert store.text(store.sample_starts[7] + 1 + 3).tolist() == text
    # Made again, the samples are the same: the store is found and the fingerprint agrees.
    again = samples_of(config, "train").all
    found = tokenised(config, encoder.tokenizer, again)
    assert found.folder == store.folder
    assert fingerprint(again) == fingerprint(samples)
    config.data.sources[source].seed = 1
    other = samples_of(config, "train").all
    assert fingerprint(other) != fingerprint(samples)


def test_the_config_of_a_model_is_not_that_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 8}')
    with pytest.raises(InputError, match=r"config\.json has no section data, so it is not"):
        load_config(tmp_path / "config.json")


def test_a_run_resumes_only_under_its_own_config(
    config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    save_config(config, tmp_path / "config.json")
    read = load_config(tmp_path / "config.json")
    check_same_config(read, config, FREE_FIELDS)
    for field, value in (
        ("env.positions", "relative"),
        ("env.stop_action", True),
        ("reward.step_cost", 0.1),
        ("data.sources.hotpotqa.weight", 2.0),
        ("data.mixture", "size"),
    ):
        other = config.copy_and_resolve_references()
        other.update_from_flattened_dict({field: value})
        with pytest.raises(InputError, match=f"config.{field}: the run has"):
            check_same_config(read, other, FREE_FIELDS)


def test_shares_by_the_sizes_of_the_sources(tmp_path: Path) -> None:
    """The combined run throws its sources into one heap; other weights are a choice."""
    config = hotpotqa_musique.get_config("tiny")
    sizes = {"hotpotqa": 30, "musique": 12}
    for name, size in sizes.items():
        made = SyntheticConfig((2,), 0.0, 8, 0)
        synthetic.write_corpus(tmp_path / name, SOURCES[name], made, size, 4)
    config.data.path = str(tmp_path)
    config.data.cache = str(tmp_path / "cache")
    taken = QRagConfig.of(config)
    with Run.open(tmp_path / "run", 0.0) as run:
        inputs = load_inputs(taken, run, None, Platform())
    kept = {name: len(store) for name, store in inputs.stores.items()}
    assert all(0.7 * sizes[name] < kept[name] <= sizes[name] for name in sizes)
    shares = taken.data.shares(inputs.stores)
    assert shares == {name: size / sum(kept.values()) for name, size in kept.items()}
    config.data.mixture = "weights"
    assert QRagConfig.of(config).data.shares(inputs.stores) == dict.fromkeys(sizes, 0.5)


def test_steps_are_as_many_as_the_facts_of_own_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the config says so: then the questions that are never solved are counted."""
    for split, facts in {"train": (1, 2, 4), "dev": (5,)}.items():
        records = [
            {"question": f"{split} {n}", "chunks": [*"abcdef"], "support": [*range(n)]}
            for n in facts
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, records)))

    def settled_steps(workdir: str, given: int) -> int:
        config = own.get_config("tiny")
        config.data.update(path=str(tmp_path), cache=str(tmp_path / "cache"))
        config.env.max_steps = given
        with Run.open(tmp_path / workdir, 0.0) as run, open_system(config, run, dry=True) as system:
            saved = load_config(run.config_path).env.max_steps
            assert saved == config.env.max_steps == system.config.rollout.max_steps
        return saved

    for _ in ("a new run", "the same command again"):
        assert settled_steps("open", 0) == 4
        assert re.findall(r"(\d+ of \d+) (\w+) questions", capsys.readouterr().out) == [
            ("1 of 1", "evaluation")
        ]
    assert settled_steps("fixed", 1) == 1
    counts = re.findall(r"(\d+ of \d+) (\w+) questions", capsys.readouterr().out)
    assert counts == [("2 of 3", "training"), ("1 of 1", "evaluation")]
    with pytest.raises(InputError, match=r"config\.env\.max_steps"):  # only training settles it
        QRagConfig.of(own.get_config(), scoring=True)


def test_facts_end_no_episode_that_a_model_rewards(config: ml_collections.ConfigDict) -> None:
    config.env.never_terminate = False
    assert not QRagConfig.of(config).rollout.never_terminate
    with_model(config)
    for name in ("answer_em", "judge"):
        config.reward.name = name
        assert QRagConfig.of(config).rollout.never_terminate
    config.reward.completion_threshold = 1.0
    QRagConfig.of(config)
    for threshold in (0.0, float("nan"), float("inf")):
        config.reward.completion_threshold = threshold
        with pytest.raises(InputError, match="completion_threshold"):
            QRagConfig.of(config)
    config.reward.name = "gt"  # which does not read the threshold
    assert QRagConfig.of(config).is_ground_truth
    with config.unlocked():
        config.reward.threshold = 1.0
    with pytest.raises(InputError, match="threshold is unknown; there are"):
        QRagConfig.of(config)


@pytest.mark.parametrize("chunks", [2000, 2001])
def test_published_positions_hold_2000_chunks(
    config: ml_collections.ConfigDict, chunks: int
) -> None:
    only_source(config, "babilong")
    config.env.positions = "random_published"
    if chunks == 2000:
        check_chunks(config.env.positions, chunks)
        documents = documents_of_length(QRagConfig.of(config).data, chunks, 1)
        assert len(documents[0].chunks) == chunks
        return
    with pytest.raises(InputError, match="at most 2000 chunks, but one has 2001"):
        check_chunks(config.env.positions, chunks)


def test_encoder_is_kept_with_the_run(config: ml_collections.ConfigDict, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    samples = samples_of(config, "train").all
    first = prepared(config, workdir, samples)
    assert [path.name for path in workdir.iterdir()] == ["encoder"]
    save_config(config, workdir / "config.json")
    config.seed = 7  # a run that has begun keeps its encoder, and needs no texts for it
    again = prepared(config, workdir)
    np.testing.assert_array_equal(again.params["word_embeddings"], first.params["word_embeddings"])


def test_refused_start_leaves_no_encoder_to_the_next(
    config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    samples = samples_of(config, "train").all
    config.encoder.scratch.positions = 64
    prepared(config, tmp_path / "run", samples)  # and the run ends here
    config.encoder.scratch.positions = 128
    second = prepared(config, tmp_path / "run", samples)
    assert second.encoder.max_positions == 128


def test_encoder_from_a_folder_is_copied(config: ml_collections.ConfigDict, tmp_path: Path) -> None:
    samples = samples_of(config, "train").all
    origin = prepared(config, tmp_path / "one", samples)
    config.encoder.path = str(tmp_path / "one" / "encoder")
    config.seed = 7
    copy = prepared(config, tmp_path / "two")
    np.testing.assert_array_equal(copy.params["word_embeddings"], origin.params["word_embeddings"])
    assert copy.tokenizer.fingerprint() == origin.tokenizer.fingerprint()
    config.encoder.path = "no/such/folder"
    with pytest.raises(InputError, match="no/such/folder"):
        prepared(config, tmp_path / "three")
    assert not list((tmp_path / "three").iterdir())


def test_config_survives_being_saved(config: ml_collections.ConfigDict, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    save_config(config, path)
    read = load_config(path)
    assert read.to_dict() == config.to_dict()
    assert read.data.synthetic.hops == (2,)
    own = ((".*", "column"),)
    assert QRagConfig.of(read).runtime.rules(own) == ((".*", own),)
    check_same_config(read, config, FREE_FIELDS)


def test_config_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--workdir must be the folder of a run"):
        load_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"seed": 4')
    with pytest.raises(InputError, match=r"config\.json is not JSON"):
        load_config(tmp_path / "config.json")


def test_every_differing_field_is_named(config: ml_collections.ConfigDict) -> None:
    other = config.copy_and_resolve_references()
    other.optimizer.learning_rate = 0.5
    other.seed = 1
    with pytest.raises(InputError) as caught:
        check_same_config(config, other, FREE_FIELDS)
    assert "config.optimizer.learning_rate: the run has 0.001, given is 0.5" in str(caught.value)
    assert "config.seed: the run has 42, given is 1" in str(caught.value)
    with other.unlocked():
        other.data.sources.musique = 1.0
    with pytest.raises(InputError, match=r"data\.sources\.musique: the run has None, given is 1"):
        check_same_config(config, other, FREE_FIELDS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train.log_every", 7),
        ("train.eval_every", 7),
        ("train.checkpoint_every", 7),
        ("eval.samples", 3),
        ("data.cache", "elsewhere"),
        ("runtime.mesh", (1, 1, -1)),
        ("profile", 5),
        ("runtime.sharding", ((".*", "replicate"),)),
    ],
)
def test_fields_that_may_differ(config: ml_collections.ConfigDict, field: str, value: Any) -> None:
    other = config.copy_and_resolve_references()
    other.update_from_flattened_dict({field: value})
    check_same_config(config, other, FREE_FIELDS)


@pytest.mark.parametrize(("field", "value"), [("eval.path", "elsewhere"), ("data.workers", 2)])
def test_fields_that_must_not_differ(
    config: ml_collections.ConfigDict, field: str, value: Any
) -> None:
    # Evaluation questions are left out of training; workers change the iterator's position.
    other = config.copy_and_resolve_references()
    other.update_from_flattened_dict({field: value})
    with pytest.raises(InputError, match=f"config.{field}: the run has"):
        check_same_config(config, other, FREE_FIELDS)


def test_fingerprint_sees_every_text(config: ml_collections.ConfigDict) -> None:
    samples = samples_of(config, "dev").all
    assert fingerprint(samples) == fingerprint(list(samples))
    assert fingerprint(samples[:-1]) != fingerprint(samples)
    assert fingerprint(samples[::-1]) != fingerprint(samples)


def test_reward_is_the_configured_one(config: ml_collections.ConfigDict) -> None:
    def rewards() -> np.ndarray:
        reward = QRagConfig.of(config).reward
        return np.asarray(fact_feedback(reward, stop_action=False)(batch, played))

    batch = types.SimpleNamespace(support=np.array([[True, False, True, False]]))
    played = types.SimpleNamespace(actions=np.array([[0, 2]]), valid=np.ones((1, 2), bool))
    config.reward.penalize_extra_steps = False
    np.testing.assert_allclose(rewards(), [[0.0, 1.0]])
    config.reward.per_fact_reward = 0.25
    np.testing.assert_allclose(rewards(), [[0.25, 1.25]])
