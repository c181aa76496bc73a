"""What a config of Q-RAG means: its data, encoder and rewards, and changes that are refused."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np
import pytest
from ml_collections import ConfigDict

from benchmarks.quality.runner import write_lines
from configs import hotpotqa, hotpotqa_musique, own
from examples.worlds.records import records
from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.loading import LoadedSamples
from qrag_jax.data.sample import SPLITS, Sample
from qrag_jax.errors import InputError
from qrag_jax.models.pretrained import load_encoder
from qrag_jax.rollouts.chunks import check_fit
from qrag_jax.runtime.flops import rows_of_loops
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.saved_config import check_same_config, save_config
from qrag_jax.systems import q_rag
from qrag_jax.systems.q_rag import open_system
from qrag_jax.systems.q_rag_config import (
    FREE_FIELDS,
    QRagConfig,
    fill_from_saved,
    load_config,
    settled,
)
from qrag_jax.systems.q_rag_inputs import Labelled, load_inputs, with_labels
from qrag_jax.systems.q_rag_scoring import DATA
from qrag_jax.systems.scoring import are_others
from tests.models.files.test_sentence_transformers import write_modules
from tests.support import worlds
from tests.support.small_models import torch_bert, write_tokenizer
from tests.systems.parts import prepared, samples_of, tokenised


@pytest.fixture
def config(tmp_path: Path) -> ml_collections.ConfigDict:
    result = hotpotqa.get_config("tiny")
    result.data.cache = str(tmp_path / "cache")
    result.data.limit = 20
    return result


def with_model(config: ml_collections.ConfigDict) -> None:
    """The rewards are a language model's."""
    config.reward.name = "answer_em"
    config.llm.update(url="http://127.0.0.1:9/v1", model="any")


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


def test_the_config_of_a_model_is_not_that_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 8}')
    with pytest.raises(InputError, match=r"config\.json"):
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
        few = partial(records, layout=name, hops=(2,), comparison=0.0, chunks=8, train=size, dev=4)
        for split in SPLITS:
            write_lines(tmp_path / name / f"{split}.jsonl", few(split))
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
    with pytest.raises(InputError, match="threshold"):
        QRagConfig.of(config)


def test_encoder_is_kept_with_the_run(config: ml_collections.ConfigDict, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    samples = samples_of(config, "train").all
    first = prepared(config, workdir, samples)
    assert [path.name for path in workdir.iterdir()] == ["encoder"]
    save_config(config, workdir / "config.json")
    config.seed = 7  # a run that has begun keeps its encoder, and needs no texts for it
    again = prepared(config, workdir)
    np.testing.assert_array_equal(again.params["word_embeddings"], first.params["word_embeddings"])


QRAG = {"pooling": "mean", "normalise": False, "scale": 0.1}


OPEN = {"pooling": "", "normalise": None, "scale": None}


def write_bert(folder: Path, published: bool = True) -> Path:
    torch_bert().save_pretrained(folder)
    write_tokenizer(folder)
    if published:  # as MiniLM was
        write_modules(folder, "Pooling", "Normalize", pooling_mode_mean_tokens=True)
    return folder


def of(encoder: Any) -> dict[str, Any]:
    return {name: getattr(encoder, name) for name in QRAG}


@pytest.fixture
def config_settled(tmp_path: Path) -> ml_collections.ConfigDict:
    config_settled = hotpotqa.get_config("tiny")
    config_settled.encoder.path = str(write_bert(tmp_path / "model"))
    return config_settled


def test_a_new_run_does_as_the_folder_says(
    config_settled: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    first = prepared(config_settled, workdir).encoder
    assert of(first) == {"pooling": "mean", "normalise": True, "scale": 1.0}
    saved = settled(config_settled, first)
    assert {
        name: config_settled.encoder[name] for name in OPEN
    } == OPEN  # what was given is as it was
    save_config(saved, workdir / "config.json")
    read = load_config(workdir / "config.json")
    assert {name: read.encoder[name] for name in QRAG} == of(first)
    assert of(prepared(read, workdir).encoder) == of(first)
    # Resumed by the same command.
    fill_from_saved(config_settled, read)
    check_same_config(read, config_settled, FREE_FIELDS)
    assert of(prepared(config_settled, workdir).encoder) == of(first)
    other = hotpotqa.get_config("tiny")
    other.encoder.update(path=config_settled.encoder.path, normalise=False)
    fill_from_saved(other, read)
    with pytest.raises(InputError, match=r"encoder\.normalise: the run has True, given is False"):
        check_same_config(read, other, FREE_FIELDS)


def test_attention_drops_the_same_share_unless_it_is_told(tmp_path: Path) -> None:
    folder, config_settled = write_bert(tmp_path), hotpotqa.get_config("tiny")

    def shares() -> tuple[float, float]:
        encoder = load_encoder(
            folder, **QRagConfig.of(config_settled).encoder.load_settings
        ).encoder
        return encoder.dropout, encoder.attention_dropout

    assert shares() == (0.0, 0.0)
    config_settled.encoder.dropout = 0.1
    assert shares() == (0.1, 0.1)
    config_settled.encoder.attention_dropout = 0.0
    assert shares() == (0.1, 0.0)


KNOWN = Sample("a", "Where?", ("In Oslo.", "No."), (1,), ("Oslo",), "own")


UNKNOWN = dataclasses.replace(KNOWN, id="b", support=())


YES = dataclasses.replace(UNKNOWN, id="c", answers=("yes",))


MUTE = dataclasses.replace(KNOWN, id="d", answers=())


def labels(
    reward: str, train: list[Sample], dev: list[Sample], best_by: str = "return"
) -> Labelled:
    config = own.get_config("tiny")
    config.reward.name = reward
    config.llm.update(url="http://127.0.0.1:9/v1", model="any")
    config.eval.best_by = best_by
    splits = (LoadedSamples({"own": samples}, ["read"]) for samples in (train, dev))
    return with_labels(QRagConfig.of(config), *splits)


def test_a_language_model_needs_no_facts() -> None:
    found = labels("answer_em", [KNOWN, UNKNOWN], [UNKNOWN, KNOWN])
    assert found.train.all == [KNOWN, UNKNOWN]
    assert (list(found.scored), found.has_facts) == ([0, 1], False)
    assert labels("answer_em", [KNOWN], [KNOWN]).has_facts


def test_answers_label_what_they_can_and_the_rest_is_told() -> None:
    found = labels("answer_in_chunk", [KNOWN, UNKNOWN, YES, MUTE], [YES, KNOWN, UNKNOWN])
    assert [(s.id, s.support) for s in found.train.all] == [("a", (0,)), ("b", (0,))]
    assert [s.support for s in found.dev] == [(), (0,), (0,)]
    assert (list(found.scored), found.has_facts) == ([1, 2], False)
    assert found.train.report == [
        "read",
        "own: 2 training questions left out: 1 have no answer, 1 are answered by yes or no, which "
        "stand in no passage",
        "evaluation: 1 questions not scored in training: 1 are answered by yes or no, which stand "
        "in no passage",
    ]


@pytest.mark.parametrize(
    ("reward", "train", "dev", "named"),
    [
        ("ground_truth", [KNOWN, UNKNOWN], [KNOWN], "support"),
        ("ground_truth", [KNOWN], [UNKNOWN], "support"),
        ("answer_in_chunk", [MUTE], [KNOWN], "answers"),
        ("answer_in_chunk", [KNOWN], [YES], "evaluation"),
    ],
)
def test_data_that_lack_what_the_reward_needs(
    reward: str, train: list[Sample], dev: list[Sample], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        labels(reward, train, dev)


def test_the_answer_key_cannot_choose_where_nobody_has_it() -> None:
    with pytest.raises(InputError, match="best_by is return_until_found, but not all evaluation"):
        labels("answer_in_chunk", [KNOWN], [KNOWN, UNKNOWN], "return_until_found")
    labels("answer_in_chunk", [KNOWN], [KNOWN], "return_until_found")


def test_each_of_several_values_is_needed_once() -> None:
    chunks = ("One: 17.", "Two: 23.", "17, as was said.", "117 and 230.")
    values = Sample("v", "Which numbers?", chunks, (0, 1), ("17", "23"), "niah")
    lost = dataclasses.replace(values, id="w", answers=("17", "99"))
    config = own.get_config("tiny")
    config.reward.name = "answer_in_chunk"
    train, dev = LoadedSamples({"niah": [values, lost]}, []), LoadedSamples({"niah": [values]}, [])
    found = with_labels(QRagConfig.of(config), train, dev)
    assert [(each.id, each.support) for each in found.train.all] == [("v", (0, 1))]
    mixed = LoadedSamples({"niah": [values], "own": [KNOWN]}, [])
    with pytest.raises(InputError, match=r"config\.data\.sources"):
        with_labels(QRagConfig.of(config), mixed, dev)


def test_a_path_alone_says_whose_reward_it_is() -> None:
    config = own.get_config("tiny")
    config.reward.path = "mine.py:score"
    settings = QRagConfig.of(config)
    assert settings.reward.name == "own"
    assert not settings.is_on_device
    assert settings.rollout.never_terminate
    config.reward.name = "answer_in_chunk"  # which reads no path
    assert QRagConfig.of(config).is_on_device


def config_scored(cache: Path) -> ConfigDict:
    made = hotpotqa_musique.get_config("tiny")
    made.data.cache = str(cache)
    return made


def no_musique(config_scored: ConfigDict) -> None:
    with config_scored.unlocked():
        del config_scored.data.sources.musique


def seed(config_scored: ConfigDict) -> None:
    config_scored.data.path = f"{worlds.WORLD}:other_world"


def question_tokens(config_scored: ConfigDict) -> None:
    config_scored.data.max_question_tokens = 8


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (no_musique, "data.sources.musique.weight"),
        (seed, "data.path"),
        (question_tokens, "data.max_question_tokens"),
    ],
)
def test_fields_that_change_what_is_scored_are_named(
    change: Callable[[ConfigDict], None], name: str, tmp_path: Path
) -> None:
    saved, given = config_scored(tmp_path), config_scored(tmp_path)
    change(given)
    for old, new in ((saved, given), (given, saved)):
        save_config(old, tmp_path / "config.json")
        with pytest.raises(InputError) as caught:
            are_others(tmp_path, new, DATA, None)
        assert f"(not as in its config: config.{name}); give --out=FOLDER" in str(caught.value)


@pytest.mark.parametrize("mesh", [(2, 1, 1), pytest.param((1, 2, 2), marks=pytest.mark.slow)])
def test_every_loop_is_known(mesh: tuple[int, int, int], tmp_path: Path) -> None:
    config = hotpotqa.get_config("tiny")
    config.runtime.mesh = mesh
    devices = jax.devices()[: mesh[0] * mesh[1] * mesh[2]]
    with (
        Run.open(tmp_path / "run", time.monotonic()) as run,
        q_rag.open_system(config, run, dry=True, devices=devices) as system,
    ):
        for name, function, arguments, loops in system.programs():
            found = rows_of_loops(function.lower(*arguments).compile().as_text())
            assert found, name
            assert found <= set(loops()), name
