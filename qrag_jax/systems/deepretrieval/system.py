"""DeepRetrieval (arXiv 2503.00223): a language model learns to rewrite queries by what they find.

One query in, one rewritten query out; a search of it, in any engine, gives the reward. The model
learns by PPO with a critic, or by GRPO. Imitation of scripted rewritings may come before.

A run is scored on its test queries next to the weights at the end of the script (SFT alone), the
untrained ones, the original query, and its words without function words. Each way has a log, which
is not played twice, and a TREC run for each collection. Rankings are scored as trec_eval scores
them, with intervals by the bootstrap; differences are paired by the queries.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.data import corpora
from qrag_jax.data.reading import WITHOUT, DatasetPart, parse_parts
from qrag_jax.data.sample import Sample, world
from qrag_jax.environments import queries
from qrag_jax.environments.episode import Document, Failed, Look
from qrag_jax.errors import InputError
from qrag_jax.evaluators.evaluation import Evaluation, lost_text, sampler
from qrag_jax.feedback import rewrite
from qrag_jax.learners.state import TrainState
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.prompts import one_line
from qrag_jax.metrics import bootstrap, summaries
from qrag_jax.metrics.bootstrap import columns_of, means, score_table
from qrag_jax.metrics.row_log import REWRITES, RewriteRow
from qrag_jax.retrieval import boolean_search, index_folder, protocol, pubmed
from qrag_jax.rollouts import libraries, token_episodes
from qrag_jax.rollouts.experience import AgentExperience, Experience
from qrag_jax.rollouts.token_episodes import Episode, Speech, facts_of
from qrag_jax.rollouts.trajectories import REWARD, TokenTrajectory
from qrag_jax.runtime import config_fields, hosts
from qrag_jax.runtime.interrupt import EndedEarly, StopSignal
from qrag_jax.runtime.run import Run, log
from qrag_jax.systems import scoring, token_system
from qrag_jax.systems.deepretrieval.config import RL, SCRIPT, TALKATIVE, RewriteConfig
from qrag_jax.systems.scoring import Logs, Predictor, ScoreOptions, Way
from qrag_jax.systems.search import OWN, REMOTE, open_search

_SEARCH = "search"  # corpora and indexes, in the run's folder
_MADE = "made"  # the collection of queries that are made here
RUNS, QRELS = "trec", "qrels.txt"
POOLED = "all collections"
_BY_RULE = ("original", "content_words")  # logs of queries that no model writes
# Sections of the config that the play of given weights depends on.
_OF_PLAY = ("model", "writing", "sampling", "seed")
Found = tuple[Document, ...] | Failure


# ---------------------------------------------------------------- what a run reads


def load_inputs(
    config: RewriteConfig,
    workdir: Path,
    mesh: Mesh,
    *,
    trains: bool = True,
    search: Path | None = None,
    listed: Sequence[Sample] | None = None,
) -> token_system.TokenInputs:
    """Reads the queries, writes or opens the corpora, prepares the model.

    Args:
        trains: else the run has a model already, and the queries of training and those that
            choose the best checkpoint are not read, nor are their collections opened.
        search: folder of corpora and indexes; None: the run's own.
        listed: queries of a file, without judgements; then the config's are not read, and all
            their collections are searched.
    """
    asked, folder = _Asked(config), search or workdir / _SEARCH
    if listed is None:
        parts = asked.parts(trains)
    else:
        plain = [dataclasses.replace(query, grades=(), answers=()) for query in listed]
        parts = {"train": [], "dev": [], "test": plain}
    data: dict[str, str] = {}
    library: libraries.SearchLibrary
    if config.search.engine == REMOTE:
        if trains and (count := jax.process_count()) > 1:
            raise InputError(f"config.search.engine {REMOTE!r} is for one host; start one.")
        library = libraries.RemoteLibrary(pubmed.RemoteEngine(config.engine))
        data["search"] = library.engine.digest
    elif listed is not None:
        library = asked.opened({*asked.corpora}, folder)
        only = next(iter(library.by_name)) if len(library.by_name) == 1 else ""
        parts["test"] = [
            dataclasses.replace(q, collection=q.collection or only) for q in parts["test"]
        ]
    else:
        trained = {query.collection for name in ("train", "dev") for query in parts[name]}
        named = trained | {query.collection for query in parts["test"]}
        begun = search is None and config_fields.has_begun(workdir)
        library = asked.opened(named, folder, begun=begun)
        for name, part in parts.items():
            field = (
                f"config.queries.{'train' if name == 'dev' and not config.queries.dev else name}"
            )
            parts[name] = asked.on_corpora(part, field, library)
        for name, collection in library.by_name.items() if trains else ():
            if (count := len(collection.corpus)) < config.reward.k:  # recall would count all
                raise InputError(
                    f"config.reward.k is {config.reward.k}, more than the {count} documents of "
                    f"{name or 'the corpus'}; lower it, or name a larger corpus."
                )
        # The test, which may change, may have a collection of its own.
        digests = {name: library.by_name[name].corpus.digest for name in sorted(trained)}
        data["search"] = token_system.fingerprint(digests.items())
    evaluated = {(task.collection, task.question) for task in (*parts["dev"], *parts["test"])}
    left = [task for task in parts["train"] if (task.collection, task.question) not in evaluated]
    if parts["train"] and not left:
        raise InputError("all of config.queries.train is in dev or test; name other parts.")
    parts["train"] = left[: config.queries.most or len(left)]
    for task in (*parts["train"], *parts["dev"]):
        rewrite.RewriteReward(config.reward).check(task)
    script = None
    if trains and config.queries.train == TALKATIVE:
        script = queries.demonstration_scripts().RewriteScript(asked.made[1])
    elif trains and SCRIPT in config.stages and isinstance(library, libraries.Collections):
        corpora = ((p.whole for p in collection.corpus) for collection in library.by_name.values())
        sentences = world("sentences.py").corpus_sentences(config.dropped, corpora)
        script = queries.demonstration_scripts().RewriteScript(*sentences)
    agent = agent_of(config, config.reward.k)
    return token_system.token_inputs(
        config,
        workdir,
        mesh,
        turn=config.writing.query_tokens,
        train=parts["train"],
        dev=parts["dev"],
        test=parts["test"],
        digest=digest_of,
        agent=agent,
        asks=lambda task: [agent.messages(task)],
        library=libraries.KeptResults(library, config.search.kept),
        script=script,
        data={"prompt": agent.prompt.fingerprint, **data},
    )


def agent_of(config: RewriteConfig, k: int) -> queries.RewriteAgent:
    """The environment, where a query finds k documents."""
    prompt = prompts.load(config.writing.prompt)
    readable = _is_boolean if config.search.engine == index_folder.BOOLEAN else None
    return queries.RewriteAgent(prompt, config.writing.kind.form, k, readable)


def _is_boolean(query: str) -> bool:
    try:
        boolean_search.parse_boolean(query)
    except InputError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The queries of a config, and what they search."""

    config: RewriteConfig

    @cached_property
    def made(self) -> tuple[dict[str, list[Sample]], list[Any], list[protocol.Passage]]:
        """What is made here: queries by part, all training questions, and the passages of all."""
        return world().talkative_parts(self.config.queries)

    def parts(self, trains: bool) -> dict[str, list[Sample]]:
        """The queries of a config, by their fields."""
        queries = self.config.queries
        parts: dict[str, list[Sample]] = {"train": [], "dev": []}
        if trains:
            parts["train"] = self.read(queries.train, "train")
            if queries.dev or queries.train == TALKATIVE:
                parts["dev"] = self.read(queries.dev or TALKATIVE, "dev")
            else:  # some of the training queries choose the best checkpoint
                parts["train"], parts["dev"] = self.held_out(parts["train"])
        return parts | {"test": self.read(queries.test, "test")}

    def held_out(self, train: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
        """The queries that are learned from, and those that choose the best checkpoint."""
        count = self.config.queries.held_out
        if len(train) <= count:
            raise InputError(f"config.queries.held_out is {count} of {len(train)}; lower it.")
        order = np.random.default_rng(self.config.seed).permutation(len(train))
        both = sorted(order[count:].tolist()), sorted(order[:count].tolist())
        left, held = ([train[number] for number in numbers] for numbers in both)
        return left, held

    def read(self, text: str, part_made: str) -> list[Sample]:
        """The queries of a dataset string; ids need be unique within each of its parts alone."""
        if text == TALKATIVE:
            return [dataclasses.replace(task, collection=_MADE) for task in self.made[0][part_made]]
        queries = []
        for part in parse_parts(text, WITHOUT):
            read, report = corpora.read_judged_queries(part)
            log(report.summary())
            name, _ = _collection(part)
            queries += [dataclasses.replace(task, collection=name) for task in read]
        return queries

    @cached_property
    def corpora(self) -> dict[str, str]:
        """The corpora of the collections that the config names; "": section `search` has it."""
        queries, search, corpora = self.config.queries, self.config.search, dict[str, str]()
        if search.index or search.corpus:
            corpora[""] = ""
        for text in filter(None, (queries.train, queries.dev, queries.test)):
            if text == TALKATIVE:
                corpora[_MADE] = ""
                continue
            for part in parse_parts(text, WITHOUT):
                name, path = _collection(part)
                if name and (name == OWN or corpora.setdefault(name, path) != path):
                    raise InputError(
                        f"{part.path} is a collection of the name {name}, as is "
                        f"{corpora.get(name) or 'one of the run itself'}; rename the folder."
                    )
        return corpora

    def opened(self, named: set[str], folder: Path, *, begun: bool = True) -> libraries.Collections:
        """What is searched, by the names of the collections; what is made is in a folder's."""
        search, opened = self.config.search, dict[str, libraries.CorpusLibrary]()
        if "" in named - {*self.corpora}:
            raise InputError("queries in rows need config.search.corpus or index; give one.")
        for name in sorted(named):
            settings = search
            if name:
                settings = dataclasses.replace(search, index="", corpus=self.corpora[name])
            opened[name] = open_search(
                settings, lambda: self.made[2], folder / (name or OWN), begun=begun
            )
        return libraries.Collections(opened)

    def on_corpora(
        self, queries: Sequence[Sample], field: str, library: libraries.Collections
    ) -> list[Sample]:
        """The queries of which their collection has a relevant document."""
        search, kept = self.config.search, list[Sample]()
        for name in dict.fromkeys(query.collection for query in queries):
            part = [query for query in queries if query.collection == name]
            if name != _MADE:  # whose passages are made with them
                needed = [*{document: 0 for query in part for document, _ in query.grades}]
                numbers = library.by_name[name].corpus.numbers(needed)
                known = {document for document, number in zip(needed, numbers) if number >= 0}
                about = f"config.search.{'index' if search.index else 'corpus'}"
                fix = f"give the corpus that they are about in {field}"
                if name:
                    about, fix = f"the corpus of {self.corpora[name]}", f"{fix} or in that folder"
                named = {"field": field, "corpus": about, "fix": fix}
                most = search.max_missing_share
                part, summary = corpora.check_in_corpus(part, known, most, **named)
                if summary:
                    log(f"{name or 'queries'}: {summary}")
            kept += part
        return kept


def _collection(part: DatasetPart) -> tuple[str, str]:
    """The name and the path of a folder in BEIR's layout; both "": it is none."""
    folder = Path(part.path).expanduser().resolve()
    return (folder.name, str(folder)) if corpora.is_collection(folder) else ("", "")


def digest_of(tasks: Sequence[Sample]) -> str:
    return token_system.fingerprint(
        (t.collection, t.id, t.question, t.grades, t.answers, t.until) for t in tasks
    )


# ---------------------------------------------------------------- the system


class GuardedExperience(AgentExperience):
    """Its `position` has the state of the guards, too."""

    def __init__(self, beyond: Counter[str], position: Any, **how: Any) -> None:
        position = position or {"batches": 0, "guard": {}}
        self._beyond = beyond
        beyond.update(position["guard"])
        super().__init__(batches=position["batches"], **how)

    def position(self) -> tuple[Any, list[Any]]:
        batches, pending = super().position()
        return {"batches": batches, "guard": dict(self._beyond)}, pending


@dataclasses.dataclass(kw_only=True)
class DeepRetrieval(token_system.TokenSystem[RewriteConfig]):
    SHOWN: ClassVar[Mapping[str, str]] = {"loss": ".3f", "return": ".3f"}
    TITLE, LEARNED = "DeepRetrieval", "rewrite search queries"
    SETTINGS, LOAD = RewriteConfig, staticmethod(load_inputs)
    OF_QUESTIONS, SEARCH = ("queries.", "search."), _SEARCH

    @classmethod
    def listed(cls, questions: str) -> dict[str, Any]:
        return {"listed": corpora.read_query_list(Path(questions).expanduser())}

    def without_result(self, rows: Sequence[RewriteRow]) -> list[str]:
        lacking = "in a collection that the run does not have"
        empty = [x for x in rows if x.failed or x.found is None or x.outcome != queries.REWRITTEN]
        reasons = Counter(
            f"failed ({x.outcome})" if x.failed else lacking if x.found is None else x.outcome
            for x in empty
        )
        return [f"{count} without results: {reason}" for reason, count in reasons.most_common()]

    def __post_init__(self) -> None:
        super().__post_init__()
        config, inputs = self.config, self.inputs
        self._shape: dict[str, float] = {}  # of the queries of the last batch
        self._beyond, self._ended = Counter[str](), ""  # of the guards, see `look`
        library, entries = inputs.library.library, {}
        if config.reward.reading_cost and isinstance(library, libraries.Collections):
            for name in {task.collection for task in inputs.train}:
                corpus = library.by_name[name].corpus
                entries[name] = rewrite.entries_of(passage.whole for passage in corpus)
        self.reward = rewrite.RewriteReward(config.reward, entries)
        self.turn = config.learned_tokens if config.rollout.query_tokens else 0
        self.line = (
            f"{len(inputs.train)} training queries, {len(inputs.dev)} that choose the best "
            f"checkpoint, searched by {config.search.engine}; {self.steps}, a step of rl by "
            f"{config.algorithm} of {config.groups} queries × {config.rule.members}; {self._where}"
        )

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        self.check_server(stop)
        self._beyond = Counter[str]()
        how: Any = {"order": self.questions, "playing": self.playing(), "counts": self.counted}
        done = run.progress
        return GuardedExperience(self._beyond, done.batches, **how, pending=done.pending)

    def prepare(self, state: TrainState, step: int, stop: StopSignal) -> None:
        if self._ended:
            raise EndedEarly(self._ended)

    def update(self, state: TrainState, episodes: Any) -> tuple[TrainState, dict[str, Any]]:
        """See `System`; guards look at the metrics."""
        stage = self.stage_at(self._updates(state))
        state, metrics = super().update(state, episodes)
        limited = self.config.guards.metrics
        if stage.plan.kind == RL and limited:
            watched = {name: metrics[name] for name in limited if name in metrics}
            self.look(self._shape | jax.device_get(watched))
        return state, metrics

    def look(self, metrics: Mapping[str, float]) -> None:
        """Guards look at the means of an update; they may end the training before the next one."""
        warning = rewrite.beyond_limits(self.config.guards, self._beyond, metrics)
        if warning and self.config.guards.action != rewrite.TELL:
            self._ended = (
                f"{warning} The training ends here, as config.guards.action says; the best "
                "checkpoint is kept. To continue, raise the limit and give the same command."
            )
        elif warning:
            log(f"guard: {warning}")

    def _sampled(self, stage: token_system.Stage) -> int:
        config = self.config
        return config.writing.query_tokens if stage.plan.kind == SCRIPT else config.learned_tokens

    # ---------------------------------------------------------------- episodes

    def judged_by(
        self, tasks: Sequence[Sample], stop: StopSignal
    ) -> list[tuple[Sample, float | Failure]]:
        """With the reward's measure of what each task's original query finds."""
        results = self.searched(tasks, self.config.reward.k, stop)
        return [
            (task, result if isinstance(result, Failure) else self.reward.measure(task, result))
            for task, result in zip(tasks, results)
        ]

    def rewarded(self, *what: Any, **how: Any) -> list[TokenTrajectory]:
        return super().rewarded(*what, turn=self.turn, **how)

    def trajectory(
        self, episode: Episode, of: tuple[int, int], task: Sample, *more: float | Failure
    ) -> TokenTrajectory:
        """See `TokenSystem`; none if the original query failed, too."""
        (original,) = more
        ended, status, parts = episode.ended, episode.status, {}
        if isinstance(original, Failure):
            status = original.cause
        elif isinstance(ended, queries.Searched):
            parts = self.reward.of(task, ended, original)
        facts = facts_of(ended)
        return TokenTrajectory(*of, episode.attempts, episode.segments, status, parts, facts)

    def searched(
        self, tasks: Sequence[Sample], k: int, stop: StopSignal, write: Callable[[str], str] = str
    ) -> list[Found]:
        """What queries by a rule find, best first; few of the searches have failed.

        `write` makes a query of a task's own one. Searches that fail are made again.
        """

        def search(some: Sequence[Sample]) -> list[Found]:
            asked = [(task, Look(one_line(write(task.question)), k)) for task in some]
            hits: dict[int, Found] = {}
            left: Sequence[int] = range(len(some))
            for _ in range(self.config.rollout.attempts):
                hits |= zip(left, self.inputs.library.look([asked[n] for n in left]), strict=True)
                left = [place for place in left if isinstance(hits[place], Failure)]
            return [hits[place] for place in range(len(some))]

        return self.patience(stop, Failure).play(tasks, search) if tasks else []

    def shape_of(self, trajectories: Sequence[TokenTrajectory]) -> dict[str, float]:
        """Means of the guards' measures of the queries, and of the parts of rewards."""
        shapes = []
        for trajectory in trajectories:
            if query := trajectory.facts.get("answer"):
                task = self.inputs.train[trajectory.question]
                shapes.append(rewrite.guard_measures(task.question, query, task.answers))
        parts = means(columns_of(trajectory.parts for trajectory in trajectories)).items()
        return {
            name: float(np.mean([shape[name] for shape in shapes])) if shapes else float("nan")
            for name in rewrite.GUARD_MEASURES
        } | {f"train/{name}": mean for name, mean in parts if name != REWARD}

    def _batch(self, stage: token_system.Stage, trajectories: Sequence[TokenTrajectory]) -> Any:
        if stage.plan.kind == RL:
            self._shape = self.shape_of(trajectories)
        return super()._batch(stage, trajectories)

    def rows(
        self,
        params: Any,
        tasks: Sequence[Sample],
        stop: StopSignal,
        stream: int = token_system.EVALUATED,
    ) -> list[RewriteRow]:
        """Plays queries for evaluation, by the draws of a stream, as deep as its measures need."""
        config, speech = self.config, self.inputs.speech
        agent, greedy = agent_of(config, config.eval.depth), config.eval.greedy
        keys = self.keys(stream, len(tasks), 1)
        episodes = self.episodes(params, tasks, keys, stop, greedy=greedy, agent=agent)
        form = config.writing.kind.form
        return [played_row(*pair, speech, form) for pair in zip(tasks, episodes, strict=True)]

    def rows_by_rule(
        self, tasks: Sequence[Sample], stop: StopSignal, write: Callable[[str], str] = str
    ) -> list[RewriteRow]:
        """Those of queries that a rule writes, see `searched`."""
        results = self.searched(tasks, self.config.eval.depth, stop, write)
        return [row_of(task, write(task.question), f) for task, f in zip(tasks, results)]

    def evaluate(self, state: TrainState, step: int, stop: StopSignal) -> Evaluation:
        settings, tasks = self.config.eval, self.inputs.dev
        rows = self.rows(state.params, tasks, stop)
        stop.check()
        originals = self.rows_by_rule(tasks, stop)
        by: Any = {"measures": settings.measures, "best_by": settings.best_by}
        return rewrite_evaluation(step, tasks, rows, originals=originals, **by)

    def _counted(self, counts: token_episodes.Counts) -> dict[str, float]:
        library = self.inputs.library
        local_counts = np.array([library.searched, library.asked])
        searched, asked = hosts.of_each(local_counts).sum(axis=0).tolist()
        shape = {name: value for name, value in self._shape.items() if not np.isnan(value)}
        return shape | {
            "failed_episodes": float(counts.failed),
            "searches": float(searched),
            "kept_search_share": 1.0 - searched / max(asked, 1),
        }

    # ---------------------------------------------------------------- a run is scored

    def plays(self, raw: ConfigDict, options: ScoreOptions, stop: StopSignal) -> dict[str, Any]:
        config, inputs, every = self.config, self.inputs, raw.to_dict()
        library, tasks = inputs.library.library, inputs.test

        def rows(
            params: Any, asked: Sequence[Sample], stop: StopSignal, stream: int
        ) -> list[RewriteRow]:
            played = self.rows(params, asked, stop, stream)
            every = not isinstance(library, libraries.Collections)
            known = [every or library.has(task) for task in asked]
            return [
                row if there and not row.failed else dataclasses.replace(row, found=None)
                for row, there in zip(played, known, strict=True)
            ]

        record = {name: every[name] for name in ("search", *_OF_PLAY)} | {
            "queries": digest_of(tasks),
            "greedy": config.eval.greedy,
            "depth": config.eval.depth,
            "data": {name: inputs.data[name] for name in ("model", "prompt")},
            "searched": sorted({library.digest(task) for task in tasks}),
        }
        # As many in a part as in training, whose memory suffices
        size = 0 if options.as_training else config.train.batch_size
        play = token_system.in_parts(rows, size, stop)
        return {"rows": REWRITES, "asked": tasks, "size": size, "play": play, "record": record}

    def ways(self, predictor: Predictor) -> Iterator[Way]:
        yield from map(predictor.way, predictor.ways(predictor.options.checkpoint))
        # A query that has none but function words stays as it is.
        words = world("sentences.py").content_words
        rules: list[tuple[str, Callable[[str], str]]] = [
            ("original query", str),
            ("without function words", lambda query: " ".join(words(query)) or query),
        ]

        def ruled(write: Any, tasks: Sequence[Sample], _: int) -> list[RewriteRow]:
            return self.rows_by_rule(tasks, predictor.stop, write)

        for name, (label, write) in zip(_BY_RULE, rules, strict=True):
            yield Way(name, label, partial(ruled, write), predictor.record)

    def summary(self, predictor: Predictor, logs: Logs) -> tuple[dict[str, Any], list[str]]:
        tasks, settings, main = self.inputs.test, self.config.eval, logs[0][0]
        rows = {label: REWRITES.read(log) for label, log in logs}
        notes = _write_runs(
            logs[0][1].parent / RUNS, tasks, {log.stem: rows[label] for label, log in logs}
        )
        summary, text = _compared(tasks, rows, main, settings.measures)
        by_model = [label for label, log in logs if log.stem not in _BY_RULE]
        shapes = {label: shape_of_rows(tasks, rows[label]) for label in by_model}
        text += ["what the models write:", *shape_lines(shapes), ""]
        about = {"main": main, "best_by": settings.best_by, "shapes": shapes, "notes": notes}
        return summary | about, text


def _compared(
    tasks: Sequence[Sample],
    rows: Mapping[str, Sequence[RewriteRow]],
    main: str,
    measures: Sequence[str],
) -> tuple[dict[str, Any], list[str]]:
    """`pooled` over all queries, and `collections`, each by its name; and their tables."""
    ways = {label: summaries.measured(rows_of_way, measures) for label, rows_of_way in rows.items()}
    places: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        places.setdefault(task.collection or OWN, []).append(number)
    every, text = dict[str, dict[str, Any]](), list[str]()
    for name, numbers in (places | {POOLED: [*range(len(tasks))]}).items():
        part = {
            label: {measure: column[numbers] for measure, column in columns.items()}
            for label, columns in ways.items()
        }
        every[name] = scoring.compared(part, main, rewrite_summary, rewrite_gains)
        if name != POOLED or len(places) > 1:
            counts = {"failed": "{failed} of {queries}"}
            scores, gains = (every[name][part].items() for part in ("scores", "gains"))
            text += [f"{name}:", *score_table(scores, measures, counts, gains), ""]
    return {"pooled": every.pop(POOLED), "collections": every}, text


def _write_runs(
    folder: Path, tasks: Sequence[Sample], rows: Mapping[str, Sequence[RewriteRow]]
) -> list[str]:
    """Each way's rankings and the judgements as TREC has them, a folder for each collection.

    The scores in a run are 1 / rank: trec_eval would order documents of equal scores by their
    names. Queries whose search failed are not in it, nor are those that found nothing.

    Returns:
        Why files are missing, a sentence each.
    """
    notes = []
    for collection in dict.fromkeys(task.collection for task in tasks):
        numbers = [n for n, task in enumerate(tasks) if task.collection == collection]
        to, ids = folder / (collection or OWN), [tasks[n].id for n in numbers]
        if len({*ids}) < len(ids):
            notes.append(f"{to} is not written: two queries have one id")
            continue
        try:
            corpora.write_qrels(to / QRELS, {tasks[n].id: dict(tasks[n].grades) for n in numbers})
            for name, way in rows.items():
                run = {
                    way[n].id: {doc: 1 / rank for rank, doc in enumerate(way[n].ranking, 1)}
                    for n in numbers
                }
                corpora.write_run(to / f"{name}.run", run, name)
        except InputError as error:
            notes.append(str(error))
    return notes


# ---------------------------------------------------------------- rows and their scores


def row_of(
    task: Sample, query: str, hits: Sequence[Document] | Failure, outcome: str = "", **written: Any
) -> RewriteRow:
    """The row of a query and what it found; `written`: `text` and `sampled` of a model's."""
    if isinstance(hits, Failure):
        outcome, hits = hits.cause, ()
    found = tuple((d.id, float(d.score)) for d in hits)
    row = RewriteRow(task.id, task.collection, task.question, query, outcome, found=found)
    return dataclasses.replace(row, grades=dict(task.grades), **written)


def played_row(task: Sample, episode: Episode, speech: Speech, form: str) -> RewriteRow:
    """The row of an episode."""
    ended, text = episode.ended, ""
    if turn := next(itertools.chain(*episode.segments), None):
        text = speech.text(turn.sampled)
    wrote: Any = {"text": text, "sampled": len(turn.sampled) if turn else 0}
    if isinstance(ended, Failed):
        query, _ = queries.read_output(text, form, cut_off=turn is None or turn.finish == "length")
        return row_of(task, query, Failure(ended.cause, ended.message), **wrote)
    assert isinstance(ended, queries.Searched)
    return row_of(task, ended.answer, ended.found, ended.outcome, **wrote)


_SHAPE = ("format", "readable", "sampled_tokens")
# Of one way of writing: measure → float `[queries]`, NaN where the search failed.
WayScores = Mapping[str, np.ndarray]


def rewrite_evaluation(
    step: int,
    tasks: Sequence[Sample],
    rows: Sequence[RewriteRow],
    *,
    originals: Sequence[RewriteRow],
    measures: Sequence[str],
    best_by: str,
) -> Evaluation:
    """Scores the played queries of a training next to the original ones."""
    original, columns = (
        {
            name: column[~np.isnan(column)]
            for name, column in summaries.measured(of, measures).items()
        }
        for of in (originals, rows)
    )
    scores, baselines = means(columns), means(original)
    values = ", ".join(
        f"{name} {scores[name]:.3f} ({baselines[name]:.3f} by the originals)" for name in measures
    )
    scores |= {name: value or 0.0 for name, value in shape_of_rows(tasks, rows).items()}
    scores.pop("readable")
    scores["failed_share"] = sum(row.failed for row in rows) / max(len(rows), 1)
    line = (
        f"step {step}: {values}, {scores['format']:.0%} readable, "
        f"{scores['query_words']:.1f} words{lost_text(scores, {'failed_share': 'failed'})} on "
        f"{len(tasks)} queries"
    )
    kept = sampler(REWRITES, rows)
    scored = Evaluation.of(line, scores, best_by, columns, episodes=kept)
    scored.baselines.update({f"original/{name}": value for name, value in baselines.items()})
    return scored


def shape_of_rows(tasks: Sequence[Sample], rows: Sequence[RewriteRow]) -> dict[str, float | None]:
    """Means over the queries that did not fail; None: of nothing.

    `format` is the share with a query, even one that the search cannot read, as in the reward, and
    `readable` that with a query that was searched for. There are also `sampled_tokens`, and over
    those with a query `GUARD_MEASURES`.
    """
    shapes = []
    for task, row in zip(tasks, rows, strict=True):
        written = rewrite.guard_measures(row.original, row.query, task.answers) if row.query else {}
        counts = bool(row.query), row.outcome == queries.REWRITTEN, row.sampled
        if not row.failed:
            shapes.append(dict(zip(_SHAPE, map(float, counts))) | written)
    columns, names = columns_of(shapes), (*_SHAPE, *rewrite.GUARD_MEASURES)
    return {name: float(np.mean(columns[name])) if name in columns else None for name in names}


# A search that failed tells nothing of its query, which is left out of the means of its way. A
# difference between two ways is over the queries that failed in neither.


def rewrite_summary(columns: WayScores) -> dict[str, Any]:
    """Each measure's interval over the queries, and how many of them `failed`."""
    count, left = len(next(iter(columns.values()))), _whole(columns)
    return {"queries": count, "failed": int(count - left.sum())} | bootstrap.with_intervals(
        {name: column[left] for name, column in columns.items()}
    )


def rewrite_gains(columns: WayScores, others: WayScores) -> dict[str, Any]:
    """Paired differences of all measures."""
    both = _whole(columns) & _whole(others)
    ours, theirs = ({name: c[both] for name, c in side.items()} for side in (columns, others))
    return bootstrap.gains(ours, theirs)


def _whole(columns: WayScores) -> np.ndarray:
    """bool `[queries]`, whether their search did not fail."""
    return ~np.isnan(next(iter(columns.values())))


def shape_lines(shapes: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """The table of what the queries of each model look like."""
    names = [*next(iter(shapes.values()), {})]
    rows = [["", *names]]
    for label, shape in shapes.items():
        cells = [shape[name] for name in names]
        rows.append([label, *("-" if cell is None else f"{cell:.3g}" for cell in cells)])
    return bootstrap.columns_text(rows)


SYSTEM = DeepRetrieval
