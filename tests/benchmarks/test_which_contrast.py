"""Contrastive training: what may be a negative, and that a training is kept that is the best."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.which_cases import contrast, single
from benchmarks.which_cases.contrast import ContrastConfig, batches
from benchmarks.which_cases.contrast_row import TWICE, TWICE_WITH_WORDS, contrastive
from benchmarks.which_cases.found import fused
from benchmarks.which_cases.row import TRAINED, WITH_WORDS, Place
from benchmarks.which_cases.settings import CHOICE, TRAIN, TWO_WIKI, Asked, Setting
from qrag_jax.errors import InputError
from tests.benchmarks import invented_setting
from tests.support.small_models import write_trainable_model


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return invented_setting.make(tmp_path_factory.mktemp("setting"))


def shared(count: int) -> list[Asked]:
    """Questions of which many have gold passages of others among their own."""
    return [
        Asked(
            f"q{n}",
            "?",
            ("a",),
            gold=(f"p{n}", f"p{(n + 1) % count}"),
            own=tuple(f"p{(n + far) % count}" for far in range(5)),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_no_gold_passage_is_a_negative(seed: int) -> None:
    questions = shared(12)
    gold = {asked.id: {*asked.gold} for asked in questions}
    made = batches(questions, 4, np.random.default_rng(seed))
    pairs = [pair for batch in made for pair in batch]
    assert len(pairs) == len(set(pairs))
    assert len(pairs) > len(questions)  # the most of two pairs of each
    for batch in made:
        assert 2 <= len(batch) <= 4
        assert len({pair.question for pair in batch}) == len(batch)
        for pair in batch:
            assert pair.gold in gold[pair.question]
            negatives = {other.gold for other in batch if other is not pair}
            negatives |= {other.negative for other in batch}
            assert not negatives & gold[pair.question]


def test_a_question_without_other_passages_is_left_out() -> None:
    alone = [Asked(f"q{n}", "?", (), (f"p{n}",), (f"p{n}",)) for n in range(4)]
    assert batches(alone, 2, np.random.default_rng(0)) == []


@pytest.mark.long
def test_the_best_model_is_kept_and_searches(
    given: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small"
    texts = [passage.whole for passage in given.corpus]
    write_trainable_model("bert", small, texts)
    monkeypatch.setattr(contrast, "find_minilm", lambda: small)
    config = ContrastConfig(rates=(1e-4, 1e-2), steps=(5,), batch=4)
    place = Place(given, tmp_path / "row", 42)
    result = contrastive(place, config)
    found = result.ways[TRAINED][TWO_WIKI]
    assert {*found.lists} == {asked.id for asked in given.test}
    assert all(len(names) == 10 for names in found.lists.values())
    assert found.asking.encoder_tokens > 4
    assert found.index_bytes > 0
    twice = result.ways[TWICE][TWO_WIKI]
    assert [names[0] for names in twice.lists.values()] == [n[0] for n in found.lists.values()]
    assert twice.asking.encoder_tokens > 2 * found.asking.encoder_tokens
    words = single.bm25(given)
    for way, own in ((WITH_WORDS, found), (TWICE_WITH_WORDS, twice)):
        both = result.ways[way][TWO_WIKI]
        assert both.lists == {q: fused((own.lists[q], words.lists[q])) for q in words.lists}
        assert both.asking.searches == own.asking.searches + 1
    assert result.training is not None
    assert result.training.cpu_minutes > 0
    invented_setting.check_course(result.training)
    assert result.training.tokens
    assert result.training.tokens > 2 * 5 * 4 * 3  # rates, steps, pairs, texts
    # What was kept is what was tried best, in the numbers of the library.
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(tmp_path / "row" / "model"), device="cpu")
    names = {passage.name: passage.whole for passage in given.corpus}
    recall = contrast.choice_recall(model, given.questions[CHOICE], names, config)
    assert f"({recall:.3f} among their own passages)" in result.about
    # Given again, it trains nothing, and finds the same.
    monkeypatch.setattr(contrast, "train", None)
    again = contrastive(place, config)
    assert again.training == result.training
    assert again.ways[TRAINED][TWO_WIKI].lists == found.lists


@pytest.mark.long
def test_training_raises_the_recall_of_its_own_questions(
    given: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small"
    write_trainable_model("bert", small, [passage.whole for passage in given.corpus])
    monkeypatch.setattr(contrast, "find_minilm", lambda: small)
    own = Setting(
        given.name,
        given.folder,
        given.corpus,
        dict(given.questions) | {CHOICE: given.questions[TRAIN]},
        {},
    )
    config = ContrastConfig(rates=(3e-3,), steps=(5, 30), batch=4, cut=2)
    tried = contrast.train(own, tmp_path / "model", 42, config)
    by_steps = {each.steps: each for each in tried}
    assert by_steps[30].recall > by_steps[5].recall
    assert tried[0].steps == 30
    assert by_steps[30].tokens > 4 * by_steps[5].tokens


def test_what_is_missing_is_named(
    given: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contrast, "find_minilm", lambda: None)
    with pytest.raises(InputError, match="QRAG_MINILM"):
        contrast.train(given, tmp_path / "model", 42, ContrastConfig())
    monkeypatch.setattr(contrast, "is_installed", lambda: False)
    with pytest.raises(InputError, match="pip install 'sentence-transformers"):
        contrast.train(given, tmp_path / "model", 42, ContrastConfig())
    assert single.ROW_TOKENS == contrast._ROW_TOKENS
