"""What a DeepRetrieval run reads: queries, what they search, what is demonstrated, and refusals."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from qrag_jax.data.sample import Sample
from qrag_jax.environments.episode import Look
from qrag_jax.errors import InputError
from qrag_jax.retrieval.index_folder import BM25
from qrag_jax.systems.deepretrieval.config import RewriteConfig
from qrag_jax.systems.deepretrieval.system import digest_of, load_inputs
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.token_system import TokenInputs
from tests.retrieval.web_service import pubmed_says, serving
from tests.support.worlds import write_lines
from tests.systems.corpora import Judged, write_collection, write_rows
from tests.systems.small_runs import small_deepretrieval as small

WORDS = ("river", "stone", "lamp", "winter", "clock", "garden", "paper", "morning")
TEXTS = {f"d{n}": f"the {word} is long and it has a {word} too" for n, word in enumerate(WORDS)}


def judged(first: int, count: int) -> Judged:
    """Queries of which one document each is relevant."""
    numbers = range(first, first + count)
    return {f"q{n}": (f"where is number {n}?", {f"d{n % len(TEXTS)}": 1}) for n in numbers}


def loaded(workdir: Path, test: str = "talkative", **fields: Any) -> TokenInputs:
    mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    config = RewriteConfig.of(small(queries__test=test, **{"reward__k": len(WORDS)} | fields))
    return load_inputs(config, workdir, mesh)


def texts_of(tasks: Sequence[Sample]) -> set[str]:
    return {each.question for each in tasks}


@pytest.fixture
def north(tmp_path: Path) -> Path:
    splits = {"train": judged(0, 12), "test": judged(20, 4)}
    return write_collection(tmp_path / "north", TEXTS, splits)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TokenInputs:
    return loaded(tmp_path_factory.mktemp("made"))


Load = Callable[..., TokenInputs]


@pytest.fixture(scope="module")
def load(made: TokenInputs) -> Load:
    """Loads with the model of `made`, which spares to train a tokenizer."""
    return partial(loaded, model__path=str(made.model.folder))


def test_made_queries_do_not_overlap(made: TokenInputs) -> None:
    parts = (made.train, made.dev, made.test)
    assert [len(each) for each in parts] == [6, 3, 4]
    assert len(set.union(*map(texts_of, parts))) == 6 + 3 + 4


def test_training_queries_in_the_test_are_left_out(load: Load, tmp_path: Path, north: Path) -> None:
    both = {"train": judged(0, 12), "test": {**judged(20, 2), **judged(3, 2)}}
    south = write_collection(tmp_path / "south", TEXTS, both)
    data = {"queries__train": f"{south},train", "queries__dev": f"{south},train[:2]"}
    inputs = load(tmp_path / "run", test=f"{south},test", **data)
    assert texts_of(inputs.train) == {f"where is number {n}?" for n in (2, *range(5, 12))}
    # The same words ask another collection for something else.
    apart = load(tmp_path / "apart", test=f"{north},train", **data)
    assert len(apart.train) == 10
    with pytest.raises(InputError, match=r"config\.queries\.train"):
        load(tmp_path / "none", test=f"{south},train", **data)


def test_queries_of_documents_that_the_corpus_lacks_are_left_out_and_counted(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it lacks of a query's documents counts as not found."""
    splits = {"train": {**judged(0, 6), **LOST}, "test": judged(20, 4)}
    folder = write_collection(tmp_path / "south", TEXTS, splits)
    data = {"queries__train": f"{folder},train", "queries__dev": f"{folder},test"}
    inputs = load(tmp_path / "run", search__max_missing_share=0.125, **data)
    assert [each.id for each in inputs.train] == [*judged(0, 6), "half"]
    assert dict(inputs.train[-1].grades) == {"d0": 1, "d98": 2}
    assert "1 of 8" in capsys.readouterr().out


LOST: Judged = {"lost": ("who is lost?", {"d99": 1}), "half": ("half?", {"d0": 1, "d98": 2})}
LONG: Judged = {"long": ("where " * 300 + "?", {"d1": 1})}
FOREIGN: Judged = {f"l{n}": (f"what lacks {n}?", {f"e{n}": 1}) for n in range(4)}


@pytest.mark.parametrize(
    ("train", "fields", "named"),
    [
        ({**judged(0, 6), **LOST}, {"search__max_missing_share": 0.1}, "1 of 8 .*'lost'"),
        (judged(0, 6), {"reward__k": 9}, r"config\.reward\.k is 9.* 8 "),
        ({**judged(0, 6), **LONG}, {}, r"'long'.*config\.sampling\.room"),
        (FOREIGN, {}, r"config\.queries\.train"),
    ],
)
def test_queries_that_are_refused(
    train: Judged, fields: dict[str, Any], named: str, load: Load, tmp_path: Path, north: Path
) -> None:
    folder = write_collection(tmp_path / "south", TEXTS, {"train": train})
    data = {"queries__train": f"{folder},train", "queries__dev": f"{north},test"}
    with pytest.raises(InputError, match=named):
        load(tmp_path / "run", **data, **fields)


def test_rows_search_an_index_beside_collections(load: Load, tmp_path: Path, north: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [(f"r{n}", f"row {n}?", ["e1"]) for n in range(4)])
    texts = ({"id": f"e{n}", "text": text} for n, text in enumerate(TEXTS.values()))
    source, index = write_lines(tmp_path / "corpus.jsonl", texts), tmp_path / "index"
    index_corpus(source, index, None, IndexSettings(engine=BM25))
    data = {"queries__train": f"{north},train;{rows},train", "search__index": str(index)}
    inputs = load(tmp_path / "run", test=f"{north},test", queries__held_out=2, **data)
    for collection, first in (("", "e"), ("north", "d")):
        task = next(each for each in inputs.train if each.collection == collection)
        (found,) = inputs.library.look([(task, Look("river", 1))])
        assert [each.id for each in found] == [f"{first}0"]


def test_a_service_has_no_queries_made_here_and_is_not_asked(load: Load, tmp_path: Path) -> None:
    """Until the run searches."""
    remote = {"search__engine": "remote", "stages": ("rl",)}
    with pytest.raises(InputError, match=r"config\.search\.engine.*'talkative'"):
        load(tmp_path / "made", **remote)
    rows = write_rows(tmp_path / "a.jsonl", [(f"{n}", f"first {n}", ["17"]) for n in range(4)])
    data = {"queries__train": f"{rows},train", "queries__held_out": 2}
    with serving(lambda call: pubmed_says(["17"])) as server:
        inputs = load(
            tmp_path / "run", f"{rows},train[:1]", **remote, **data, engine__url=server.url
        )
        assert not server.calls
        (found,) = inputs.library.look([(inputs.train[0], Look("a", 5))])
        assert [each.id for each in found] == ["17"]  # type: ignore[union-attr]


def test_made_queries_are_demonstrated_by_those_of_the_corpus(made: TokenInputs) -> None:
    script, config = made.script, RewriteConfig.of(small())
    assert script is not None
    shown = [script.at(config, n, n) for n in range(25)]
    assert [task.question for task, _ in shown[:6]] == [each.question for each in made.train]
    for task, query in shown:
        asked = set(re.findall(r"\w+", task.question.casefold()))
        assert set(re.findall(r"\w+", query.casefold())) <= asked
    assert len({script.at(config, 0, index)[1] for index in range(40)}) > 1


def test_sentences_of_the_corpora_are_demonstrated_for_data(tmp_path: Path, north: Path) -> None:
    """With words dropped at random, or all frequent or rare ones."""
    data = {"queries__train": f"{north},train", "queries__held_out": 2}
    script = loaded(tmp_path / "run", f"{north},test", **data, dropped__frequent_from=0.5).script
    assert script is not None
    assert set(script.given) == set(TEXTS.values())
    config = RewriteConfig.of(small(dropped__share=0.5))
    for index in range(20):
        task, query = script.at(config, 3, index)
        left = iter(task.question.split())
        assert query
        assert all(word in left for word in query.split())  # in their order
        assert task.grades == ()
    almost = {"dropped__frequent_share": 0.99, "dropped__rare_share": 0.99}
    of_kinds = RewriteConfig.of(small(dropped__kinds=("frequent", "rare"), **almost))
    drawn = {script.at(of_kinds, 3, index)[1] for index in range(60)}
    assert drawn >= {f"{WORDS[3]} {WORDS[3]}", "the is long and it has a too"}
    asked: Judged = {name: (f"what {name}?", {"d0": 1}) for name in "abc"}
    folder = write_collection(tmp_path / "short", {"d0": "two words"}, {"train": asked})
    data = {"queries__train": f"{folder},train", "queries__held_out": 1, "reward__k": 1}
    with pytest.raises(InputError, match=r"config\.dropped\.least_words"):
        loaded(tmp_path / "none", f"{folder},train[:1]", **data)


def test_queries_are_held_out_by_a_seed(load: Load, tmp_path: Path, north: Path) -> None:
    data = {"queries__train": f"{north},train", "queries__held_out": 5}
    one, other = (load(tmp_path / f"{seed}", seed=seed, **data) for seed in (1, 2))
    assert [len(one.train), len(one.dev)] == [7, 5]
    assert len(texts_of(one.train) | texts_of(one.dev)) == 12
    assert one.dev != other.dev


def test_every_part_of_a_query_counts_for_the_digest(made: TokenInputs) -> None:
    first, second, *_ = made.train
    changes = {"question": "Who?", "answers": ("1931",), "collection": "x", "id": "x"}
    changes |= {"until": "2001-02-03", "grades": ((second.grades[0][0], 2),)}
    others = [dataclasses.replace(second, **{name: value}) for name, value in changes.items()]
    lists = [[first, second], [second, first], [first], *([first, other] for other in others)]
    assert len({digest_of(each) for each in lists}) == len(lists)
