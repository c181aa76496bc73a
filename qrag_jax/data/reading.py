"""Reads the records of a data set's part as samples, and reports which of them are unusable.

Q-RAG and HARR name a source and a path. RLVR, LeReT and DeepRetrieval name parts in one string,
`path,config,split;path,config,split`, or of judged queries, which have no configuration,
`path,split;path,split`. There, a path is a file or folder of this machine, or else a data set of
the Hugging Face hub, and the split may have a slice as the library `datasets` writes it, such as
train[:16], train[-5:] or train[10%:20%].
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.data.records import HubPath, find_split, load_hub, read_records, split_files
from qrag_jax.data.sample import BadRecord, Decomposition, Sample, Split
from qrag_jax.data.sources import (
    BABILONG,
    HUB_SPLITS,
    MUSIQUE,
    NEEDED,
    OPEN_SOURCES,
    OWN,
    SOURCES,
    USUAL,
    Columns,
    Source,
    parse_by_layout,
)
from qrag_jax.errors import InputError
from qrag_jax.runtime import own_code

Records = Iterator[tuple[str, dict[str, Any]]]  # pairs (place such as "train.jsonl:17", record)


@dataclasses.dataclass
class ReadReport:
    """What happened to the records of one source or part.

    Attributes:
        skipped: reason -> number of records.
        mended: harmless fault -> number of records that were kept in spite of it.
        first: reason or fault -> place of the first such record, e.g. "train.jsonl:17".
    """

    source: str
    files: tuple[str, ...]  # paths read, or one "hub:REPOSITORY"
    read: int = 0
    kept: int = 0  # number of samples made; `read` is `kept` plus all counts in `skipped`
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)
    mended: Counter[str] = dataclasses.field(default_factory=Counter)
    first: dict[str, str] = dataclasses.field(default_factory=dict)

    def skip(self, reason: str, where: str) -> None:
        """Counts one record as skipped."""
        self.skipped[reason] += 1
        self.first.setdefault(reason, where)

    def mend(self, reason: str, where: str) -> None:
        """Counts one record as kept in spite of a harmless fault."""
        self.mended[reason] += 1
        self.first.setdefault(reason, where)

    def losses(self) -> str:
        """Returns "3 no supporting facts, 1 duplicate id", empty when nothing was skipped."""
        return ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())

    def summary(self) -> str:
        """Returns one line for the screen."""
        names = ", ".join(
            file if file.startswith("hub:") else Path(file).name for file in self.files
        )
        line = f"{self.source}: kept {self.kept} of {self.read} records of {names}"
        line += f" (skipped: {self.losses()})" if self.skipped else ""
        return line + "".join(f"; {count} with {what}" for what, count in self.mended.items())


def _parsed(
    records: Records, parse: Callable[..., Sample], report: ReadReport, fix: str, limit: int = 0
) -> list[Sample]:
    """The samples of the usable records; the report counts them and the others."""
    samples: dict[str, Sample] = {}
    for where, record in records:
        report.read += 1
        try:
            sample = parse(record, partial(report.mend, where=where))
            if sample.id in samples:
                raise BadRecord("duplicate id")
        except BadRecord as bad:
            report.skip(str(bad), where)
            continue
        samples[sample.id] = sample
        if len(samples) == limit:
            break
    report.kept = len(samples)
    if not samples:
        reason, where = next(iter(report.first.items()), ("no record", report.files[0]))
        raise InputError(
            f"{', '.join(report.files)} has no usable record of {report.source} among "
            f"{report.read} (skipped: {report.losses()}; the first is {where}: {reason}); {fix}"
        )
    return list(samples.values())


# ---------------------------------------------------------------- a source and a path


def load_samples(
    source: str,
    path: str,
    split: Split,
    limit: int = 0,
    columns: Columns | None = None,
    *,
    apart: bool = False,
) -> tuple[list[Sample], ReadReport]:
    """Returns the samples of one split and the report of what was skipped.

    Args:
        path: a data file, a folder with the split's files, or a folder that has them in a
            sub-folder named after the source (so that one folder serves a mixture); a data set of
            the hub in the source's layout, hub:NAME; or a function that gives records in it,
            FILE.py:FUNCTION. Empty: the records come from the hub.
    """
    known, columns = _source(source), columns or USUAL
    names, records = _records(source, known, path, split)
    parse: Callable[..., Sample] = known.parse
    if source == OWN:
        records, parse = _with_columns(records, columns), partial(parse, columns=columns)
    if apart:
        parse = partial(_taken_apart, parse, known)
    report = ReadReport(source, names)
    fix = f"check that it is {source} data, with python -m qrag_jax.validate_data --source {source}"
    return _parsed(records, parse, report, f"{fix} --path FILE", limit), report


def _taken_apart(
    parse: Callable[..., Sample], known: Source, record: dict[str, Any], mend: Callable[[str], None]
) -> Sample:
    sample = parse(record, mend)
    assert known.hops is not None
    try:
        hops = Decomposition(known.hops(record, sample.answers), sample.answers)
    except BadRecord as bad:
        mend(f"no way to take them apart ({bad})")
        return sample
    return dataclasses.replace(sample, decomposition=hops)


def _with_columns(records: Records, columns: Columns) -> Records:
    """The records; the first must have the needed columns, and one at least each renamed one."""
    unseen = columns.renamed()
    first: tuple[str, dict[str, Any]] | None = None
    for where, record in records:
        if first is None:
            first = where, record
            columns.check({field: getattr(columns, field) for field in NEEDED}, *first)
        unseen = {field: name for field, name in unseen.items() if name not in record}
        yield where, record
    if first is not None:
        columns.check(unseen, *first)


def is_one_part(path: str) -> bool:
    """Whether a path has no dev part of its own: it is one file, or one split of the hub's."""
    named = HubPath.parse(path)
    return named.split is not None if named else bool(path) and Path(path).is_file()


def _records(
    source: str, known: Source, path: str, split: Split
) -> tuple[tuple[str, ...], Records]:
    """What is read, as reports name it, and the records of one split."""
    if named := HubPath.parse(path):
        return _hub_records(named.repo, named.config, named.split or HUB_SPLITS[split])
    if own_code.is_own_code(path):
        return (path,), _code_records(path, split)
    if path:
        if not Path(path).exists():
            raise InputError(
                f"{path} does not exist; give a data file or folder, hub:NAME or FILE.py:FUNCTION "
                "as config.data.path (of what is evaluated, config.eval.path; of validate_data, "
                "--path)"
            )
        return _file_records(known, path, split)
    if source == OWN:
        raise InputError(
            "config.data.path is empty, but your own data are nowhere by themselves; set it to a "
            "file, a folder, or hub:NAME"
        )
    if known.hub is None:
        raise InputError(
            f"the data source '{source}' is not on the hub; set config.data.path to files"
        )
    return _hub_records(known.hub.repo, known.hub.config, known.hub.splits[split])


def _file_records(known: Source, path: str, split: Split) -> tuple[tuple[str, ...], Records]:
    folder, official = Path(path), known.official[split]
    if folder.is_dir() and not find_split(folder, split, official):
        # Perhaps the source's sub-folder has them.
        there = (folder / name for name in known.folders)
        folder = next((each for each in there if each.is_dir()), folder)
    files = split_files(folder, split, official)
    return tuple(map(str, files)), (pair for file in files for pair in read_records(file))


def _hub_records(repo: str, config: str | None, split: str) -> tuple[tuple[str, ...], Records]:
    numbered = enumerate(load_hub(repo, config, split), 1)
    return (f"hub:{repo}",), ((f"hub:{repo}:{number}", record) for number, record in numbered)


def _code_records(spec: str, split: str) -> Records:
    """The records of a split that a user's function gives; it is called with `split`."""
    field = "config.data.path"
    code = own_code.load(spec, field, ("split",))
    name, number = Path(spec.rpartition(":")[0]).name, 0
    try:
        for number, record in enumerate(code.function(split=split), 1):
            if not isinstance(record, dict):
                raise InputError(
                    f"{field} is {spec}, whose record {number} of {split} is {record!r:.60}, no "
                    "dict; give dicts."
                )
            yield f"{name}, {split} record {number}", record
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{field} is {spec}, which failed after record {number} of {split} "
            f"({own_code.told(error)}); mend it."
        ) from error
    if not number:
        raise InputError(f"{field} is {spec}, which has no {split} record; give one at least.")


def _source(name: str) -> Source:
    if name == BABILONG:
        raise InputError("the data source 'babilong' has stories and books, no files of records")
    if name in OPEN_SOURCES:
        raise InputError(
            f"the data source '{name}' has no passages to choose from; use it for query writers, "
            "who search a corpus"
        )
    if name not in SOURCES:
        known = ", ".join([*SOURCES, BABILONG])
        raise InputError(f"unknown data source '{name}'; the known ones are {known}")
    return SOURCES[name]


# ---------------------------------------------------------------- parts named in one string

_SPLIT = re.compile(r"(\w+(?:\.\w+)*)(\[(-?\d+%?)?:(-?\d+%?)?\])?")
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
# Names of a split → ours, by which files are found.
_SPLITS: dict[str, Split] = {"train": "train", "dev": "dev", "validation": "dev"}
WITH_CONFIG, WITHOUT = "path,config,split", "path,split"  # forms of a part


class DatasetPart(NamedTuple):
    """One part of a dataset string.

    Attributes:
        config: the data set's configuration; for files, it may name their source. "" if parts have
            none.
    """

    path: str  # a file or folder, or a name on the hub
    config: str
    split: str
    bounds: str = ""  # the slice's own text, such as "[:16]"; "" for all records

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


def _place(bound: str | None, count: int, default: int) -> int:
    if not bound:
        return default
    number = round(int(bound[:-1]) * count / 100) if bound.endswith("%") else int(bound)
    return max(number + count, 0) if number < 0 else min(number, count)


def parse_parts(text: str, form: str = WITH_CONFIG) -> tuple[DatasetPart, ...]:
    """The parts of a dataset string, such as "bdsaglam/musique,answerable,train[:256]"."""
    fix = f"write {form}, and a semicolon between parts"
    if not text.strip():
        raise InputError(f"the dataset string is empty; {fix}.")
    names = form.split(",")
    parts = []
    for part in text.split(";"):
        words = [word.strip() for word in part.split(",")]
        if len(words) != len(names) or not words[0]:
            raise InputError(
                f"the part {part.strip()!r} of the dataset string has not the form {form}; {fix}."
            )
        path, *between, split = words
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


def read_parts(text: str, *, from_corpus: bool = False) -> tuple[list[Sample], list[ReadReport]]:
    """The questions of a dataset string, and for each part the report of what was skipped.

    Questions without gold passages are skipped, too. A slice is of the records, whether they are
    usable or not. The source of a record is the one that `config` names, or else that of its
    layout.

    Args:
        from_corpus: whether questions without passages of their own are read, too, such as HoVer's.
    """

    def parse(record: dict[str, Any], mend: Callable[[str], None], source: str) -> Sample:
        sample = parse_by_layout(record, mend, source=source)
        if not from_corpus and not sample.chunks:
            raise BadRecord("neither 'paragraphs' nor 'context'")
        return sample

    known = "MuSiQue, HotpotQA or 2WikiMultiHopQA" + ", or HoVer" * from_corpus
    samples: dict[str, Sample] = {}
    reports = []
    for part in parse_parts(text):
        names, records = _part_records(part)
        report = ReadReport(part.path, names)
        fix = f"name data in the format of {known}."
        for each in _parsed(records, partial(parse, source=part.config), report, fix):
            if each.id in samples:
                raise InputError(
                    f"the question {each.id!r} is there twice; name parts of data that do not "
                    "overlap."
                )
            samples[each.id] = each
        reports.append(report)
    return [*samples.values()], reports


def _part_records(part: DatasetPart) -> tuple[tuple[str, ...], Records]:
    path = Path(part.path).expanduser()
    if not path.exists():
        if not _HUB_NAME.fullmatch(part.path):
            raise InputError(
                f"{part.path} does not exist; give the path of a data file or folder, or a name on "
                "the hub."
            )
        return _hub_records(part.path, part.config or None, part.split + part.bounds)
    if path.is_dir() and part.split not in _SPLITS:
        raise InputError(
            f"the folder {part.path} has no split {part.split!r}; use one of {', '.join(_SPLITS)}."
        )
    known = {**SOURCES, **OPEN_SOURCES}.get(part.config, SOURCES[MUSIQUE])
    names, records = _file_records(known, str(path), _SPLITS.get(part.split, "train"))
    if part.bounds:
        every = list(records)
        records = iter([every[place] for place in part.of(len(every))])
    return names, records


def without_asked(
    train: Sequence[Any], dev: Sequence[Any], field: str = "config.questions"
) -> list[Any]:
    """The training questions that are not evaluated on, by their text."""
    asked = {each.question for each in dev}
    kept = [each for each in train if each.question not in asked]
    if not kept:
        raise InputError(
            f"{field}.train and {field}.dev name the same questions, so none is left to train on; "
            "name other parts."
        )
    return kept
