"""Questions taken apart: the sub-questions that lead to an answer, with the answer of each.

MuSiQue and 2WikiMultiHopQA come with their decompositions, and data of one's own may (`hops`). An
agent that follows one needs no language model (`environments.rag.scripted`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from qrag_jax.data.sample import BadRecord, Split
from qrag_jax.data.sources import fields, musique, own
from qrag_jax.data.sources.registry import ReadReport, read_source
from qrag_jax.errors import InputError

_SLOT = re.compile(r"#([1-9][0-9]?)(?![0-9])")
_RELATION = re.compile(r"\s*>>\s*")  # MuSiQue: "Valotte >> performer"
_PREPOSITIONS = ("after", "at", "by", "from", "in", "of", "on", "to", "with")
_VERBS = ("located", "follows", "crosses")
_SHORTEST_ALIAS = 4  # letters and digits
_NAMESAKE = re.compile(r"\s*\([^()]*\)$")  # 2Wiki: "Jon Hall (actor)"


@dataclasses.dataclass(frozen=True, slots=True)
class SubQuestion:
    """One hop: a question, and all forms of its answer.

    Attributes:
        text: the question; `#1` stands for the answer of the first hop.
        answers: the answer and its other forms, one at least.
    """

    text: str
    answers: tuple[str, ...]

    @property
    def needs(self) -> tuple[int, ...]:
        """Positions of the earlier hops whose answers the question needs, sorted."""
        return tuple(sorted({int(number) - 1 for number in _SLOT.findall(self.text)}))

    def filled(self, answers: Sequence[str]) -> str:
        """The question with the answers of the earlier hops, `[hop]`, in their slots."""
        return _SLOT.sub(lambda slot: answers[int(slot[1]) - 1], self.text)


@dataclasses.dataclass(frozen=True, slots=True)
class Decomposition:
    """A question taken apart.

    Attributes:
        hops: the sub-questions in the order in which they can be asked.
        answers: the answer of the whole question and its other forms. In a chain, the answer of the
            last hop is one of them; in a comparison, the answers of all hops decide which it is.
    """

    hops: tuple[SubQuestion, ...]
    answers: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.hops:
            raise BadRecord("no decomposition")
        if not self.answers:
            raise BadRecord("no answer")
        for place, hop in enumerate(self.hops):
            if not hop.text.strip():
                raise BadRecord("empty sub-question")
            if not hop.answers or not all(map(_letters, hop.answers)):
                raise BadRecord("sub-answer without a word")
            if any(needed >= place for needed in hop.needs):
                raise BadRecord("sub-question needs a later answer")


def of_musique(record: dict[str, Any]) -> Decomposition:
    """Takes a record of MuSiQue apart, as its `question_decomposition` does.

    A step such as "Valotte >> performer" becomes "What is the performer of Valotte?", and
    "#1 >> owned by" becomes "#1 owned by what?".
    """
    final = fields.answers(record)
    steps = fields.items(fields.present(record, "question_decomposition"), "question_decomposition")
    hops = []
    for step in steps:
        if not isinstance(step, dict):
            raise BadRecord("field 'question_decomposition' is not a list of objects")
        text = fields.text(fields.present(step, "question"), "sub-question").strip()
        answer = fields.text(fields.present(step, "answer"), "sub-answer").strip()
        parts = _RELATION.split(text)
        if len(parts) == 2 and all(parts):
            text = _asked(*parts)
        same = _letters(answer) in map(_letters, final)
        hops.append(SubQuestion(text, _forms([answer], final if same else ())))
    return Decomposition(tuple(hops), final)


@dataclasses.dataclass
class _Fact:
    """What 2WikiMultiHopQA knows of one subject and relation."""

    subject: str
    relation: str
    subject_id: str
    objects: list[str]
    object_ids: list[str]

    def leads_to(self, later: _Fact) -> bool:
        """Whether the other fact is about an object of this one, by Wikidata id or by name."""
        by_id = later.subject_id != "" and later.subject_id in self.object_ids
        return by_id or _letters(later.subject) in map(_letters, self.objects)


def of_two_wiki(record: dict[str, Any]) -> Decomposition:
    """Takes a record of 2WikiMultiHopQA apart, by its `evidences`.

    Each triple (subject, relation, object) is a hop, "What is the RELATION of SUBJECT?". A subject
    that is the object of an earlier triple becomes a slot: it has the same Wikidata id or the same
    name. If it has neither (the data may name a person in two ways), the order of the triples is
    what counts: the second follows the first, and in a bridge comparison the third follows the
    first, and the fourth the second. Triples with the same subject and relation are one hop with
    several answers.
    """
    final = fields.answers(record)
    chain = fields.text(fields.present(record, "type"), "type") in ("compositional", "inference")
    facts = _facts(record)
    aliases: list[tuple[str, ...]] = [() for _ in facts]
    texts = []
    for place, fact in enumerate(facts):
        bridge = next((i for i in range(place) if facts[i].leads_to(fact)), None)
        if bridge is None and chain and place:
            bridge = place - 1
        if bridge is None and record["type"] == "bridge_comparison" and 2 <= place < 4:
            bridge = place - 2
        if bridge is not None:  # passages may use either name
            aliases[bridge] += (_NAMESAKE.sub("", fact.subject),)
        elif _SLOT.search(fact.subject):
            raise BadRecord("a name looks like the place of an answer")
        subject = fact.subject if bridge is None else f"#{bridge + 1}"
        texts.append(_asked(subject, fact.relation))
    if chain and facts:
        aliases[-1] += final
    forms = [_forms(fact.objects, more) for fact, more in zip(facts, aliases)]
    return Decomposition(tuple(map(SubQuestion, texts, forms)), final)


def _facts(record: dict[str, Any]) -> list[_Fact]:
    triples = _triples(fields.present(record, "evidences"), "evidences")
    ids = _triples(record.get("evidences_id") or [], "evidences_id")
    if len(ids) != len(triples):  # comparisons of dates and numbers have none
        ids = [("", "", "")] * len(triples)
    facts: dict[tuple[str, str], _Fact] = {}
    for (subject, relation, found), (subject_id, _, found_id) in zip(triples, ids):
        fact = facts.setdefault((subject, relation), _Fact(subject, relation, subject_id, [], []))
        fact.objects.append(found)
        fact.object_ids.append(found_id)
    return list(facts.values())


def of_own(record: dict[str, Any], columns: own.Columns) -> Decomposition:
    """Takes a record of one's own data apart: `hops`, `[{"question", "answers"}, ...]`."""
    hops = []
    for hop in fields.items(fields.present(record, "hops"), "hops"):
        if not isinstance(hop, dict):
            raise BadRecord("field 'hops' is not a list of objects")
        text = fields.text(fields.present(hop, "question"), "sub-question").strip()
        answers = fields.texts(fields.present(hop, "answers"), "sub-answers")
        hops.append(SubQuestion(text, tuple(answers)))
    return Decomposition(tuple(hops), own.parse(record, columns=columns).answers)


KNOWN = (musique.NAME, "two_wiki", own.NAME)  # sources


def read(
    source: str, path: str, split: Split, columns: own.Columns | None = None
) -> tuple[dict[str, Decomposition], ReadReport]:
    """Reads the decompositions of one split of one of the sources `KNOWN`; see `load_samples`.

    Returns:
        Decompositions by the records' ids, and the report of the records that have none.
    """
    columns = columns or own.USUAL
    names, records = read_source(source, path, split, columns)
    report = ReadReport(source, names)
    found: dict[str, Decomposition] = {}
    for where, record in records:
        report.read += 1
        try:
            if source == own.NAME:
                name = own.parse(record, columns=columns).id
                apart = of_own(record, columns)
            else:
                name = fields.text(fields.present(record, "_id", "id"), "id")
                apart = (of_musique if source == musique.NAME else of_two_wiki)(record)
            if name in found:
                raise BadRecord("duplicate id")
            found[name] = apart
        except BadRecord as bad:
            report.skip(str(bad), where)
    report.kept = len(found)
    if not found:
        reason, where = next(iter(report.first.items()), ("no record", "no file"))
        raise InputError(
            f"{', '.join(names)} has no {source} record with a decomposition among "
            f"{report.read} (the first is {where}: {reason}); give {source} data"
        )
    return found, report


def _asked(subject: str, relation: str) -> str:
    """A question for the object of a Wikidata relation, which is a noun or part of a sentence."""
    words = relation.split()
    if not words or not subject.strip():
        raise BadRecord("a triple without subject or relation")
    if words[0] in _VERBS or words[-1] in _PREPOSITIONS:
        return f"{subject} {relation} what?"
    return f"What is the {relation} of {subject}?"


def _forms(answers: Iterable[str], aliases: Iterable[str]) -> tuple[str, ...]:
    """The answers, and the aliases that are long enough to be found in a text.

    Norway has the alias "NO", which almost every passage contains.
    """
    long = [alias for alias in aliases if len(_letters(alias)) >= _SHORTEST_ALIAS]
    forms: dict[str, str] = {}
    for form in (*answers, *long):
        forms.setdefault(form.strip().casefold(), form.strip())
    return tuple(forms.values())


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def _triples(value: Any, name: str) -> list[tuple[str, str, str]]:
    triples = [fields.texts(triple, name) for triple in fields.items(value, name)]
    if any(len(triple) != 3 for triple in triples):
        raise BadRecord(f"field '{name}' is not a list of triples")
    return [(triple[0], triple[1], triple[2]) for triple in triples]
