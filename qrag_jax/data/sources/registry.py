"""The registry of data sources; loads the samples of a source and counts skipped records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from qrag_jax.data.files.hub import HubPath, load_hub
from qrag_jax.data.files.records import find_split, read_records, split_files
from qrag_jax.data.sample import BadRecord, QueryQuestion, Sample
from qrag_jax.data.sources import hotpotqa, hover, musique, niah, own, two_wiki
from qrag_jax.data.sources.own import own_records
from qrag_jax.errors import InputError
from qrag_jax.runtime import own_code

Split = Literal["train", "dev"]


class Files(Protocol):
    """Where the files of a source are."""

    @property
    def NAME(self) -> str:
        """The source's name."""

    @property
    def FOLDERS(self) -> tuple[str, ...]:
        """Names of its folder in a parent folder that sources share."""

    @property
    def OFFICIAL(self) -> dict[str, tuple[str, ...]]:
        """Split -> official file names."""


class OpenSource(Files, Protocol):
    """The module of a source whose questions bring no passages; see `data.query_question`."""

    def parse(self, record: dict[str, Any]) -> QueryQuestion:
        """Turns one record into a question, or raises BadRecord."""


class Source(Files, Protocol):
    """The interface of a source's module. A new source is such a module and a line in `SOURCES`."""

    @property
    def HUB(self) -> tuple[str, str | None, dict[str, str]] | None:
        """(repository, configuration, split -> hub split); None if the source is not on the hub."""

    def parse(self, record: dict[str, Any]) -> Sample:
        """Turns one record into a sample, or raises BadRecord."""

    def mended(self, record: dict[str, Any]) -> str:
        """A harmless fault of a record that `parse` accepts; "" if it has none."""

    def to_record(
        self,
        id: str,
        question: str,
        answer: str,
        paragraphs: Sequence[tuple[str, Sequence[str]]],
        support: Sequence[int],
    ) -> dict[str, Any]:
        """Makes a record in the official layout, the inverse of `parse`."""


SOURCES: dict[str, Source] = {
    hotpotqa.NAME: hotpotqa,
    musique.NAME: musique,
    two_wiki.NAME: two_wiki,
    niah.NAME: niah,
    own.NAME: own.Own(),
}
# How answers are scored: a name in `metrics.answers.RULES`; of other sources, "squad".
ANSWER_RULES = {
    hotpotqa.NAME: "hotpotqa",
    two_wiki.NAME: "hotpotqa",
    musique.NAME: "musique",
    niah.NAME: "ruler",
    "babilong": "babilong",
}
HUB_SPLITS = {"train": "train", "dev": "validation"}  # of a data set that a path names
OPEN_SOURCES: dict[str, OpenSource] = {hover.NAME: hover}


def answer_rule(source: str) -> str:
    """The rule by which answers of a source are scored; SQuAD's for data of one's own."""
    return ANSWER_RULES.get(source, "squad")


@dataclasses.dataclass
class ReadReport:
    """What happened to the records of one source.

    Attributes:
        source: the source's name.
        files: paths read, or one "hub:REPOSITORY".
        read: number of records read.
        kept: number of samples made; `read` is `kept` plus all counts in `skipped`.
        skipped: reason -> number of records.
        mended: harmless fault -> number of records that were kept in spite of it.
        first: reason or fault -> place of the first such record, e.g. "train.jsonl:17".
    """

    source: str
    files: tuple[str, ...]
    read: int = 0
    kept: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    mended: dict[str, int] = dataclasses.field(default_factory=dict)
    first: dict[str, str] = dataclasses.field(default_factory=dict)

    def skip(self, reason: str, where: str) -> None:
        """Counts one record as skipped."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        self.first.setdefault(reason, where)

    def mend(self, reason: str, where: str) -> None:
        """Counts one record as kept in spite of a harmless fault."""
        self.mended[reason] = self.mended.get(reason, 0) + 1
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


def load_samples(
    source: str, path: str, split: Split, limit: int = 0, columns: own.Columns | None = None
) -> tuple[list[Sample], ReadReport]:
    """Returns the samples of one split and the report of what was skipped.

    Args:
        source: a name in `SOURCES`.
        path: a data file, a folder with the split's files, or a folder that has them in a
            sub-folder named after the source (so that one folder serves a mixture). Empty: the
            records come from the hub. Of one's own data it may name a data set of the hub, or a
            function, FILE.py:FUNCTION.
        split: "train" or "dev".
        limit: stop after this many samples; 0 is no limit.
        columns: names of the fields of one's own data; None: the usual ones.
    """
    module = own.Own(columns or own.Columns()) if source == own.NAME else _module(source)
    records: Iterator[tuple[str, dict[str, Any]]]
    if isinstance(module, own.Own) and (named := HubPath.parse(path)):
        report = ReadReport(source, (f"hub:{named.repo}",))
        wanted = named.split or HUB_SPLITS[split]
        records = module.checked(_hub_records(named.repo, named.config, wanted))
    elif isinstance(module, own.Own) and own_code.is_own_code(path):
        report = ReadReport(source, (path,))
        records = module.checked(own_records(path, split))
    elif path:
        files = files_of(source, path, split)
        report = ReadReport(source, tuple(str(file) for file in files))
        records = (pair for file in files for pair in _records(module, file))
    elif isinstance(module, own.Own):
        raise InputError(
            "data.path is empty, but your own data are nowhere by themselves; set data.path to a "
            "file, a folder, or hub:NAME"
        )
    elif module.HUB is None:
        raise InputError(f"the data source '{source}' is not on the hub; set data.path to files")
    else:
        report = ReadReport(source, (f"hub:{module.HUB[0]}",))
        repo, config, splits = module.HUB
        records = _hub_records(repo, config, splits[split])
    samples: list[Sample] = []
    seen: set[str] = set()
    for where, record in records:
        report.read += 1
        try:
            sample = module.parse(record)
            if sample.id in seen:
                raise BadRecord("duplicate id")
        except BadRecord as bad:
            report.skip(str(bad), where)
            continue
        if wrong := module.mended(record):
            report.mend(wrong, where)
        seen.add(sample.id)
        samples.append(sample)
        if len(samples) == limit:
            break
    report.kept = len(samples)
    if not samples:
        reason, where = next(iter(report.first.items()), ("no record", report.files[0]))
        raise InputError(
            f"{', '.join(report.files)} has no usable {source} record among {report.read} "
            f"(skipped: {report.losses()}; the first is {where}: {reason}); check that it is "
            f"{source} data, with python -m qrag_jax.validate_data --source {source} --path FILE"
        )
    return samples, report


def is_one_part(path: str) -> bool:
    """Whether a path has no dev part of its own: it is one file, or one split of the hub's."""
    named = HubPath.parse(path)
    return named.split is not None if named else bool(path) and Path(path).is_file()


def files_of(source: str, path: str, split: Split) -> list[Path]:
    """The files of one split; the arguments are those of `load_samples`, with a path.

    Args:
        source: may be one of `OPEN_SOURCES`, too.
    """
    module: Files = OPEN_SOURCES[source] if source in OPEN_SOURCES else _module(source)
    folder = _source_folder(Path(path), split, module)
    return split_files(folder, split, module.OFFICIAL[split])


BY_SIZE = "size"
MIXTURES = ("weights", BY_SIZE)


def mix_weights(
    weights: Mapping[str, float], sizes: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Returns each source's share of a mixture; the shares sum to 1.

    Args:
        weights: weight of each source.
        sizes: number of training questions of each source. With it, a share is proportional to
            weight times size, so that equal weights pool the questions of all sources (as in
            Q-RAG's combined runs).
    """
    if not weights:
        raise InputError("data.sources names no source; give one weight at least")
    for name, weight in weights.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight <= 0:
            raise InputError(
                f"the weight of data source '{name}' is {weight!r}; give a positive number"
            )
    parts = {name: weight * (sizes[name] if sizes else 1) for name, weight in weights.items()}
    total = math.fsum(parts.values())
    return {name: part / total for name, part in parts.items()}


def _module(source: str) -> Source:
    if source == "synthetic":
        raise InputError("the data source 'synthetic' is made by the program, it has no files")
    if source == "babilong":
        raise InputError("the data source 'babilong' has stories and books, no files of records")
    if source in OPEN_SOURCES:
        raise InputError(
            f"the data source '{source}' has no passages to choose from; use it for query writers, "
            "who search a corpus"
        )
    if source not in SOURCES:
        known = ", ".join([*SOURCES, "babilong", "synthetic"])
        raise InputError(f"unknown data source '{source}'; the known ones are {known}")
    return SOURCES[source]


def _source_folder(path: Path, split: str, module: Files) -> Path:
    """Returns `path`, or the source's sub-folder if `path` itself has no file of the split."""
    if not path.is_dir() or find_split(path, split, module.OFFICIAL[split]):
        return path
    return next((path / name for name in module.FOLDERS if (path / name).is_dir()), path)


def _records(module: Source, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    records = read_records(file)
    return module.checked(records) if isinstance(module, own.Own) else records


def _hub_records(repo: str, config: str | None, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, record in enumerate(load_hub(repo, config, split), 1):
        yield f"hub:{repo}:{number}", record
