"""What a reward needs of the data, and what is left out or refused where they lack it."""

from __future__ import annotations

import dataclasses

import pytest
from ml_collections import ConfigDict

from configs import own
from qrag_jax.data.lazy_samples import LazySamples
from qrag_jax.data.loading import LoadedSamples
from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError
from qrag_jax.systems.q_rag_config import QRagConfig
from qrag_jax.systems.reward_labels import Labelled, with_labels

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


def test_facts_stay_as_they_are() -> None:
    found = labels("ground_truth", [KNOWN, MUTE], [KNOWN])
    assert found.train.all == [KNOWN, MUTE]
    assert found.dev == [KNOWN]
    assert (list(found.scored), found.has_facts) == ([0], True)


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
    ("reward", "train", "dev", "says"),
    [
        (
            "ground_truth",
            [KNOWN, UNKNOWN],
            [KNOWN],
            "config.reward.name is ground_truth, but the own question b has no supporting facts "
            "(field 'support'); give them, or use config.reward.name=answer_in_chunk or",
        ),
        ("ground_truth", [KNOWN], [UNKNOWN], "the own question b has no supporting facts"),
        (
            "answer_in_chunk",
            [MUTE],
            [KNOWN],
            "no own training question can be rewarded by it (1 have no answer); give data with "
            "answers (field 'answers' of your own data)",
        ),
        ("answer_in_chunk", [KNOWN], [YES], "no evaluation question can be rewarded by it (1 are"),
    ],
)
def test_data_that_lack_what_the_reward_needs(
    reward: str, train: list[Sample], dev: list[Sample], says: str
) -> None:
    with pytest.raises(InputError) as caught:
        labels(reward, train, dev)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


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


def test_documents_that_are_made_know_their_facts() -> None:
    config: ConfigDict = own.get_config("tiny")
    config.reward.name = "answer_in_chunk"
    made = LoadedSamples({"niah": LazySamples(1, lambda index: KNOWN)}, [])
    with pytest.raises(InputError, match="niah makes its documents as they are played"):
        with_labels(QRagConfig.of(config), made, made)


def test_a_path_alone_says_whose_reward_it_is() -> None:
    config = own.get_config("tiny")
    config.reward.path = "mine.py:score"
    settings = QRagConfig.of(config)
    assert settings.reward.name == "own"
    assert not settings.is_on_device
    assert settings.rollout.never_terminate
    config.reward.name = "answer_in_chunk"  # which reads no path
    assert QRagConfig.of(config).is_on_device
