"""One form for the episodes of all systems, and evaluations during training, which keep a few.

Each log's rows become `Episode`s, for pages and texts. An episode has a question, its answers and
steps. A step has a query and what was found, or a text and its tokens. A system whose log is to be
shown needs one function, one line in `KINDS` and its words in episode_words.json.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from qrag_jax.metrics import bootstrap, row_log
from qrag_jax.metrics import row_log as logs
from qrag_jax.runtime import bounded_json, hosts, whole_files

LONGEST = 300  # characters that are shown of a text
_MOST_FOUND, _MOST_REWRITTEN = 10, 30  # passages of a search in texts; of a rewritten one on pages
Settings = Mapping[str, Any]  # fields of a run's config, by their dotted names

_MASKED = "masked"  # `rollouts.trajectories.MASKED`, whose module brings jax
_NOISE = 1e-4  # a smaller regret is of float32 and not of the retriever


class Found(NamedTuple):
    """A chunk or passage; `gold`: the log says that it is a supporting one."""

    name: str
    score: float | None = None
    gold: bool = False
    text: str = ""


@dataclasses.dataclass
class Step:
    """A chunk that was taken, a search, a text that was observed, or a turn of a model."""

    head: Sequence[str] = ()  # short facts
    query: str | None = None  # None: it is no search by words
    text: str = ""  # what was read or written
    found: Sequence[Found] = ()  # best first
    tokens: Sequence[tuple[int, str]] = ()  # ids and texts of the tokens of `text`
    log_probs: Sequence[float] = ()  # of these tokens, if the model sampled them
    # Of these tokens: "observed", "sampled", or "trained" (an update learns from them)
    kind: str = ""


@dataclasses.dataclass
class Episode:
    """An episode of any system; what is None is not known."""

    # Its question's id and what else it needs, the same in the logs of two models
    key: tuple[str, ...]
    question: str
    steps: Sequence[Step]
    answers: Sequence[str] = ()  # right ones
    answered: str | None = None  # None: no answer was asked for
    facts: Sequence[tuple[str, str]] = ()  # what else is to be said, by names
    missed: Sequence[Found] = ()  # gold that was not found
    solved: bool | None = None
    hops: int | None = None  # hops, score: see `words_of`
    score: float | None = None
    regret: float | None = None
    before: Episode | None = None  # the episode of the untrained model


def best_return(facts: int, settings: Settings) -> float:
    """The return of Q-RAG's episode that takes the facts first, in more than T steps if it must.

    1 where the settings are not known; see `feedback.facts`.
    """
    if "pqn.gamma" not in settings:
        return 1.0
    gamma = settings["pqn.gamma"]
    penalized = settings.get("reward.penalize_extra_steps", True)
    reward = 0.5 + 0.5 * facts / (facts + 1e-5) if penalized else 1.0
    per_fact = settings.get("reward.per_fact_reward", 0.0)
    best = sum(gamma**t * per_fact for t in range(facts)) + gamma ** (facts - 1) * reward
    if settings.get("env.never_terminate", True) and not settings.get("env.stop_action", False):
        # The other steps must take chunks that are no fact.
        cost = settings.get("reward.step_cost", 0.0)
        best -= sum(gamma**t * cost for t in range(facts, settings["env.max_steps"]))
    return best


def _chunks(row: logs.Row, settings: Settings) -> Episode:
    gold, count = set(row.sf_idx), len(set(row.sf_idx))
    values: Sequence[float | None] = row.q_values or [None] * len(row.pred_idx)
    taken = zip(row.pred_idx, row.pred_texts, values)
    steps = [Step(found=[Found(f"chunk {i}", q, i in gold, text)]) for i, text, q in taken]
    missed = [
        Found(f"chunk {i}", None, True, text)
        for i, text in zip(row.sf_idx, row.sf_texts)
        if i not in row.pred_idx
    ]
    hits, regret = count - len({m.name for m in missed}), None
    if row.ret is not None and count:
        regret = best_return(count, settings) - row.ret
        regret = 0.0 if abs(regret) < _NOISE else regret
    return Episode(
        (row.id,),
        row.question,
        steps,
        answers=[alias for alias in (row.answer, *row.aliases) if alias],
        facts=[("gold chunks taken", f"{hits} of {count}" if count else "not known")],
        missed=missed,
        solved=hits == count if count else None,
        hops=count or None,
        score=row.ret,
        regret=regret,
    )


def _tokens(row: logs.Prediction, settings: Settings) -> Episode:
    played, facts = row.trajectory, row.trajectory["facts"]
    masked = settings.get("tools.truncated") == _MASKED and played["status"] == "truncated"
    kind = "sampled" if row.reward is None or masked else "trained"
    steps = []
    turns = [turn for segment in played["segments"] for turn in segment]
    for number, (turn, texts) in enumerate(zip(turns, row.turns, strict=True), start=1):
        observed, sampled = (
            [*zip(turn[name], texts[f"{name}_tokens"], strict=True)]
            for name in ("observed", "sampled")
        )
        head = ["tool result" if number > 1 else "prompt", f"{len(observed)} tokens observed"]
        steps.append(Step(head, None, texts["observed"], tokens=observed, kind="observed"))
        head = [f"turn {number} of the model", f"{len(sampled)} tokens sampled"]
        head += ["trained" if kind == "trained" else "not trained"]
        head += [] if turn["finish"] == "stop" else ["cut off"]
        head += [f"weights {turn['version']}"] if turn["version"] else []
        log_probs = [round(p, 4) for p in turn["log_probs"]]
        steps.append(Step(head, None, texts["sampled"], (), sampled, log_probs, kind))
    ended = [played["status"], facts.get("message", "")]
    ended += [", ".join(f"{name} {count}" for name, count in facts.get("tally", {}).items())]
    ended += [f"{name} {', '.join(facts[name])}" for name in ("cited", "seen") if facts.get(name)]
    return Episode(
        (row.id, f"draw {row.draw}"),
        row.question,
        steps,
        answers=row.answers,
        answered=row.prediction,
        facts=[("ended", "; ".join(filter(None, ended))), ("scores", _scores(played["parts"]))],
        solved=None if row.reward is None else played["parts"].get("em") == 1,
        hops=row.hops,
        score=row.reward,
    )


def _hops(row: logs.Searched, settings: Settings) -> Episode:
    last = row.hops[-1].scores if row.hops and not row.failed else {}
    ap, every = last.get("ap"), last.get("all_gold")
    steps, gold = [], {*row.pages, *row.gold}
    for hop in row.hops:
        pairs = hop.found or [(name, None) for name in hop.pool]
        results = [Found(n, score, n in gold, row.texts.get(n, "")) for n, score in pairs]
        head = [*filter(None, [hop.outcome]), _scores(hop.scores)]
        steps.append(Step(head, hop.query, found=results))
    return Episode(
        (row.id,),
        row.question,
        steps,
        answers=row.answers,
        facts=[("gold pages", ", ".join(row.pages)), ("after the last hop", _scores(last))],
        solved=None if every is None else every == 1,
        hops=len(row.pages),
        score=ap,
        regret=None if ap is None else 1 - ap,
    )


def _agents(row: logs.AgentRow, settings: Settings) -> Episode:
    steps = []
    for search in row.searches:
        read = search.get("answer")
        text = f"read as the answer of this search: {read}" if read else ""
        results = [*map(Found, search["names"])]
        steps.append(Step([search["status"]], search["query"], text, results))
    return Episode(
        (row.id,),
        row.question,
        steps,
        answers=row.golds,
        answered=row.answer or f"(no answer: {row.broken or 'it gave up'})",
        facts=[("recall of gold", "not known" if row.recall is None else f"{row.recall:.3f}")],
        solved=None if row.failed else row.em == 1,
        hops=len(row.searches),
        score=None if row.failed else row.f1,
        regret=None if row.failed else 1 - row.f1,
    )


def _rewrites(row: logs.RewriteRow, settings: Settings) -> Episode:
    text, results = f"the model wrote: {row.text}" if row.text else "", row.found or ()
    head = [row.outcome, f"{row.sampled} tokens", f"{len(results)} found"]
    step = Step(head, row.query, text, [Found(*pair) for pair in results[:_MOST_REWRITTEN]])
    return Episode((row.id, row.collection), row.original, [step])


# Kind → the logs of this kind, and (row, the run's settings) → episode.
KINDS: dict[str, tuple[row_log.RowLog, Callable[[Any, Settings], Episode]]] = {
    logs.RETRIEVALS.name: (logs.RETRIEVALS, _chunks),
    logs.PREDICTIONS.name: (logs.PREDICTIONS, _tokens),
    logs.HOPS.name: (logs.HOPS, _hops),
    logs.AGENTS.name: (logs.AGENTS, _agents),
    logs.REWRITES.name: (logs.REWRITES, _rewrites),
}


def words_of(kind: str) -> dict[str, str]:
    """What `score`, `hops`, `solved`, `unsolved` and the scores of what was `found` are called.

    And how `regret` is defined, and a `note` on all these logs; "": there is none.
    """
    file = resources.files("qrag_jax.evaluators") / "episode_words.json"
    return json.loads(file.read_text(encoding="utf-8"))[kind]


def episodes_of(
    kind: str, rows: Sequence[Any], before: Sequence[Any] = (), settings: Settings | None = None
) -> list[Episode]:
    """The episodes of rows of one kind, with those of the untrained model's rows next to them."""
    (_, view), settings = KINDS[kind], settings or {}
    early = {e.key: e for e in (view(row, settings) for row in before)}
    episodes = [view(row, settings) for row in rows]
    best = max((e.score for e in episodes if e.score is not None), default=0.0)
    for e in episodes:
        e.before = early.get(e.key)
        if kind == logs.PREDICTIONS.name and e.score is not None:
            e.regret = best - e.score
    return episodes


def _scores(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in scores.items())


# ---------------------------------------------------------------- logs of a run

UNTRAINED = ("untrained", "best-0")
_CHECKPOINT = re.compile(r"(?:best|last)-(\d+)")
_BESIDE = ("single_step_", "planned_")  # names of logs that go with one of the same play
GIVE = "give the folder of a run, such as runs/quickstart, or a log in it"


def newest_log(folder: Path) -> Path | None:
    """The newest log of an evaluation of trained weights, of others if there is none.

    A rule that is scored with them, such as the question as it is, comes behind any checkpoint.
    """

    def worth(log: Path) -> tuple[Any, ...]:
        label = log.stem if log.parent in (folder, folder / "eval") else log.parent.name
        is_beside = log.name.startswith(_BESIDE)
        step = int(match[1]) if (match := _CHECKPOINT.fullmatch(label)) else -1
        of = step > 0, step == 0, label not in UNTRAINED
        return *of, not is_beside, log.stat().st_mtime, log.name

    return max(logs_of(folder), key=worth, default=None)


def kind_of(path: Path) -> str | None:
    """What a log's rows are, by its first line: one of `KINDS`; None: it is no such log."""
    record, none = first_record(path), dataclasses.MISSING
    for name, (log, _) in KINDS.items():
        fields = dataclasses.fields(log.kind)
        if record.keys() >= {f.name for f in fields if f.default is f.default_factory is none}:
            return name
    return None


def first_record(path: Path) -> dict[str, Any]:
    """The first line of a file that may be anything; {} if it is no object of JSON."""
    try:
        with path.open("rb") as file:
            line = next(whole_files.bounded_lines(file, path, GIVE), b"null")
        return bounded_json.typed(dict[str, Any], line)
    except (OSError, ValueError):  # InputError is a ValueError, too
        return {}


def logs_of(folder: Path) -> list[Path]:
    base = folder / "eval" if (folder / "eval").is_dir() else folder
    files = sorted([*base.glob("*.jsonl"), *base.glob("*/*.jsonl")])
    return [file for file in files if kind_of(file)]


# ---------------------------------------------------------------- samples of them


class EpisodeSample(NamedTuple):
    kind: str  # name of its log, see `KINDS`
    rows: list[dict[str, Any]]  # each as its log has it in JSON
    text: str  # the same for people, in Markdown


# (most episodes) → a sample of so many; of several hosts the first one calls it.
Sampler = Callable[[int], EpisodeSample]


def sampler(
    log: row_log.RowLog, played: Sequence[Any], row_of: Callable[[Any], Any] = lambda row: row
) -> Sampler:
    """The sampler of an evaluation, with the same places each time, spread evenly.

    An episode with a number that is not finite, as of weights that are broken, is left out: no log
    can hold it.

    Args:
        row_of: makes the row of what was played, only if it is asked for.
    """

    def sample(most: int) -> EpisodeSample:
        rows = [row_of(played[place]) for place in spread(len(played), most)]
        kept, words = [*filter(_is_finite, rows)], words_of(log.name)
        parts = [_text(e, words) for e in episodes_of(log.name, kept)]
        return EpisodeSample(log.name, [log.to_json(row) for row in kept], "\n\n".join(parts))

    return sample


def spread(count: int, most: int) -> list[int]:
    """At most so many of the places 0 … count − 1, spread evenly."""
    if most >= count:
        return [*range(count)]
    return np.linspace(0, count - 1, most).round().astype(int).tolist()


def _text(episode: Episode, words: Mapping[str, str]) -> str:
    """For TensorBoard's texts: a block of code, in which Markdown and HTML read nothing."""
    parts = [f"{name}: {text}" for name, text in episode.facts]
    if episode.score is not None:
        parts.insert(0, f"{words['score']} {episode.score:.3f}")
    if episode.answered is not None:
        parts.append(f"answered: {episode.answered}")
    if episode.answers:
        parts.append(f"right: {' / '.join(episode.answers)}")
    lines = [episode.question, "; ".join(parts)]

    def add(mark: str, hit: Found) -> None:
        score = "" if hit.score is None else f"{words['found']} {hit.score:.3f}, ".lstrip()
        gold = "GOLD " if hit.gold else ""
        lines.append(f"- {mark}{gold}{score}{hit.name}: {hit.text}")

    # The first text that is observed is the prompt, the same in all episodes.
    steps = [s for n, s in enumerate(episode.steps) if n or s.kind != "observed"]
    for number, step in enumerate(steps, start=1):
        lines.append(f"{number}. {'; '.join([*step.head, step.query or '', step.text])}")
        for hit in step.found[:_MOST_FOUND]:
            add("", hit)
    for hit in episode.missed:
        add("not found: ", hit)
    return "\n".join(f"    {' '.join(line.split())[:LONGEST]}" for line in lines)


def _is_finite(row: Any) -> bool:
    try:
        json.dumps(dataclasses.asdict(row), allow_nan=False)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------- evaluations


class Evaluation(NamedTuple):
    metrics: dict[str, float]  # values by the names they are written under
    # Metrics that later evaluations repeat if this one is of the untrained weights
    baselines: dict[str, float]
    line: str  # one line for the screen
    score: float  # the score that chooses the best checkpoint
    # All scores of multi-step play, kept with the checkpoint if it is the best
    scores: dict[str, float]
    # Gives some of the episodes, on the first host; None: none are kept to look at
    episodes: Sampler | None = None
    each: Sequence[float] = ()  # `score` of each question that has one; (): these are not shown
    q_spread: float | None = None  # see `runtime.step_log.Evaluated`

    @classmethod
    def of(
        cls,
        line: str,
        scores: Mapping[str, float],
        best_by: str,
        columns: Mapping[str, bootstrap.Values],
        **more: Any,
    ) -> Evaluation:
        """`columns` have the scores of each question, as far as it has them."""
        metrics = {f"eval/{name}": value for name, value in scores.items()}
        for name, values in columns.items():
            if name in scores and len(values) > 1:
                metrics[f"eval_half_width/{name}"] = bootstrap.half_width(values)
        return cls(
            metrics=metrics,
            baselines={f"untrained/{name}": value for name, value in scores.items()},
            line=line,
            score=scores[best_by],
            scores=dict(scores),
            each=[*columns.get(best_by, ())],
            **more,
        )


def lost_text(scores: Mapping[str, float], words: Mapping[str, str]) -> str:
    """Of the shares that are not 0, what they are of, for the line on the screen."""
    shares = ((scores.get(name, 0.0), word) for name, word in words.items())
    return "".join(f", {share:.0%} {word}" for share, word in shares if share)


def of_all_hosts(count: int, ask: Callable[[Sequence[int]], Sequence[Any]]) -> list[Any]:
    """What is found of each of so many questions; each host asks its part.

    It is in the order of the questions, so that a mean does not depend on the number of hosts. All
    hosts fail together if one is stopped or has lost its feedback.
    """
    index, number = jax.process_index(), jax.process_count()
    parts = hosts.values_of_each(hosts.all_or_none(lambda: ask(range(count)[index::number])))
    return [parts[place % number][place // number] for place in range(count)]
