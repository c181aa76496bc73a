"""What a config of Q-RAG means: its data, encoder and rewards; documents of several lengths, and
under which settings a log of scores goes on.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections
import pytest

from configs import common, hotpotqa, own
from qrag_jax.data.loading import DataConfig, LoadedSamples, documents_of_lengths, sources_section
from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError
from qrag_jax.metrics.row_log import differing
from qrag_jax.models.first_encoder import prepare_encoder
from qrag_jax.runtime.config_fields import flat, save_config
from qrag_jax.runtime.run import Run
from qrag_jax.systems.config import load_config
from qrag_jax.systems.q_rag.config import QRagConfig, settled
from qrag_jax.systems.q_rag.run import SavedRun
from qrag_jax.systems.q_rag.scoring import BEAM_FIELDS, log_record
from qrag_jax.systems.q_rag.system import QRag, with_labels
from qrag_jax.systems.scoring import FREE_FIELDS, is_free
from tests.models.test_folders import write_pooling as write_modules
from tests.support.small_models import small_model, write_tokenizer
from tests.systems.parts import samples_of


@pytest.fixture
def config(tmp_path: Path) -> ml_collections.ConfigDict:
    result = hotpotqa.get_config("tiny")
    result.data.cache = str(tmp_path / "cache")
    result.data.limit = 20
    return result


def test_the_config_of_a_model_is_not_that_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 8}')
    with pytest.raises(InputError, match=r"config\.json"):
        load_config(tmp_path / "config.json")


def test_steps_are_as_many_as_the_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless the config says so: then the questions that are never solved are counted."""
    for split, facts in {"train": (1, 2, 4), "dev": (5,)}.items():
        rows = [
            {"question": f"{split} {n}", "chunks": [*"abcdef"], "support": [*range(n)]}
            for n in facts
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for given, steps, unsolved in ((0, 4, ["1 of 1"]), (1, 1, ["2 of 3", "1 of 1"])):
        config = own.get_config("tiny")
        config.data.update(path=str(tmp_path), cache=str(tmp_path / "cache"))
        config.env.max_steps = given
        workdir = tmp_path / f"run{given}"
        with Run.open(workdir, 0.0) as run, QRag.open_system(config, run, dry=True) as system:
            saved = load_config(run.config_path).env.max_steps
            assert saved == config.env.max_steps == system.config.rollout.max_steps == steps
        assert re.findall(r"(\d+ of \d+) \w+ questions", capsys.readouterr().out) == unsolved
    with pytest.raises(InputError, match=r"config\.env\.max_steps"):  # only training settles it
        QRagConfig.of(own.get_config(), scoring=True)


def test_facts_end_no_episode_that_a_model_rewards(config: ml_collections.ConfigDict) -> None:
    config.env.never_terminate = False
    assert not QRagConfig.of(config).rollout.never_terminate
    config.llm.update(url="http://127.0.0.1:9/v1", model="any")
    for name in ("answer_em", "judge"):
        config.reward.name = name
        assert QRagConfig.of(config).rollout.never_terminate
    config.reward.completion_threshold = 0.0
    with pytest.raises(InputError, match="completion_threshold"):
        QRagConfig.of(config)
    config.reward.update(name="gt", completion_threshold=None)
    assert QRagConfig.of(config).reward.name == "ground_truth"


def test_a_run_does_as_the_folder_says(config: ml_collections.ConfigDict, tmp_path: Path) -> None:
    """Fields that are left open are settled when the run begins, and are the run's from then on."""
    small_model("bert").save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    write_modules(tmp_path / "model", "Pooling", "Normalize", pooling_mode_mean_tokens=True)
    config.encoder.path = str(tmp_path / "model")
    workdir, as_told = tmp_path / "run", {"pooling": "mean", "normalise": True, "scale": 1.0}
    wanted = QRagConfig.of(config).encoder
    first = prepare_encoder(wanted, workdir, (), config.seed, is_kept=False).encoder
    assert {name: getattr(first, name) for name in as_told} == as_told
    save_config(settled(config, first), workdir / "config.json")
    read = load_config(workdir / "config.json")
    assert {name: read.encoder[name] for name in as_told} == as_told
    QRagConfig.fill_open(config, read)
    Run(workdir, 0.0).check_config(read, config, QRagConfig.FREE_FIELDS, ())


KNOWN = Sample("a", "Where?", ("In Oslo.", "No."), (1,), ("Oslo",), "own")
UNKNOWN = dataclasses.replace(KNOWN, id="b", support=())
YES = dataclasses.replace(UNKNOWN, id="c", answers=("yes",))
MUTE = dataclasses.replace(KNOWN, id="d", answers=())


def labels(reward: str, train: list[Sample], dev: list[Sample], best_by: str = "return") -> Any:
    config = own.get_config("tiny")
    config.reward.name = reward
    config.llm.update(url="http://127.0.0.1:9/v1", model="any")
    config.eval.best_by = best_by
    splits = (LoadedSamples({"own": samples}, ["read"]) for samples in (train, dev))
    return with_labels(QRagConfig.of(config), *splits)


def test_answers_label_what_they_can_and_the_rest_is_told() -> None:
    # A model's reward needs no facts.
    train, _, scored, has_facts = labels("answer_em", [KNOWN, UNKNOWN], [UNKNOWN, KNOWN])
    assert train.all == [KNOWN, UNKNOWN]
    assert (list(scored), has_facts) == ([0, 1], False)
    assert labels("answer_em", [KNOWN], [KNOWN])[-1]
    every = [KNOWN, UNKNOWN, YES, MUTE], [YES, KNOWN, UNKNOWN]
    train, dev, scored, has_facts = labels("answer_in_chunk", *every)
    assert [(s.id, s.support) for s in train.all] == [("a", (0,)), ("b", (0,))]
    assert [s.support for s in dev] == [(), (0,), (0,)]
    assert (list(scored), has_facts) == ([1, 2], False)


def test_data_that_lack_what_the_reward_needs() -> None:
    for reward, train, dev, named in (
        ("ground_truth", [KNOWN, UNKNOWN], [KNOWN], "support"),
        ("ground_truth", [KNOWN], [UNKNOWN], "support"),
        ("answer_in_chunk", [MUTE], [KNOWN], "answers"),
        ("answer_in_chunk", [KNOWN], [YES], "evaluation"),
    ):
        with pytest.raises(InputError, match=named):
            labels(reward, train, dev)
    with pytest.raises(InputError, match="best_by"):
        labels("answer_in_chunk", [KNOWN], [KNOWN, UNKNOWN], "return_until_found")


def test_each_of_several_values_is_needed_once() -> None:
    chunks = ("One: 17.", "Two: 23.", "17, as was said.", "117 and 230.")
    values = Sample("v", "Which numbers?", chunks, (0, 1), ("17", "23"), "niah")
    lost = dataclasses.replace(values, id="w", answers=("17", "99"))
    config = own.get_config("tiny")
    config.reward.name = "answer_in_chunk"
    train, dev = LoadedSamples({"niah": [values, lost]}, []), LoadedSamples({"niah": [values]}, [])
    found, *_ = with_labels(QRagConfig.of(config), train, dev)
    assert [(each.id, each.support) for each in found.all] == [("v", (0, 1))]
    mixed = LoadedSamples({"niah": [values], "own": [KNOWN]}, [])
    with pytest.raises(InputError, match=r"config\.data\.sources"):
        with_labels(QRagConfig.of(config), mixed, dev)


# ---------------------------------------------------------------- documents of several lengths


def data_of(config: ml_collections.ConfigDict, source: str, **fields: Any) -> DataConfig:
    """The data of an evaluation on this source alone."""
    with config.unlocked():
        config.data.sources = sources_section([source])
        config.data.path = common.invented(config)
    config.data.sources[source].update(**fields)
    return QRagConfig.of(config).dev_data


def documents(data: DataConfig, chunks: int, count: int) -> Sequence[Sample]:
    return documents_of_lengths(data, {chunks: count}, every_story=True)[chunks].samples


@pytest.mark.parametrize("source", ["babilong", "niah"])
def test_documents_of_a_length(config: ml_collections.ConfigDict, source: str) -> None:
    data = data_of(config, source, chunks=14, dev=6)
    of_20, of_50 = (documents(data, length, 4) for length in (20, 50))
    assert [len(sample.chunks) for sample in (*of_20, *of_50)] == [20] * 4 + [50] * 4
    assert [sample.id for sample in of_20] == [sample.id for sample in of_50]
    # No more than there are; at the config's own length they are those of the evaluation.
    assert [*documents(data, 14, 100)] == [*samples_of(config, "dev").all]


def test_documents_that_have_their_length(config: ml_collections.ConfigDict) -> None:
    with pytest.raises(InputError, match="hotpotqa"):
        documents(data_of(config, "hotpotqa"), 20, 4)
    config.eval.path = "needles.jsonl"
    with pytest.raises(InputError, match="niah"):
        documents(data_of(config, "niah"), 20, 4)


# ---------------------------------------------------------------- records of logs

BEST = ("best-6", "ab12")
# What a folder settles: the record has what the encoder does, not what the config asks for.
SETTLED = ("encoder.pooling", "encoder.normalise", "encoder.scale")
NAMES = sorted(flat(common.get_config("hotpotqa").to_dict()))  # of a run on a data set


@pytest.fixture(scope="module")
def run(finished_run: Path) -> SavedRun:
    return SavedRun.open(finished_run, load_config(finished_run / "config.json"))


def other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 0.5 if math.isinf(value) else value + 1
    if isinstance(value, str):
        return value + "x"
    return (*value, "more") if isinstance(value, tuple) else 0.25


@pytest.mark.parametrize("searched", [False, True])
def test_every_field_that_changes_a_row_is_named(run: SavedRun, searched: bool) -> None:
    """A field that comes later, too, unless somebody shows that it changes no row."""

    def named(field: str, value: Any) -> list[str]:
        changed = dataclasses.replace(run, fields=run.fields | {field: value})
        both = (log_record(each, *BEST, "4", searched=searched) for each in (run, changed))
        return [line.partition(" ")[0] for line in differing(*both)]

    free = FREE_FIELDS if searched else (*FREE_FIELDS, *BEAM_FIELDS)
    for name in NAMES:
        if name in SETTLED or (name not in run.fields and not is_free(name, free)):
            continue
        expected = [] if is_free(name, free) else [f"config.{name}"]
        assert named(name, other(run.fields.get(name))) == expected
    assert sum(is_free(name) for name in NAMES) < len(NAMES) / 2
    assert named("env.of_later", 1) == ["config.env.of_later"]
