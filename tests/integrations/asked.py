"""Questions to the small corpus, and a retriever that knows who asked."""

from __future__ import annotations

import threading
from typing import Any

from qrag_jax import Retriever
from qrag_jax.retrieval.multi_step import Hit

QUESTION = "which river is by the silver bridge"
QUESTIONS = [QUESTION, "a clock in the garden", "paper and stone"]


class Watched:
    """Searches with a retriever, and keeps the threads that asked."""

    def __init__(self, retriever: Retriever) -> None:
        self.retriever, self.threads = retriever, set[int]()

    def search(self, questions: str, *settings: Any, **more: Any) -> list[Hit]:
        self.threads.add(threading.get_ident())
        return self.retriever.search(questions, *settings, **more)


def metadata(hit: Hit) -> dict[str, Any]:
    """What documents have beside text, id and score."""
    return dict(hit.metadata) | {"step": hit.step} | ({"title": hit.title} if hit.title else {})
