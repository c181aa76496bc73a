"""Rows of the suite which from the command to the lists, with tiny models on invented questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.which_cases import harr_row, rewrite_row, rlvr_row, writers
from benchmarks.which_cases.harr_row import harr
from benchmarks.which_cases.invented import Sizes
from benchmarks.which_cases.measured import costs_of
from benchmarks.which_cases.q_rag_row import NEGATIVES, RUN, in_order, q_rag, q_rag_mined
from benchmarks.which_cases.row import TRAINED, UNTRAINED, WITH_WORDS, Place, Result
from benchmarks.which_cases.settings import TRAIN, TWO_WIKI, Setting
from qrag_jax.data import decompositions
from qrag_jax.metrics import answer_log, predictions
from qrag_jax.retrieval.multi_step import Hit
from qrag_jax.retrieval.protocol import NONE
from qrag_jax.runtime.minilm import find_minilm
from qrag_jax.systems.mined_negatives import FOUND, read_found
from tests.benchmarks import invented_setting

FEW = ("--config.train.steps=2", "--config.train.eval_every=2", "--config.eval.samples=2")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return invented_setting.make(tmp_path_factory.mktemp("setting"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    sizes = Sizes(test=3, passages=5)
    made = invented_setting.make(tmp_path_factory.mktemp("other"), sizes)
    return Setting("other", made.folder, made.corpus, made.questions, made.lacking)


def check(result: Result, given: Setting, ways: tuple[str, ...]) -> None:
    assert {*ways} <= {*result.ways}
    corpus = {passage.name for passage in given.corpus}
    for tests in result.ways.values():
        found = tests[TWO_WIKI]
        assert {*found.lists} == {asked.id for asked in given.test}
        for names in found.lists.values():
            assert {*names} <= corpus
            assert len(set(names)) == len(names) <= 10
        assert found.index_bytes > 0
    assert result.training is not None
    assert result.training.cpu_minutes > 0
    invented_setting.check_course(result.training)


def test_invented_questions_can_be_taken_apart(given: Setting) -> None:
    found, report = decompositions.read("two_wiki", [given.testing / "dev.jsonl"])
    assert not report.skipped
    for asked in given.test:
        first, second = found[asked.id].hops
        assert not first.needs
        assert second.needs == (0,)
        assert second.answers[0] == asked.answers[0]


def test_what_is_taken_is_read_before_what_is_found_beside_it() -> None:
    def hits(*found: str) -> list[Hit]:
        return [Hit(int(step), 0.0, name, "", "", {}) for step, name in found]

    # The first step found b beside a, and the second one takes it.
    assert in_order(hits("1a", "2b"), hits("1a", "1b", "1c", "2d", "2e")) == tuple("abdec")


@pytest.mark.long
def test_q_rag_trains_and_searches_both_corpora(
    given: Setting, other: Setting, tmp_path: Path
) -> None:
    flags = (*FEW, "--config.train.checkpoint_every=2")
    place = Place(given, tmp_path / "row", 42, (other,), flags)
    result = q_rag(place, variant="tiny")
    check(result, given, (TRAINED, WITH_WORDS, UNTRAINED))
    assert {*result.ways[TRAINED]} == {TWO_WIKI, "other"}
    assert {*result.ways[TRAINED]["other"].lists} == {asked.id for asked in other.test}
    found = result.ways[TRAINED][TWO_WIKI]
    assert all(len(names) == 10 for names in found.lists.values())
    assert found.asking.searches == 2
    assert found.asking.encoder_tokens > 20
    # The training is not done again.
    assert costs_of(place.folder)["train"].starts == 1
    assert q_rag(place, variant="tiny").ways[TRAINED][TWO_WIKI].lists == found.lists
    assert costs_of(place.folder)["train"].starts == 1


@pytest.mark.long
def test_mined_negatives_are_what_the_row_without_them_finds(
    given: Setting, tmp_path: Path
) -> None:
    # The first training must find more than the untrained towers after one of its steps, or it has
    # nothing to search with.
    flags = (
        *("--config.train.steps=12", "--config.train.eval_every=1"),
        *("--config.train.checkpoint_every=2", "--config.eval.samples=4"),
    )
    place = Place(given, tmp_path / "q_rag_mined-42", 42, flags=flags)
    result = q_rag_mined(place, variant="tiny")
    check(result, given, (TRAINED, WITH_WORDS))
    first = costs_of(tmp_path / "q_rag-42")
    own = costs_of(place.folder)
    assert {*first} == {"train"}
    assert {*own} == {"index", "train"}
    fields = [word.partition("=")[2] for word in own["train"].given if ".negatives." in word]
    index, search, count = fields
    assert Path(index) == place.folder / "index"
    assert Path(search) == tmp_path / "q_rag-42" / RUN
    assert int(count) == NEGATIVES
    numbers, _ = read_found(place.folder / RUN / FOUND)
    assert numbers.shape == (len(given.questions[TRAIN]), NEGATIVES)
    assert (numbers != NONE).any()
    costs = [first["train"], own["index"], own["train"]]
    assert result.training is not None
    minutes = sum(each.cpu_seconds for each in costs) / 60
    # The minutes of the first training come before all of its own scores.
    before = sum(each.cpu_seconds for each in costs[:-1]) / 60
    assert result.training.course is not None
    assert result.training.course.points[0][0] >= before
    assert result.training.cpu_minutes == pytest.approx(minutes)
    assert result.training.searches == len(given.questions[TRAIN])
    # 12 steps of 8 questions with 4 or more passages each, twice; once with ten more.
    assert result.training.tokens is not None
    plain = q_rag(Place(given, tmp_path / "q_rag-42", 42, flags=flags), variant="tiny").training
    assert plain is not None
    assert plain.tokens is not None
    assert plain.tokens > 12 * 8 * 4 * 3
    assert result.training.tokens > 2 * plain.tokens
    # The row without negatives does not train again.
    assert costs_of(tmp_path / "q_rag-42")["train"].starts == 1


@pytest.mark.long
def test_harr_is_asked_the_test_questions(
    given: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(harr_row.BATCHES, "grpo", ())
    flags = (*FEW, "--config.train.checkpoint_every=2")
    place = Place(given, tmp_path / "row", 42, flags=flags)
    result = harr(place, "grpo", variant="two_wiki-scripted-tiny")
    check(result, given, (TRAINED, UNTRAINED, harr_row.STATELESS))
    for way, tests in result.ways.items():
        found = tests[TWO_WIKI]
        assert "told the decomposition" in found.note
        assert found.asking.searches >= 1
        assert found.asking.encoder_tokens > 5, way
    assert result.training is not None
    assert result.training.tokens is not None
    assert result.training.searches is not None
    trained = result.ways[TRAINED][TWO_WIKI].asking
    of_a_search = trained.encoder_tokens / trained.searches
    assert result.training.tokens == pytest.approx(result.training.searches * of_a_search)
    # A state with the question and the history is longer than a sub-query.
    stateless = result.ways[harr_row.STATELESS][TWO_WIKI].asking
    assert result.ways[UNTRAINED][TWO_WIKI].asking.encoder_tokens > stateless.encoder_tokens


@pytest.mark.long
def test_queries_are_rewritten_and_searched_by_words_and_vectors(
    given: Setting, tmp_path: Path
) -> None:
    if find_minilm(download=False) is None:
        pytest.skip("MiniLM is not on this machine")
    flags = (
        *("--config.script.steps=2", "--config.train.steps=1", "--config.train.batch_size=2"),
        *("--config.reward.k=10", "--config.eval.samples=2", "--config.ppo.critic_warmup=0"),
    )
    place = Place(given, tmp_path / "row", 42, flags=flags)
    result = rewrite_row.deepretrieval(place, "tiny")
    check(result, given, (TRAINED, UNTRAINED, writers.DENSE))
    asking = result.ways[TRAINED][TWO_WIKI].asking
    assert asking.read_tokens > 5
    assert asking.written_tokens > 0
    assert result.ways[writers.DENSE][TWO_WIKI].asking.encoder_tokens > 0


def test_searches_of_rlvr_are_those_of_its_evaluations_and_as_many_in_an_episode(
    tmp_path: Path,
) -> None:
    def write(samples: int) -> None:
        config = {"train": {"batch_size": 2}, "grpo": {"members": 8}, "eval": {"samples": samples}}
        (tmp_path / "config.json").write_text(json.dumps(config))

    write(10)
    rows = {"step": 0, "eval/searches": 1.0}, {"step": 5}, {"step": 20, "eval/searches": 2.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert rlvr_row.searches_of(tmp_path) == 20 * 2 * 8 * 1.5 + 10 * 3.0
    write(0)
    assert rlvr_row.searches_of(tmp_path) is None


def test_what_an_episode_saw_is_its_list(tmp_path: Path) -> None:
    turn = {"observed": [1, 2], "sampled": [3], "log_probs": [0.0], "finish": "stop", "version": ""}
    texts = {"segment": 0, "observed": "a b", "sampled": "c"}
    texts |= {"observed_tokens": ["a", "b"], "sampled_tokens": ["c"]}
    tally = dict.fromkeys(predictions._COUNTS, 0.0) | {"searches": 2.0}
    episodes = [
        predictions.Prediction(
            id=f"q{number}",
            question="?",
            answers=["a"],
            hops=2,
            draw=0,
            prediction="a",
            reward=1.0,
            turns=[texts] * 2,
            trajectory={
                **{"question": number, "member": 0, "attempt": 1, "segments": [[turn, turn]]},
                **{"status": "done", "parts": dict.fromkeys(predictions.OF_PARTS, 0.0)},
                "facts": {"tally": tally} | ({"seen": ["p2", "p1"]} if number else {}),
            },
        )
        for number in range(2)
    ]
    answer_log.append(tmp_path / "played.jsonl", episodes)
    found = rlvr_row._of_file(tmp_path / "played.jsonl", 5.0, 7)
    assert found.lists == {"q0": (), "q1": ("p2", "p1")}
    asking = found.asking
    assert (asking.read_tokens, asking.written_tokens, asking.searches) == (4.0, 2.0, 2.0)
