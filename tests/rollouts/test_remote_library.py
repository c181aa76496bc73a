"""A search service as the agent's library: documents or failures, and each question's last day."""

from __future__ import annotations

import pytest

from qrag_jax.environments.tools.episode import Document, Look, Open, ToolTask
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.pubmed import RemoteEngine
from qrag_jax.rollouts.corpus_library import RemoteLibrary
from qrag_jax.rollouts.token_episodes import Library
from tests.retrieval.web_service import Call, Say, pubmed_says, quick, serving

DAYS = {"early": "2010-01-31", "late": "2020-01-31", "open": "", "wrong": "soon"}


def task(name: str, *gold: str) -> ToolTask:
    return ToolTask(name, "what?", ("that",), gold_ids=gold)


def until(asked: ToolTask) -> str:
    return DAYS[asked.id]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCBI_API_KEY", raising=False)


def test_each_question_has_its_last_day_and_one_failure_is_one() -> None:
    def script(call: Call) -> Say:
        if call.query == "bad":
            return Say("<html></html>")
        return pubmed_says(["1", "2"] if call.fields["maxdate"] == "2010/01/31" else ["3", "1"])

    with serving(script) as server:
        library: Library = RemoteLibrary(RemoteEngine(quick(server.url)), until)
        asked = [
            (task("late", "1", "7"), Look("good", 5)),
            (task("open"), Look("bad", 5)),
            (task("early", "1"), Look("good", 2)),
        ]
        late, bad, early = library.look(asked)
        assert library.look([]) == []
    assert late == (Document("3", "", "", False), Document("1", "", "", True))
    assert early == (Document("1", "", "", True), Document("2", "", "", False))
    assert isinstance(bad, Failure)
    assert bad.cause == "malformed"


def test_a_document_cannot_be_opened() -> None:
    with serving(lambda call: pubmed_says([])) as server:
        opened = RemoteLibrary(RemoteEngine(quick(server.url))).open(task("open"), Open("1"))
    assert isinstance(opened, Failure)
    assert "PubMed" in opened.message
    assert server.calls == []


def test_the_digest_has_the_question_s_last_day() -> None:
    engine = RemoteEngine(quick("http://127.0.0.1:9"))
    library = RemoteLibrary(engine, until)
    assert library.digest(task("early")) == f"{engine.digest} until=2010-01-31"
    assert library.digest(task("open")) == f"{engine.digest} until=open"
    assert RemoteLibrary(engine).digest(task("late")) == f"{engine.digest} until=open"


def test_a_last_day_that_is_none_names_the_question() -> None:
    library = RemoteLibrary(RemoteEngine(quick("http://127.0.0.1:9")), until)
    for call in (
        lambda: library.look([(task("wrong"), Look("a", 1))]),
        lambda: library.digest(task("wrong")),
    ):
        with pytest.raises(InputError, match="question 'wrong' is 'soon'"):
            call()
