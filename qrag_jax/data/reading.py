"""Reads the records of a data set's part as samples, and reports the unusable ones.

Q-RAG and HARR name a source and a path. The others name parts in one string,
`path,config,split;path,config,split`, or `path,split;path,split` of judged queries. There, a path
is a file or folder, or else a data set of the hub, and the split may have a slice of `datasets`,
such as train[-5:] or train[10%:20%].
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.data import sources
from qrag_jax.data.records import HUB, load_hub, read_records, split_files
from qrag_jax.data.sample import BadRecord, Sample, Split, taken_apart
from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_json, own_code

# Names of what is read, and pairs (place such as "train.jsonl:17", record).
Records = tuple[tuple[str, ...], Iterable[tuple[str, Any]]]


@dataclasses.dataclass
class ReadReport:
    """What happened to the records of one source or part."""

    source: str
    files: tuple[str, ...]  # paths, or one "hub:REPOSITORY"
    read: int = 0
    kept: int = 0
    # By the reason; by the harmless fault in spite of which a record was kept; and the first record
    # of a reason or fault, such as `train.jsonl:17, {"id": 5, …`.
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)
    mended: Counter[str] = dataclasses.field(default_factory=Counter)
    first: dict[str, str] = dataclasses.field(default_factory=dict)

    def count(self, counts: Counter[str], reason: str, where: str, record: Any) -> None:
        counts[reason] += 1
        if reason not in self.first:
            self.first[reason] = f"{where}, {bounded_json.shown(record)}"

    def losses(self) -> str:
        """As in "3 no supporting facts, 1 duplicate id"."""
        return ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())

    def summary(self) -> str:
        names = ", ".join(f if f.startswith("hub:") else Path(f).name for f in self.files)
        line = f"{self.source}: kept {self.kept} of {self.read} records of {names}"
        line += f" (skipped: {self.losses()})" if self.skipped else ""
        return line + "".join(f"; {count} with {what}" for what, count in self.mended.items())


@contextlib.contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Records have none: Python's search took a quarter of the time of loading HotpotQA."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_no_search_for_cycles()
def usable(
    source: str, records: Records, parse: Callable[[Any], Sample], fix: str, limit: int = 0
) -> tuple[list[Sample], ReadReport]:
    """What `parse` makes of the usable records; the report counts them and the others."""
    report = ReadReport(source, records[0])
    samples: dict[str, Sample] = {}
    for where, record in records[1]:
        report.read += 1
        try:
            sample = parse(record)
            if sample.id in samples:
                raise BadRecord("duplicate id")
        except BadRecord as bad:
            report.count(report.skipped, str(bad), where, record)
            continue
        if sample.fault:
            report.count(report.mended, sample.fault, where, record)
        samples[sample.id] = sample
        if len(samples) == limit:
            break
    report.kept = len(samples)
    if not samples:
        reason, where = next(iter(report.first.items()), ("no record", report.files[0]))
        raise InputError(
            f"{', '.join(report.files)} has no usable record of {source} among {report.read} "
            f"(skipped: {report.losses()}; the first is {where}: {reason}); {fix}"
        )
    return list(samples.values()), report


# ---------------------------------------------------------------- a source and a path


def load_samples(
    source: str,
    path: str,
    split: Split,
    limit: int = 0,
    columns: sources.Columns = sources.USUAL,
    *,
    apart: bool = False,
) -> tuple[list[Sample], ReadReport]:
    """The samples of one split, and the report of what was skipped.

    The path is a data file; a folder with the split's files, perhaps in a sub-folder named after
    the source; a data set of the hub in the source's layout, hub:NAME; or a function that gives
    records in it, FILE.py:FUNCTION. Empty: the source's own place on the hub. `apart`: with their
    decompositions.
    """
    if source not in sources.SOURCES:
        names = ", ".join(sources.SOURCES)
        raise InputError(f"no data source {source!r} has records with passages; use one of {names}")
    known = sources.SOURCES[source]
    files, records = _records(source, known, path, split)
    parse: Callable[..., Sample] = known.parse
    if source == sources.OWN:
        records, parse = columns.over(records), partial(parse, columns=columns)
    if apart:
        parse = partial(_with_hops, parse, known)
    fix = f"check that it is {source} data (qrag data counts the reasons)"
    return usable(source, (files, records), parse, fix, limit)


def _with_hops(
    parse: Callable[..., Sample], known: sources.Source, record: dict[str, Any]
) -> Sample:
    sample = parse(record)
    assert known.hops is not None
    try:
        return taken_apart(sample, known.hops(record, sample.answers))
    except BadRecord as bad:
        return dataclasses.replace(sample, fault=f"no way to take them apart ({bad})")


def is_one_part(path: str) -> bool:
    """Whether a path has no dev part of its own: it is one file, or one split of the hub's."""
    if path.startswith(HUB):
        return bool(_on_hub(path).split)
    return bool(path) and Path(path).is_file()


def _on_hub(path: str) -> DatasetPart:
    """The part of `hub:NAME[,CONFIG[,SPLIT]]`; without a split, each is read by its name."""
    name, *rest = (part.strip() for part in path.removeprefix(HUB).split(","))
    if not name or len(rest) > 2:
        forms = f"{HUB}NAME, {HUB}NAME,CONFIG or {HUB}NAME,CONFIG,SPLIT"
        raise InputError(f"data.path is {path!r}; write {forms}")
    return DatasetPart(name, *rest)


def _records(source: str, known: sources.Source, path: str, split: Split) -> Records:
    if path.startswith(HUB):
        return _hub_records(_on_hub(path), split)
    if own_code.is_own_code(path):
        return (path,), _code_records(path, split)
    if path:
        if not Path(path).exists():
            raise InputError(f"no data at {path}; give a file, folder, hub:NAME or FILE.py:NAME")
        return _file_records(known, path, split)
    if not known.hub:
        raise InputError(f"'{source}' is not on the hub; set config.data.path to a file or folder")
    return _hub_records(DatasetPart(*known.hub), split)


def _file_records(known: sources.Source, path: str, split: Split) -> Records:
    files = split_files(Path(path), split, (getattr(known, split),), known.folders)
    return tuple(map(str, files)), (pair for file in files for pair in read_records(file))


def _hub_records(part: DatasetPart, split: Split) -> Records:
    name = f"hub:{part.path}"
    wanted = part.split + part.bounds or sources.HUB_SPLITS[split]
    rows = load_hub(part.path, part.config or None, wanted)
    return (name,), ((f"{name}:{number}", row) for number, row in enumerate(rows, 1))


def _code_records(spec: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a split that a user's function gives."""
    field = "config.data.path"
    code = own_code.load(spec, field, ("split",))
    name, number = Path(spec.rpartition(":")[0]).name, 0
    try:
        for number, record in enumerate(code.function(split=split), 1):
            if not isinstance(record, dict):
                raise TypeError(f"{record!r:.60} is no dict")
            yield f"{name}, {split} record {number}", record
    except (Exception, SystemExit) as error:
        why = f"after {number} {split} records {own_code.reason_of(error)}"
        raise InputError(f"{field} is {spec}: {why}") from error
    if not number:
        raise InputError(f"{field} is {spec}, which has no {split} record; give one at least.")


# ---------------------------------------------------------------- parts named in one string

_SPLIT = re.compile(r"(\w+(?:\.\w+)*)(\[(-?\d+%?)?:(-?\d+%?)?\])?")
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
# Names of a split → ours, by which files are found.
_SPLITS: dict[str, Split] = {"train": "train", "dev": "dev", "validation": "dev"}
WITH_CONFIG, WITHOUT = "path,config,split", "path,split"  # forms of a part


class DatasetPart(NamedTuple):
    path: str  # a file or folder, or a name on the hub
    config: str = ""  # the data set's configuration; for files, it may name their source
    split: str = ""
    bounds: str = ""  # the slice's own text, such as "[:16]"; "" for all records

    def of(self, count: int) -> range:
        """The places of the slice among `count` records, by the rules of `datasets`."""
        parts = _SPLIT.fullmatch(self.split + self.bounds)
        assert parts is not None
        places = range(count)[slice(*(_place(bound, count) for bound in parts.group(3, 4)))]
        if not places:
            raise InputError(f"{self.split}{self.bounds} of {self.path}: none of {count} records.")
        return places


def _place(bound: str | None, count: int) -> int | None:
    if bound is None or not bound.endswith("%"):
        return None if bound is None else int(bound)
    return round(int(bound[:-1]) * count / 100)


def parse_parts(text: str, form: str = WITH_CONFIG) -> tuple[DatasetPart, ...]:
    """The parts of a dataset string, such as "bdsaglam/musique,answerable,train[:256]"."""
    parts = []
    for part in text.split(";"):
        words = [word.strip() for word in part.split(",")]
        parsed = _SPLIT.fullmatch(words[-1])
        if len(words) != form.count(",") + 1 or not words[0] or not parsed:
            raise InputError(
                f"the part {part.strip()!r} of the dataset string {text!r} is not {form}, with a "
                "split such as train, train[:16] or train[10%:20%]; write that, semicolons between."
            )
        bounds = [bound for bound in parsed.group(3, 4) if bound]
        percents = [int(bound[:-1]) for bound in bounds if bound.endswith("%")]
        if any(abs(part) > 100 for part in percents) or len(percents) not in (0, len(bounds)):
            raise InputError(f"the slice {words[-1]!r} mixes percents and numbers or exceeds 100 %")
        parts.append(DatasetPart(words[0], "".join(words[1:-1]), parsed[1], parsed[2] or ""))
    return tuple(parts)


def read_parts(text: str, *, from_corpus: bool = False) -> tuple[list[Sample], list[ReadReport]]:
    """The questions of a dataset string, and for each part the report of what was skipped.

    A slice is of the records, usable or not. The source of a record is the one that `config` names,
    or else that of its layout. With `from_corpus`, questions without passages of their own are
    read, too, such as HoVer's.
    """

    def parse(record: dict[str, Any], source: str) -> Sample:
        sample = sources.parse_by_layout(record, source=source)
        if not from_corpus and not sample.chunks:
            raise BadRecord("neither 'paragraphs' nor 'context'")
        return sample

    known = "MuSiQue, HotpotQA or 2WikiMultiHopQA" + ", or HoVer" * from_corpus
    fix = f"name data in the format of {known}."
    samples: dict[str, Sample] = {}
    reports = []
    for part in parse_parts(text):
        parsed = partial(parse, source=part.config)
        read, report = usable(part.path, _part_records(part), parsed, fix)
        for sample in read:
            if sample.id in samples:
                raise InputError(f"the question {sample.id!r} is there twice; name other parts.")
            samples[sample.id] = sample
        reports.append(report)
    return [*samples.values()], reports


def _part_records(part: DatasetPart) -> Records:
    path = Path(part.path).expanduser()
    if not path.exists():
        if not _HUB_NAME.fullmatch(part.path):
            raise InputError(f"{part.path} does not exist; give a file, folder, or hub name.")
        return _hub_records(part, "train")
    if path.is_dir() and part.split not in _SPLITS:
        raise InputError(f"{part.path} has no split {part.split!r}; use {', '.join(_SPLITS)}.")
    tables = {**sources.SOURCES, **sources.OPEN_SOURCES}
    known = tables.get(part.config, tables[sources.MUSIQUE])
    names, records = _file_records(known, str(path), _SPLITS.get(part.split, "train"))
    if part.bounds:
        every = list(records)
        records = iter([every[place] for place in part.of(len(every))])
    return names, records


def without_asked(train: Sequence[Any], dev: Sequence[Any]) -> list[Any]:
    """The training questions that are not evaluated on, by their text."""
    asked = {question.question for question in dev}
    kept = [question for question in train if question.question not in asked]
    if not kept:
        raise InputError("config.questions.dev has all of config.questions.train; name others.")
    return kept
