"""The table of data sets, and how their records become samples.

HotpotQA and 2WikiMultiHopQA: in the official files, `context` is `[[title, [sentence, ...]], ...]`
and `supporting_facts` is `[[title, sentence index], ...]`. The hub's copies have the same data as
columns: `{"title": [...], "sentences": [[...], ...]}` and `{"title": [...], "sent_id": [...]}`. A
third form has only `supporting_titles`, `[title, ...]`. Questions over a corpus have no `context`,
and perhaps `gold_doc_ids`, the ids of their pages there.

HoVer (Jiang et al., Findings of EMNLP 2020) has claims that up to four pages support or do not:
`uid`, `claim`, `label`, and `supporting_facts` as above or, on the hub, as
`[{"key": title, "value": sentence index}, ...]`. It has no passages.

Data of your own have the schema of docs/own_data.md, with names of fields by `Columns`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import sentencex

from qrag_jax.data import records
from qrag_jax.data.records import INDEX, ITEMS, OBJECTS, TEXT, TEXTS, checked, get
from qrag_jax.data.sample import BadRecord, Passage, Sample, Split, SubQuestion, letters
from qrag_jax.errors import Filled, InputError
from qrag_jax.runtime.retriever_config import passage_text

MUSIQUE, TITLE_SEPARATOR = "musique", ". "  # between title and text of MuSiQue's chunks
NIAH, OWN, BABILONG = "niah", "own", "babilong"
Record = dict[str, Any]


def _sample(
    source: str,
    record_id: str,
    question: str,
    answers: tuple[str, ...],
    *,
    chunks: Sequence[str] = (),
    support: Iterable[int] = (),
    titles: Sequence[str] = (),
    pages: Sequence[Passage] = (),
    fault: str = "",
) -> Sample:
    """The sample, if it can be trained on; a chunk that is named twice supports once."""
    question, support = question.strip(), tuple(dict.fromkeys(support))
    wrong = {
        "empty id": not record_id.strip(),
        "empty question": not question,
        "empty chunk": not all(map(str.strip, chunks)),
        "support index out of range": not all(0 <= place < len(chunks) for place in support),
        "no supporting facts": not support and not pages and source != OWN,
        "no chunks": not chunks and not pages,
        "empty title": not all(page.title for page in pages),
    }
    for reason, is_so in wrong.items():
        if is_so:
            raise BadRecord(reason)
    titles = tuple(map(str.strip, titles))
    return Sample(
        *(record_id, question, tuple(chunks), support, answers, source, titles, tuple(pages)),
        fault=fault,
    )


# ---------------------------------------------------------------- HotpotQA, 2Wiki, HoVer


def parse_titled(record: Record, *, source: str) -> Sample:
    """One record of titled paragraphs; a chunk is `title + " " + sentences`.

    A sentence index outside its paragraph is a harmless fault: only the paragraph matters. Of
    paragraphs with the same title, the first one counts.
    """
    asked = _asked(record)
    pairs = _pairs(records.present(record, "context"), "context", "title", "sentences")
    titles = checked([title for title, _ in pairs], TEXTS, "context title")
    texts = [checked(sentences, TEXTS, "context sentences") for _, sentences in pairs]
    position = dict(zip(reversed(titles), reversed(range(len(titles)))))
    support, sound = [], True
    for title, sentence in _facts(record):
        if title not in position:
            raise BadRecord("support title not in the context")
        support.append(position[title])
        sound &= sentence is None or 0 <= sentence < len(texts[position[title]])
    chunks = [
        passage_text(title, " ".join(filter(None, map(str.strip, sentences))))
        for title, sentences in zip(titles, texts)
    ]
    fault = "" if sound else "sentence index out of range, paragraph kept"
    return _sample(source, *asked, chunks=chunks, support=support, titles=titles, fault=fault)


def parse_open(record: Record, *, source: str = "") -> Sample:
    """One record without a context, whose gold pages are known by title."""
    titles = [title for title, _ in _facts(record)]
    ids = get(record, TEXTS, "gold_doc_ids", default=[])
    return _sample(source, *_asked(record), pages=_pages(titles, ids))


# HoVer's labels; the hub's copies have numbers.
_ANSWERS = {"SUPPORTED": "yes", "NOT_SUPPORTED": "no", "1": "yes", "0": "no"}


def parse_claim(record: Record) -> Sample:
    """One record of HoVer as a question that is answered by yes or no."""
    claim, label = get(record, TEXT, "claim").strip(), records.present(record, "label")
    if not claim:
        raise BadRecord("empty claim")
    if str(label) not in _ANSWERS:
        raise BadRecord("field 'label' is neither SUPPORTED nor NOT_SUPPORTED")
    question = f"Is the following claim supported: {claim.rstrip(' .?')}?"
    pages = _pages([title for title, _ in _facts(record)])
    return _sample("", get(record, TEXT, "uid"), question, (_ANSWERS[str(label)],), pages=pages)


def _asked(record: Record) -> tuple[str, str, tuple[str, ...]]:
    record_id, question = get(record, TEXT, "_id", "id"), get(record, TEXT, "question")
    return record_id, question, records.answers(record)


def _pages(titles: Sequence[str], ids: Sequence[str] = ()) -> list[Passage]:
    """The different pages of these titles, with their ids."""
    distinct = list(dict.fromkeys(title.strip() for title in titles))
    if ids and len(ids) != len(distinct):
        raise BadRecord("gold_doc_ids has not as many ids as there are supporting titles")
    ids = ids or [""] * len(distinct)
    return [Passage(name, title=title) for title, name in zip(distinct, ids)]


def _pairs(value: Any, name: str, *keys: str) -> list[Sequence[Any]]:
    """A list of pairs, which the hub's copies have as an object of columns, or as objects."""
    if isinstance(value, dict):
        columns = [get(value, ITEMS, key) for key in keys]
        if len(set(map(len, columns))) > 1:
            raise BadRecord(f"field '{name}' has columns of different lengths")
        value = [*map(list, zip(*columns))]
    pairs = checked(value, ITEMS, name)
    if pairs and isinstance(pairs[0], dict):
        pairs = [[pair.get("key"), pair.get("value")] for pair in checked(pairs, OBJECTS, name)]
    if {len(pair) if isinstance(pair, list) else 0 for pair in pairs} - {2}:
        raise BadRecord(f"field '{name}' is not a list of pairs ({', '.join(keys)})")
    return pairs


def _facts(record: Record) -> list[tuple[str, int | None]]:
    """Pairs (title, sentence index); the index is None if only titles are known."""
    name, titles = "supporting_facts", "supporting_titles"
    if record.get(name) is None and record.get(titles) is not None:
        return [(title, None) for title in get(record, TEXTS, titles)]
    pairs = _pairs(records.present(record, name), name, "title", "sent_id")
    titles = checked([title for title, _ in pairs], TEXTS, name)
    return [*zip(titles, (checked(place, INDEX, name) for _, place in pairs))]


# ---------------------------------------------------------------- MuSiQue


def parse_musique(record: Record) -> Sample:
    """One record of MuSiQue-Ans (Trivedi et al., TACL 2022).

    The supporting facts are the paragraphs whose `idx` is named by a step of
    `question_decomposition`. Without a decomposition, they are those marked `is_supporting`.
    """
    if record.get("answerable", True) is not True:
        raise BadRecord("not answerable")
    paragraphs = get(record, OBJECTS, "paragraphs")
    titles = [get(paragraph, TEXT, "title") for paragraph in paragraphs]
    texts = [get(paragraph, TEXT, "paragraph_text") for paragraph in paragraphs]
    if steps := get(record, OBJECTS, "question_decomposition", default=[]):
        position = {get(paragraph, INDEX, "idx"): i for i, paragraph in enumerate(paragraphs)}
        if len(position) < len(paragraphs):
            raise BadRecord("two paragraphs have one idx")
        name = "paragraph_support_idx"  # may differ from the position
        support = [position.get(get(step, INDEX, name), -1) for step in steps]
    else:
        support = [i for i, p in enumerate(paragraphs) if p.get("is_supporting") is True]
    chunks = [passage_text(*pair, TITLE_SEPARATOR) for pair in zip(titles, texts)]
    return _sample(MUSIQUE, *_asked(record), chunks=chunks, support=support, titles=titles)


# ---------------------------------------------------------------- RULER's needles

# The last sentence of the instruction in RULER's prompt; the text begins after it.
_INSTRUCTION = "I will quiz you about"
# The splitter treats a quotation as one sentence, so quotation marks are removed, and single ones
# at the end of a sentence, which would begin the next one. It must see no other single marks: after
# an elision ("'gan", "'tis") it would search pages for the closing mark.
_QUOTATION_MARKS = re.compile(r"""["“”]|(?<=[.!?])['’](?=["“”\s]|$)""")
_HIDDEN = str.maketrans("'‘’", "ʼʻʽ")
_SHOWN = str.maketrans("ʼʻʽ", "'‘’")


def parse_niah(record: Record) -> Sample:
    """One record of RULER (Hsieh et al., 2024): chunks are sentences, answers all outputs.

    In RULER's own layout, `input` is the instruction, the text, the question and perhaps the
    beginning of an answer. It may be split already: `sentences`, and `input_suffix` with the
    question. The supporting facts are the sentences `supporting`, or else those with an output.
    """
    outputs = get(record, TEXTS, "outputs")
    if record.get("sentences") is not None:
        chunks, suffix = get(record, TEXTS, "sentences"), get(record, TEXT, "input_suffix")
        line = next((line for line in reversed(suffix.split("\n")) if line.strip()), "")
        head, mark, _ = line.rpartition("?")  # without the beginning of an answer
        question = head + mark if mark else line
    else:
        chunks, question = _split_prompt(get(record, TEXT, "input"))
    if record.get("supporting") is not None:
        places = get(record, ITEMS, "supporting")
        support = [checked(place, INDEX, "supporting") for place in places]
    else:
        support = [place for output in outputs for place in _holding(chunks, output)]
    if not (name := get(record, TEXT, "id", default="")):
        name = f"{get(record, TEXT, 'task', default=NIAH)}-{get(record, INDEX, 'index')}"
    answers = records.distinct(outputs)
    return _sample(NIAH, name, question, answers, chunks=chunks, support=support)


def _split_prompt(prompt: str) -> tuple[list[str], str]:
    """The sentences of the text in a prompt, and the question at its end."""
    # RULER separates sentences by line breaks, except those that it takes from essays.
    sentences = [text for line in prompt.split("\n") for text in sentences_of(line)]
    asked = [place for place, text in enumerate(sentences) if text.endswith("?")]
    if not asked:
        raise BadRecord("no question")
    instructions = [i for i, text in enumerate(sentences[:5]) if _INSTRUCTION in text]
    first = instructions[-1] + 1 if instructions else 0
    return sentences[first : asked[-1]], sentences[asked[-1]]


def sentences_of(text: str) -> list[str]:
    """The sentences with a letter of an English text, without double quotation marks."""
    parts = sentencex.segment("en", _QUOTATION_MARKS.sub("", text).translate(_HIDDEN))
    sentences = (" ".join(part.translate(_SHOWN).split()) for part in parts)
    return [sentence for sentence in sentences if any(map(str.isalpha, sentence))]


def _holding(chunks: Sequence[str], output: str) -> list[int]:
    """The indices of the chunks that contain an output as a separate word."""
    pattern = re.compile(rf"(?<![\w-]){re.escape(output)}(?![\w-])")
    places = [place for place, chunk in enumerate(chunks) if pattern.search(chunk)]
    if not places:
        raise BadRecord("an expected output is in no sentence")
    return places


# ---------------------------------------------------------------- data of your own


@dataclasses.dataclass(frozen=True)
class Columns:
    """Section `data.columns`: what the fields of your own data are called."""

    question: Filled = "question"  # the field with the question, a text
    chunks: Filled = "chunks"  # with the passages, a list of texts
    support: str = "support"  # with the places of the needed passages, from 0; "": not read
    answers: str = "answers"  # with the right answers, a list of texts or one text; "": not read
    id: str = "id"  # with the record's own id; "": not read. Without one, an id is made

    def __post_init__(self) -> None:
        names = list(filter(None, dataclasses.astuple(self)))
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(f"config.data.columns has {twice[0]!r} twice; give others.")

    @classmethod
    def parse(cls, text: str) -> Columns:
        """The columns as a flag has them, such as "question=query,chunks=passages"."""
        known = [field.name for field in dataclasses.fields(cls)]
        return cls(**records.named_columns(text, known, known[2:]))

    def over(self, records: Iterable[tuple[str, Record]]) -> Iterator[tuple[str, Record]]:
        """The records; each needed or renamed column must be in one of them at least."""
        usual = {"support": "support", "answers": "answers", "id": "id"}
        names = dataclasses.asdict(self).items()
        unseen = {field: name for field, name in names if name and name != usual.get(field)}
        where, record = "", Record()
        for where, record in records:
            unseen = {field: name for field, name in unseen.items() if name not in record}
            yield where, record
        for field, name in unseen.items():
            there = ", ".join(map(repr, record)) or "none"
            raise InputError(
                f"{where}: there is no field {name!r} with the {field}, only {there}; name it "
                f"with --config.data.columns.{field}=NAME (qrag data: --columns={field}=NAME)."
            )


USUAL = Columns()


def parse_own(record: Record, columns: Columns = USUAL) -> Sample:
    question = get(record, TEXT, columns.question)
    chunks = checked(_list(record, columns.chunks), TEXTS, columns.chunks)
    # What is not read has the name "", which no record has.
    places = _list(record, columns.support)
    support = [checked(place, INDEX, columns.support) for place in places]
    listed = _list(record, columns.answers, alone=True)
    answers = records.distinct(checked(listed, TEXTS, columns.answers))
    if not support and not answers:
        names = (columns.support or "support", columns.answers or "answers")
        raise BadRecord("neither '{}' nor '{}' says anything".format(*names))
    if record.get(columns.id) is not None:
        name = records.identifier(record[columns.id], columns.id)
    else:
        content = json.dumps([question, chunks]).encode()
        name = f"own-{hashlib.sha256(content).hexdigest()[:16]}"
    return _sample(OWN, name, question, answers, chunks=chunks, support=support)


def _list(record: Record, name: str, *, alone: bool = False) -> list[Any]:
    """A list, which in a table is a text in JSON; `alone`: or another text, one item."""
    value = [] if record.get(name) is None else record[name]
    if isinstance(value, str):
        try:
            is_item = alone and not value.lstrip().startswith("[")
            value = [value] if is_item else json.loads(value)
        except (ValueError, RecursionError):
            raise BadRecord(f'field \'{name}\' is no JSON list, such as ["a", "b"]') from None
    return checked(value, ITEMS, name)


def neutral_record(sample: Sample) -> Record:
    """A sample of any source as a record of one's own, without what is not known."""
    answers = [", ".join(sample.answers)] if sample.needs_all else list(sample.answers)
    record: Record = {"id": sample.id, "question": sample.question, "chunks": list(sample.chunks)}
    record |= {"support": list(sample.support)} if sample.support else {}
    return record | ({"answers": answers} if sample.answers else {})


# ---------------------------------------------------------------- sub-questions
# MuSiQue and 2WikiMultiHopQA come with their decompositions, and data of one's own may. An agent
# that follows one needs no language model (`environments.rag`).

_RELATION = re.compile(r"\s*>>\s*")  # MuSiQue: "Valotte >> performer"
_PREPOSITIONS = ("after", "at", "by", "from", "in", "of", "on", "to", "with")
_VERBS = ("located", "follows", "crosses")
_SHORTEST_ALIAS = 4  # letters and digits
_NAMESAKE = re.compile(r"\s*\([^()]*\)$")  # 2Wiki: "Jon Hall (actor)"


def musique_hops(record: Record, final: Sequence[str]) -> tuple[SubQuestion, ...]:
    """The hops of a record of MuSiQue.

    A step such as "Valotte >> performer" becomes "What is the performer of Valotte?", and
    "#1 >> owned by" becomes "#1 owned by what?".
    """
    hops = []
    for step in get(record, OBJECTS, "question_decomposition"):
        text, answer = get(step, TEXT, "question").strip(), get(step, TEXT, "answer").strip()
        parts = _RELATION.split(text)
        if len(parts) == 2 and all(parts):
            text = _wh_question(*parts)
        same = letters(answer) in map(letters, final)
        hops.append(SubQuestion(text, _forms([answer], final if same else ())))
    return tuple(hops)


class _Fact(NamedTuple):
    """What 2WikiMultiHopQA knows of one subject and relation."""

    subject: str
    relation: str
    subject_id: str
    objects: list[str]
    object_ids: list[str]


def two_wiki_hops(record: Record, final: Sequence[str]) -> tuple[SubQuestion, ...]:
    """The hops of a record of 2WikiMultiHopQA, by its triples `evidences`.

    Triples with the same subject and relation are one hop with several answers. A subject that is
    the object of an earlier triple, by Wikidata id or name, becomes a slot. Otherwise (the data may
    name a person in two ways) the order counts: the second follows the first, and in a bridge
    comparison the third the first, and the fourth the second.
    """
    chain = get(record, TEXT, "type") in ("compositional", "inference")
    facts = _wikidata_facts(record)
    aliases: list[tuple[str, ...]] = [() for _ in facts]
    # An id has a capital, which letters have not.
    objects = [{*map(letters, fact.objects), *filter(None, fact.object_ids)} for fact in facts]
    texts = []
    for place, fact in enumerate(facts):
        names = {letters(fact.subject)} | ({fact.subject_id} - {""})
        bridge = next((i for i in range(place) if names & objects[i]), None)
        if bridge is None and chain and place:
            bridge = place - 1
        if bridge is None and record["type"] == "bridge_comparison" and 2 <= place < 4:
            bridge = place - 2
        if bridge is not None:  # passages may use either name
            aliases[bridge] += (_NAMESAKE.sub("", fact.subject),)
        elif SubQuestion(fact.subject, ()).needs:
            raise BadRecord("a name looks like the place of an answer")
        subject = fact.subject if bridge is None else f"#{bridge + 1}"
        texts.append(_wh_question(subject, fact.relation))
    if chain and facts:
        aliases[-1] += tuple(final)
    forms = [_forms(fact.objects, more) for fact, more in zip(facts, aliases)]
    return tuple(map(SubQuestion, texts, forms))


def _wikidata_facts(record: Record) -> list[_Fact]:
    triples = _triples(get(record, ITEMS, "evidences"))
    ids = _triples(get(record, ITEMS, "evidences_id", default=[]))
    if len(ids) != len(triples):  # comparisons of dates and numbers have none
        ids = [["", "", ""]] * len(triples)
    facts: dict[tuple[str, str], _Fact] = {}
    for (subject, relation, answer), (subject_id, _, answer_id) in zip(triples, ids):
        fact = facts.setdefault((subject, relation), _Fact(subject, relation, subject_id, [], []))
        fact.objects.append(answer)
        fact.object_ids.append(answer_id)
    return list(facts.values())


def _triples(values: Sequence[Any]) -> list[list[str]]:
    triples = [checked(triple, TEXTS, "evidences") for triple in values]
    if any(len(triple) != 3 for triple in triples):
        raise BadRecord("field 'evidences' is not a list of triples")
    return triples


def own_hops(record: Record, final: Sequence[str]) -> tuple[SubQuestion, ...]:
    hops = get(record, OBJECTS, "hops")
    return tuple(
        SubQuestion(get(hop, TEXT, "question").strip(), tuple(get(hop, TEXTS, "answers")))
        for hop in hops
    )


def _wh_question(subject: str, relation: str) -> str:
    """A question for the object of a relation, which is a noun or part of a sentence."""
    words = relation.split()
    if not words or not subject.strip():
        raise BadRecord("a triple without subject or relation")
    if words[0] in _VERBS or words[-1] in _PREPOSITIONS:
        return f"{subject} {relation} what?"
    return f"What is the {relation} of {subject}?"


def _forms(answers: Iterable[str], aliases: Iterable[str]) -> tuple[str, ...]:
    """The answers, and aliases of some length: almost every passage has Norway's alias "NO"."""
    long = [alias for alias in aliases if len(letters(alias)) >= _SHORTEST_ALIAS]
    forms: dict[str, str] = {}
    for form in (*answers, *long):
        forms.setdefault(form.strip().casefold(), form.strip())
    return tuple(forms.values())


# ---------------------------------------------------------------- the table


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set. A new one is a row in `SOURCES` and a parser."""

    parse: Callable[..., Sample]
    train: str  # name of the official file
    dev: str
    folders: tuple[str, ...]  # names of its folder in a parent folder that sources share
    hub: tuple[str, ...] = ()  # name and configuration; (): not on the hub
    rule: str = "squad"  # how answers are scored, a name in `metrics.answers.RULES`
    # A record and its answers → the sub-questions, or BadRecord; None: it has no decompositions
    hops: Callable[[Record, Sequence[str]], tuple[SubQuestion, ...]] | None = None
    ordered: bool = False  # whether supporting facts follow the reasoning, for the stage imitate


HUB_SPLITS: Mapping[Split, str] = {"train": "train", "dev": "validation"}
SOURCES: dict[str, Source] = {
    # Distractor setting (Yang et al., EMNLP 2018).
    "hotpotqa": Source(
        partial(parse_titled, source="hotpotqa"),
        *("hotpot_train_v1.1.json", "hotpot_dev_distractor_v1.json", ("hotpotqa",)),
        ("hotpotqa/hotpot_qa", "distractor"),
        "hotpotqa",
    ),
    MUSIQUE: Source(
        parse_musique,
        *("musique_ans_v1.0_train.jsonl", "musique_ans_v1.0_dev.jsonl", ("musique",)),
        ("dgslibisey/MuSiQue",),
        "musique",
        musique_hops,
        ordered=True,
    ),
    # 2WikiMultiHopQA (Ho et al., COLING 2020). The authors' copy needs a loading script, which
    # `datasets` no longer runs. This copy has the same splits in HotpotQA's hub layout.
    "two_wiki": Source(
        partial(parse_titled, source="two_wiki"),
        *("train.json", "dev.json", ("two_wiki", "2wikimultihopqa")),
        ("framolfese/2WikiMultihopQA",),
        "hotpotqa",
        two_wiki_hops,
        ordered=True,
    ),
    # RULER publishes a generator, not data; "validation" is the name that it uses.
    NIAH: Source(
        parse_niah, "train.jsonl", "validation.jsonl", ("niah", "ruler_niah"), rule="ruler"
    ),
    OWN: Source(parse_own, "train.jsonl", "dev.jsonl", (OWN,), hops=own_hops),
}
# Data sets whose questions bring no passages: for query writers, who search a corpus.
OPEN_SOURCES: dict[str, Source] = {
    "hover": Source(
        parse_claim, *("hover_train_release_v1.1.json", "hover_dev_release_v1.1.json", ("hover",))
    )
}


def answer_rule(source: str) -> str:
    """The rule by which answers of a source are scored; SQuAD's for data of one's own."""
    if source == BABILONG:
        return source
    return SOURCES[source].rule if source in SOURCES else "squad"


def parse_by_layout(record: Record, *, source: str = "") -> Sample:
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
    sample = SOURCES[source].parse(record)
    if not sample.support:  # of one's own data; rewards here are of supporting passages
        raise BadRecord("no supporting facts")
    return sample
