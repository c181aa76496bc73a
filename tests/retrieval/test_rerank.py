from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.client.client import Client
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.protocol import NONE, Passage, Queries
from qrag_jax.retrieval.rerank import RerankedIndex, rerank_documents
from qrag_jax.retrieval.scorers import CrossEncoderScorer, EmbeddingScorer, EndpointScorer
from tests.llm.asking import eventually
from tests.llm.model_server import Call, ModelServer, Reply
from tests.retrieval.small_corpus import TableIndex, stored

TEXTS = ["red cat", "red red cat", "blue dog", "red dog", "green cow", "blue cat"]


@pytest.fixture
def corpus(tmp_path: Path) -> StoredCorpus:
    return stored(tmp_path / "corpus", TEXTS, odd=[i % 2 for i in range(6)])


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running


@pytest.fixture
def client(server: ModelServer) -> Iterator[Client]:
    settings: dict[str, Any] = {"attempts": 3, "attempt_timeout": 5.0, "deadline": 10.0}
    settings |= {"retry_pause": 0.01, "probe_pause": 0.05, "wait_limit": 0.3}
    with Client(ClientConfig(server.url, "tiny", **settings), log=lambda line: None) as made:
        yield made


def letters(texts: Sequence[str]) -> np.ndarray:
    """float32 `[texts, 26]`: how often each letter occurs."""
    return np.array([[text.count(chr(97 + i)) for i in range(26)] for text in texts], np.float32)


# ---------------------------------------------------------------- vectors


def test_inner_products_order_the_engines_hits(corpus: StoredCorpus) -> None:
    engine = TableIndex(corpus, {"dog": {0: 4.0, 4: 3.0, 2: 2.0, 3: 1.0}})
    index = RerankedIndex(engine, EmbeddingScorer(letters, letters))
    hits = index.search(Queries(["dog", "unknown"]), 6)
    products = letters(TEXTS) @ letters(["dog"])[0]
    order = sorted((0, 4, 2, 3), key=lambda n: (-products[n], n))
    assert hits.numbers.tolist() == [[*order, NONE, NONE], [NONE] * 6]
    assert hits.scores[0, :4].tolist() == [products[n] for n in order]
    assert (index.scored, index.kept) == (2, 0)
    assert index.search(Queries(["dog"]), 2).numbers.tolist() == [order[:2]]


def test_depth_bounds_what_is_scored(corpus: StoredCorpus) -> None:
    engine = TableIndex(corpus, {"dog": {0: 4.0, 4: 3.0, 2: 2.0, 3: 1.0}})
    index = RerankedIndex(engine, EmbeddingScorer(letters, letters), depth=3)
    assert index.search(Queries(["dog"]), 4).numbers.tolist() == [[2, 4, 0, NONE]]
    filtered = index.search(Queries(["dog"]), 4, {"odd": 1})
    assert filtered.numbers.tolist() == [[3, NONE, NONE, NONE]]
    with pytest.raises(InputError, match=r"config\.rerank\.depth is 0"):
        RerankedIndex(engine, EmbeddingScorer(letters, letters), depth=0)


def test_equal_scores_go_by_number(corpus: StoredCorpus) -> None:
    engine = TableIndex(corpus, {"q": {5: 3.0, 1: 2.0, 3: 1.0}})

    def same(texts: Sequence[str]) -> np.ndarray:
        return np.ones((len(texts), 2), np.float32)

    hits = RerankedIndex(engine, EmbeddingScorer(same, same)).search(Queries(["q"]), 3)
    assert hits.numbers.tolist() == [[1, 3, 5]]


def test_each_text_is_embedded_once_and_vectors_are_checked() -> None:
    seen: list[Sequence[str]] = []

    def noted(texts: Sequence[str]) -> np.ndarray:
        seen.append(texts)
        return letters(texts)

    documents = [["b", "a"], [], ["a", "a", "c"]]
    found = rerank_documents(EmbeddingScorer(letters, noted), ["a", "b", "c"], documents, 2)
    assert seen == [["b", "a", "c"]]
    assert found.hits.numbers.tolist() == [[1, 0], [NONE, NONE], [2, 0]]
    assert not found.failed.any()
    none = rerank_documents(EmbeddingScorer(letters, letters), ["a"], [[]], 2)
    assert none.hits.numbers.tolist() == [[NONE, NONE]]
    with pytest.raises(ValueError, match=r"2 texts were embedded as an array of shape \(26,\)"):
        EmbeddingScorer(letters, lambda texts: letters(texts)[0]).scores(["a"], [["b", "c"]])


def test_equal_texts_tie_wherever_they_stand() -> None:
    rng = np.random.default_rng(0)
    known = {text: rng.standard_normal(61).astype(np.float32) for text in "abcdq"}

    def drawn(texts: Sequence[str]) -> np.ndarray:
        return np.stack([known[text] for text in texts])

    documents = rng.choice(list("abcd"), 37).tolist()
    hits = rerank_documents(EmbeddingScorer(drawn, drawn), ["q"], [documents], 37).hits
    for letter in "abcd":
        places = [place for place in hits.numbers[0].tolist() if documents[place] == letter]
        assert places == sorted(places)
        assert np.unique(hits.scores[0][np.isin(hits.numbers[0], places)]).size == 1


def test_numbers_that_are_no_numbers_count_as_a_failure(corpus: StoredCorpus) -> None:
    def broken(texts: Sequence[str]) -> np.ndarray:
        return np.where(letters(texts) > 1, np.nan, letters(texts))

    table = {"dog": {2: 2.0, 1: 1.0}, "cat": {2: 5.0, 5: 1.0}}
    index = RerankedIndex(TableIndex(corpus, table), EmbeddingScorer(letters, broken))
    found = index.search_marked(Queries(["dog", "cat"]), 2)
    assert found.failed.tolist() == [True, False]
    assert found.hits.numbers.tolist() == [[2, 1], [5, 2]]
    assert found.hits.scores[0].tolist() == [2.0, 1.0]


# ---------------------------------------------------------------- a server


def test_a_server_orders_the_engines_hits(
    corpus: StoredCorpus, server: ModelServer, client: Client
) -> None:
    """The server sends the best first, so the scores have to find their passages again."""
    index = RerankedIndex(BM25Index.build(corpus), EndpointScorer(client, {"user": "me"}))
    hits = index.search(Queries(["cat dog blue", "nothing here", "cow"]), 5)
    assert hits.numbers.tolist() == [[2, 5, 0, 1, 3], [NONE] * 5, [4] + [NONE] * 4]
    assert hits.scores[0].tolist() == [2.0, 2.0, 1.0, 1.0, 1.0]
    assert (index.scored, index.kept) == (3, 0)
    calls = {call.body["query"]: call for call in server.calls}
    assert calls.keys() == {"cat dog blue", "cow"}  # no request without documents
    assert calls["cow"].path == "/v1/rerank"
    assert calls["cow"].body == {
        "model": "tiny",
        "query": "cow",
        "documents": ["green cow"],
        "user": "me",
    }


def test_titles_go_to_the_server_too(tmp_path: Path, server: ModelServer, client: Client) -> None:
    corpus = write_corpus(tmp_path, [Passage("a", "text", "Title")])
    engine = TableIndex(corpus, {"q": {0: 1.0}})
    RerankedIndex(engine, EndpointScorer(client)).search(Queries(["q"]), 1)
    assert server.calls[0].body["documents"] == ["Title text"]


def test_a_failure_that_passes_is_tried_again(server: ModelServer, client: Client) -> None:
    server.script = lambda call: Reply(status=500) if call.nth == 0 else Reply()
    found = rerank_documents(EndpointScorer(client), ["a"], [["b", "a"]], 2)
    assert found.hits.numbers.tolist() == [[1, 0]]
    assert not found.failed.any()
    assert client.counters().retries == 1


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (Reply(status=500), "server"),
        (Reply(status=404), "request"),
        (Reply(status=400, text="longer than the maximum model length"), "too_long"),
        (Reply(raw="{}"), "malformed"),
        (Reply(raw="no JSON"), "malformed"),
        (Reply(raw='{"results": [{"index": 0, "relevance_score": 1.0}]}'), "malformed"),
        (Reply(raw='{"results": [{"index": 0, "relevance_score": 1.0},'
                   '{"index": 0, "relevance_score": 2.0}]}'), "malformed"),
        (Reply(raw='{"results": [{"index": 0, "relevance_score": 1.0},'
                   '{"index": 2, "relevance_score": 2.0}]}'), "malformed"),
        (Reply(raw='{"results": [{"index": 0, "relevance_score": 1.0},'
                   '{"index": 1, "relevance_score": NaN}]}'), "malformed"),
        (Reply(raw='{"results": [{"index": 0, "relevance_score": 1.0},'
                   '{"index": 1, "relevance_score": null}]}'), "malformed"),
        (Reply(raw='{"results": {"0": 1.0, "1": 2.0}}'), "malformed"),
        (Reply(drop=True), "connection"),
    ],
)  # fmt: skip
def test_a_failure_keeps_the_engines_order_and_is_marked(
    reply: Reply, cause: str, corpus: StoredCorpus, server: ModelServer, client: Client
) -> None:
    def script(call: Call) -> Reply:
        return reply if call.prompt == "bad" else Reply()

    server.script = script
    table = {"bad": {4: 3.0, 1: 2.0}, "dog": {4: 3.0, 2: 2.0}}
    index = RerankedIndex(TableIndex(corpus, table), EndpointScorer(client))
    found = index.search_marked(Queries(["bad", "dog"]), 2)
    assert found.failed.tolist() == [True, False]
    assert found.hits.numbers.tolist() == [[4, 1], [2, 4]]
    assert found.hits.scores.tolist() == [[3.0, 2.0], [1.0, 0.0]]
    assert (index.scored, index.kept) == (1, 1)
    assert client.counters().failures[cause] == 1


def test_a_server_that_is_down_keeps_the_order_of_all(
    corpus: StoredCorpus, server: ModelServer, client: Client
) -> None:
    server.kill()
    index = RerankedIndex(BM25Index.build(corpus), EndpointScorer(client))
    found = index.search_marked(Queries(["blue", "cat"]), 3)
    first = index.engine.search(Queries(["blue", "cat"]), 3)
    assert found.failed.all()
    np.testing.assert_array_equal(found.hits.numbers, first.numbers)
    np.testing.assert_array_equal(found.hits.scores, first.scores)
    assert (index.scored, index.kept) == (0, 2)
    server.start()
    assert eventually(lambda: not index.search_marked(Queries(["blue"]), 3).failed.any())
    assert index.scored >= 1


def test_a_failed_questions_documents_keep_their_order(server: ModelServer, client: Client) -> None:
    server.script = lambda call: Reply(status=404)
    found = rerank_documents(EndpointScorer(client), ["b", "c"], [["a", "b"], []], 3)
    assert found.hits.numbers.tolist() == [[0, 1, NONE], [NONE] * 3]
    assert found.hits.scores[0, :2].tolist() == [0.0, 0.0]
    assert found.failed.tolist() == [True, False]


def test_scores_are_cached_as_answers_are(server: ModelServer, tmp_path: Path) -> None:
    config = ClientConfig(server.url, "tiny", cache=str(tmp_path / "cache.sqlite"))
    for _ in range(2):
        with Client(config) as client:
            found = rerank_documents(EndpointScorer(client), ["b"], [["a", "b"]], 2)
            assert found.hits.numbers.tolist() == [[1, 0]]
    assert len(server.calls) == 1


# ---------------------------------------------------------------- a cross-encoder here


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with one output and random weights, saved as transformers does it."""
    return tiny_bert(tmp_path_factory.mktemp("cross_encoder"), labels=1)


def tiny_bert(folder: Path, labels: int) -> Path:
    import torch
    import transformers

    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        num_labels=labels,
        initializer_range=0.5,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_a_cross_encoder_here_gives_its_logits(cross_encoder: Path, corpus: StoredCorpus) -> None:
    import torch
    import transformers

    scorer = CrossEncoderScorer(str(cross_encoder), batch=2, device="cpu")
    queries, documents = ["red dog", "cow", "cat"], [TEXTS, [], TEXTS[2:4]]
    model = transformers.BertForSequenceClassification.from_pretrained(cross_encoder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(cross_encoder)
    for query, texts, scores in zip(queries, documents, scorer.scores(queries, documents)):
        assert scores is not None
        assert scores.shape == (len(texts),)
        for text, score in zip(texts, scores):
            with torch.no_grad():
                logit = model(**tokenizer(query, text, return_tensors="pt")).logits.item()
            assert score == pytest.approx(logit, abs=1e-4)
    assert np.unique(scorer.scores(queries, documents)[0]).size > 3
    assert scorer.scores([], []) == []
    index = RerankedIndex(BM25Index.build(corpus), scorer)
    hits = index.search(Queries(["red dog"]), 6)
    expected = scorer.scores(["red dog"], [TEXTS])[0]
    assert expected is not None
    found = hits.numbers[0][hits.numbers[0] != NONE]
    assert found.tolist() == sorted(found, key=lambda number: -expected[number])


def test_models_that_are_no_cross_encoders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be loaded as a cross-encoder"):
        CrossEncoderScorer(str(tmp_path / "none"))
    (tmp_path / "two").mkdir()
    with pytest.raises(InputError, match="gives 2 scores for a pair"):
        CrossEncoderScorer(str(tiny_bert(tmp_path / "two", labels=2)))


def test_the_folder_is_the_first_engines(corpus: StoredCorpus, tmp_path: Path) -> None:
    index = RerankedIndex(BM25Index.build(corpus), EmbeddingScorer(letters, letters))
    index.save(tmp_path / "index")
    again = RerankedIndex(
        BM25Index.open(tmp_path / "index", corpus), EmbeddingScorer(letters, letters)
    )
    queries = Queries(["cat", "dog"])
    for one, other in zip(index.search(queries, 4), again.search(queries, 4)):
        np.testing.assert_array_equal(one, other)
