"""How parts are scored: by `evaluate`, or by the list that a row gives each question.

Each function trains if its part does, and returns the scores of every way.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.quality import corpora, peers
from benchmarks.quality.corpora import Setting
from benchmarks.quality.logs import MOST, Lists, by_turns, fused, lists_of, the_log
from benchmarks.quality.parts import MAIN, MINILM, SETTINGS, Part
from benchmarks.quality.runner import command, once, read_lines, train, write_lines
from qrag_jax.sweep import question_scores

FUSED, TWICE = "fused with BM25", "then with its first passage"
EVERY_STEP = "fused at each step"
_HOP, _WORDS = 3, 64  # passages of a first search; words of a query with a passage, as LeReT's
_ENGINES = {"bm25": ("--engine=bm25",), "exact": MINILM}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one part is run.

    Attributes:
        runs: folder of all trainings of this version.
        data: folder of all data.
        seed: of the training.
    """

    part: Part
    runs: Path
    data: Path
    seed: int

    @property
    def workdir(self) -> Path:
        """The folder of the training, which parts may share."""
        return self.runs / f"{self.part.of or self.part.name}-{self.seed}"

    @property
    def out(self) -> Path:
        """The folder of the scores."""
        scored = self.workdir.with_name(f"{self.workdir.name}-scored")
        return scored / self.part.name.replace("/", "-")

    @cached_property
    def setting(self) -> Setting:
        """The corpus and the questions of a row of the side-by-side."""
        return corpora.setting(self.part.data, self.data, self.settings)

    @property
    def settings(self) -> Path:
        """The folder of the setting."""
        return self.runs / "settings" / self.part.data

    @cached_property
    def values(self) -> dict[str, Path]:
        """What the placeholders of fields and flags stand for."""
        data, paths = self.part.data, {"data": self.data}
        if data in SETTINGS:
            folder = self.setting.folder
            paths |= {"beir": folder, "corpus": folder / "corpus.jsonl"}
            paths |= {name: folder / name for name in ("choosing", "testing")}
            paths["index"] = folder / "index"
        elif data:
            folder, out = corpora.folder_of(self.data, data), self.runs / "halves"
            paths |= corpora.write_halves(data, folder, out)
            if any("{own_" in field for field in self.part.fields):
                paths |= corpora.own_halves(data, folder, out)
        paths["imitated"] = self.workdir.with_name(f"{self.workdir.name}-imitated") / "model"
        return paths

    def filled(self, words: Sequence[str]) -> list[str]:
        """Fields or flags with their placeholders filled."""
        named = {name for word in words for _, name, *_ in string.Formatter().parse(word) if name}
        if "index" in named:
            self.index("bm25")
        if not named:
            return [*words]
        return [word.format_map(self.values) for word in words]

    def train(self) -> float | None:
        """Trains the part; returns its minutes, None if nothing is trained."""
        part, minutes = self.part, 0.0
        if not part.config:
            return None
        if part.first:
            run, model = self.values["imitated"].with_name("run"), self.values["imitated"]
            minutes = train(run, part.config, part.first, self.seed)
            words = (f"--workdir={run}", "--checkpoint=last", f"--out={model}")
            once(model.with_name("exported"), command, "qrag_jax.export", *words)
        return minutes + train(self.workdir, part.config, self.filled(part.fields), self.seed)

    def index(self, *engines: str) -> Path:
        """The setting's index with these engines: words (bm25), vectors of MiniLM (exact)."""
        folder, corpus = self.setting.folder / "index", self.setting.folder / "corpus.jsonl"
        for engine in engines:
            words = (f"--corpus={corpus}", f"--index={folder}", *_ENGINES[engine])
            once(self.setting.folder / f"{engine}.done", command, "qrag_jax.index", *words)
        return folder

    def search(self, index: Path, name: str, *flags: str, queries: Path | None = None) -> Path:
        """Asks the test questions by `qrag search`; returns the file of hits."""
        out = self.out / f"{name}.jsonl"
        asked = f"--queries={queries or self.setting.folder / 'test.jsonl'}"
        out.parent.mkdir(parents=True, exist_ok=True)
        done = out.with_suffix(".done")
        once(done, command, "qrag_jax.search", f"--index={index}", asked, f"--out={out}", *flags)
        return out

    def by_words(self) -> Lists:
        """What BM25 finds."""
        return lists_of(self.search(self.index("bm25"), "bm25", f"--k={MOST}"))[0]

    def ways(self, **lists: Lists) -> dict[str, Any]:
        """The scores of each way's lists."""
        return {way: self.setting.scores(ranked) for way, ranked in lists.items()}


Ways = Mapping[str, Any]


def _evaluated(place: Place) -> Ways:
    return {way: question_scores(log, place.workdir) for way, log in _logs(place).items()}


def _logs(place: Place) -> dict[str, Path]:
    """The log of each way that `evaluate` writes."""
    words = (f"--workdir={place.workdir}", f"--out={place.out}", *place.filled(place.part.flags))
    command("qrag_jax.evaluate", *words)
    return {way: the_log(place.out, pattern) for way, pattern in place.part.ways.items()}


def _search(place: Place) -> Ways:
    """Searches the setting's index once."""
    flags = place.part.flags
    index = place.index(*(["exact"] if flags else []), *(["bm25"] if flags != MINILM else []))
    hits = place.search(index, "hits", *flags, f"--k={MOST}")
    return place.ways(**{place.part.main: lists_of(hits)[0]})


def _search_twice(place: Place) -> Ways:
    lists = _twice(place, place.index("bm25"), *place.part.flags)
    return place.ways(**{place.part.main: lists})


def _twice(place: Place, index: Path, *flags: str) -> Lists:
    """By the question, then by the question with the passage found first."""
    first = place.search(index, "first", *flags, f"--k={_HOP}")
    longer = place.out / "longer.jsonl"
    write_lines(longer, map(_with_passage, read_lines(first)))
    then = place.search(index, "then", *flags, f"--k={MOST}", queries=longer)
    one, other = lists_of(first)[0], lists_of(then)[0]
    return {question: by_turns((one[question], other[question])) for question in one}


def _with_passage(row: Mapping[str, Any]) -> dict[str, str]:
    words = [row["question"], *(f"{hit['title']} {hit['text']}" for hit in row["hits"][:1])]
    return {"id": row["id"], "question": " ".join(" ".join(words).split()[:_WORDS])}


def _contrastive(place: Place) -> Ways:
    """MiniLM trained on gold pairs by sentence-transformers; it searches once, and twice."""
    model = place.workdir / "model"
    once(
        place.workdir / "trained.done",
        lambda *_: peers.contrastive(place.setting, model, place.seed),
        dataclasses.asdict(peers.GRID),
    )
    encoder = (f"--encoder={model}", MINILM[1])
    index = place.workdir / "index"
    words = (f"--corpus={place.values['corpus']}", f"--index={index}", *encoder)
    once(place.workdir / "index.done", command, "qrag_jax.index", *words)
    single = lists_of(place.search(index, "hits", *encoder, f"--k={MOST}"))[0]
    twice, words_alone = _twice(place, index, *encoder), place.by_words()
    ways = {MAIN: single, f"{MAIN}, {TWICE}": twice}
    for way, lists in [*ways.items()]:
        ways[f"{way}, {FUSED}"] = fused(lists, words_alone)
    return place.ways(**ways)


def _multi_step_peer(place: Place) -> Ways:
    ways = {
        MAIN: peers.multi_step_peer(place.setting, place.seed),
        "untrained": peers.multi_step_peer(place.setting, place.seed, trained=False),
    }
    ways[f"{MAIN}, {FUSED}"] = fused(ways[MAIN], place.by_words())
    return place.ways(**ways)


def _q_rag(place: Place) -> Ways:
    """The trained towers search in as many steps as in training.

    First come the passages that the steps took, as the retriever reads them; then the others
    that its steps list. The weight of BM25 in each step is the one that finds most for the
    questions for choices.
    """
    index, run = place.workdir / "index", f"--workdir={place.workdir}"
    flags = (run, *place.part.flags)
    corpus = f"--corpus={place.values['corpus']}"
    for engine in ((), ("--engine=bm25",)):
        words = (corpus, f"--index={index}", *(engine or flags))
        once(index.with_name(f"index{len(engine)}.done"), command, "qrag_jax.index", *words)
    choice = place.out / "choice.jsonl"
    asked = place.setting.questions[corpora.CHOICE]
    write_lines(choice, ({"id": one.id, "question": one.text} for one in asked))

    def play(name: str, weight: float = 0.0, queries: Path | None = None) -> Lists:
        every = (*flags, "--beam=1", "--threshold=-inf", f"--bm25_weight={weight}")
        taken = place.search(index, f"taken{name}", *every, queries=queries)
        steps = max(hit["step"] for row in read_lines(taken) for hit in row["hits"])
        most = f"--per_step={-(-MOST // steps)}"
        more = place.search(index, f"more{name}", *every, most, queries=queries)
        one, other = lists_of(taken)[0], lists_of(more)[0]
        return {name: tuple(dict.fromkeys((*one[name], *other[name])))[:MOST] for name in one}

    def recall(weight: float) -> float:
        lists = play(f"-choice-{weight}", weight, choice)
        shares = (len({*one.gold} & {*lists[one.id][:4]}) / len(one.gold) for one in asked)
        return sum(shares) / len(asked)

    main, lists = place.part.main, play("")
    ways = {main: lists, f"{main}, {FUSED}": fused(lists, place.by_words())}
    if place.part.weights:
        best = max(place.part.weights, key=recall)
        print(f"{place.part.name}, seed {place.seed}: bm25_weight {best}", flush=True)
        ways[f"{main}, {EVERY_STEP}"] = play("-fused", best)
    return place.ways(**ways)


def _agent(place: Place) -> Ways:
    """An agent that searches, scored by `evaluate`; its searches are the list."""
    return {way: place.setting.scores(*lists_of(log)) for way, log in _logs(place).items()}


def _predicted(place: Place) -> Ways:
    """A language model that plays the test questions."""
    ways = {}
    place.out.mkdir(parents=True, exist_ok=True)
    for way, checkpoint in place.part.ways.items():
        out = place.out / f"{checkpoint}.jsonl"
        words = (f"--workdir={place.workdir}", f"--checkpoint={checkpoint}", f"--out={out}")
        command("qrag_jax.predict", *words, *place.filled(place.part.flags))
        ways[way] = place.setting.scores(*lists_of(out))
    return ways


HOW: Mapping[str, Callable[[Place], Ways]] = {
    "evaluate": _evaluated,
    "search": _search,
    "search_twice": _search_twice,
    "contrastive": _contrastive,
    "multi_step_peer": _multi_step_peer,
    "q_rag": _q_rag,
    "agent": _agent,
    "predict": _predicted,
}


def run(part: Part, seed: int, runs: Path, data: Path) -> dict[str, Any]:
    """Trains and scores a part with one seed.

    Raises:
        InputError: data or packages are missing.
    """
    place = Place(part, runs, data, seed)
    minutes = place.train()
    ways = HOW[part.how](place)
    return {"ways": ways, "minutes": minutes, "seed": seed, "about": _about(place)}


def _about(place: Place) -> str:
    """What was scored, in words."""
    if place.part.data not in SETTINGS:
        return ""
    setting = place.setting
    sizes = ", ".join(f"{len(questions)} {name}" for name, questions in setting.questions.items())
    return f"{len(setting.corpus)} passages; questions: {sizes}; {setting.left_out} left out"
