"""Queries of a file in place of a run's own: what is searched for them, and what rewrites them.

They are searched for in what the run has indexed: in the collection that they name, or in the only
one. A query for which there is none is rewritten all the same, and finds nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh

from qrag_jax.data.files.query_lists import ListedQuery
from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.environments.tools.episode import Document, Look, Open, ToolTask
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.server.model_digest import model_digest
from qrag_jax.retrieval import corpus
from qrag_jax.retrieval.opening import CORPUS
from qrag_jax.rollouts.kept_results import KeptResults
from qrag_jax.runtime.run import log as tell
from qrag_jax.runtime.whole_files import default_cache
from qrag_jax.systems.deepretrieval_config import RewriteConfig
from qrag_jax.systems.deepretrieval_inputs import (
    SEARCH,
    Inputs,
    agent_of,
    check_prompts,
    model_of,
)
from qrag_jax.systems.query_search import open_passages
from qrag_jax.systems.rewrite_search import OWN, REMOTE, Collections, collection_of, open_remote


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
    model, speech = model_of(config, workdir, mesh)
    check_prompts(config, agent, speech, tasks)
    kept = KeptResults(library, config.search.kept)
    digest = model_digest(model.folder, default_cache(), tell)
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
