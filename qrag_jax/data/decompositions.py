"""Takes records apart: the sub-questions that lead to an answer, with the answer of each.

MuSiQue and 2WikiMultiHopQA come with their decompositions, and data of one's own may (`hops`). An
agent that follows one needs no language model (`environments.rag`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from qrag_jax.data import fields
from qrag_jax.data.sample import BadRecord, SubQuestion, has_slot, letters

_RELATION = re.compile(r"\s*>>\s*")  # MuSiQue: "Valotte >> performer"
_PREPOSITIONS = ("after", "at", "by", "from", "in", "of", "on", "to", "with")
_VERBS = ("located", "follows", "crosses")
_SHORTEST_ALIAS = 4  # letters and digits
_NAMESAKE = re.compile(r"\s*\([^()]*\)$")  # 2Wiki: "Jon Hall (actor)"


def of_musique(record: dict[str, Any], final: Sequence[str]) -> tuple[SubQuestion, ...]:
    """The hops of a record of MuSiQue, as its `question_decomposition` does.

    A step such as "Valotte >> performer" becomes "What is the performer of Valotte?", and
    "#1 >> owned by" becomes "#1 owned by what?".
    """
    name, hops = "question_decomposition", []
    for step in fields.objects(fields.present(record, name), name):
        text = fields.text(fields.present(step, "question"), "sub-question").strip()
        answer = fields.text(fields.present(step, "answer"), "sub-answer").strip()
        parts = _RELATION.split(text)
        if len(parts) == 2 and all(parts):
            text = _asked(*parts)
        same = letters(answer) in map(letters, final)
        hops.append(SubQuestion(text, _forms([answer], final if same else ())))
    return tuple(hops)


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
        return by_id or letters(later.subject) in map(letters, self.objects)


def of_two_wiki(record: dict[str, Any], final: Sequence[str]) -> tuple[SubQuestion, ...]:
    """The hops of a record of 2WikiMultiHopQA, by its `evidences`.

    Each triple (subject, relation, object) is a hop, "What is the RELATION of SUBJECT?". A subject
    that is the object of an earlier triple becomes a slot: it has the same Wikidata id or the same
    name. If it has neither (the data may name a person in two ways), the order of the triples is
    what counts: the second follows the first, and in a bridge comparison the third follows the
    first, and the fourth the second. Triples with the same subject and relation are one hop with
    several answers.
    """
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
        elif has_slot(fact.subject):
            raise BadRecord("a name looks like the place of an answer")
        subject = fact.subject if bridge is None else f"#{bridge + 1}"
        texts.append(_asked(subject, fact.relation))
    if chain and facts:
        aliases[-1] += tuple(final)
    forms = [_forms(fact.objects, more) for fact, more in zip(facts, aliases)]
    return tuple(map(SubQuestion, texts, forms))


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


def of_own(record: dict[str, Any], final: Sequence[str]) -> tuple[SubQuestion, ...]:
    """The hops of a record of one's own data: `hops`, `[{"question", "answers"}, ...]`."""
    hops = []
    for hop in fields.objects(fields.present(record, "hops"), "hops"):
        text = fields.text(fields.present(hop, "question"), "sub-question").strip()
        answers = fields.texts(fields.present(hop, "answers"), "sub-answers")
        hops.append(SubQuestion(text, tuple(answers)))
    return tuple(hops)


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
    long = [alias for alias in aliases if len(letters(alias)) >= _SHORTEST_ALIAS]
    forms: dict[str, str] = {}
    for form in (*answers, *long):
        forms.setdefault(form.strip().casefold(), form.strip())
    return tuple(forms.values())


def _triples(value: Any, name: str) -> list[tuple[str, str, str]]:
    triples = [fields.texts(triple, name) for triple in fields.items(value, name)]
    if any(len(triple) != 3 for triple in triples):
        raise BadRecord(f"field '{name}' is not a list of triples")
    return [(triple[0], triple[1], triple[2]) for triple in triples]
