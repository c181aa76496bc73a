"""The record layouts of HotpotQA, 2WikiMultiHopQA and HoVer: titled paragraphs of sentences.

In the official files, `context` is `[[title, [sentence, ...]], ...]` and `supporting_facts` is
`[[title, sentence index], ...]`. The hub's copies have the same data as columns:
`{"title": [...], "sentences": [[...], ...]}` and `{"title": [...], "sent_id": [...]}`. A third
form has only the titles of the supporting facts: `supporting_titles` is `[title, ...]`. Questions
over a corpus have no `context`, and perhaps `gold_doc_ids`, the ids of their pages there.

HoVer (Jiang et al., Findings of EMNLP 2020) has claims that up to four pages support or do not:
`uid`, `claim`, `label`, and `supporting_facts` as above or, on the hub, as
`[{"key": title, "value": sentence index}, ...]`. It has no passages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qrag_jax.data.sample import BadRecord, QueryQuestion, Sample
from qrag_jax.data.sources import fields
from qrag_jax.data.sources.fields import Mend, ignore
from qrag_jax.runtime.retriever_config import passage_text

Paragraph = tuple[str, Sequence[str]]  # title, sentences


def parse(record: dict[str, Any], mend: Mend = ignore, *, source: str) -> Sample:
    """One record as a sample of `source`; a chunk is `title + " " + sentences`.

    Only the paragraph of a supporting fact matters: a sentence index outside the paragraph is
    accepted, as a harmless fault. If two paragraphs have the same title, the first one counts.
    """
    record_id, question, answers = _asked(record)
    paragraphs = _paragraphs(fields.present(record, "context"))
    if not paragraphs:
        raise BadRecord("no chunks")
    position: dict[str, int] = {}
    for place, (title, _) in enumerate(paragraphs):
        position.setdefault(title, place)
    support, sound = [], True
    for title, sentence in _supporting_facts(record):
        if title not in position:
            raise BadRecord("support title not in the context")
        support.append(position[title])
        sound &= sentence is None or 0 <= sentence < len(paragraphs[position[title]][1])
    chunks = [_chunk(title, sentences) for title, sentences in paragraphs]
    sample = fields.make_sample(
        source, record_id, question, chunks, support=support, answer_texts=answers
    )
    if not sound:
        mend("sentence index out of range, paragraph kept")
    return sample


def parse_open(record: dict[str, Any]) -> QueryQuestion:
    """One record without a context as a question whose gold pages are known by title."""
    record_id, question, answers = _asked(record)
    titles = [title for title, _ in _supporting_facts(record)]
    ids = fields.texts(record.get("gold_doc_ids") or [], "gold_doc_ids")
    return fields.make_question(record_id, question, answers, titles=titles, ids=ids)


# HoVer's labels; the hub's copies have numbers.
_ANSWERS: dict[Any, str] = {"SUPPORTED": "yes", "NOT_SUPPORTED": "no", 1: "yes", 0: "no"}


def parse_claim(record: dict[str, Any]) -> QueryQuestion:
    """One record of HoVer as a question that is answered by yes or no."""
    record_id = fields.text(fields.present(record, "uid"), "uid")
    claim = fields.text(fields.present(record, "claim"), "claim").strip()
    if not claim:
        raise BadRecord("empty claim")
    titles = []
    for fact in fields.items(record.get("supporting_facts") or [], "supporting_facts"):
        if isinstance(fact, dict):
            fact = [fact.get("key"), fact.get("value")]
        titles.append(_titled_index(fact)[0])
    label = fields.present(record, "label")
    if isinstance(label, bool) or not isinstance(label, str | int) or label not in _ANSWERS:
        raise BadRecord("field 'label' is neither SUPPORTED nor NOT_SUPPORTED")
    question = f"Is the following claim supported: {claim.rstrip(' .?')}?"
    return fields.make_question(record_id, question, (_ANSWERS[label],), titles=titles)


def _asked(record: dict[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    record_id = fields.text(fields.present(record, "_id", "id"), "_id")
    question = fields.text(fields.present(record, "question"), "question")
    return record_id, question, fields.answers(record)


def _chunk(title: str, sentences: Sequence[str]) -> str:
    return passage_text(title, " ".join(part.strip() for part in sentences if part.strip()))


def _paragraphs(context: Any) -> list[Paragraph]:
    if isinstance(context, dict):
        titles = fields.items(fields.present(context, "title"), "context.title")
        bodies = fields.items(fields.present(context, "sentences"), "context.sentences")
        if len(titles) != len(bodies):
            raise BadRecord("context has not as many titles as paragraphs")
        pairs: list[Any] = [list(pair) for pair in zip(titles, bodies)]
    else:
        pairs = fields.items(context, "context")
    paragraphs: list[Paragraph] = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRecord("field 'context' is not a list of [title, sentences]")
        title = fields.text(pair[0], "context title")
        paragraphs.append((title, fields.texts(pair[1], "context sentences")))
    return paragraphs


def _supporting_facts(record: dict[str, Any]) -> list[tuple[str, int | None]]:
    """Returns pairs (title, sentence index); the index is None if only titles are known."""
    if record.get("supporting_facts") is None and record.get("supporting_titles") is not None:
        titles = fields.texts(record["supporting_titles"], "supporting_titles")
        return [(title, None) for title in titles]
    facts = fields.present(record, "supporting_facts")
    if isinstance(facts, dict):
        titles = fields.items(fields.present(facts, "title"), "supporting_facts.title")
        sentences = fields.items(fields.present(facts, "sent_id"), "supporting_facts.sent_id")
        if len(titles) != len(sentences):
            raise BadRecord("supporting_facts has not as many titles as sentence indices")
        facts = [list(pair) for pair in zip(titles, sentences)]
    return [_titled_index(fact) for fact in fields.items(facts, "supporting_facts")]


def _titled_index(fact: Any) -> tuple[str, int]:
    if not isinstance(fact, list) or len(fact) != 2:
        raise BadRecord("field 'supporting_facts' is not a list of [title, sentence index]")
    title = fields.text(fact[0], "supporting_facts title")
    return title, fields.index(fact[1], "supporting_facts sentence index")
