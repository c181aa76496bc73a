"""The record layout that HotpotQA and 2WikiMultiHopQA share: titled paragraphs of sentences.

In the official files, `context` is `[[title, [sentence, ...]], ...]` and `supporting_facts` is
`[[title, sentence index], ...]`. The hub's copies have the same data as columns:
`{"title": [...], "sentences": [[...], ...]}` and `{"title": [...], "sent_id": [...]}`. A third
form has only the titles of the supporting facts: `supporting_titles` is `[title, ...]`. Questions
over a corpus have no `context`, and perhaps `gold_doc_ids`, the ids of their pages there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qrag_jax.data.sample import BadRecord, QueryQuestion, Sample
from qrag_jax.data.sources import fields
from qrag_jax.runtime.retriever_config import passage_text

Paragraph = tuple[str, Sequence[str]]  # title, sentences


def parse(record: dict[str, Any], source: str) -> Sample:
    """Turns one record into a sample of `source`; a chunk is `title + " " + sentences`.

    Only the paragraph of a supporting fact matters: a sentence index outside the paragraph is
    accepted (see `mended`). If two paragraphs have the same title, the first one counts.

    Raises:
        BadRecord: a field is missing or has the wrong type, the id, the question, the context or a
            chunk is empty, or the supporting facts are missing or not in the context.
    """
    record_id = fields.text(fields.present(record, "_id", "id"), "_id")
    question = fields.text(fields.present(record, "question"), "question")
    paragraphs = _paragraphs(fields.present(record, "context"))
    if not paragraphs:
        raise BadRecord("no chunks")
    answers = fields.answers(record)
    position: dict[str, int] = {}
    for place, (title, _) in enumerate(paragraphs):
        position.setdefault(title, place)
    support = []
    for title, _ in _supporting_facts(record):
        if title not in position:
            raise BadRecord("support title not in the context")
        support.append(position[title])
    chunks = [_chunk(title, sentences) for title, sentences in paragraphs]
    return fields.make_sample(
        source, record_id, question, chunks, support=support, answer_texts=answers
    )


def parse_open(record: dict[str, Any]) -> QueryQuestion:
    """Turns one record without a context into a question whose gold pages are known by title.

    Raises:
        BadRecord: a field is missing or has the wrong type, the id, the question or a title is
            empty, or the supporting facts are missing, or not as many as `gold_doc_ids` if these
            are there.
    """
    record_id = fields.text(fields.present(record, "_id", "id"), "_id")
    question = fields.text(fields.present(record, "question"), "question")
    answers = fields.answers(record)
    titles = [title for title, _ in _supporting_facts(record)]
    ids = fields.texts(record.get("gold_doc_ids") or [], "gold_doc_ids")
    return fields.make_question(record_id, question, answers, titles=titles, ids=ids)


def mended(record: dict[str, Any]) -> str:
    """A harmless fault of a record that `parse` accepts; "" if it has none."""
    sizes: dict[str, int] = {}
    for title, sentences in _paragraphs(fields.present(record, "context")):
        sizes.setdefault(title, len(sentences))
    facts = _supporting_facts(record)
    sound = all(sentence is None or 0 <= sentence < sizes[title] for title, sentence in facts)
    return "" if sound else "sentence index out of range, paragraph kept"


def to_record(
    record_id: str,
    question: str,
    answer: str,
    paragraphs: Sequence[Paragraph],
    support: Sequence[int],
) -> dict[str, Any]:
    """Makes a record in the official layout; each supporting fact is a paragraph's first sentence.

    Args:
        record_id: id, unique in its file.
        question: question text.
        answer: answer text, may be empty.
        paragraphs: (title, sentences) in document order, with distinct titles and at least one
            sentence each.
        support: positions in `paragraphs`.

    Raises:
        ValueError: two paragraphs have the same title, but the layout refers to them by title.
    """
    titles = [title for title, _ in paragraphs]
    if len(set(titles)) < len(titles):
        raise ValueError("paragraph titles must be distinct")
    return {
        "_id": record_id,
        "question": question,
        "answer": answer,
        "supporting_facts": [[titles[place], 0] for place in support],
        "context": [[title, list(sentences)] for title, sentences in paragraphs],
    }


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
    pairs: list[tuple[str, int | None]] = []
    for fact in fields.items(facts, "supporting_facts"):
        if not isinstance(fact, list) or len(fact) != 2:
            raise BadRecord("field 'supporting_facts' is not a list of [title, sentence index]")
        title = fields.text(fact[0], "supporting_facts title")
        pairs.append((title, fields.index(fact[1], "supporting_facts sentence index")))
    return pairs
