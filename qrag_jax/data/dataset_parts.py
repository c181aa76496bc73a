"""Reads questions that are named as `path,config,split;path,config,split`.

This is how RLVR names its data. Judged queries have no configuration: `path,split;path,split`. A
path is a file or folder of this machine, or else a data set of
the Hugging Face hub. The split may have a slice as the library `datasets` writes it, such as
train[:16], train[10:20], train[-5:] or train[10%:20%].
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from qrag_jax.data.files.records import load_hub, read_records
from qrag_jax.data.sample import BadRecord, Page, QueryQuestion, Sample, Split
from qrag_jax.data.sources import musique, titled_context
from qrag_jax.data.sources.registry import OPEN_SOURCES, SOURCES, ReadReport, files_of
from qrag_jax.errors import InputError

T = TypeVar("T")

_SPLIT = re.compile(r"(\w+(?:\.\w+)*)(\[(-?\d+%?)?:(-?\d+%?)?\])?")
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
# Names of a split → ours, by which files are found.
_SPLITS: dict[str, Split] = {"train": "train", "dev": "dev", "validation": "dev"}
WITH_CONFIG, WITHOUT = "path,config,split", "path,split"  # forms of a part


class TitledSample(NamedTuple):
    """A sample, and the title with which each of its chunks begins; "" for one without."""

    sample: Sample
    titles: tuple[str, ...]

    def body(self, place: int) -> str:
        """What follows the title in a chunk."""
        title, chunk = self.titles[place], self.sample.chunks[place]
        return chunk.removeprefix(title).removeprefix(".").lstrip() if title else chunk


def untitled(sample: Sample) -> TitledSample:
    """A sample whose chunks have no titles, or none that is known."""
    return TitledSample(sample, ("",) * len(sample.chunks))


@dataclasses.dataclass(frozen=True)
class DatasetPart:
    """One part of a dataset string.

    Attributes:
        path: a file or folder, or a name on the hub.
        config: the data set's configuration; for files, it may name their source. "" if parts have
            none.
        split: the name of the split, without the slice.
        bounds: the slice's own text, such as "[:16]"; "" for all records.
    """

    path: str
    config: str
    split: str
    bounds: str = ""

    def of(self, count: int) -> range:
        """The places of the slice among `count` records, by the rules of `datasets`.

        A negative number counts from the end, percents are rounded to the closest record, and what
        is beyond the records is left out.
        """
        found = _SPLIT.fullmatch(self.split + self.bounds)
        assert found is not None
        start, stop = _place(found[3], count, 0), _place(found[4], count, count)
        if start >= stop:
            raise InputError(
                f"the slice {self.split}{self.bounds} of {self.path} has none of its {count} "
                "records; give one that has some."
            )
        return range(start, stop)


def parse_parts(text: str, form: str = WITH_CONFIG) -> tuple[DatasetPart, ...]:
    """The parts of a dataset string, such as "bdsaglam/musique,answerable,train[:256]".

    Args:
        text: the parts, with semicolons between them.
        form: of a part, `WITH_CONFIG` or `WITHOUT`.
    """
    fix = f"write {form}, and a semicolon between parts"
    if not text.strip():
        raise InputError(f"the dataset string is empty; {fix}.")
    names = form.split(",")
    parts = []
    for part in text.split(";"):
        fields = [field.strip() for field in part.split(",")]
        if len(fields) != len(names) or not fields[0]:
            raise InputError(
                f"the part {part.strip()!r} of the dataset string has not the form {form}; {fix}."
            )
        path, *between, split = fields
        found = _SPLIT.fullmatch(split)
        if not found:
            raise InputError(
                f"the split {split!r} of the dataset string cannot be read; write one such as "
                "train, train[:16] or train[10%:20%]."
            )
        bounds = [bound for bound in found.group(3, 4) if bound]
        percents = [bound for bound in bounds if bound.endswith("%")]
        too_many = any(abs(int(bound[:-1])) > 100 for bound in percents)
        if too_many or len(percents) not in (0, len(bounds)):
            raise InputError(
                f"the slice {split!r} of the dataset string mixes percents with numbers, or has "
                "more than 100 %; write one such as train[:16] or train[10%:20%]."
            )
        parts.append(DatasetPart(path, "".join(between), found[1], found[2] or ""))
    return tuple(parts)


def read_part(part: DatasetPart) -> tuple[list[TitledSample], ReadReport]:
    """The usable samples of one part, and the report of what was skipped.

    The slice is of the records, whether they are usable or not. The source of a record is the one
    that `config` names, or else that of its layout.
    """

    def parse(record: dict[str, Any]) -> tuple[str, TitledSample]:
        titled = titled_sample(record, part.config)
        return titled.sample.id, titled

    return read_part_as(part, parse, "MuSiQue, HotpotQA or 2WikiMultiHopQA")


def read_part_as(
    part: DatasetPart, parse: Callable[[dict[str, Any]], tuple[str, T]], known: str
) -> tuple[list[T], ReadReport]:
    """What the usable records of one part are parsed into; see `read_part`.

    Args:
        parse: gives the id of a record, and what becomes of it, or raises BadRecord.
        known: names of the data sets that it can parse, for the error.
    """
    if Path(part.path).expanduser().exists():
        files = _files(part)
        report = ReadReport(part.path, tuple(map(str, files)))
        records = [pair for file in files for pair in read_records(file)]
        if part.bounds:
            records = [records[place] for place in part.of(len(records))]
    else:
        report = ReadReport(part.path, (f"hub:{part.path}",))
        records = list(_hub_records(part))
    parsed: dict[str, T] = {}
    for where, record in records:
        report.read += 1
        try:
            name, each = parse(record)
            if name in parsed:
                raise BadRecord("duplicate id")
        except BadRecord as bad:
            report.skip(str(bad), where)
            continue
        parsed[name] = each
    report.kept = len(parsed)
    if not parsed:
        raise InputError(
            f"{part.path} has no usable record among {report.read} (skipped: {report.losses()}); "
            f"name data in the format of {known}."
        )
    return list(parsed.values()), report


def titled_sample(record: dict[str, Any], config: str) -> TitledSample:
    """One record as a sample with titles.

    Args:
        config: the name of its source; any other text: its layout tells the source.
    """
    if config not in SOURCES:
        config = musique.NAME if "paragraphs" in record else "hotpotqa"
        if config != musique.NAME and "context" not in record:
            raise BadRecord("neither 'paragraphs' nor 'context'")
    sample = SOURCES[config].parse(record)
    if not sample.support:  # of one's own data, whose rewards here are of supporting passages
        raise BadRecord("no supporting facts")
    titles = tuple(title.strip() for title in _titles(record))
    return TitledSample(sample, titles) if titles else untitled(sample)


def _place(bound: str | None, count: int, default: int) -> int:
    if not bound:
        return default
    number = round(int(bound[:-1]) * count / 100) if bound.endswith("%") else int(bound)
    return max(number + count, 0) if number < 0 else min(number, count)


def _files(part: DatasetPart) -> list[Path]:
    path = Path(part.path).expanduser()
    if path.is_file():
        return [path]
    if part.split not in _SPLITS:
        raise InputError(
            f"the folder {part.path} has no split {part.split!r}; use one of {', '.join(_SPLITS)}."
        )
    source = part.config if part.config in (*SOURCES, *OPEN_SOURCES) else musique.NAME
    return files_of(source, str(path), _SPLITS[part.split])


def _hub_records(part: DatasetPart) -> Iterator[tuple[str, dict[str, Any]]]:
    if not _HUB_NAME.fullmatch(part.path):
        raise InputError(
            f"{part.path} does not exist; give the path of a data file or folder, or a name on the "
            "hub."
        )
    records = load_hub(part.path, part.config or None, part.split + part.bounds)
    for number, record in enumerate(records, 1):
        yield f"hub:{part.path}:{number}", record


def _titles(record: dict[str, Any]) -> list[str]:
    """The titles of a record that its source has parsed, in the order of the chunks."""
    if "paragraphs" in record:
        return [paragraph["title"] for paragraph in record["paragraphs"]]
    context = record.get("context") or []
    return context["title"] if isinstance(context, dict) else [title for title, _ in context]


# ---------------------------------------------------------------- questions of query writers

_QUERY_DATA = "HotpotQA, 2WikiMultiHopQA, MuSiQue or HoVer"


def read_query_questions(text: str) -> tuple[list[QueryQuestion], list[ReadReport]]:
    """The questions of a dataset string, and for each part the report of what was skipped.

    Questions without gold pages are skipped, too.

    Args:
        text: `path,config,split;path,config,split`, see `dataset_parts`. A path may be the file of
            questions without a context.
    """
    found: dict[str, QueryQuestion] = {}
    reports = []
    for part in parse_parts(text):
        questions, report = _read(part)
        reports.append(report)
        for each in questions:
            if each.id in found:
                raise InputError(
                    f"the question {each.id!r} is there twice; name parts of data that do not "
                    "overlap."
                )
            found[each.id] = each
    return [*found.values()], reports


def unseen(train: Sequence[QueryQuestion], dev: Sequence[QueryQuestion]) -> list[QueryQuestion]:
    """The training questions that are not evaluated on, by their text."""
    asked = {each.question for each in dev}
    kept = [each for each in train if each.question not in asked]
    if not kept:
        raise InputError(
            "config.questions.train and config.questions.dev name the same questions, so none is "
            "left to train on; name other parts."
        )
    return kept


def of_titled(given: TitledSample) -> QueryQuestion:
    """A sample as a question; its gold pages are its supporting passages."""
    sample, titles = given
    passages = tuple(Page(title, given.body(place)) for place, title in enumerate(titles))
    gold = tuple(passages[place] for place in sample.support)
    return QueryQuestion(sample.id, sample.question, sample.answers, gold, passages, sample.source)


def _read(part: DatasetPart) -> tuple[list[QueryQuestion], ReadReport]:
    def parse(record: dict[str, Any]) -> tuple[str, QueryQuestion]:
        question = _parsed(record, part.config)
        return question.id, question

    return read_part_as(part, parse, _QUERY_DATA)


def _parsed(record: dict[str, Any], config: str) -> QueryQuestion:
    if config == "hover" or "claim" in record:
        return titled_context.parse_claim(record)
    if record.get("paragraphs") is not None or record.get("context") is not None:
        return of_titled(titled_sample(record, config))
    if "question" in record:
        return dataclasses.replace(titled_context.parse_open(record), source=config)
    raise BadRecord("neither 'question' nor 'claim'")
