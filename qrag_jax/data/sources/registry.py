"""The table of data sets, how their records become samples, and how sources are mixed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.data.files.records import HubPath, find_split, load_hub, read_records, split_files
from qrag_jax.data.sample import BadRecord, Sample, Split
from qrag_jax.data.sources import musique, niah, own, titled_context
from qrag_jax.errors import InputError
from qrag_jax.runtime import own_code

Records = Iterator[tuple[str, dict[str, Any]]]  # pairs (place such as "train.jsonl:17", record)


class Hub(NamedTuple):
    """A data set of the hub."""

    repo: str
    config: str | None
    splits: Mapping[Split, str]


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set. A new one is a row in `SOURCES` and a parser.

    Attributes:
        parse: a record → a sample, or it raises BadRecord; also called with `mend` (see `fields`).
        official: the names of its files.
        folders: names of its folder in a parent folder that sources share.
        hub: None: it is not on the hub by itself.
        rule: how answers are scored, a name in `metrics.answers.RULES`.
    """

    parse: Callable[..., Sample]
    official: Mapping[Split, tuple[str, ...]]
    folders: tuple[str, ...]
    hub: Hub | None = None
    rule: str = "squad"


HUB_SPLITS: Mapping[Split, str] = {"train": "train", "dev": "validation"}
SOURCES: dict[str, Source] = {
    # Distractor setting (Yang et al., EMNLP 2018).
    "hotpotqa": Source(
        partial(titled_context.parse, source="hotpotqa"),
        {"train": ("hotpot_train_v1.1.json",), "dev": ("hotpot_dev_distractor_v1.json",)},
        ("hotpotqa",),
        Hub("hotpotqa/hotpot_qa", "distractor", HUB_SPLITS),
        "hotpotqa",
    ),
    musique.NAME: Source(
        musique.parse,
        {"train": ("musique_ans_v1.0_train.jsonl",), "dev": ("musique_ans_v1.0_dev.jsonl",)},
        ("musique",),
        Hub("dgslibisey/MuSiQue", None, HUB_SPLITS),
        "musique",
    ),
    # 2WikiMultiHopQA (Ho et al., COLING 2020). The authors' copy needs a loading script, which
    # `datasets` no longer runs. This copy has the same splits in HotpotQA's hub layout.
    "two_wiki": Source(
        partial(titled_context.parse, source="two_wiki"),
        {"train": ("train.json",), "dev": ("dev.json",)},
        ("two_wiki", "2wikimultihopqa"),
        Hub("framolfese/2WikiMultihopQA", None, HUB_SPLITS),
        "hotpotqa",
    ),
    # RULER publishes a generator, not data; "validation" is the name that it uses.
    niah.NAME: Source(
        niah.parse,
        {"train": ("train.jsonl",), "dev": ("validation.jsonl",)},
        ("niah", "ruler_niah"),
        rule="ruler",
    ),
    own.NAME: Source(own.parse, {"train": ("train.jsonl",), "dev": ("dev.jsonl",)}, (own.NAME,)),
}
# Data sets whose questions bring no passages: for query writers, who search a corpus.
OPEN_SOURCES: dict[str, Source] = {
    "hover": Source(
        titled_context.parse_claim,  # type: ignore[arg-type]
        {
            "train": ("hover_train_release_v1.1.json",),
            "dev": ("hover_dev_release_v1.1.json",),
        },
        ("hover",),
    ),
}


def answer_rule(source: str) -> str:
    """The rule by which answers of a source are scored; SQuAD's for data of one's own."""
    if source == "babilong":
        return source
    return SOURCES[source].rule if source in SOURCES else "squad"


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


def read_source(
    source: str, path: str, split: Split, columns: own.Columns | None = None
) -> tuple[tuple[str, ...], Records]:
    """What is read, as reports name it, and the records of one split; see `load_samples`."""
    known = _source(source)
    names, records = _origin(source, known, path, split)
    if source == own.NAME:
        records = own.checked(records, columns or own.Columns())
    return names, records


def load_samples(
    source: str, path: str, split: Split, limit: int = 0, columns: own.Columns | None = None
) -> tuple[list[Sample], ReadReport]:
    """Returns the samples of one split and the report of what was skipped.

    Args:
        source: a name in `SOURCES`.
        path: a data file, a folder with the split's files, or a folder that has them in a
            sub-folder named after the source (so that one folder serves a mixture); a data set of
            the hub in the source's layout, hub:NAME; or a function that gives records in it,
            FILE.py:FUNCTION. Empty: the records come from the hub.
        limit: stop after this many samples; 0 is no limit.
        columns: names of the fields of one's own data; None: the usual ones.
    """
    names, records = read_source(source, path, split, columns)
    parse = _source(source).parse
    if source == own.NAME and columns:
        parse = partial(parse, columns=columns)
    report = ReadReport(source, names)
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
        reason, where = next(iter(report.first.items()), ("no record", names[0]))
        raise InputError(
            f"{', '.join(names)} has no usable {source} record among {report.read} "
            f"(skipped: {report.losses()}; the first is {where}: {reason}); check that it is "
            f"{source} data, with python -m qrag_jax.validate_data --source {source} --path FILE"
        )
    return list(samples.values()), report


def is_one_part(path: str) -> bool:
    """Whether a path has no dev part of its own: it is one file, or one split of the hub's."""
    named = HubPath.parse(path)
    return named.split is not None if named else bool(path) and Path(path).is_file()


def files_of(source: str, path: str, split: Split) -> list[Path]:
    """The files of one split of a source, or of one of `OPEN_SOURCES`."""
    known = OPEN_SOURCES.get(source) or _source(source)
    folder, official = Path(path), known.official[split]
    if folder.is_dir() and not find_split(folder, split, official):
        # Perhaps the source's sub-folder has them.
        there = (folder / name for name in known.folders)
        folder = next((each for each in there if each.is_dir()), folder)
    return split_files(folder, split, official)


def _origin(source: str, known: Source, path: str, split: Split) -> tuple[tuple[str, ...], Records]:
    if named := HubPath.parse(path):
        hub = Hub(named.repo, named.config, HUB_SPLITS)
        return (f"hub:{hub.repo}",), _hub_records(hub, named.split or hub.splits[split])
    if own_code.is_own_code(path):
        return (path,), own.code_records(path, split)
    if path:
        files = files_of(source, path, split)
        return tuple(map(str, files)), (pair for file in files for pair in read_records(file))
    if source == own.NAME:
        raise InputError(
            "data.path is empty, but your own data are nowhere by themselves; set data.path to a "
            "file, a folder, or hub:NAME"
        )
    if known.hub is None:
        raise InputError(f"the data source '{source}' is not on the hub; set data.path to files")
    return (f"hub:{known.hub.repo}",), _hub_records(known.hub, known.hub.splits[split])


def _hub_records(hub: Hub, split: str) -> Records:
    for number, record in enumerate(load_hub(hub.repo, hub.config, split), 1):
        yield f"hub:{hub.repo}:{number}", record


def _source(name: str) -> Source:
    if name == "babilong":
        raise InputError("the data source 'babilong' has stories and books, no files of records")
    if name in OPEN_SOURCES:
        raise InputError(
            f"the data source '{name}' has no passages to choose from; use it for query writers, "
            "who search a corpus"
        )
    if name not in SOURCES:
        known = ", ".join([*SOURCES, "babilong"])
        raise InputError(f"unknown data source '{name}'; the known ones are {known}")
    return SOURCES[name]


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
