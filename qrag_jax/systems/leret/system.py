"""LeReT (arXiv 2410.23214): a language model learns to write search queries from its own tries.

In each iteration several prompts make the model try different queries at each hop. The average
precision of what these find says which is better. The model imitates the best ones by its bare
prompt (SFT), and then learns from pairs of them (IPO or DPO): prompts → tries → lessons → batches.

A run is scored hop by hop. Next to the trained weights, asked by the bare prompt, are: the question
itself as the query, the question with the best passage found so far, the weights at the end of each
earlier stage, the untrained ones, and the prompts that made the tries by the weights that they were
made with.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.data.reading import without_asked
from qrag_jax.data.sample import Sample, Split, world
from qrag_jax.environments import queries
from qrag_jax.errors import InputError
from qrag_jax.evaluators.evaluation import Evaluation, sampler
from qrag_jax.feedback.pairs import check_found, check_pairs, read_pairs, report_of, write_pairs
from qrag_jax.learners.state import TrainState
from qrag_jax.learners.token_policy import row_log_probs
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.prompts import one_line
from qrag_jax.metrics.row_log import HOPS, Searched
from qrag_jax.metrics.summaries import SHOWN, hop_columns, hop_gains, hop_summary, hop_table
from qrag_jax.retrieval import corpus, protocol
from qrag_jax.rollouts import experience, libraries, token_episodes, trajectories
from qrag_jax.rollouts.token_episodes import Episode, Start
from qrag_jax.rollouts.trajectories import DONE, REWARD, TokenTrajectory
from qrag_jax.runtime import config_fields, hosts, whole_files
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.systems import scoring, token_config, token_system
from qrag_jax.systems.leret import tries
from qrag_jax.systems.leret.config import PREFERENCE, SCRIPT, STYLED, LeretConfig
from qrag_jax.systems.leret.tries import Lesson, Lessons, PlayBy, Trying
from qrag_jax.systems.scoring import Logs, Predictor, ScoreOptions, Way
from qrag_jax.systems.search import open_search

CORPUS = "search"  # of pooled passages, in the run's folder
# Sections of the config that the play of given weights depends on.
_OF_PLAY = ("model", "search", "writing", "sampling", "reward", "seed")
_WORDS = 64  # of a query with a passage


def load_inputs(
    config: LeretConfig,
    workdir: Path,
    mesh: Mesh,
    *,
    trains: bool = True,
    search: Path | None = None,
) -> token_system.TokenInputs:
    """Reads the questions, writes or opens the corpus, prepares the model.

    Args:
        trains: else there are no training questions.
        search: a folder for the pooled passages of the config's questions; None: the run's, which
            is written by what trains.
    """
    asked, settings, writing = config.questions, config.search, config.writing
    is_made, questions = asked.train == token_config.BRIDGE, dict[str, list[Any]]()

    def read(split: Split, text: str, count: int) -> list[Sample]:
        if text != token_config.BRIDGE:
            return token_system.read_samples(text, from_corpus=True)
        questions[split] = world().bridge_questions(asked.bridge_seed, split, range(count))
        return [question.query for question in questions[split]]

    pairs = read_pairs(config.pairs.path) if trains else []
    every_dev, train = read("dev", asked.dev, asked.bridge_dev), list[Sample]()
    passages: Callable[[], Iterable[protocol.Passage]] | None = None
    if trains or search is not None:
        every = read("train", asked.train, asked.bridge_corpus)
        # Where they are made here, passages of more questions are searched.
        count = asked.bridge_train if is_made else len(every)
        train = without_asked(every[:count], every_dev)
        train = train[: asked.most or len(train)]
        brought = (*train, *every_dev, *every[count:])

        def pages() -> Iterable[protocol.Passage]:
            return corpus.pooled(page for sample in brought for page in sample.passages)

        passages = pages
    begun = search is None and config_fields.has_begun(workdir)
    library = open_search(settings, passages, search or workdir / CORPUS, begun=begun)

    by = library.corpus, settings.gold_by, settings.max_missing_share
    states = libraries.states_on(train, *by) if trains else []
    variants = queries.style_variants() if config.tries.ways == STYLED else ()
    prompt = queries.QueryPrompt(prompts.load(writing.prompt), variants, writing.passage_words)
    script = None
    if is_made and trains:
        script = queries.demonstration_scripts().QueryScript.of(
            questions["train"], library, settings.gold_by, prompt
        )
    data = {"prompt": prompt.prompt.fingerprint, "corpus": library.corpus.digest}
    data |= {"pairs": token_system.fingerprint(pairs)} if pairs else {}
    return token_system.token_inputs(
        config,
        workdir,
        mesh,
        turn=writing.query_tokens,
        train=states,
        dev=libraries.states_on(every_dev, *by),
        digest=digest_of,
        agent=queries.QueryAgent(prompt, writing.k, writing.stop),
        asks=lambda state: [prompt.messages(state.asked_by(n)) for n in range(len(prompt.names))],
        library=library,
        script=script,
        pairs=pairs,
        data=data,
    )


def digest_of(states: Sequence[queries.QueryState]) -> str:
    return token_system.fingerprint((state.id, state.question, state.pages) for state in states)


class Taught(NamedTuple):
    """What a stage learns from."""

    plan: token_config.StagePlan
    lessons: Sequence[Lesson]
    shape: trajectories.BlockShape  # one for all batches, so that one program is compiled
    # Of pairs, float32 `[2·P]`: log-probabilities by the weights of the stage's start
    reference: np.ndarray | None


def taught_by(
    lessons: Sequence[Lesson], numbers: Sequence[int] | None = None
) -> list[TokenTrajectory]:
    """Lessons of these numbers as an update takes them; queries of a pair are side by side."""
    return [
        TokenTrajectory(number, member, 1, (segment,), DONE, {REWARD: 0.0})
        for number, lesson in zip(numbers or range(len(lessons)), lessons, strict=True)
        for member, segment in enumerate(lesson.queries)
    ]


@dataclasses.dataclass(kw_only=True)
class Leret(token_system.TokenSystem[LeretConfig]):
    """See `systems.System`; tries are kept in its folder."""

    SHOWN: ClassVar[Mapping[str, str]] = {"loss": ".3f", "accuracy": ".2f"}
    TITLE, LEARNED = "LeReT", "write search queries, one at each hop"
    SETTINGS, LOAD = LeretConfig, staticmethod(load_inputs)
    OF_QUESTIONS, SEARCH = ("questions.", "search."), CORPUS

    def __post_init__(self) -> None:
        super().__post_init__()
        config, inputs = self.config, self.inputs
        self._lessons: Lessons | None = None  # of the latest iteration
        self._taught: Taught | None = None  # of the latest stage that learns from tries
        self.line = (
            f"{len(inputs.train)} training questions of {config.writing.hops} hops, "
            f"{len(inputs.dev)} scored, {len(inputs.library.corpus)} passages searched by "
            f"{config.search.engine}; {len(config.tries.variants)} prompts × "
            f"{config.tries.samples} tries at a state; {self.steps}; {self._where}"
        )

    # ---------------------------------------------------------------- prompts → tries → lessons

    @cached_property
    def trying(self) -> Trying:
        inputs = self.inputs
        return Trying(self.config, inputs.agent, inputs.train, inputs.library, self.workdir)

    @cached_property
    def prompt(self) -> queries.QueryPrompt:
        """All ways to ask; those with examples must be there."""
        return self.trying.prompt()

    def prepare(self, state: TrainState, step: int, stop: StopSignal) -> None:
        """Makes what a stage learns from when its first batch is due; a resumed run reads it."""
        plan, old = (stage := self.stage_at(step)).plan, self._taught
        if self._imitates(stage) or (old is not None and old.plan == plan):
            return
        if old is None or old.plan.iteration != plan.iteration:
            first = min(p.first for p in self.config.plan if p.iteration == plan.iteration)
            # Later steps have other weights, by which nothing may be made that is missing.
            self._lessons = self.lessons(plan.iteration, state if step == first else None, stop)
        assert self._lessons is not None
        lessons, longest = self._lessons.of[plan.kind], self._lessons.longest
        if not lessons:
            fix = "config.tries.prompts or samples, or config.sampling.temperature"
            if self._from_file(plan.iteration):
                fix = "config.sampling.room, or give config.pairs.path with others"
            long = self._lessons.too_long
            raise InputError(
                f"the stage {plan.kind} has no lesson ({long} prompts are too long); raise {fix}."
            )
        # The shape depends on the tries, and not on when the run was begun.
        members = len(lessons[0].queries)
        might = [Lesson((segment,) * members, 0) for segment in longest]
        rows = self.token_rows(stage, taught_by([*lessons, *might]))
        shape, reference = self.block_shape(stage, rows), None
        if plan.kind == PREFERENCE:
            begins = state if step == plan.first else None
            reference = self.reference(stage, lessons, shape, begins, stop)
        self._taught = Taught(plan, lessons, shape, reference)

    def lessons(self, iteration: int, state: TrainState | None, stop: StopSignal) -> Lessons:
        """What an iteration learns from.

        The state has the weights that make what is missing; None: these are gone.
        """
        if self._from_file(iteration):
            lessons = tries.lessons_in(self.inputs.pairs, self.inputs.speech)
            count, file = len(lessons.of[PREFERENCE]), self.config.pairs.path
            log(f"iteration {iteration}: {count} pairs of {file}, {lessons.too_long} are too long")
            return lessons
        play = None if state is None else self.play_by(self.weights(state), stop)
        made, shown = self.trying.iteration(iteration, play, stop)
        check_found(made)
        states = tries.states_of(self.config, made)
        lessons = tries.lessons_of(states, shown, self.inputs.agent.prompt, self.inputs.speech)
        path = self.trying.folder(iteration) / tries.PAIRS
        hosts.first_does(partial(write_pairs, path, lessons.texts))
        unscored = sum(not attempt.scored for attempt in made)
        log(
            f"iteration {iteration}: {report_of(states)}; {unscored} tries without a score, "
            f"{lessons.too_long} states whose prompts are too long"
        )
        if PREFERENCE in self.config.stages:
            check_pairs(states)
        return lessons

    def play_by(self, weights: Any, stop: StopSignal, **how: Any) -> PlayBy:
        """Plays by a prompt; `how`: see `play`."""

        def play(prompt: queries.QueryPrompt, starts: Sequence[Start]) -> list[Episode]:
            agent = dataclasses.replace(self.inputs.agent, prompt=prompt)
            return self.play(weights, starts, stop, agent=agent, **how)

        return play

    def reference(
        self,
        stage: token_system.Stage,
        pairs: Sequence[Lesson],
        shape: trajectories.BlockShape,
        state: TrainState | None,
        stop: StopSignal,
    ) -> np.ndarray:
        """Log-probabilities of all pairs' queries by the weights of the stage's start: `[2·P]`.

        The state has these weights; None: they are gone.
        """
        path = self.trying.folder(stage.plan.iteration) / "reference.json"
        if state is None:
            return np.array(config_fields.read_fields(path)["log_probs"], np.float32)
        parts, size = [], self._size(stage)  # as many as in an update: one program
        for first in range(0, len(pairs), size):
            stop.check()
            rows = self.token_rows(stage, taught_by(pairs[first : first + size]))
            parts.append(self._log_probs(state.params, rows, shape, *self.base))
        log_probs = np.concatenate(parts)
        hosts.first_does(partial(whole_files.write_json, path, {"log_probs": log_probs.tolist()}))
        return log_probs

    @cached_property
    def _log_probs(self) -> Any:
        return row_log_probs(next(s.policy for s in self.stages if s.plan.kind == PREFERENCE))

    # ---------------------------------------------------------------- lessons → batches

    def questions(self, step: int) -> np.ndarray:
        """The lessons of a batch, with their questions; a batch may hold several epochs of few."""
        if self._imitates(stage := self.stage_at(step)):
            return super().questions(step)
        assert self._taught is not None
        lessons, first = self._taught.lessons, stage.plan.first
        how = len(lessons), self._size(stage), self.config.seed + first
        drawn = experience.questions_at(step - first, *how)
        asked = [lessons[number].question for number in drawn[:, 0]]
        if not self._from_file(stage.plan.iteration):
            asked = [self.trying.asked[place] for place in asked]
        return np.insert(drawn, 1, asked, axis=1)

    def names(self, numbers: Sequence[int], step: int) -> list[str]:
        if self._from_file(self.stage_at(step - 1).plan.iteration):
            return [f"pair {number}" for number in numbers]
        return super().names(numbers, step)

    def _from_file(self, iteration: int) -> bool:
        return iteration == 1 and bool(self.config.pairs.path)

    def _played(
        self, weights: Any, numbers: Sequence[int], step: int, stop: StopSignal
    ) -> list[TokenTrajectory]:
        assert self._taught is not None
        return taught_by([self._taught.lessons[number] for number in numbers], numbers)

    def _batch(
        self, stage: token_system.Stage, trajectories: Sequence[TokenTrajectory], *how: Any
    ) -> Any:
        taught, reference = self._taught, None
        if self._imitates(stage) or taught is None:
            return super()._batch(stage, trajectories)
        if taught.reference is not None:
            reference = taught.reference[[2 * t.question + t.member for t in trajectories]]
        return super()._batch(stage, trajectories, taught.shape, reference)

    def _sampled(self, stage: token_system.Stage) -> int:
        return self.config.writing.query_tokens

    # ---------------------------------------------------------------- evaluation

    def searched(
        self,
        params: Any,
        states: Sequence[queries.QueryState],
        stop: StopSignal,
        stream: int = token_system.EVALUATED,
        *,
        variant: int = 0,
    ) -> list[Searched]:
        """Plays questions hop by hop for evaluation, by the draws of a stream.

        `variant`: number of the prompt that asks; those with examples must be there.
        """
        play = self.play_by(params, stop, greedy=self.config.eval.greedy)
        by = partial(play, self.prompt if variant else self.inputs.agent.prompt)
        how = self.config, self.inputs.library, states, by, stream
        return tries.search_hops(*how, variant=variant)[0]

    def evaluate(self, state: TrainState, step: int, stop: StopSignal) -> Evaluation:
        rows = self.searched(state.params, self.inputs.dev, stop)
        return query_evaluation(step, rows, self.config.eval.best_by)

    def _counted(self, counts: token_episodes.Counts) -> dict[str, float]:
        return {"failed_tries": float(counts.failed)}

    # ---------------------------------------------------------------- a run is scored

    def plays(self, raw: ConfigDict, options: ScoreOptions, stop: StopSignal) -> dict[str, Any]:
        config, inputs, every = self.config, self.inputs, raw.to_dict()
        record = {name: every[name] for name in _OF_PLAY} | {
            "questions": digest_of(inputs.dev),
            "greedy": config.eval.greedy,
            "tries": every["tries"],
            "data": {name: key for name, key in inputs.data.items() if name != "questions"},
        }
        # As many in a part as in training, whose memory suffices
        size = 0 if options.as_training else config.tries.questions
        play = token_system.in_parts(self.searched, size, stop)
        return {"rows": HOPS, "asked": inputs.dev, "size": size, "play": play, "record": record}

    def ways(self, predictor: Predictor) -> Iterator[Way]:
        config, library = self.config, self.inputs.library
        yield from map(predictor.way, predictor.ways(predictor.options.checkpoint))
        first = config.plan[0]
        try:
            variants = self.trying.variants(self.prompt)
        except InputError:  # prompts with examples are made in training
            variants = ()
        for variant in filter(None, variants):
            scripted = first.kind == SCRIPT
            weights = predictor.after(first) if scripted else predictor.weights(scoring.FIRST)
            name, asks = self.prompt.names[variant], self.prompt.variants[variant - 1]
            label = f"prompt {name}, by what made the first tries"
            prompt = token_system.fingerprint([(asks,)])
            asks_so = partial(self.searched, variant=variant)
            play = token_system.in_parts(asks_so, 0, predictor.stop)
            yield predictor.way(weights, f"prompt-{name}", label, play, prompt=prompt)

        def ruled(by: Any, shown: Sequence[queries.QueryState], _: int) -> list[Searched]:
            return tries.search_hops(config, library, shown, by, token_system.EVALUATED)[0]

        for name, label, write in (
            ("question", "the question", lambda state: one_line(state.question)),
            ("question_and_passage", "the question and the first passage", _with_passage),
        ):
            by = tries.by_rule(library, config.writing.k, write)
            yield Way(name, label, partial(ruled, by), predictor.record)

    def summary(self, predictor: Predictor, logs: Logs) -> tuple[dict[str, Any], list[str]]:
        rows, main = {label: HOPS.read(log) for label, log in logs}, logs[0][0]
        summary = scoring.compared(rows, main, hop_summary, hop_gains)
        return summary, hop_table(summary["scores"], summary["gains"], len(rows[main][0].hops))


def query_evaluation(step: int, rows: Sequence[Searched], best_by: str) -> Evaluation:
    """Scores the played questions of a training."""
    scores, last = hop_scores(rows), len(rows[0].hops)
    of_hop = "hop {0}: recall {1:.3f}, AP {2:.3f}, all gold {3:.3f}"
    parts = [of_hop.format(n, *(scores[f"hop{n}/{x}"] for x in SHOWN)) for n in range(1, last + 1)]
    lost = scores["empty_share"] + scores["too_long_share"] + scores["failed_share"]
    without = f"; {lost:.1%} without a query" if lost else ""
    return Evaluation.of(
        f"step {step}: {'; '.join(parts)}{without}; {len(rows)} questions",
        scores,
        f"hop{last}/{best_by}",
        hop_columns([row for row in rows if not row.failed]),
        episodes=sampler(HOPS, rows),
    )


def hop_scores(rows: Sequence[Searched]) -> dict[str, float]:
    """Means over the questions: `hopN/SCORE` after each hop, and what the queries took.

    A query that is empty or too long finds nothing: the pool stays as it was. A question with a hop
    that failed is left out of the scores.
    """
    columns = hop_columns([row for row in rows if not row.failed])
    scores = {name: float(np.mean(columns.get(name) or 0.0)) for name in hop_columns(rows)}
    hops = [hop for row in rows for hop in row.hops]
    outcomes = Counter(hop.outcome for hop in hops if hop.outcome)  # of what a model wrote
    count = max(outcomes.total(), 1)
    known = {
        "empty_share": queries.EMPTY,
        "too_long_share": queries.TOO_LONG,
        "stopped_share": queries.STOPPED,
    }
    failed = sum(number for outcome, number in outcomes.items() if outcome not in queries.OUTCOMES)
    return {
        **scores,
        **{name: outcomes[outcome] / count for name, outcome in known.items()},
        "failed_share": failed / count,
        "sampled_tokens": sum(hop.sampled for hop in hops) / len(rows),
        "read_tokens": sum(hop.read for hop in hops) / len(rows),
    }


def _with_passage(state: queries.QueryState) -> str:
    passage = state.pool[0].text if state.pool else ""
    return " ".join(f"{state.question} {passage.lstrip('# ')}".split()[:_WORDS])


SYSTEM = Leret
