"""The peer of our searches: a plain loop of sentence-transformers and faiss, and its server.

    python -m benchmarks.speed.dense EXPORT VECTORS.npy PASSAGES.jsonl PORT

The server answers one request at a time, as servers of this kind do: no queue, and no batches but
those that a client sends. PASSAGES has one JSON list `[name, text]` a line, VECTORS
float32 `[passages, width]`, in the same order.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from sentence_transformers import SentenceTransformer

from qrag_jax.runtime.retriever_config import RetrieverConfig


class StepLoop:
    """Searches with exported towers: encode the states, look their vectors up, take the best.

    Args:
        export: folder of the towers.
        vectors: of the passages.
        texts: what a passage adds to a state, in the same order.
    """

    def __init__(self, export: Path, vectors: np.ndarray, texts: Sequence[str]) -> None:
        self.config, self.texts = RetrieverConfig.read(export), texts
        self.tower = SentenceTransformer(str(export / self.config.state.folder), device="cpu")
        self.index = faiss.IndexFlatIP(vectors.shape[1])
        self.index.add(np.ascontiguousarray(vectors, np.float32))

    def search(self, questions: Sequence[str], steps: int) -> list[list[int]]:
        """The numbers of the passages taken for each question, step by step."""
        taken: list[list[int]] = [[] for _ in questions]
        for step in range(steps):
            states = [
                self.config.separator.join([question, *(self.texts[n] for n in numbers)])
                for question, numbers in zip(questions, taken, strict=True)
            ]
            encoded = np.asarray(self.tower.encode(states, show_progress_bar=False), np.float32)
            _, nearest = self.index.search(encoded, step + 1)
            for numbers, row in zip(taken, nearest.tolist(), strict=True):
                numbers.append(next(n for n in row if n not in numbers))
        return taken


def serve(loop: StepLoop, names: Sequence[str], port: int) -> None:
    """Answers `{"questions": […], "steps": T}` with hits as `qrag serve` gives them."""
    import uvicorn
    from fastapi import FastAPI

    app, lock = FastAPI(), threading.Lock()

    # No names of types: FastAPI would look for them outside this function.
    @app.post("/search")
    def search(request: dict) -> dict:
        with lock:  # torch and faiss use all cores for one request already
            taken = loop.search(request["questions"], request["steps"])
        hits: list[list[dict[str, Any]]] = [
            [{"id": names[n], "text": loop.texts[n]} for n in numbers] for numbers in taken
        ]
        return {"hits": hits}

    @app.get("/health")
    def health() -> dict:
        return {"status": "ready"}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    export, vectors, passages, port = sys.argv[1:]
    lines = [json.loads(line) for line in Path(passages).read_text().splitlines()]
    serve(
        StepLoop(Path(export), np.load(vectors), [line[1] for line in lines]),
        [line[0] for line in lines],
        int(port),
    )
