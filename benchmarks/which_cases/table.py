"""Tables of the suite which.

An ordering of two lines is claimed where the interval of their paired difference leaves 0 out; no
correction is made for the number of pairs.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.report import markdown
from benchmarks.which_cases.found import COUNTS, READ, Found, Training
from benchmarks.which_cases.row import COMPARED_WAYS, TRAINED, Result
from benchmarks.which_cases.rows import ROWS, Row
from benchmarks.which_cases.scores import (
    ALL,
    ANSWER,
    AP,
    RECALL,
    SPAN_EM,
    SPAN_F1,
    Columns,
    Interval,
    columns,
    difference,
    interval,
)
from benchmarks.which_cases.settings import SETTINGS, Setting

COMPARED = f"{ALL}@{READ}"
SIMPLE = ("bm25", "second_hop", "hybrid")  # searches that all trained rows are compared with
CONTRASTIVE = "contrastive"
BEGUN_WITH = {CONTRASTIVE: "minilm", "q_rag_mined": "q_rag"}  # row → the row that it was before


@dataclasses.dataclass
class Scored:
    """One line of the tables: a way of a row, of all its finished trainings in a setting.

    Attributes:
        trained_in: the setting.
        seeds: of the trainings; (0,) if nothing is trained.
        found: test → what each training read.
        scores: test → the scores of each training.
        training: their costs; () for a way that needs none.
        about: what each training says of itself.
    """

    trained_in: str
    row: Row
    way: str
    seeds: list[int] = dataclasses.field(default_factory=list)
    found: dict[str, list[Found]] = dataclasses.field(default_factory=dict)
    scores: dict[str, list[Columns]] = dataclasses.field(default_factory=dict)
    training: list[Training] = dataclasses.field(default_factory=list)
    about: list[str] = dataclasses.field(default_factory=list)

    @property
    def title(self) -> str:
        """What it is called."""
        if not self.row.seeds:
            return self.row.title
        return f"{self.row.title}, {self.way}"

    def column(self, name: str, test: str = "") -> list[np.ndarray]:
        """A score of each training on a test, its own if none is named; [] if there is none."""
        runs = self.scores.get(test or self.trained_in, [])
        return [run[name] for run in runs if name in run]


def scored(results: Mapping[str, Result], settings: Callable[[str], Setting]) -> list[Scored]:
    """The lines, in the order of the rows.

    Args:
        results: part → its result.
        settings: gives a setting by its name.
    """
    lines: dict[tuple[str, str, str], Scored] = {}
    for where in SETTINGS:
        for row in ROWS:
            for part, seed in zip(row.parts, row.seeds or (0,), strict=True):
                if (result := results.get(f"{where}/{part}")) is None:
                    continue
                for way, tests in result.ways.items():
                    line = lines.setdefault((where, row.name, way), Scored(where, row, way))
                    line.seeds.append(seed)
                    for test, found in tests.items():
                        line.found.setdefault(test, []).append(found)
                        line.scores.setdefault(test, []).append(columns(settings(test), found))
                    if way.startswith(TRAINED) and result.training is not None:
                        line.training.append(result.training)
                    line.about.append(result.about)
    return [*lines.values()]


def add_answers(lines: Sequence[Scored], parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds the columns `em@k` and `f1@k` of the parts that were answered.

    Args:
        parts: SETTING/answers → `lines`: part → way → column → float of each question.
    """
    for name, part in parts.items():
        where = name.partition("/")[0]
        for line in lines:
            if line.trained_in != where:
                continue
            for run, seed in zip(line.scores.get(where, []), line.seeds, strict=False):
                own = f"{line.row.name}-{seed}" if line.row.seeds else line.row.name
                for column, values in part["lines"].get(own, {}).get(line.way, {}).items():
                    run[column] = np.array(values, float)


# ---------------------------------------------------------------- tables


def tables(lines: Sequence[Scored], notes: Sequence[str], waiting: Sequence[str] = ()) -> list[str]:
    """All tables in Markdown, each with its heading, and the notes.

    Args:
        waiting: parts that are not run yet.
    """
    made = []
    for where in SETTINGS:
        own = [line for line in lines if line.trained_in == where]
        if own:
            absent = [part.partition("/")[2] for part in waiting if part.startswith(f"{where}/")]
            made += [
                f"### {where}: what is found\n\n{quality_table(own, absent)}",
                f"### {where}: what it costs\n\n{cost_table(own)}",
            ]
            if gains := gain_table(own):
                made.append(f"### {where}: what training brings, by {COMPARED}\n\n{gains}")
            made.append(f"### {where}: which is above which\n\n{order_table(own)}")
    if transferred := transfer_table(lines):
        made.append(f"### Transfer: trained in one setting, tested in the other\n\n{transferred}")
    told = [f"Not run yet: {', '.join(waiting)}."] if waiting else []
    every = dict.fromkeys([*notes, *told, *_notes(lines)])
    return [*made, "\n".join(f"- {note}" for note in every) + "\n"]


def quality_table(lines: Sequence[Scored], waiting: Sequence[str] = ()) -> str:
    """What each line finds on its own test.

    Args:
        waiting: parts of this setting that are not run yet; rows that have no other are told.
    """
    names = [f"{ALL}@{k}" for k in COUNTS]
    names += [f"{RECALL}@{READ}", AP, f"{ANSWER}@{READ}"]
    names += [SPAN_EM, SPAN_F1]
    names += [name for name in (f"em@{READ}", f"f1@{READ}") if any(x.column(name) for x in lines)]
    rows = []
    for line in lines:
        cells = [interval_cell(score_of(line, name), short=name != COMPARED) for name in names]
        each = f" ({', '.join(_number(_mean([c])) for c in line.column(COMPARED))})"
        cells[names.index(COMPARED)] += each if len(line.seeds) > 1 else ""
        told = line.row.told if line.way.startswith(TRAINED) else ""
        trainings = str(len(line.training) or "")
        rows.append([line.title, told, line.row.in_use, trainings, *cells])
    for row in ROWS:
        if {*row.parts} <= {*waiting}:
            blank = [""] * (len(names) - 1)
            rows.append([row.title, row.told, row.in_use, "not run yet", "", *blank])
    return markdown(["row", "is told in training", "in use", "trainings", *names], rows)


def cost_table(lines: Sequence[Scored]) -> str:
    """What each line costs: its training, a question, its index."""
    header = ["row", "training, CPU minutes", "minutes", "tokens", "searches", "ms a question"]
    header += ["encoder tokens", "LLM tokens read", "written", "searches a question", "index, MB"]
    rows = []
    for line in lines:
        costs, found = line.training, line.found[line.trained_in]
        asking = [each.asking for each in found]
        rows.append(
            [
                line.title,
                spread_cell([cost.cpu_minutes for cost in costs]),
                *(cost_cell([getattr(cost, name) for cost in costs]) for name in _TRAINING),
                *(cost_cell([getattr(each, name) for each in asking]) for name in _ASKING),
                cost_cell([each.index_bytes / 1e6 for each in found]),
            ]
        )
    return markdown(header, rows)


_TRAINING = ("minutes", "tokens", "searches")
_ASKING = ("milliseconds", "encoder_tokens", "read_tokens", "written_tokens", "searches")


def is_compared(line: Scored) -> bool:
    """Whether it is in the table of orderings: what needs no training, and trained models.

    Of the further searches of trained models these are: the second one of the contrastive encoder,
    which is the simple rival of training for several steps, and what is fused with BM25.
    """
    return not line.row.seeds or line.way in COMPARED_WAYS


def order_table(lines: Sequence[Scored]) -> str:
    """The lines by what they find, with the numbers of those that each one is above."""
    scores = [(line, score_of(line, COMPARED)) for line in lines if is_compared(line)]
    known = [(line, score) for line, score in scores if score is not None]
    known.sort(key=lambda pair: -pair[1].mean)
    rows = []
    for number, (line, score) in enumerate(known, 1):
        above: dict[int, Interval] = {}
        alike = []
        for place, (other, _) in enumerate(known, 1):
            found = difference_of(line, other)
            if other is line or found is None:
                continue
            if found.low > 0:
                above[place] = found
            elif not found.is_away:
                alike.append(place)
        least = min(above, key=lambda place: above[place].mean, default=0)
        told = f"{known[least - 1][0].title}: {interval_cell(above[least])}" if above else ""
        cells = [ranges(above) or "none", told, ranges(alike) or "none"]
        rows.append([str(number), line.title, interval_cell(score), *cells])
    header = ["", "row", COMPARED, "is above (paired interval away from 0)"]
    return markdown([*header, "least of these differences", "not told apart from"], rows)


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in words, such as 1, 3-6; "" for none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def gain_table(lines: Sequence[Scored]) -> str:
    """What training brings: each trained line less others; "" if nothing is trained."""
    simple = {name: [x for x in lines if x.row.name == name] for name in SIMPLE}
    contrastive = [x for x in lines if x.row.name == CONTRASTIVE and x.way == TRAINED]
    rows = []
    for line in (each for each in lines if each.way == TRAINED):
        untrained = list(begun_with(line, lines))
        gains = [(x.way, interval_cell(difference_of(line, x), sign=True)) for x in untrained]
        cells = [f"{way}: {gain}" if len(gains) > 1 else gain for way, gain in gains if gain]
        beside = [contrastive, *simple.values()]
        each = [
            interval_cell(difference_of(line, found[0]), sign=True)
            if found and found[0] is not line
            else ""
            for found in beside
        ]
        rows.append([line.title, "; ".join(cells), *each])
    if not rows:
        return ""
    titles = [row.title for name in (CONTRASTIVE, *SIMPLE) for row in ROWS if row.name == name]
    return markdown(["row", "less itself untrained", *(f"less {x}" for x in titles)], rows)


def begun_with(line: Scored, lines: Sequence[Scored]) -> Iterator[Scored]:
    """What a trained line was before its training, in each way of searching.

    Contrastive training begins with MiniLM, which is a row of its own, and Q-RAG with negatives
    with what Q-RAG without them begins with.
    """
    name = BEGUN_WITH.get(line.row.name, line.row.name)
    for other in lines:
        if (
            other.trained_in == line.trained_in
            and other.row.name == name
            and not other.way.startswith(TRAINED)
        ):
            yield other


def transfer_table(lines: Sequence[Scored]) -> str:
    """Lines that are tested in another setting, beside the same row trained there; "": none is."""
    rows = []
    for line in lines:
        for test in line.found:
            if test == line.trained_in:
                continue
            there = [x for x in lines if x.trained_in == test and x.row.name == line.row.name]
            same = next((x for x in there if x.way == line.way), None)
            hybrid = next(
                (x for x in lines if x.trained_in == test and x.row.name == SIMPLE[-1]), None
            )
            rows.append(
                [
                    line.title,
                    f"{line.trained_in} → {test}",
                    interval_cell(interval(line.column(COMPARED, test))),
                    "" if same is None else interval_cell(_difference(line, same, test), sign=True),
                    ""
                    if hybrid is None
                    else interval_cell(_difference(line, hybrid, test), sign=True),
                ]
            )
    if not rows:
        return ""
    header = ["row", "trained → tested", COMPARED, "less the one that was trained there"]
    return markdown([*header, "less BM25 and MiniLM there"], rows)


def _notes(lines: Sequence[Scored]) -> Iterator[str]:
    for line in lines:
        for found in line.found.values():
            for each in found:
                if each.note:
                    yield f"{line.row.title}: {each.note}."
        if untold := sum(cost.untold for cost in line.training):
            yield (
                f"{line.title}, {line.trained_in}: starts that were killed: {untold}. Their "
                "minutes are not in the cost."
            )
        if line.way == TRAINED:
            about = zip(line.seeds, line.about, strict=True)
            told = "; ".join(f"seed {seed}: {text}" for seed, text in about if text)
            if told:
                yield f"{line.title}, {line.trained_in}: {told}."


# ---------------------------------------------------------------- differences


def difference_of(line: Scored, other: Scored, name: str = COMPARED) -> Interval | None:
    """The first less the second on their own test; None: a score is missing."""
    return _difference(line, other, line.trained_in, name)


def _difference(line: Scored, other: Scored, test: str, name: str = COMPARED) -> Interval | None:
    first, second = line.column(name, test), other.column(name, test)
    return difference(first, second) if first and second else None


# ---------------------------------------------------------------- cells


def score_of(line: Scored, name: str) -> Interval | None:
    """A score on the line's own test; None: it has none."""
    runs = line.column(name)
    return interval(runs) if runs else None


def _mean(runs: Sequence[np.ndarray]) -> float:
    return float(np.nanmean(runs))


def interval_cell(found: Interval | None, *, short: bool = False, sign: bool = False) -> str:
    """A mean with its interval, or alone; "" for None."""
    if found is None:
        return ""
    form = "+.3f" if sign else ".3f"
    mean = format(found.mean, form)
    return mean if short else f"{mean} [{found.low:{form}}, {found.high:{form}}]"


def _number(value: float) -> str:
    return f"{value:.3f}"


def cost_cell(values: Sequence[float | None]) -> str:
    """The mean of what is known; "" if nothing is."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = statistics.mean(known)
    return f"{mean:,.0f}" if mean >= 10 or mean == 0 else f"{mean:.2g}"


def spread_cell(values: Sequence[float]) -> str:
    """The mean, with the least and the most where there are several; "" if there is none."""
    least, most = (cost_cell([f(values)]) if values else "" for f in (min, max))
    return cost_cell(values) + (f" ({least}-{most})" if least != most else "")
