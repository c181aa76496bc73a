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

from qrag_jax.data.dataset_parts import WITHOUT, parse_parts
from qrag_jax.data.files import queries
from qrag_jax.data.files.queries import JudgedQuery, ListedQuery, Origin, check_in_corpus
from qrag_jax.data.sample import Split
from qrag_jax.data.scripted import BLOCK, TalkativeQuestion, talkative_questions
from qrag_jax.environments.query_rewriting.agent import RewriteAgent, any_query
from qrag_jax.environments.query_rewriting.prompt import RewritePrompt
from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.environments.tools.episode import Document, Look, Open, ToolTask
from qrag_jax.errors import InputError
from qrag_jax.feedback.rewrite import RewriteReward
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.server.model_digest import model_digest
from qrag_jax.llm.text import prompts
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.retrieval import corpus
from qrag_jax.retrieval.boolean_search import BooleanError, parse_boolean
from qrag_jax.retrieval.judged_queries import read_judged_queries
from qrag_jax.retrieval.opening import BOOLEAN, CORPUS
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.rollouts.libraries import KeptResults
from qrag_jax.rollouts.token_episodes import Speech
from qrag_jax.runtime.run import DEV, log
from qrag_jax.runtime.saved_config import has_begun
from qrag_jax.runtime.whole_files import default_cache
from qrag_jax.systems.deepretrieval_config import SCRIPT, TALKATIVE, RewriteConfig
from qrag_jax.systems.query_search import (
    OWN,
    REMOTE,
    Collections,
    RewriteSearchConfig,
    SearchLibrary,
    collection_of,
    ids_in,
    open_collections,
    open_passages,
    open_remote,
    passages_of,
)
from qrag_jax.systems.rewrite_script import RewriteScript, script_of_questions, script_of_texts
from qrag_jax.systems.token_system import model_of

SEARCH = "search"  # corpora and indexes, in the run's folder
_MADE = "made"  # the collection of queries that are made here


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run reads.

    Attributes:
        model: what is trained.
        agent: the environment, which finds as many documents as rewards need.
        library: what is searched; it keeps results.
        speech: between text and ids.
        train, dev, test: the queries; dev chooses the best checkpoint, test is for `evaluate`.
        script: what is demonstrated; None: nothing is.
        data: content keys.
    """

    model: FirstLanguageModel
    agent: RewriteAgent
    library: KeptResults
    speech: Speech
    train: Sequence[RewriteTask]
    dev: Sequence[RewriteTask]
    test: Sequence[RewriteTask]
    script: RewriteScript | None
    data: dict[str, str]


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
    train, dev = _split(config, made) if trains else ([], [])
    tested = [] if test is None else _read(test, made.test)
    named = {each.collection for each in (*train, *dev, *tested)}
    folders = _folders((queries.train, queries.dev, test or ""))
    opened = partial(_opened, begun=search is not None or has_begun(workdir))
    library = opened(config, made, (named, folders), search or workdir / SEARCH)
    told = _digest(library, {each.collection for each in (*train, *dev)})
    # Without a dev of its own, some of the training queries choose the best checkpoint.
    named_by = ((train, "train"), (dev, "dev" if queries.dev else "train"), (tested, "test"))
    train, dev, tested = (
        on_corpora(tasks, f"config.queries.{name}", library, config.search, folders)
        for tasks, name in named_by
    )
    if trains:
        check_depths(library, config.reward.k)
    train = _unseen(train, (*dev, *tested))
    train = train[: queries.most] if queries.most else train
    reward = RewriteReward(config.reward)
    for each in (*train, *dev):
        reward.check(each)
    kept = KeptResults(library, config.search.kept)
    agent = agent_of(config, config.reward.k)
    script = _script(config, made, library) if trains else None
    model, speech = _model(config, workdir, mesh, script)
    check_prompts(config, agent, speech, (*train, *dev, *tested))
    order = np.random.default_rng(config.eval.seed).permutation(len(dev))
    shown = sorted(order[: config.eval.samples or len(dev)].tolist())
    return Inputs(
        model=model,
        agent=agent,
        library=kept,
        speech=speech,
        train=train,
        dev=[dev[number] for number in shown],
        test=tested,
        script=script if SCRIPT in config.stages else None,
        data={
            "queries": fingerprint(train),
            DEV: fingerprint(dev),
            "model": model_digest(model.folder, default_cache(), log),
            "prompt": agent.prompt.prompt.fingerprint,
            "search": told,
        },
    )


def _model(
    config: RewriteConfig, workdir: Path, mesh: Mesh, script: RewriteScript | None = None
) -> tuple[FirstLanguageModel, Speech]:
    texts = partial(script.texts, config, agent_of(config, config.reward.k)) if script else None
    return model_of(config, workdir, mesh, texts, config.writing.query_tokens)


def agent_of(config: RewriteConfig, k: int) -> RewriteAgent:
    """The environment, where a query finds k documents."""
    prompt = RewritePrompt(prompts.load(config.writing.prompt))
    readable = _is_boolean if config.search.engine == BOOLEAN else any_query
    return RewriteAgent(prompt, config.writing.kind.form, k, readable)


def _is_boolean(query: str) -> bool:
    try:
        parse_boolean(query)
    except BooleanError:
        return False
    return True


def _split(config: RewriteConfig, made: MadeQueries) -> tuple[list[RewriteTask], list[RewriteTask]]:
    """Training queries, and those that choose the best checkpoint."""
    queries = config.queries
    train = _read(queries.train, made.train)
    if queries.dev:
        return train, _read(queries.dev, made.dev)
    if queries.train == TALKATIVE:
        return train, _read(TALKATIVE, made.dev)
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


def _read(text: str, made: Callable[[], list[JudgedQuery]]) -> list[RewriteTask]:
    """The tasks of a dataset string, part by part: ids need be unique within a part alone."""
    if text == TALKATIVE:
        return [_task(each, _MADE) for each in made()]
    found = []
    for part in parse_parts(text, WITHOUT):
        read, reports = read_judged_queries(f"{part.path},{part.split}{part.bounds}")
        for report in reports:
            log(report.summary())
        folder = Path(part.path).expanduser()
        name = folder.resolve().name if queries.is_collection(folder) else ""
        found += [_task(each, name) for each in read]
    return found


def _task(query: JudgedQuery, collection: str) -> RewriteTask:
    return RewriteTask.judged(
        query.id,
        query.text,
        dict(query.grades),
        answers=query.answers,
        collection=collection,
        until=query.until,
    )


def _opened(
    config: RewriteConfig,
    made: MadeQueries,
    given: tuple[set[str], dict[str, str]],
    folder: Path,
    *,
    begun: bool,
) -> SearchLibrary:
    """What is searched.

    Args:
        given: names of collections, and the folders of those that have one.
        begun: see `query_search.open_query_search`.
    """
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
            wanted[name] = partial(passages_of, paths[name])
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


def _folders(texts: Sequence[str]) -> dict[str, str]:
    """The folders of collections by their names.

    Args:
        texts: dataset strings; "" names nothing.
    """
    found = dict[str, str]()
    for text in texts:
        if text in ("", TALKATIVE):
            continue
        for part in parse_parts(text, WITHOUT):
            folder = Path(part.path).expanduser()
            if not queries.is_collection(folder):
                continue
            name = folder.resolve().name
            if name in (_MADE, OWN):
                raise InputError(
                    f"{part.path} is a collection of the name {name}, which other passages of a "
                    "run have; rename the folder."
                )
            first = found.setdefault(name, part.path)
            if Path(first).expanduser().resolve() != folder.resolve():
                raise InputError(
                    f"{first} and {part.path} are collections of one name, {name}; rename a folder."
                )
    return found


def _unseen(train: Sequence[RewriteTask], others: Sequence[RewriteTask]) -> list[RewriteTask]:
    """The training queries that are not evaluated on, by collection and text."""
    asked = {(each.collection, each.question) for each in others}
    kept = [each for each in train if (each.collection, each.question) not in asked]
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
        return script_of_questions(made.questions)
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

    def tokens_of(task: RewriteTask) -> int:
        return len(speech.scaffold.opening(agent.prompt.messages(task)))

    def size(task: RewriteTask) -> int:
        return len(task.question.encode())

    most = config.sampling.room - config.writing.query_tokens
    around = tokens_of(min(tasks, key=size))
    for task in tasks:
        # A token has a byte at least, so most queries need not be encoded.
        if around + size(task) > most and (tokens := tokens_of(task)) > most:
            raise InputError(
                f"the prompt of query {task.id!r} has {tokens} tokens, an output may have "
                f"{config.writing.query_tokens} (config.writing.query_tokens), and "
                f"config.sampling.room is {config.sampling.room}; raise the room."
            )


def fingerprint(tasks: Sequence[RewriteTask]) -> str:
    """A digest of the queries and their judgements."""
    digest = hashlib.sha256()
    for task in tasks:
        told = task.collection, task.id, task.question, task.grades, task.answers, task.until
        digest.update(f"{told}\0".encode())
    return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class IfThere:
    """See `token_episodes.Library`: a task whose collection is not there finds nothing.

    Attributes:
        there: what can be searched.
    """

    there: Collections

    def has(self, task: ToolTask) -> bool:
        """Whether a query of this task is searched for."""
        return collection_of(task) in self.there.by_name

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first."""
        places = [n for n, (task, _) in enumerate(asked) if self.has(task)]
        found = self.there.look([asked[n] for n in places])
        known = dict(zip(places, found, strict=True))
        return [known.get(n, ()) for n in range(len(asked))]

    def open(self, task: ToolTask, step: Open) -> Document | Failure | None:
        """The document of this id; None if there is none."""
        return self.there.open(task, step) if self.has(task) else None

    def digest(self, task: ToolTask) -> str:
        """Of what a query of this task searches."""
        return self.there.digest(task) if self.has(task) else "nothing"


def listed_inputs(
    config: RewriteConfig, workdir: Path, mesh: Mesh, queries: Sequence[ListedQuery]
) -> Inputs:
    """What a run reads of the queries of a file; its own queries and their data are not read."""
    remote = config.search.engine == REMOTE
    library = open_remote(config.engine) if remote else IfThere(_indexed(config, workdir))
    only = ""
    if isinstance(library, IfThere) and len(library.there.by_name) == 1:
        (only,) = library.there.by_name
    tasks = [
        RewriteTask.judged(
            each.id, each.text, {}, collection=each.collection or only, until=each.until
        )
        for each in queries
    ]
    agent = agent_of(config, config.eval.depth)
    model, speech = _model(config, workdir, mesh)
    check_prompts(config, agent, speech, tasks)
    kept = KeptResults(library, config.search.kept)
    digest = model_digest(model.folder, default_cache(), log)
    data = {"model": digest, "prompt": agent.prompt.prompt.fingerprint}
    return Inputs(model, agent, kept, speech, [], [], tasks, None, data)


def _indexed(config: RewriteConfig, workdir: Path) -> Collections:
    """What the run has indexed, by the names of its collections."""
    found, search = {}, config.search
    if search.index:
        found[""] = open_passages(search.of_index(search.index), _no_others, workdir)
    for path in sorted((workdir / SEARCH).glob(f"*/{CORPUS}/{corpus.NAME}")):
        folder = path.parents[1]
        name = "" if folder.name == OWN else folder.name
        found.setdefault(name, open_passages(search.of_index(""), _no_others, folder))
    return Collections(found)


def _no_others() -> None:
    """No passages but those that a folder has."""


def on_corpora(
    tasks: Sequence[RewriteTask],
    field: str,
    library: SearchLibrary,
    search: RewriteSearchConfig,
    folders: Mapping[str, str],
) -> list[RewriteTask]:
    """The tasks of which their collection has a relevant document; a service is not asked.

    Args:
        field: that names the queries, such as "config.queries.train".
        folders: of collections in BEIR's layout, by their names.
    """
    if not isinstance(library, Collections):
        return [*tasks]
    kept: list[RewriteTask] = []
    for name in dict.fromkeys(each.collection for each in tasks):
        own = [each for each in tasks if each.collection == name]
        if name and name not in folders:  # made here, with their passages
            kept += own
            continue
        judged = [JudgedQuery(each.id, each.question, each.grades) for each in own]
        needed = (document for each in judged for document, _ in each.grades)
        known = ids_in(library.by_name[name].corpus, needed)
        origin = _origin(field, search, folders.get(name, ""))
        found = check_in_corpus(judged, known, origin, search.max_missing_share)
        if found.summary:
            log(f"{name or 'queries'}: {found.summary}")
        there = {id(each) for each in found.queries}  # query ids of two parts may be alike
        kept += [task for task, each in zip(own, judged, strict=True) if id(each) in there]
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


def _origin(field: str, search: RewriteSearchConfig, folder: str) -> Origin:
    """Of the queries of a folder in BEIR's layout; "": of those of files of rows."""
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

    def train(self) -> list[JudgedQuery]:
        """Training queries."""
        return [each.judged for each in self.questions[: self.config.queries.made_train]]

    def dev(self) -> list[JudgedQuery]:
        """Those that choose the best checkpoint."""
        return [each.judged for each in self._others[1]]

    def test(self) -> list[JudgedQuery]:
        """Those that `evaluate` scores."""
        return [each.judged for each in self._others[0]]

    def passages(self) -> Iterator[Passage]:
        """Those of all questions, and of all in the blocks of the others."""
        test, dev = self._others
        last = len(test) + len(dev)
        filled = self._made("dev", last, last + -last % BLOCK)
        for each in (*self.questions, *test, *dev, *filled):
            yield from (Passage(*document) for document in each.documents)

    @functools.cached_property
    def _others(self) -> tuple[list[TalkativeQuestion], list[TalkativeQuestion]]:
        queries = self.config.queries
        made = self._made("dev", 0, queries.made_test + queries.held_out)
        return made[: queries.made_test], made[queries.made_test :]

    def _made(self, split: Split, first: int, end: int) -> list[TalkativeQuestion]:
        queries = self.config.queries
        numbers = range(first, end)
        return talkative_questions(queries.made_seed, split, numbers, queries.clauses)
