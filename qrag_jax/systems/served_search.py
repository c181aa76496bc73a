"""What a server searches with: an index, and what makes vectors of questions."""

from __future__ import annotations

import dataclasses

from qrag_jax.retrieval.opening import IndexAt
from qrag_jax.serving.searcher import MultiStep, Searcher, SingleStep
from qrag_jax.systems.plain_search import PlainEncoder, open_plain
from qrag_jax.systems.retriever import LoadSettings, Retriever


@dataclasses.dataclass(frozen=True)
class ServedSearch:
    """Which search is served; with neither a retriever nor an encoder it compares words.

    Attributes:
        index: the index, and what searches it.
        retriever: folder of an export or of a run, which searches in steps as it was trained.
        settings: how it is loaded.
        encoder: a plain encoder, which searches in one step.
    """

    index: IndexAt
    retriever: str = ""
    settings: LoadSettings = dataclasses.field(default_factory=LoadSettings)
    encoder: PlainEncoder | None = None

    def open(self) -> Searcher:
        """Loads it.

        Raises:
            InputError: the index or the encoder cannot be used, or they do not belong together.
        """
        if not self.retriever:
            return SingleStep(open_plain(self.index, self.encoder))
        retriever = Retriever.load(self.retriever, self.settings)
        retriever.open_at(self.index)
        return MultiStep(retriever.multi_step)
