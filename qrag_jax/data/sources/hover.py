"""HoVer (Jiang et al., Findings of EMNLP 2020): claims that up to four pages support or do not.

An official record has `uid`, `claim`, `label`, `num_hops`, `hpqa_id` (the question of HotpotQA that
the claim comes from), and `supporting_facts` as `[[title, sentence index], ...]`. The hub's copies
have `[{"key": title, "value": sentence index}, ...]` and numbers for labels. There are no passages:
gold pages are known by their titles, so this is no source of `Sample`s, but of query writers' only.
"""

from __future__ import annotations

from typing import Any

from qrag_jax.data.sample import BadRecord, QueryQuestion
from qrag_jax.data.sources import fields

NAME = "hover"
FOLDERS: tuple[str, ...] = ("hover",)
OFFICIAL: dict[str, tuple[str, ...]] = {
    "train": ("hover_train_release_v1.1.json",),
    "dev": ("hover_dev_release_v1.1.json",),
}
YES, NO = "yes", "no"
_ANSWERS: dict[Any, str] = {"SUPPORTED": YES, "NOT_SUPPORTED": NO, 1: YES, 0: NO}


def parse(record: dict[str, Any]) -> QueryQuestion:
    """Turns one official or hub record into a question that is answered by yes or no.

    Raises:
        BadRecord: a field is missing or has the wrong type, the id or the claim is empty, the label
            is unknown, or there are no supporting facts, as in the test split.
    """
    record_id = fields.text(fields.present(record, "uid"), "uid")
    claim = fields.text(fields.present(record, "claim"), "claim").strip()
    if not claim:
        raise BadRecord("empty claim")
    titles = _titles(record)
    label = fields.present(record, "label")
    if isinstance(label, bool) or not isinstance(label, str | int) or label not in _ANSWERS:
        raise BadRecord("field 'label' is neither SUPPORTED nor NOT_SUPPORTED")
    return fields.make_question(record_id, question_of(claim), (_ANSWERS[label],), titles=titles)


def question_of(claim: str) -> str:
    """The question whether a claim is right."""
    return f"Is the following claim supported: {claim.rstrip(' .?')}?"


def _titles(record: dict[str, Any]) -> list[str]:
    titles = []
    for fact in fields.items(record.get("supporting_facts") or [], "supporting_facts"):
        if isinstance(fact, dict):
            fact = [fact.get("key"), fact.get("value")]
        if not isinstance(fact, list) or len(fact) != 2:
            raise BadRecord("field 'supporting_facts' is not a list of [title, sentence index]")
        titles.append(fields.text(fact[0], "supporting_facts title"))
        fields.index(fact[1], "supporting_facts sentence index")
    return titles
