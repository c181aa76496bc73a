"""The table of data sets, and how their records become samples.

HotpotQA and 2WikiMultiHopQA: in the official files, `context` is `[[title, [sentence, ...]], ...]`
and `supporting_facts` is `[[title, sentence index], ...]`. The hub's copies have the same data as
columns: `{"title": [...], "sentences": [[...], ...]}` and `{"title": [...], "sent_id": [...]}`. A
third form has only the titles of the supporting facts: `supporting_titles` is `[title, ...]`.
Questions over a corpus have no `context`, and perhaps `gold_doc_ids`, the ids of their pages there.

HoVer (Jiang et al., Findings of EMNLP 2020) has claims that up to four pages support or do not:
`uid`, `claim`, `label`, and `supporting_facts` as above or, on the hub, as
`[{"key": title, "value": sentence index}, ...]`. It has no passages.

Data of your own, in a neutral schema, are records with
- `question`: a text;
- `chunks`: a list of texts, the passages to choose from, in document order;
- `support`: a list of whole numbers, the places in `chunks` (from 0) of the passages that are
  needed; optional;
- `answers`: a list of texts, or one text: the right answer, then other ways to say it; optional.
  One of `support` and `answers` must be there;
- `id`: a text or a whole number, unique; optional;
- `hops`: the question taken apart, for HARR's scripted agent; optional (`data.decompositions`).

Other names of these fields are set by `Columns`. In a table (CSV) a list is written as JSON in one
cell: `["first passage", "second passage"]`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from qrag_jax.data import decompositions, fields
from qrag_jax.data.fields import Mend, ignore
from qrag_jax.data.noise import sentences_of
from qrag_jax.data.sample import BadRecord, Page, Sample, Split, SubQuestion
from qrag_jax.errors import InputError
from qrag_jax.runtime.retriever_config import passage_text

MUSIQUE, TITLE_SEPARATOR = "musique", ". "  # between title and text of MuSiQue's chunks
NIAH, OWN, BABILONG = "niah", "own", "babilong"

# ---------------------------------------------------------------- HotpotQA, 2Wiki, HoVer


def parse_titled(record: dict[str, Any], mend: Mend = ignore, *, source: str) -> Sample:
    """One record of titled paragraphs; a chunk is `title + " " + sentences`.

    Only the paragraph of a supporting fact matters: a sentence index outside the paragraph is
    accepted, as a harmless fault. If two paragraphs have the same title, the first one counts.
    """
    asked, paragraphs = _asked(record), _paragraphs(fields.present(record, "context"))
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
    chunks = [
        passage_text(title, " ".join(part.strip() for part in sentences if part.strip()))
        for title, sentences in paragraphs
    ]
    titles = [title for title, _ in paragraphs]
    sample = fields.make_sample(source, *asked, chunks=chunks, support=support, titles=titles)
    if not sound:
        mend("sentence index out of range, paragraph kept")
    return sample


def parse_open(record: dict[str, Any], mend: Mend = ignore, *, source: str = "") -> Sample:
    """One record without a context, whose gold pages are known by title."""
    asked, titles = _asked(record), [title for title, _ in _supporting_facts(record)]
    ids = fields.texts(record.get("gold_doc_ids") or [], "gold_doc_ids")
    return fields.make_sample(source, *asked, pages=_pages(titles, ids))


# HoVer's labels; the hub's copies have numbers.
_ANSWERS: dict[Any, str] = {"SUPPORTED": "yes", "NOT_SUPPORTED": "no", 1: "yes", 0: "no"}


def parse_claim(record: dict[str, Any], mend: Mend = ignore) -> Sample:
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
    return fields.make_sample("", record_id, question, (_ANSWERS[label],), pages=_pages(titles))


def _asked(record: dict[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    record_id = fields.text(fields.present(record, "_id", "id"), "_id")
    question = fields.text(fields.present(record, "question"), "question")
    return record_id, question, fields.answers(record)


def _pages(titles: Sequence[str], ids: Sequence[str] = ()) -> list[Page]:
    """The pages of these titles, each once; `ids` are those of the different pages."""
    distinct = list(dict.fromkeys(title.strip() for title in titles))
    if ids and len(ids) != len(distinct):
        raise BadRecord("gold_doc_ids has not as many ids as there are supporting titles")
    return [Page(title, id=name) for title, name in zip(distinct, ids or [""] * len(distinct))]


def _columns(value: Any, name: str, *parts: str) -> Any:
    """A list of lists; the hub's copies have it as an object of columns."""
    if not isinstance(value, dict):
        return value
    columns = [fields.items(fields.present(value, part), f"{name}.{part}") for part in parts]
    if len(set(map(len, columns))) > 1:
        raise BadRecord(f"field '{name}' has columns of different lengths")
    return [list(row) for row in zip(*columns)]


def _paragraphs(context: Any) -> list[tuple[str, Sequence[str]]]:
    paragraphs: list[tuple[str, Sequence[str]]] = []
    for pair in fields.items(_columns(context, "context", "title", "sentences"), "context"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRecord("field 'context' is not a list of [title, sentences]")
        title = fields.text(pair[0], "context title")
        paragraphs.append((title, fields.texts(pair[1], "context sentences")))
    return paragraphs


def _supporting_facts(record: dict[str, Any]) -> list[tuple[str, int | None]]:
    """Returns pairs (title, sentence index); the index is None if only titles are known."""
    name = "supporting_facts"
    if record.get(name) is None and record.get("supporting_titles") is not None:
        titles = fields.texts(record["supporting_titles"], "supporting_titles")
        return [(title, None) for title in titles]
    facts = _columns(fields.present(record, name), name, "title", "sent_id")
    return [_titled_index(fact) for fact in fields.items(facts, name)]


def _titled_index(fact: Any) -> tuple[str, int]:
    if not isinstance(fact, list) or len(fact) != 2:
        raise BadRecord("field 'supporting_facts' is not a list of [title, sentence index]")
    title = fields.text(fact[0], "supporting_facts title")
    return title, fields.index(fact[1], "supporting_facts sentence index")


# ---------------------------------------------------------------- MuSiQue


def parse_musique(record: dict[str, Any], mend: Mend = ignore) -> Sample:
    """One record of MuSiQue-Ans (Trivedi et al., TACL 2022).

    The supporting facts are the paragraphs whose `idx` is named by a step of
    `question_decomposition`. Without a decomposition, they are those marked `is_supporting`.
    """
    answerable = record.get("answerable", True)
    if not isinstance(answerable, bool):
        raise BadRecord("field 'answerable' is not true or false")
    if not answerable:
        raise BadRecord("not answerable")
    record_id = fields.text(fields.present(record, "id"), "id")
    question = fields.text(fields.present(record, "question"), "question")
    paragraphs = fields.objects(fields.present(record, "paragraphs"), "paragraphs")
    if not paragraphs:
        raise BadRecord("no chunks")
    answers = fields.answers(record)
    titles = [fields.text(fields.present(each, "title"), "title") for each in paragraphs]
    texts = [
        fields.text(fields.present(each, "paragraph_text"), "paragraph_text") for each in paragraphs
    ]
    return fields.make_sample(
        MUSIQUE,
        record_id,
        question,
        answers,
        chunks=[passage_text(*pair, TITLE_SEPARATOR) for pair in zip(titles, texts)],
        support=_musique_support(record, paragraphs),
        titles=titles,
    )


def _musique_support(record: dict[str, Any], paragraphs: list[dict[str, Any]]) -> list[int]:
    """Returns the positions of the supporting paragraphs; `idx` may differ from the position."""
    name = "question_decomposition"
    steps = fields.objects(record.get(name) or [], name)
    if not steps:
        return [i for i, each in enumerate(paragraphs) if each.get("is_supporting") is True]
    position = {
        fields.index(fields.present(paragraph, "idx"), "idx"): place
        for place, paragraph in enumerate(paragraphs)
    }
    if len(position) < len(paragraphs):
        raise BadRecord("two paragraphs have one idx")
    support = []
    for step in steps:
        named = fields.present(step, "paragraph_support_idx")
        place = position.get(fields.index(named, "paragraph_support_idx"))
        if place is None:
            raise BadRecord("support index out of range")
        support.append(place)
    return support


# ---------------------------------------------------------------- RULER's needles

# The last sentence of the instruction in RULER's prompt; the text begins after it.
_INSTRUCTION = "I will quiz you about"


def parse_niah(record: dict[str, Any], mend: Mend = ignore) -> Sample:
    """One record of RULER (Hsieh et al., 2024): chunks are sentences, answers all outputs.

    Two layouts are read:
    - RULER's own: `input` is the instruction, the text, the question and perhaps the beginning of
      an answer. It is split into sentences.
    - Already split: `sentences`, and the question in `input_suffix`.

    The supporting facts are the sentences whose indices are in `supporting`. Without this field,
    they are the sentences that contain one of the `outputs`.
    """
    outputs = fields.texts(fields.present(record, "outputs"), "outputs")
    if record.get("sentences") is not None:
        chunks = fields.texts(record["sentences"], "sentences")
        suffix = fields.text(fields.present(record, "input_suffix"), "input_suffix")
        line = next((line for line in reversed(suffix.split("\n")) if line.strip()), "")
        head, mark, _ = line.rpartition("?")  # without the beginning of an answer
        question = (head + mark if mark else line).strip()
    else:
        chunks, question = _split_prompt(fields.text(fields.present(record, "input"), "input"))
    if not chunks:
        raise BadRecord("no chunks")
    if record.get("supporting") is not None:
        places = fields.items(record["supporting"], "supporting")
        support = [fields.index(place, "supporting") for place in places]
        if not all(0 <= place < len(chunks) for place in support):
            raise BadRecord("support index out of range")
    else:
        support = _holding(chunks, outputs)
    answers = tuple(dict.fromkeys(each.strip() for each in outputs if each.strip()))
    if record.get("id") is not None:
        name = fields.text(record["id"], "id")
    else:
        task = fields.text(record.get("task") or NIAH, "task")
        name = f"{task}-{fields.index(fields.present(record, 'index'), 'index')}"
    return fields.make_sample(NIAH, name, question, answers, chunks=chunks, support=support)


def _split_prompt(prompt: str) -> tuple[list[str], str]:
    """The sentences of the text in a prompt, and the question at its end."""
    # RULER separates sentences by line breaks, except those that it takes from essays.
    sentences = [text for line in prompt.split("\n") for text in sentences_of(line)]
    asked = [place for place, text in enumerate(sentences) if text.endswith("?")]
    if not asked:
        raise BadRecord("no question")
    said = [place for place, text in enumerate(sentences[:5]) if _INSTRUCTION in text]
    return sentences[said[-1] + 1 if said else 0 : asked[-1]], sentences[asked[-1]]


def _holding(chunks: Sequence[str], outputs: Sequence[str]) -> list[int]:
    """The indices of the chunks that contain an output as a separate word."""
    found = []
    for output in outputs:
        pattern = re.compile(rf"(?<![\w-]){re.escape(output)}(?![\w-])")
        holding = [place for place, chunk in enumerate(chunks) if pattern.search(chunk)]
        if not holding:
            raise BadRecord("an expected output is in no sentence")
        found += holding
    return found


# ---------------------------------------------------------------- data of your own

NEEDED = ("question", "chunks")


@dataclasses.dataclass(frozen=True)
class Columns:
    """Section `data.columns`: what the fields of your own data are called."""

    question: str = "question"  # the field with the question, a text
    chunks: str = "chunks"  # with the passages, a list of texts
    support: str = "support"  # with the places of the needed passages, from 0; "": not read
    answers: str = "answers"  # with the right answers, a list of texts or one text; "": not read
    id: str = "id"  # with the record's own id; "": not read. Without one, an id is made

    def __post_init__(self) -> None:
        for field in NEEDED:
            if not getattr(self, field):
                raise InputError(
                    f"config.data.columns.{field} is empty; give the name of the field with the "
                    f"{field}."
                )
        names = list(filter(None, dataclasses.astuple(self)))
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(
                f"config.data.columns has {twice[0]!r} for two fields; give each its own name."
            )

    @classmethod
    def parse(cls, text: str) -> Columns:
        """The columns as a flag has them, such as "question=query,chunks=passages"."""
        known = [field.name for field in dataclasses.fields(cls)]
        return cls(**fields.named_columns(text, known, known))

    def renamed(self) -> dict[str, str]:
        """Optional fields that have another name than usual, and that name."""
        return {
            field.name: name
            for field in dataclasses.fields(self)
            if field.name not in NEEDED and (name := getattr(self, field.name)) != field.default
            if name
        }

    def check(self, names: Mapping[str, str], where: str, record: Mapping[str, Any]) -> None:
        """Refuses a record without these columns, {field: name}."""
        for field, name in names.items():
            if name not in record:
                there = ", ".join(map(repr, record)) or "none"
                raise InputError(
                    f"{where}: there is no field {name!r} with the {field}, only {there}; name it "
                    f"with --config.data.columns.{field}=NAME (validate_data: "
                    f"--columns={field}=NAME)."
                )


USUAL = Columns()


def parse_own(record: dict[str, Any], mend: Mend = ignore, columns: Columns = USUAL) -> Sample:
    """One record of data of your own."""
    question = fields.text(fields.present(record, columns.question), columns.question)
    listed = _listed(fields.present(record, columns.chunks), columns.chunks)
    chunks = fields.texts(listed, columns.chunks)
    if not chunks:
        raise BadRecord(f"field '{columns.chunks}' has no chunk")
    # What is not read has the name "", which no record has.
    places = _listed(record.get(columns.support) or [], columns.support)
    support = [fields.index(each, columns.support) for each in places]
    if not all(0 <= place < len(chunks) for place in support):
        raise BadRecord(f"field '{columns.support}' has an index out of range (they begin at 0)")
    answers = _own_answers(record.get(columns.answers), columns.answers)
    if not support and not answers:
        raise BadRecord(
            f"neither '{columns.support or 'support'}' nor '{columns.answers or 'answers'}' says "
            "anything"
        )
    name = record.get(columns.id)
    if name is None:
        content = json.dumps([question, chunks])  # ASCII: half surrogate pairs are refused later
        name = f"own-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    return fields.make_sample(
        OWN,
        fields.identifier(name, columns.id),
        question,
        answers,
        chunks=chunks,
        support=support,
        needs_support=False,
    )


def _listed(value: Any, name: str) -> list[Any]:
    """A list, or a text that is one in JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRecord(f'field \'{name}\' is no JSON list, such as ["a", "b"]') from None
    return fields.items(value, name)


def _own_answers(value: Any, name: str) -> tuple[str, ...]:
    """Distinct answers that are not empty; a text that begins with `[` must be a JSON list."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        value = [value]
    listed = fields.texts(_listed([] if value is None else value, name), name)
    return tuple(dict.fromkeys(each.strip() for each in listed if each.strip()))


def neutral_record(sample: Sample) -> dict[str, Any]:
    """A sample of any source as a record of the neutral schema, without what is not known."""
    record: dict[str, Any] = {
        "id": sample.id,
        "question": sample.question,
        "chunks": list(sample.chunks),
    }
    if sample.support:
        record["support"] = list(sample.support)
    if sample.answers:
        joined = [", ".join(sample.answers)]
        record["answers"] = joined if sample.needs_all else list(sample.answers)
    return record


# ---------------------------------------------------------------- the table


class Hub(NamedTuple):
    """A data set of the hub; `splits` are its names of ours."""

    repo: str
    config: str | None
    splits: Mapping[Split, str]


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set. A new one is a row in `SOURCES` and a parser.

    Attributes:
        hops: a record and its answers → the sub-questions, or it raises BadRecord; None: it has
            no decompositions.
    """

    parse: Callable[..., Sample]
    official: Mapping[Split, tuple[str, ...]]
    folders: tuple[str, ...]  # names of its folder in a parent folder that sources share
    hub: Hub | None = None  # None: it is not on the hub by itself
    rule: str = "squad"  # how answers are scored, a name in `metrics.answers.RULES`
    hops: Callable[[dict[str, Any], Sequence[str]], tuple[SubQuestion, ...]] | None = None


HUB_SPLITS: Mapping[Split, str] = {"train": "train", "dev": "validation"}
SOURCES: dict[str, Source] = {
    # Distractor setting (Yang et al., EMNLP 2018).
    "hotpotqa": Source(
        partial(parse_titled, source="hotpotqa"),
        {"train": ("hotpot_train_v1.1.json",), "dev": ("hotpot_dev_distractor_v1.json",)},
        ("hotpotqa",),
        Hub("hotpotqa/hotpot_qa", "distractor", HUB_SPLITS),
        "hotpotqa",
    ),
    MUSIQUE: Source(
        parse_musique,
        {"train": ("musique_ans_v1.0_train.jsonl",), "dev": ("musique_ans_v1.0_dev.jsonl",)},
        ("musique",),
        Hub("dgslibisey/MuSiQue", None, HUB_SPLITS),
        "musique",
        decompositions.of_musique,
    ),
    # 2WikiMultiHopQA (Ho et al., COLING 2020). The authors' copy needs a loading script, which
    # `datasets` no longer runs. This copy has the same splits in HotpotQA's hub layout.
    "two_wiki": Source(
        partial(parse_titled, source="two_wiki"),
        {"train": ("train.json",), "dev": ("dev.json",)},
        ("two_wiki", "2wikimultihopqa"),
        Hub("framolfese/2WikiMultihopQA", None, HUB_SPLITS),
        "hotpotqa",
        decompositions.of_two_wiki,
    ),
    # RULER publishes a generator, not data; "validation" is the name that it uses.
    NIAH: Source(
        parse_niah,
        {"train": ("train.jsonl",), "dev": ("validation.jsonl",)},
        ("niah", "ruler_niah"),
        rule="ruler",
    ),
    OWN: Source(
        parse_own,
        {"train": ("train.jsonl",), "dev": ("dev.jsonl",)},
        (OWN,),
        hops=decompositions.of_own,
    ),
}
# Data sets whose questions bring no passages: for query writers, who search a corpus.
OPEN_SOURCES: dict[str, Source] = {
    "hover": Source(
        parse_claim,
        {"train": ("hover_train_release_v1.1.json",), "dev": ("hover_dev_release_v1.1.json",)},
        ("hover",),
    )
}


def answer_rule(source: str) -> str:
    """The rule by which answers of a source are scored; SQuAD's for data of one's own."""
    if source == BABILONG:
        return source
    return SOURCES[source].rule if source in SOURCES else "squad"


def parse_by_layout(record: dict[str, Any], mend: Mend = ignore, *, source: str = "") -> Sample:
    """One record of any source; where `source` names none, its layout tells what it is."""
    if source == "hover" or "claim" in record:
        return parse_claim(record)
    if source not in (OWN, NIAH):
        if record.get("paragraphs") is None and record.get("context") is None:
            if "question" not in record:
                raise BadRecord("neither 'question' nor 'claim'")
            return parse_open(record, source=source)
        if source not in SOURCES:
            source = MUSIQUE if "paragraphs" in record else "hotpotqa"
    sample = SOURCES[source].parse(record, mend)
    if not sample.support:  # of one's own data; rewards here are of supporting passages
        raise BadRecord("no supporting facts")
    return sample
