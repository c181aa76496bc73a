"""Reads and checks the queries, the corpora and the model of a DeepRetrieval run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.data.corpora import check_in_corpus, is_collection, read_judged_queries
from qrag_jax.data.reading import WITHOUT, DatasetPart, parse_parts
from qrag_jax.data.sample import Sample, world
from qrag_jax.environments.queries import RewriteAgent, demonstration_scripts
from qrag_jax.errors import InputError
from qrag_jax.feedback.rewrite import RewriteReward
from qrag_jax.llm.text import prompts
from qrag_jax.retrieval.boolean_search import parse_boolean
from qrag_jax.retrieval.index_folder import BOOLEAN
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.retrieval.pubmed import RemoteEngine
from qrag_jax.rollouts.libraries import (
    Collections,
    CorpusLibrary,
    KeptResults,
    RemoteLibrary,
    SearchLibrary,
)
from qrag_jax.runtime.run import log
from qrag_jax.runtime.saved_config import has_begun
from qrag_jax.systems.deepretrieval.config import SCRIPT, TALKATIVE, RewriteConfig
from qrag_jax.systems.search import OWN, REMOTE, open_search
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
    listed: Sequence[Sample] | None = None,
) -> TokenInputs:
    """Reads the queries, writes or opens the corpora, prepares the model.

    Args:
        trains: else the run has a model already, and the queries of training and those that
            choose the best checkpoint are not read, nor are their collections opened.
        search: folder of corpora and indexes; None: the run's own.
        listed: queries of a file, without judgements; then the config's are not read, and all
            their collections are searched.
    """
    queries, asked, folder = config.queries, _Asked(config), search or workdir / SEARCH
    if listed is None:
        parts = asked.parts(trains)
    else:
        plain = [dataclasses.replace(each, grades=(), answers=()) for each in listed]
        parts = {"train": [], "dev": [], "test": plain}
    data: dict[str, str] = {}
    library: SearchLibrary
    if config.search.engine == REMOTE:
        if trains and (hosts := jax.process_count()) > 1:
            raise InputError(
                f"config.search.engine {REMOTE!r} is for one host, not {hosts}; start one process."
            )
        library = RemoteLibrary(RemoteEngine(config.engine))
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
        begun = search is None and has_begun(workdir)
        library = asked.opened(named, folder, begun=begun)
        for name, part in parts.items():
            field = f"config.queries.{'train' if name == 'dev' and not queries.dev else name}"
            parts[name] = asked.on_corpora(part, field, library)
        for name, collection in library.by_name.items() if trains else ():
            if (count := len(collection.corpus)) < config.reward.k:  # recall would count all
                raise InputError(
                    f"config.reward.k is {config.reward.k}, more than the {count} documents of "
                    f"{name or 'the corpus'}; lower it, or name a larger corpus."
                )
        # The test, which may change, may have a collection of its own.
        digests = {name: library.by_name[name].corpus.digest for name in sorted(trained)}
        data["search"] = fingerprint(digests.items())
    evaluated = {(each.collection, each.question) for each in (*parts["dev"], *parts["test"])}
    left = [each for each in parts["train"] if (each.collection, each.question) not in evaluated]
    if parts["train"] and not left:
        raise InputError(
            "all of config.queries.train is in config.queries.dev or test; name other parts."
        )
    parts["train"] = left[: queries.most or len(left)]
    for task in (*parts["train"], *parts["dev"]):
        RewriteReward(config.reward).check(task)
    script = None
    if trains and queries.train == TALKATIVE:
        script = demonstration_scripts().RewriteScript(asked.made[1])
    elif trains and SCRIPT in config.stages and isinstance(library, Collections):
        corpora = ((p.whole for p in each.corpus) for each in library.by_name.values())
        sentences = world("sentences.py").corpus_sentences(config.dropped, corpora)
        script = demonstration_scripts().RewriteScript(*sentences)
    agent = agent_of(config, config.reward.k)
    return token_inputs(
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
        library=KeptResults(library, config.search.kept),
        script=script,
        data={"prompt": agent.prompt.fingerprint, **data},
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


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The queries of a config, and what they search."""

    config: RewriteConfig

    @functools.cached_property
    def made(self) -> tuple[dict[str, list[Sample]], list[Any], list[Passage]]:
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
            raise InputError(
                f"config.queries.held_out is {count}, and config.queries.train has {len(train)}; "
                "lower it, or name others in config.queries.dev."
            )
        order = np.random.default_rng(self.config.seed).permutation(len(train))
        held = {*order[:count].tolist()}
        sides: tuple[list[Sample], list[Sample]] = [], []
        for number, each in enumerate(train):
            sides[number in held].append(each)
        return sides

    def read(self, text: str, part_made: str) -> list[Sample]:
        """The queries of a dataset string; ids need be unique within each of its parts alone."""
        if text == TALKATIVE:
            return [dataclasses.replace(each, collection=_MADE) for each in self.made[0][part_made]]
        found = []
        for part in parse_parts(text, WITHOUT):
            read, report = read_judged_queries(part)
            log(report.summary())
            name, _ = _collection(part)
            found += [dataclasses.replace(each, collection=name) for each in read]
        return found

    @functools.cached_property
    def corpora(self) -> dict[str, str]:
        """The corpora of the collections that the config names; "": section `search` has it."""
        queries, search, found = self.config.queries, self.config.search, dict[str, str]()
        if search.index or search.corpus:
            found[""] = ""
        for text in filter(None, (queries.train, queries.dev, queries.test)):
            if text == TALKATIVE:
                found[_MADE] = ""
                continue
            for part in parse_parts(text, WITHOUT):
                name, path = _collection(part)
                if name and (name == OWN or found.setdefault(name, path) != path):
                    raise InputError(
                        f"{part.path} is a collection of the name {name}, as is "
                        f"{found.get(name) or 'one of the run itself'}; rename the folder."
                    )
        return found

    def opened(self, named: set[str], folder: Path, *, begun: bool = True) -> Collections:
        """What is searched, by the names of the collections; what is made is in a folder's."""
        search, found = self.config.search, dict[str, CorpusLibrary]()
        if "" in named - {*self.corpora}:
            raise InputError(
                "queries in rows need documents; give config.search.corpus or search.index."
            )
        for name in sorted(named):
            own = search
            if name:
                own = dataclasses.replace(search, index="", corpus=self.corpora[name])
            found[name] = open_search(
                own, lambda: self.made[2], folder / (name or OWN), begun=begun
            )
        return Collections(found)

    def on_corpora(
        self, queries: Sequence[Sample], field: str, library: Collections
    ) -> list[Sample]:
        """The queries of which their collection has a relevant document."""
        search, kept = self.config.search, list[Sample]()
        for name in dict.fromkeys(each.collection for each in queries):
            own = [each for each in queries if each.collection == name]
            if name != _MADE:  # whose passages are made with them
                needed = [*{document: 0 for each in own for document, _ in each.grades}]
                numbers = library.by_name[name].corpus.numbers(needed)
                known = {document for document, number in zip(needed, numbers) if number >= 0}
                about = f"config.search.{'index' if search.index else 'corpus'}"
                fix = f"give the corpus that they are about in {field}"
                if name:
                    about, fix = f"the corpus of {self.corpora[name]}", f"{fix} or in that folder"
                named = {"field": field, "corpus": about, "fix": fix}
                own, summary = check_in_corpus(own, known, search.max_missing_share, **named)
                if summary:
                    log(f"{name or 'queries'}: {summary}")
            kept += own
        return kept


def _collection(part: DatasetPart) -> tuple[str, str]:
    """The name and the path of a folder in BEIR's layout; both "": it is none."""
    folder = Path(part.path).expanduser().resolve()
    return (folder.name, str(folder)) if is_collection(folder) else ("", "")


def digest_of(tasks: Sequence[Sample]) -> str:
    return fingerprint(
        (t.collection, t.id, t.question, t.grades, t.answers, t.until) for t in tasks
    )
