"""Reads and checks the queries, the corpora and the model of a DeepRetrieval run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from qrag_jax.data import queries
from qrag_jax.data.queries import Origin, Query, check_in_corpus
from qrag_jax.data.reading import WITHOUT, parse_parts
from qrag_jax.data.sample import Split
from qrag_jax.data.scripted import (
    BLOCK,
    STREAM,
    Draw,
    TalkativeQuestion,
    dropped,
    frequent_words,
    is_among,
    sentences_of,
    talkative_questions,
)
from qrag_jax.environments.demonstrations import draw_rewriting
from qrag_jax.environments.queries import RewriteAgent, RewriteTask
from qrag_jax.errors import InputError
from qrag_jax.feedback.rewrite import RewriteReward
from qrag_jax.llm.text import prompts
from qrag_jax.models.pretrained_lm import LoadedLanguageModel
from qrag_jax.retrieval import corpus
from qrag_jax.retrieval.boolean_search import BooleanError, parse_boolean
from qrag_jax.retrieval.judged_queries import read_judged_queries
from qrag_jax.retrieval.opening import BOOLEAN, CORPUS
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.rollouts.libraries import KeptResults
from qrag_jax.rollouts.token_episodes import Speech
from qrag_jax.runtime.run import DEV, log
from qrag_jax.runtime.saved_config import has_begun
from qrag_jax.systems.deepretrieval_config import (
    ANY,
    FREQUENT,
    SCRIPT,
    TALKATIVE,
    DroppedConfig,
    RewriteConfig,
)
from qrag_jax.systems.search import (
    OWN,
    REMOTE,
    Collections,
    RewriteSearchConfig,
    SearchLibrary,
    ids_in,
    open_collections,
    open_remote,
    open_search,
    passages_of,
)
from qrag_jax.systems.token_system import TokenInputs, check_room, fingerprint, model_of

SEARCH = "search"  # corpora and indexes, in the run's folder
_MADE = "made"  # the collection of queries that are made here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs(TokenInputs):
    """What a run reads."""

    agent: RewriteAgent  # finds as many documents as rewards need
    library: KeptResults
    # train, dev, test: the queries; dev chooses the best checkpoint, test is for `evaluate`
    train: Sequence[RewriteTask] = ()
    dev: Sequence[RewriteTask] = ()
    test: Sequence[RewriteTask]
    script: RewriteScript | None = None  # what is demonstrated; None: nothing is


def load_inputs(
    config: RewriteConfig,
    workdir: Path,
    mesh: Mesh,
    *,
    test: str | None = None,
    trains: bool = True,
    search: Path | None = None,
) -> Inputs:
    """Reads the queries, writes or opens the corpora, prepares the model.

    Args:
        test: in place of `config.queries.test`; None: the test queries are not read.
        trains: else the run has a model already, and the queries of training and those that
            choose the best checkpoint are not read, nor are their collections opened.
        search: folder of corpora and indexes; None: the run's own.
    """
    queries, made = config.queries, MadeQueries(config)
    folders = dict[str, Path]()
    train, dev = _split(config, made, folders) if trains else ([], [])
    tested = [] if test is None else _read(test, made, "test", folders)
    named = {each.collection for each in (*train, *dev, *tested)}
    opened = partial(_opened, begun=search is not None or has_begun(workdir))
    library = opened(config, made, (named, folders), search or workdir / SEARCH)
    told = _digest(library, {each.collection for each in (*train, *dev)})
    # Without a dev of its own, some of the training queries choose the best checkpoint.
    named_by = ((train, "train"), (dev, "dev" if queries.dev else "train"), (tested, "test"))
    train, dev, tested = (
        on_corpora(asked, f"config.queries.{name}", library, config.search, folders)
        for asked, name in named_by
    )
    if trains:
        check_depths(library, config.reward.k)
    train = _unseen(train, (*dev, *tested))
    train = train[: queries.most] if queries.most else train
    tasks, shown, test_tasks = ([*map(_task, part)] for part in (train, dev, tested))
    reward = RewriteReward(config.reward)
    for each in (*tasks, *shown):
        reward.check(each)
    kept = KeptResults(library, config.search.kept)
    agent = agent_of(config, config.reward.k)
    script = _script(config, made, library) if trains else None
    model, speech, model_key = _model(config, workdir, mesh, script)
    check_prompts(config, agent, speech, (*tasks, *shown, *test_tasks))
    return Inputs(
        model=model,
        agent=agent,
        library=kept,
        speech=speech,
        train=tasks,
        dev=drawn(shown, config.eval.samples, config.eval.seed),
        test=test_tasks,
        script=script if SCRIPT in config.stages else None,
        data={
            "queries": digest_of(tasks),
            DEV: digest_of(shown),
            "model": model_key,
            "prompt": agent.prompt.fingerprint,
            "search": told,
        },
    )


def drawn(tasks: Sequence[RewriteTask], samples: int, seed: int) -> list[RewriteTask]:
    """So many of the queries, in their order; 0: all."""
    order = np.random.default_rng(seed).permutation(len(tasks))[: samples or len(tasks)]
    return [tasks[number] for number in sorted(order.tolist())]


def _model(
    config: RewriteConfig, workdir: Path, mesh: Mesh, script: RewriteScript | None = None
) -> tuple[LoadedLanguageModel, Speech, str]:
    texts = partial(script.texts, config, agent_of(config, config.reward.k)) if script else None
    return model_of(config, workdir, mesh, texts, config.writing.query_tokens)


def agent_of(config: RewriteConfig, k: int) -> RewriteAgent:
    """The environment, where a query finds k documents."""
    prompt = prompts.load(config.writing.prompt)
    readable = _is_boolean if config.search.engine == BOOLEAN else None
    return RewriteAgent(prompt, config.writing.kind.form, k, readable)


def _is_boolean(query: str) -> bool:
    try:
        parse_boolean(query)
    except BooleanError:
        return False
    return True


def _split(
    config: RewriteConfig, made: MadeQueries, folders: dict[str, Path]
) -> tuple[list[Query], list[Query]]:
    """Training queries, and those that choose the best checkpoint."""
    queries = config.queries
    train = _read(queries.train, made, "train", folders)
    if queries.dev or queries.train == TALKATIVE:
        return train, _read(queries.dev or TALKATIVE, made, "dev", folders)
    if len(train) <= queries.held_out:
        raise InputError(
            f"config.queries.train has {len(train)} queries, of which config.queries.held_out, "
            f"{queries.held_out}, would be held out, so none is left; lower it, or name others in "
            "config.queries.dev."
        )
    order = np.random.default_rng(config.seed).permutation(len(train))
    held = set(order[: queries.held_out].tolist())
    return (
        [each for number, each in enumerate(train) if number not in held],
        [each for number, each in enumerate(train) if number in held],
    )


def _read(text: str, made: MadeQueries, part_made: str, folders: dict[str, Path]) -> list[Query]:
    """The queries of a dataset string, part by part: ids need be unique within a part alone."""
    if text == TALKATIVE:
        return [each._replace(collection=_MADE) for each in made.of(part_made)]
    found = []
    for part in parse_parts(text, WITHOUT):
        read, reports = read_judged_queries(f"{part.path},{part.split}{part.bounds}")
        for report in reports:
            log(report.summary())
        folder = Path(part.path).expanduser().resolve()
        name = folder.name if queries.is_collection(folder) else ""
        if name in (_MADE, OWN):
            raise InputError(
                f"{part.path} is a collection of the name {name}, which other passages of a run "
                "have; rename the folder."
            )
        if name and folders.setdefault(name, folder) != folder:
            raise InputError(
                f"{folders[name]} and {folder} are collections of one name, {name}; rename a "
                "folder."
            )
        found += [each._replace(collection=name) for each in read]
    return found


def _task(query: Query) -> RewriteTask:
    of = RewriteTask.judged(query.id, query.text, dict(query.grades), answers=query.answers)
    return dataclasses.replace(of, collection=query.collection, until=query.until)


def _opened(
    config: RewriteConfig,
    made: MadeQueries,
    given: tuple[set[str], Mapping[str, Path]],
    folder: Path,
    *,
    begun: bool,
) -> SearchLibrary:
    search, (named, paths) = config.search, given
    if search.engine == REMOTE:
        if _MADE in named:
            raise InputError(
                f"config.search.engine is {REMOTE!r}, which does not know the queries "
                f"{TALKATIVE!r}; name data in config.queries."
            )
        return open_remote(config.engine)
    wanted: dict[str, Callable[[], Iterable[Passage]]] = {}
    for name in sorted(named):
        if name == _MADE:
            wanted[name] = made.passages
        elif name:
            wanted[name] = partial(passages_of, str(paths[name]))
        elif not search.corpus and not search.index:
            raise InputError(
                "queries in files of rows bring no documents; name the corpus that they are about "
                "in config.search.corpus or config.search.index."
            )
        else:
            wanted[name] = partial(passages_of, search.corpus)
    return open_collections(search, wanted, folder, begun=begun)


def _digest(library: SearchLibrary, names: set[str]) -> str:
    """Of what training searches; the test, which may change, may have a collection of its own."""
    if not isinstance(library, Collections):
        return library.engine.digest
    found = (f"{name} {library.by_name[name].corpus.digest}" for name in sorted(names))
    return hashlib.sha256("\0".join(found).encode()).hexdigest()[:16]


def _unseen(train: Sequence[Query], others: Sequence[Query]) -> list[Query]:
    """The training queries that are not evaluated on, by collection and text."""
    asked = {(each.collection, each.text) for each in others}
    kept = [each for each in train if (each.collection, each.text) not in asked]
    if train and not kept:
        raise InputError(
            "config.queries.train has no query that config.queries.dev or test has not, so none is "
            "left to train on; name other parts."
        )
    return kept


def _script(
    config: RewriteConfig, made: MadeQueries, library: SearchLibrary
) -> RewriteScript | None:
    if config.queries.train == TALKATIVE:
        return RewriteScript(made.questions)
    if SCRIPT not in config.stages or not isinstance(library, Collections):
        return None
    texts = {
        name: (passage.whole for passage in each.corpus) for name, each in library.by_name.items()
    }
    return script_of_texts(config.dropped, texts)


def check_prompts(
    config: RewriteConfig, agent: RewriteAgent, speech: Speech, tasks: Sequence[RewriteTask]
) -> None:
    """Refuses queries whose prompt leaves an output no room."""

    def size(task: RewriteTask) -> int:
        return len(task.question.encode())

    shortest, tokens = min(tasks, key=size), config.writing.query_tokens
    around = len(speech.scaffold.opening(agent.messages(shortest)))
    for task in tasks:
        # A token has a byte at least, so most queries need not be encoded.
        if around + size(task) + tokens > config.sampling.room:
            check_room(config, speech, task.id, agent.messages(task), tokens)


def digest_of(tasks: Sequence[RewriteTask]) -> str:
    """A digest of the queries and their judgements."""
    return fingerprint(
        (t.collection, t.id, t.question, t.grades, t.answers, t.until) for t in tasks
    )


def listed_inputs(
    config: RewriteConfig, workdir: Path, mesh: Mesh, queries: Sequence[Query]
) -> Inputs:
    """What a run reads of the queries of a file; its own queries and their data are not read."""
    remote = config.search.engine == REMOTE
    library = open_remote(config.engine) if remote else _indexed(config, workdir)
    only = ""
    if isinstance(library, Collections) and len(library.by_name) == 1:
        (only,) = library.by_name
    asked = [each._replace(grades=(), answers=()) for each in queries]
    tasks = [_task(each._replace(collection=each.collection or only)) for each in asked]
    agent = agent_of(config, config.eval.depth)
    model, speech, model_key = _model(config, workdir, mesh)
    check_prompts(config, agent, speech, tasks)
    kept = KeptResults(library, config.search.kept)
    data = {"model": model_key, "prompt": agent.prompt.fingerprint}
    return Inputs(model=model, agent=agent, library=kept, speech=speech, test=tasks, data=data)


def _indexed(config: RewriteConfig, workdir: Path) -> Collections:
    """What the run has indexed, by the names of its collections."""
    found, search = {}, config.search
    if search.index:
        found[""] = open_search(search, None, workdir)
    for path in sorted((workdir / SEARCH).glob(f"*/{CORPUS}/{corpus.NAME}")):
        folder = path.parents[1]
        name = "" if folder.name == OWN else folder.name
        pooled = dataclasses.replace(search, index="", corpus="")
        found.setdefault(name, open_search(pooled, None, folder))
    return Collections(found)


def on_corpora(
    queries: Sequence[Query],
    field: str,
    library: SearchLibrary,
    search: RewriteSearchConfig,
    folders: Mapping[str, Path],
) -> list[Query]:
    """The queries of which their collection has a relevant document; a service is not asked."""
    if not isinstance(library, Collections):
        return [*queries]
    kept: list[Query] = []
    for name in dict.fromkeys(each.collection for each in queries):
        own = [each for each in queries if each.collection == name]
        if not name or name in folders:  # others are made here, with their passages
            needed = (document for each in own for document, _ in each.grades)
            known = ids_in(library.by_name[name].corpus, needed)
            origin = _origin(field, search, folders.get(name))
            own, summary = check_in_corpus(own, known, origin, search.max_missing_share)
            if summary:
                log(f"{name or 'queries'}: {summary}")
        kept += own
    return kept


def check_depths(library: SearchLibrary, k: int) -> None:
    """Refuses a K of training that no ranking can have; recall would count all that match."""
    if not isinstance(library, Collections):
        return
    for name, each in library.by_name.items():
        if (many := len(each.corpus)) < k:
            of = f"the corpus of {name}" if name else "the corpus"
            raise InputError(
                f"config.reward.k is {k}, but {of} has {many} document(s), so no ranking is that "
                f"long; use {many} or less, or name a larger corpus."
            )


def _origin(field: str, search: RewriteSearchConfig, folder: Path | None) -> Origin:
    """Of the queries of a folder in BEIR's layout; None: of those of files of rows."""
    if folder:
        return Origin(
            field,
            f"the corpus of {folder}",
            f"put the corpus that they are about into that folder, or name another in {field}",
        )
    named = "config.search.index" if search.index else "config.search.corpus"
    path = search.index or search.corpus
    return Origin(field, f"{named}, {path},", f"give the corpus that they are about in {named}")


@dataclasses.dataclass(frozen=True)
class MadeQueries:
    """The queries that are made here; those of the test are of another world, as are dev's."""

    config: RewriteConfig

    @functools.cached_property
    def questions(self) -> list[TalkativeQuestion]:
        """Training questions: all whose passages are searched."""
        return self._made("train", 0, self.config.queries.made_corpus)

    @functools.cached_property
    def _others(self) -> list[TalkativeQuestion]:
        queries = self.config.queries
        return self._made("dev", 0, queries.made_test + queries.held_out)

    def of(self, part: str) -> list[Query]:
        """Those of "train", of "test", or of "dev", which choose the best checkpoint."""
        queries = self.config.queries
        made = {
            "train": self.questions[: queries.made_train],
            "test": self._others[: queries.made_test],
            "dev": self._others[queries.made_test :],
        }
        return [each.judged for each in made[part]]

    def passages(self) -> Iterator[Passage]:
        """Those of all questions, and of all in the blocks of the others."""
        last = len(self._others)
        filled = self._made("dev", last, last + -last % BLOCK)
        for each in (*self.questions, *self._others, *filled):
            yield from (Passage(*document) for document in each.documents)

    def _made(self, split: Split, first: int, end: int) -> list[TalkativeQuestion]:
        queries = self.config.queries
        numbers = range(first, end)
        return talkative_questions(queries.made_seed, split, numbers, queries.clauses)


# ---------------------------------------------------------------- what is demonstrated

_READ_FOR_TOKENIZER = 2000  # demonstrations on which a tiny model's tokenizer is trained


@dataclasses.dataclass(frozen=True)
class RewriteScript:
    """Demonstrations before they are drawn."""

    given: Sequence[TalkativeQuestion | str]  # queries of which the script knows all, or sentences
    # The frequent words of these sentences' corpora, in small letters
    frequent: frozenset[str] = frozenset()

    def at(self, config: RewriteConfig, number: int, index: int) -> tuple[RewriteTask, str]:
        """Demonstration `index`, of query `number`: its task, and the query to imitate.

        It depends on the arguments only. Of a sentence, no document is relevant.
        """
        one = self.given[number]
        if isinstance(one, str):
            draw = Draw(config.seed, STREAM, index)
            task = RewriteTask(id=f"sentence-{number}", question=one, answers=())
            return task, self._dropped(config.dropped, one, draw)
        judged = one.judged
        task = RewriteTask.judged(judged.id, judged.text, dict(judged.grades))
        return task, draw_rewriting(config.styles, config.seed, index, one)[1]

    def _dropped(self, config: DroppedConfig, sentence: str, draw: Draw) -> str:
        """The sentence without words of one kind."""
        kind = draw.choice(config.kinds) if len(config.kinds) > 1 else config.kinds[0]
        if kind == ANY:
            return dropped(sentence, draw, config.share)
        is_frequent = partial(is_among, words=self.frequent)
        if kind == FREQUENT:
            return dropped(sentence, draw, config.frequent_share, is_frequent)
        return dropped(sentence, draw, config.rare_share, lambda token: not is_frequent(token))

    def texts(self, config: RewriteConfig, agent: RewriteAgent) -> Iterator[str]:
        """The texts of some demonstrations, prompts included; they are spread over all."""
        step = max(len(self.given) // _READ_FOR_TOKENIZER, 1)
        for number in range(0, len(self.given), step):
            task, query = self.at(config, number, number)
            yield from (text for _, text in agent.messages(task))
            yield query


def script_of_texts(config: DroppedConfig, texts: Mapping[str, Iterable[str]]) -> RewriteScript:
    """Demonstrations of the sentences of corpora."""
    sentences: dict[str, None] = {}
    limits, every = (config.most_words, config.least_words), list[str]()
    for each in texts.values():
        known = [*each]
        every += known
        for together in range(1, config.together + 1):
            sentences |= dict.fromkeys(sentences_of(known, *limits, together))
    if not sentences:
        raise InputError(
            f"no corpus has a sentence of {config.least_words} to {config.most_words} words, of "
            "which demonstrations would be; change config.dropped.least_words and most_words."
        )
    return RewriteScript([*sentences], frequent_words(every, config.frequent_from))
