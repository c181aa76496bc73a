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

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.data.reading import without_asked
from qrag_jax.data.sample import Sample, world
from qrag_jax.environments import queries
from qrag_jax.environments.few_shot import split_questions
from qrag_jax.errors import InputError
from qrag_jax.evaluators.evaluation import Evaluation
from qrag_jax.evaluators.token_scores import query_evaluation
from qrag_jax.feedback.pairs import check_found, check_pairs, report_of
from qrag_jax.learners.state import TrainState
from qrag_jax.learners.token_policy import (
    episode_shardings,
    pair_episodes,
    row_log_probs,
    token_episodes,
)
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.prompts import one_line
from qrag_jax.metrics.bootstrap import interval_text
from qrag_jax.metrics.rows import HOPS, Searched
from qrag_jax.metrics.summaries import hop_gains, hop_summary, hop_table
from qrag_jax.retrieval.corpus import pooled
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.rollouts.experience import Experience, QuestionOrder
from qrag_jax.rollouts.libraries import states_on
from qrag_jax.rollouts.schedule import Counts
from qrag_jax.rollouts.token_blocks import BlockShape
from qrag_jax.rollouts.token_episodes import Episode, Start
from qrag_jax.rollouts.trajectories import Segment, TokenBatch
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import put_whole
from qrag_jax.runtime.run import DEV, Run, log
from qrag_jax.runtime.saved_config import has_begun, read_fields
from qrag_jax.runtime.whole_files import run_lock, write_json, write_whole
from qrag_jax.systems import scoring, token_system
from qrag_jax.systems.leret_config import FEW_SHOT, PREFERENCE, SCRIPT, STYLED, LeretConfig
from qrag_jax.systems.leret_tries import (
    PAIR,
    Lessons,
    PromptMaker,
    TryMaker,
    by_rule,
    lesson_batch,
    lessons_of,
    search_hops,
    states_of,
)
from qrag_jax.systems.search import open_search
from qrag_jax.systems.token_config import BRIDGE, StagePlan

OF_QUESTIONS = ("questions.", "search.")  # fields that say what is asked
CORPUS = "search"  # of pooled passages, in the run's folder


def load_inputs(
    config: LeretConfig, workdir: Path, mesh: Mesh, *, trains: bool = True, pool: Path | None = None
) -> token_system.TokenInputs:
    """Reads the questions, writes or opens the corpus, prepares the model.

    Args:
        trains: else there are no training questions.
        pool: a folder for the pooled passages of the config's questions; None: the run's, which is
            written by what trains.
    """
    asked, search, writing = config.questions, config.search, config.writing
    is_made, seed = asked.train == BRIDGE, asked.bridge_seed
    if asked.dev == BRIDGE:
        every_dev = [
            e.query for e in world().bridge_questions(seed, "dev", range(asked.bridge_dev))
        ]
    else:
        every_dev = token_system.read_samples(asked.dev, from_corpus=True)
    made: list[Any] = []
    train: list[Sample] = []
    passages: Callable[[], Iterable[Passage]] | None = None
    if trains or pool is not None:
        if is_made:
            made = world().bridge_questions(seed, "train", range(asked.bridge_corpus))
            tried = [each.query for each in made[: asked.bridge_train]]
        else:
            tried = token_system.read_samples(asked.train, from_corpus=True)
        train = without_asked(tried, every_dev)
        train = train[: asked.most or len(train)]

        def pages() -> Iterable[Passage]:
            more = (each.query for each in made[asked.bridge_train :])
            return pooled(page for e in (*train, *every_dev, *more) for page in e.passages)

        passages = pages
    begun = pool is not None or has_begun(workdir)
    library = open_search(search, passages, pool or workdir / CORPUS, begun=begun)

    def states_on_corpus(questions: Sequence[Sample]) -> list[queries.QueryState]:
        states, left_out = states_on(
            questions, library.corpus, search.gold_by, max_missing_share=search.max_missing_share
        )
        if left_out:
            log(left_out)
        return states

    states = states_on_corpus(train) if trains else []
    variants = queries.style_variants() if config.tries.ways == STYLED else ()
    prompt = queries.QueryPrompt(prompts.load(writing.prompt), variants, writing.passage_words)
    script = None
    if is_made and trains:
        script = queries.demonstration_scripts().QueryScript.of(
            made, library, search.gold_by, prompt
        )
    dev = states_on_corpus(every_dev)
    longest = max((*states, *dev), key=lambda state: len(state.question))
    asks = (prompt.messages(longest.asked_by(number)) for number in range(len(prompt.names)))
    return token_system.token_inputs(
        config,
        workdir,
        mesh,
        turn=writing.query_tokens,
        prompts=((longest.id, messages) for messages in asks),
        agent=queries.QueryAgent(prompt, writing.k, writing.stop),
        library=library,
        train=states,
        dev=dev,
        script=script,
        data={
            "questions": digest_of(states),
            DEV: digest_of(dev),
            "prompt": prompt.prompt.fingerprint,
            "corpus": library.corpus.digest,
        },
    )


def digest_of(states: Sequence[queries.QueryState]) -> str:
    return token_system.fingerprint((state.id, state.question, state.pages) for state in states)


@dataclasses.dataclass
class Leret(token_system.TokenSystem[LeretConfig]):
    """See `systems.System`; tries are kept in its folder."""

    SHOWN: ClassVar[Mapping[str, str]] = {"loss": ".3f", "accuracy": ".2f"}

    def __post_init__(self) -> None:
        super().__post_init__()
        config, inputs = self.config, self.inputs
        self.line = (
            f"{len(inputs.train)} training questions of {config.writing.hops} hops, "
            f"{len(inputs.dev)} scored, {len(inputs.library.corpus)} passages searched by "
            f"{config.search.engine}; {config.tries.asked} prompts × {config.tries.samples} tries "
            f"at a state; {self.steps}; {self._where}"
        )

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        self.check_server(stop)
        return LessonExperience(self, run.progress.batches or 0)

    def _first_stage(self, plan: StagePlan) -> token_system.Stage:
        config, kind = self.config, plan.kind
        algorithm: Any = getattr(config, kind)
        steps = algorithm.steps * getattr(algorithm, "epochs", 1)
        firsts = [stage.first for stage in config.plan if stage.kind == kind]
        # Stages of a kind begin again after as many steps as an iteration has.
        period = firsts[1] - firsts[0] if len(firsts) > 1 else config.train.steps
        return self.make_stage(
            plan,
            algorithm,
            optimizer=dataclasses.replace(
                config.optimizer,
                learning_rate=algorithm.learning_rate,
                total_steps=steps,
                warmup_steps=min(config.optimizer.warmup_steps, steps // token_system.WARM_UP),
            ),
            step_of=lambda step: (step - firsts[0]) % period,
        )

    # ---------------------------------------------------------------- batches

    def shape_of(self, kind: str, rows: TokenBatch) -> BlockShape:
        """The shape of the blocks of a stage with rows like these."""
        pairs = kind == PREFERENCE
        return self.block_shape(rows, PAIR if pairs else 1, whole=pairs)

    def batch(
        self,
        stage: token_system.Stage,
        lessons: Sequence[Sequence[Segment]],
        shape: BlockShape | None = None,
        reference: np.ndarray | None = None,
    ) -> Any:
        """What an update of a stage takes, on the host, in blocks that suit these lessons or given.

        `reference`: float32 `[2·P]`, log-probabilities of pairs' queries; None: zeros.
        """
        rows = lesson_batch(lessons, self.config.sampling.room)
        shape = shape or self.shape_of(stage.plan.kind, rows)
        if stage.plan.kind != PREFERENCE:
            return token_episodes(stage.policy, rows, shape)
        if reference is None:
            reference = np.zeros(PAIR * len(lessons), np.float32)
        return pair_episodes(stage.policy, rows, shape, reference)

    def _longest(self, stage: token_system.Stage) -> Any:
        config, kind = self.config, stage.plan.kind
        lesson = (self._longest_segment(config.writing.query_tokens),) * (
            PAIR if kind == PREFERENCE else 1
        )
        return self.batch(stage, [lesson] * getattr(config, kind).batch_size)

    # ---------------------------------------------------------------- play

    @cached_property
    def prompt(self) -> queries.QueryPrompt:
        """All ways to ask; those with examples must be there, see `maker`."""
        prompt = self.inputs.agent.prompt
        if self.maker is None:
            return prompt
        return dataclasses.replace(prompt, variants=self.maker.prompts(self.workdir, None))

    @cached_property
    def maker(self) -> PromptMaker | None:
        """Makes prompts with examples; None if the config has none."""
        config, inputs = self.config, self.inputs
        if config.tries.ways != FEW_SHOT:
            return None
        split = split_questions(len(inputs.train), config.few_shot)
        return PromptMaker(config, inputs.agent.prompt, inputs.train, split, inputs.library)

    @cached_property
    def asked(self) -> Sequence[int]:
        """The training questions that are tried: those that no example is of."""
        if self.maker is None:
            return range(len(self.inputs.train))
        return self.maker.split.training

    @property
    def variants(self) -> tuple[int, ...]:
        """Numbers of the prompts that try; there may be fewer than the config asks for."""
        there = range(len(self.prompt.names))
        return tuple(number for number in self.config.tries.variants if number in there)

    @cached_property
    def tries(self) -> TryMaker:
        """Makes and keeps tries; the prompts must be there."""
        inputs = self.inputs
        questions = [inputs.train[number] for number in self.asked]
        return TryMaker(self.config, questions, inputs.library, self.variants, self.workdir)

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
        agent, greedy = self.inputs.agent, self.config.eval.greedy
        if variant:
            agent = dataclasses.replace(agent, prompt=self.prompt)

        def play(starts: Sequence[Start]) -> list[Episode]:
            return self.play(params, starts, stop, greedy=greedy, agent=agent)

        library = self.inputs.library
        return search_hops(self.config, library, states, play, stream, variant=variant)[0]

    # ---------------------------------------------------------------- lessons

    def lessons(self, iteration: int, state: TrainState | None, stop: StopSignal) -> Lessons:
        """What an iteration learns from: prompts are made first, then the tries by them.

        The state has the weights that make what is missing; None: these are gone.
        """
        play: Any = None
        if state is not None:
            weights = self.weights(state)

            def play_by(prompt: queries.QueryPrompt, starts: Sequence[Start]) -> list[Episode]:
                agent = dataclasses.replace(self.inputs.agent, prompt=prompt)
                return self.play(weights, starts, stop, agent=agent)

            if self.maker is not None and iteration == 1:
                self.maker.prompts(self.workdir, play_by)
            play = partial(play_by, self.prompt)
        tried = self.tries.iteration(iteration, play, stop)
        check_found(tried.tries)
        states = states_of(self.config, tried)
        lessons = lessons_of(states, tried.states, self.prompt, self.inputs.speech)
        unscored = sum(not each.scored for each in tried.tries)
        log(
            f"iteration {iteration}: {report_of(states)}; {unscored} tries without a score, "
            f"{lessons.too_long} states whose prompts are too long"
        )
        if PREFERENCE in self.config.stages:
            check_pairs(states)
        return lessons

    def reference(
        self,
        plan: StagePlan,
        pairs: Sequence[Sequence[Segment]],
        shape: BlockShape,
        state: TrainState | None,
        stop: StopSignal,
    ) -> np.ndarray:
        """Log-probabilities of all pairs' queries by the weights of the stage's start: `[2·P]`.

        The state has these weights; None: they are gone.
        """
        path = self.tries.folder(plan.iteration) / "reference.json"
        if state is None:
            return np.array(read_fields(path)["log_probs"], np.float32)
        room, size, parts = self.config.sampling.room, self.config.preference.batch_size, []
        for first in range(0, len(pairs), size):  # as many as in an update: one program
            stop.check()
            rows = lesson_batch(pairs[first : first + size], room)
            parts.append(self._log_probs(state.params, rows, shape, *self.base))
        found = np.concatenate(parts)
        hosts.first_does(partial(write_json, path, {"log_probs": found.tolist()}))
        return found

    @cached_property
    def _log_probs(self) -> Any:
        return row_log_probs(next(s.policy for s in self.stages if s.plan.kind == PREFERENCE))

    # ---------------------------------------------------------------- evaluation

    def evaluate(self, state: TrainState, step: int, stop: StopSignal) -> Evaluation:
        rows = self.searched(state.params, self.inputs.dev, stop)
        return query_evaluation(step, rows, self.config.eval.best_by)

    def _counted(self, counts: Counts) -> dict[str, float]:
        return {"failed_tries": float(counts.failed)}


class LessonExperience(Experience):
    """See `rollouts.experience.Experience`.

    Tries of an iteration are made when its first step is due. They and the log-probabilities of the
    reference are kept in the run's folder, so that a resumed run learns from the same.
    """

    def __init__(self, system: Leret, batches: int = 0) -> None:
        self.waited = {"play": 0.0}
        self._system, self._batches = system, batches
        # The stage that learns from tries, what its iteration gave, one shape for all its batches,
        # so that one program is compiled, and of pairs the log-probabilities by its first weights
        self._plan: StagePlan | None = None
        self._lessons: Lessons | None = None
        self._shape: BlockShape | None = None
        self._reference = np.zeros(0, np.float32)

    def next(self, state: TrainState, number: int, stop: StopSignal) -> Any:
        stop.check()
        stage, before = self._system.stage_at(number), time.monotonic()
        if stage.plan.kind == SCRIPT:
            batch = self._script(stage, number)
        else:
            if stage.plan != self._plan:
                self._begin(stage.plan, state, number, stop)
            batch = self._learned(stage, number)
        batch = put_whole(batch, episode_shardings(self._system.mesh))
        self.waited["play"] += time.monotonic() - before
        self._batches += 1
        return batch

    def position(self) -> tuple[Any, list[Any]]:
        return self._batches, []

    def counts(self) -> dict[str, float]:
        return self._system.counted()

    # ---------------------------------------------------------------- batches

    def _script(self, stage: token_system.Stage, number: int) -> Any:
        """Demonstrations of the styles, all their hops."""
        config, inputs = self._system.config, self._system.inputs
        script, size = inputs.script, config.script.batch_size
        self.samples = QuestionOrder(len(script), size, config.seed).at(number)
        numbers = self.samples[:, 0].tolist()
        segments = script.segments(config, numbers, number * size, inputs.speech)
        return self._system.batch(stage, [(segment,) for segment in segments])

    def _learned(self, stage: token_system.Stage, number: int) -> Any:
        """The batch of a step that learns from tries.

        Each lesson comes once an epoch; a batch may hold several epochs of few.
        """
        assert self._lessons is not None
        system, plan, every = self._system, stage.plan, self._lessons.of[stage.plan.kind]
        size = getattr(system.config, plan.kind).batch_size
        order = QuestionOrder(len(every), size, system.config.seed + plan.first)
        numbers, epochs = order.at(number - plan.first).T
        questions = np.array([system.asked[every[n].question] for n in numbers], np.int32)
        self.samples = np.stack([questions, epochs], axis=1)
        reference = None
        if plan.kind == PREFERENCE:
            reference = self._reference.reshape(-1, PAIR)[numbers].reshape(-1)
        return system.batch(stage, [every[n].queries for n in numbers], self._shape, reference)

    def _begin(self, plan: StagePlan, state: TrainState, number: int, stop: StopSignal) -> None:
        """Makes or reads what a stage learns from."""
        system, old = self._system, self._plan
        if old is None or old.iteration != plan.iteration:
            first = min(p.first for p in system.config.plan if p.iteration == plan.iteration)
            # Later steps have other weights, by which nothing may be made that is missing.
            self._lessons = system.lessons(plan.iteration, state if number == first else None, stop)
        assert self._lessons is not None
        every = [lesson.queries for lesson in self._lessons.of[plan.kind]]
        if not every:
            raise InputError(
                f"the tries gave nothing to learn from for the stage {plan.kind}; raise "
                "config.tries.prompts or samples, or config.sampling.temperature, or leave it out."
            )
        # The shape depends on the tries, and not on when the run was begun.
        longest = [(segment,) * len(every[0]) for segment in self._lessons.longest]
        rows = lesson_batch([*every, *longest], system.config.sampling.room)
        self._shape = shape = system.shape_of(plan.kind, rows)
        if plan.kind == PREFERENCE:
            begins = state if number == plan.first else None
            self._reference = system.reference(plan, every, shape, begins, stop)
        self._plan = plan


open_system = partial(token_system.open_token_system, Leret, LeretConfig, load_inputs)
before_devices, check = LeretConfig.before_devices, LeretConfig.of


# ---------------------------------------------------------------- a run is scored

# Sections of the config that the play of given weights depends on.
_OF_PLAY = ("model", "search", "writing", "sampling", "reward", "seed")
_WORDS = 64  # of a query with a passage


def score_run(workdir: Path, raw: ConfigDict, options: scoring.ScoreOptions) -> dict[str, Any]:
    """Scores the run's checkpoint; returns the summary."""
    raw, out, halves = scoring.begin_scoring(workdir, raw, options, OF_QUESTIONS)
    pool = out / CORPUS if scoring.of_others(workdir, raw, OF_QUESTIONS) else None
    with open_hop_predictor(raw, workdir, pool=pool, scores=True) as predictor:
        ways = _ways(predictor, options.checkpoint)
        found, notes = predictor.questions.played(
            out, ways, predictor.stop, restart=options.restart
        )
        questions = halves(predictor.system.inputs.drawn)
    rows, main = {label: HOPS.read(log) for label, log in found}, found[0][0]
    summary = scoring.compared(rows, main, hop_summary, hop_gains)
    hops = len(rows[main][0].hops)
    lines = hop_table(summary["scores"], hops)
    for way, gain in filter(lambda each: each[1], summary["gains"].items()):
        interval = interval_text(gain[f"hop{hops}/all_gold"], sign=True)
        lines.append(f"{main} - {way}, all gold: {interval}")
    summary |= {"questions": questions, "notes": notes}
    return scoring.end_scoring(out, raw, summary, [*lines, questions["line"]])


def _ways(predictor: scoring.Predictor, checkpoint: str) -> Iterator[scoring.Way]:
    """All ways, the run's own first."""
    system = predictor.system
    config, library = system.config, system.inputs.library
    yield from map(predictor.way, predictor.ways(checkpoint))
    first = config.plan[0]
    try:
        variants = system.variants
    except InputError:  # prompts with examples are made in training
        variants = ()
    for variant in filter(None, variants):
        by = predictor.after(first) if first.kind == SCRIPT else predictor.weights(scoring.FIRST)
        name, asks = system.prompt.names[variant], system.prompt.variants[variant - 1]

        def play(params: Any, shown: Sequence[queries.QueryState], _: int, n: int = variant) -> Any:
            return system.searched(params, shown, predictor.stop, variant=n)

        label = f"prompt {name}, by what made the first tries"
        prompt = token_system.fingerprint([(asks,)])
        yield predictor.way(by, f"prompt-{name}", label, play, prompt=prompt)

    def ruled(name: str, label: str, write: Callable[[queries.QueryState], str]) -> scoring.Way:
        plays = by_rule(library, config.writing.k, write)

        def play(shown: Sequence[queries.QueryState], first: int) -> list[Searched]:
            return search_hops(config, library, shown, plays, token_system.EVALUATED)[0]

        return scoring.Way(name, label, play, predictor.record)

    yield ruled("question", "the question", lambda state: one_line(state.question))
    yield ruled("question_and_passage", "the question and the first passage", _with_passage)


def _with_passage(state: queries.QueryState) -> str:
    passage = state.pool[0].text if state.pool else ""
    return " ".join(f"{state.question} {passage.lstrip('# ')}".split()[:_WORDS])


@contextlib.contextmanager
def open_hop_predictor(
    raw: ConfigDict,
    workdir: Path,
    *,
    trains: bool = False,
    pool: Path | None = None,
    scores: bool = False,
) -> Iterator[scoring.Predictor]:
    """Opens the model of a run, and the questions to ask.

    If it scores, all are asked at once, by the draws of the evaluations of the training.
    """
    config = LeretConfig.of(raw)
    mesh, size = scoring.mesh_of_run(config, workdir), config.tries.questions
    every = raw.to_dict()
    with StopSignal() as stop:
        inputs = load_inputs(config, workdir, mesh, trains=trains, pool=pool)
        system = Leret(config, mesh, inputs, workdir)

        def play(params: Any, states: Sequence[queries.QueryState], first: int) -> list[Searched]:
            stream = token_system.EVALUATED if scores else scoring.PREDICTED + first // size
            return system.searched(params, states, stop, stream)

        record = {name: every[name] for name in _OF_PLAY} | {
            "questions": digest_of(inputs.dev),
            "greedy": config.eval.greedy,
            "tries": every["tries"],
            "data": {name: key for name, key in inputs.data.items() if name != "questions"},
        }
        # As many in a part as in training, whose memory suffices
        questions: scoring.Questions[queries.QueryState, Searched] = scoring.Questions(
            HOPS, inputs.dev, 0 if scores else size
        )
        yield scoring.Predictor(system, stop, questions, play, record)


def write_pairs(system: Leret, iteration: int, path: Path) -> tuple[int, int, int]:
    """Writes the pairs of an iteration's tries as JSON lines: `prompt`, `chosen`, `rejected`.

    These are the columns that TRL's `DPOTrainer` reads. `prompt` is the text of the bare prompt.
    The tries are read from the run's folder, in which nobody may train meanwhile, and are paired as
    the run pairs them. Weights of pairs are not in the file.

    Returns:
        Numbers of pairs, of states that have some, and of those that have none.
    """
    config = system.config
    if not 1 <= iteration <= config.iterations:
        raise InputError(
            f"--iteration={iteration}: the run has the iterations 1 to {config.iterations}."
        )
    with run_lock(system.workdir):
        found = system.tries.iteration(iteration, None, StopSignal())
    speech, states = system.inputs.speech, states_of(config, found)
    lines, paired = list[str](), [state for state in states if state.pairs]
    for state in paired:
        assert state.at is not None
        shown = found.states[state.at].asked_by(0)
        ids = speech.scaffold.opening(system.prompt.messages(shown))
        text = speech.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        for pair in state.pairs:
            chosen, rejected = (state.queries[n].query for n in (pair.winner, pair.loser))
            # ASCII alone, so that half surrogate pairs, which models do write, survive.
            lines.append(json.dumps({"prompt": text, "chosen": chosen, "rejected": rejected}))
    write_whole(path, "".join(f"{line}\n" for line in lines))
    return len(lines), len(paired), len(states) - len(paired)
