"""Reads and checks the queries, the corpora and the model of a DeepRetrieval run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.data.corpora import Query, check_in_corpus, is_collection, read_judged_queries
from qrag_jax.data.reading import WITHOUT, parse_parts
from qrag_jax.data.sample import world
from qrag_jax.environments.queries import RewriteAgent, RewriteTask, demonstration_scripts
from qrag_jax.errors import InputError
from qrag_jax.feedback.rewrite import RewriteReward
from qrag_jax.llm.text import prompts
from qrag_jax.retrieval import corpus
from qrag_jax.retrieval.boolean_search import parse_boolean
from qrag_jax.retrieval.index_folder import BOOLEAN, CORPUS
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.rollouts.libraries import KeptResults
from qrag_jax.runtime.run import DEV, log
from qrag_jax.runtime.saved_config import has_begun
from qrag_jax.systems.deepretrieval_config import SCRIPT, TALKATIVE, RewriteConfig
from qrag_jax.systems.search import (
    OWN,
    REMOTE,
    Collections,
    SearchLibrary,
    open_collections,
    open_remote,
    passages_of,
)
from qrag_jax.systems.token_system import TokenInputs, fingerprint, token_inputs

SEARCH = "search"  # corpora and indexes, in the run's folder
_MADE = "made"  # the collection of queries that are made here


def load_inputs(
    config: RewriteConfig,
    workdir: Path,
    mesh: Mesh,
    *,
    trains: bool = True,
    search: Path | None = None,
) -> TokenInputs:
    """Reads the queries, writes or opens the corpora, prepares the model.

    Args:
        trains: else the run has a model already, and the queries of training and those that
            choose the best checkpoint are not read, nor are their collections opened.
        search: folder of corpora and indexes; None: the run's own.
    """
    queries, asked = config.queries, _Asked(config)
    dev_of, read = queries.dev, asked.read
    parts: dict[str, list[Query]] = {"train": [], "dev": []}  # by their fields
    if trains:
        parts["train"] = read(queries.train, "train")
        if dev_of or queries.train == TALKATIVE:
            parts["dev"] = read(dev_of or TALKATIVE, "dev")
        else:  # some of the training queries choose the best checkpoint
            parts["train"], parts["dev"] = _held_out(config, parts["train"])
    parts["test"] = read(queries.test, "test")
    trained = {query.collection for name in ("train", "dev") for query in parts[name]}
    named = trained | {query.collection for query in parts["test"]}
    library: SearchLibrary
    if config.search.engine == REMOTE:
        if trains and (hosts := jax.process_count()) > 1:
            raise InputError(
                f"config.search.engine {REMOTE!r} is for one host, not {hosts}; start one process."
            )
        library = open_remote(config.engine)
        digest = library.engine.digest
    else:
        folder, begun = search or workdir / SEARCH, search is not None or has_begun(workdir)
        library = open_collections(config.search, asked.passages(named), folder, begun=begun)
        for name, part in parts.items():
            field = f"config.queries.{'train' if name == 'dev' and not dev_of else name}"
            parts[name] = asked.on_corpora(part, field, library)
        for name, collection in library.by_name.items() if trains else ():
            if (count := len(collection.corpus)) < config.reward.k:  # recall would count all
                raise InputError(
                    f"config.reward.k is {config.reward.k}, more than the {count} documents of "
                    f"{name or 'the corpus'}; lower it, or name a larger corpus."
                )
        # The test, which may change, may have a collection of its own.
        digests = {name: library.by_name[name].corpus.digest for name in sorted(trained)}
        digest = fingerprint(digests.items())
    train, dev, tested = parts.values()
    evaluated = {(query.collection, query.text) for query in (*dev, *tested)}
    left = [query for query in train if (query.collection, query.text) not in evaluated]
    if train and not left:
        raise InputError(
            "all of config.queries.train is in config.queries.dev or test; name other parts."
        )
    tasks, shown, test_tasks = (
        [*map(_task, part)] for part in (left[: queries.most or len(left)], dev, tested)
    )
    for task in (*tasks, *shown):
        RewriteReward(config.reward).check(task)
    script = None
    if trains and queries.train == TALKATIVE:
        script = demonstration_scripts().RewriteScript(asked.made[1])
    elif trains and SCRIPT in config.stages and isinstance(library, Collections):
        corpora = ((p.whole for p in each.corpus) for each in library.by_name.values())
        sentences = world("sentences.py").corpus_sentences(config.dropped, corpora)
        script = demonstration_scripts().RewriteScript(*sentences)
    return _with_model(
        config,
        workdir,
        mesh,
        library,
        script=script,
        train=tasks,
        dev=shown,
        test=test_tasks,
        data={"queries": digest_of(tasks), DEV: digest_of(shown), "search": digest},
    )


def listed_inputs(
    config: RewriteConfig, workdir: Path, mesh: Mesh, queries: Sequence[Query]
) -> TokenInputs:
    """What a run reads of the queries of a file; its own queries and their data are not read."""
    library: SearchLibrary
    only, search = "", config.search
    if search.engine == REMOTE:
        library = open_remote(config.engine)
    else:  # what the run has indexed, by the names of its collections
        there = sorted((workdir / SEARCH).glob(f"*/{CORPUS}/{corpus.NAME}"))
        names = ["" if path.parents[1].name == OWN else path.parents[1].name for path in there]
        found = dict.fromkeys(["", *names] if search.index else names)
        library = open_collections(search, found, workdir / SEARCH)
        only = next(iter(found)) if len(found) == 1 else ""
    asked = (each._replace(grades=(), answers=()) for each in queries)
    tasks = [_task(each._replace(collection=each.collection or only)) for each in asked]
    return _with_model(config, workdir, mesh, library, test=tasks, data={})


def _with_model(
    config: RewriteConfig,
    workdir: Path,
    mesh: Mesh,
    library: SearchLibrary,
    *,
    data: Mapping[str, str],
    script: Any = None,
    **parts: Any,
) -> TokenInputs:
    """The model and the environment; refuses queries whose prompt leaves an output no room."""
    agent = agent_of(config, config.reward.k)
    tasks = itertools.chain(*parts.values())
    longest = max(tasks, key=lambda task: len(task.question.encode()))
    return token_inputs(
        config,
        workdir,
        mesh,
        turn=config.writing.query_tokens,
        prompts=[(longest.id, agent.messages(longest))],
        agent=agent,
        library=KeptResults(library, config.search.kept),
        script=script,
        data={"prompt": agent.prompt.fingerprint, **data},
        **parts,
    )


def agent_of(config: RewriteConfig, k: int) -> RewriteAgent:
    """The environment, where a query finds k documents."""
    prompt = prompts.load(config.writing.prompt)
    readable = _is_boolean if config.search.engine == BOOLEAN else None
    return RewriteAgent(prompt, config.writing.kind.form, k, readable)


def _is_boolean(query: str) -> bool:
    try:
        parse_boolean(query)
    except InputError:
        return False
    return True


def _held_out(config: RewriteConfig, train: Sequence[Query]) -> tuple[list[Query], list[Query]]:
    """The queries that are learned from, and those that choose the best checkpoint."""
    count = config.queries.held_out
    if len(train) <= count:
        raise InputError(
            f"config.queries.held_out is {count}, and config.queries.train has {len(train)}; lower "
            "it, or name others in config.queries.dev."
        )
    held = {*np.random.default_rng(config.seed).permutation(len(train))[:count].tolist()}
    sides: tuple[list[Query], list[Query]] = [], []
    for number, each in enumerate(train):
        sides[number in held].append(each)
    return sides


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The queries of a config, and what they search."""

    config: RewriteConfig
    folders: dict[str, Path] = dataclasses.field(default_factory=dict)  # of collections, by name

    @functools.cached_property
    def made(self) -> tuple[dict[str, list[Query]], list[Any], list[Passage]]:
        """What is made here: queries by part, all training questions, and the passages of all."""
        return world().talkative_parts(self.config.queries)

    def read(self, text: str, part_made: str) -> list[Query]:
        """The queries of a dataset string; ids need be unique within each of its parts alone."""
        if text == TALKATIVE:
            return [each._replace(collection=_MADE) for each in self.made[0][part_made]]
        found = []
        for part in parse_parts(text, WITHOUT):
            read, report = read_judged_queries(part)
            log(report.summary())
            folder = Path(part.path).expanduser().resolve()
            name = folder.name if is_collection(folder) else ""
            known = self.folders.setdefault(name, folder) if name else folder
            if name in (_MADE, OWN) or known != folder:
                raise InputError(
                    f"{part.path} is a collection of the name {name}, as is "
                    f"{known if known != folder else 'one of the run itself'}; rename the folder."
                )
            found += [each._replace(collection=name) for each in read]
        return found

    def passages(self, named: set[str]) -> dict[str, Callable[[], Iterable[Passage]]]:
        """What gives the passages of each of these collections."""
        search = self.config.search
        if "" in named and not search.corpus and not search.index:
            raise InputError(
                "queries in rows need documents; give config.search.corpus or search.index."
            )
        found: dict[str, Callable[[], Iterable[Passage]]] = {
            name: partial(passages_of, str(self.folders[name]) if name else search.corpus)
            for name in sorted(named - {_MADE})
        }
        return found | ({_MADE: lambda: self.made[2]} if _MADE in named else {})

    def on_corpora(self, queries: Sequence[Query], field: str, library: Collections) -> list[Query]:
        """The queries of which their collection has a relevant document."""
        search, kept = self.config.search, list[Query]()
        for name in dict.fromkeys(each.collection for each in queries):
            own = [each for each in queries if each.collection == name]
            if name != _MADE:  # whose passages are made with them
                needed = [*{document: 0 for each in own for document, _ in each.grades}]
                numbers = library.by_name[name].corpus.numbers(needed)
                known = {document for document, number in zip(needed, numbers) if number >= 0}
                about = f"config.search.{'index' if search.index else 'corpus'}"
                fix = f"give the corpus that they are about in {field}"
                if name:
                    about, fix = f"the corpus of {self.folders[name]}", f"{fix} or in that folder"
                named = {"field": field, "corpus": about, "fix": fix}
                own, summary = check_in_corpus(own, known, search.max_missing_share, **named)
                if summary:
                    log(f"{name or 'queries'}: {summary}")
            kept += own
        return kept


def _task(query: Query) -> RewriteTask:
    of = {"answers": query.answers, "collection": query.collection, "until": query.until}
    return RewriteTask.judged(query.id, query.text, dict(query.grades), **of)


def digest_of(tasks: Sequence[RewriteTask]) -> str:
    return fingerprint(
        (t.collection, t.id, t.question, t.grades, t.answers, t.until) for t in tasks
    )
