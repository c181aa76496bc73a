"""A plain server of a dense index: sentence-transformers, faiss and FastAPI, and nothing else.

    python -m benchmarks.peers.dense_server MODEL VECTORS.npy PASSAGES.jsonl PORT

It answers Search-R1's request one request at a time, as servers of this kind do: no queue, and no
batches but those that a client sends. PASSAGES has one JSON list `[name, title, text, …]` a line,
VECTORS float32 `[passages, width]`, in the same order.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import sentence_transformers
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class Request(BaseModel):
    """Search-R1's request."""

    queries: list[str]
    topk: int = 3
    return_scores: bool = False


def make_app(model: str, vectors: np.ndarray, passages: list[list[Any]]) -> FastAPI:
    """The server of an encoder's folder and its vectors."""
    encoder = sentence_transformers.SentenceTransformer(model, device="cpu")
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    app, lock = FastAPI(), threading.Lock()

    @app.post("/retrieve")
    def retrieve(request: Request) -> dict[str, Any]:
        with lock:  # torch and faiss use all cores for one request already
            asked = encoder.encode(request.queries, convert_to_numpy=True)
            scores, numbers = index.search(np.asarray(asked, np.float32), request.topk)
        result = []
        for own, found in zip(scores, numbers, strict=True):
            documents = [
                {"id": passages[n][0], "contents": f'"{passages[n][1]}"\n{passages[n][2]}'}
                for n in found
            ]
            pairs = zip(documents, own.tolist(), strict=True)
            scored = [{"document": document, "score": score} for document, score in pairs]
            result.append(scored if request.return_scores else documents)
        return {"result": result}

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ready"}

    return app


if __name__ == "__main__":
    folder, vectors, texts, port = sys.argv[1:]
    lines = [json.loads(line) for line in Path(texts).read_text().splitlines()]
    app = make_app(folder, np.load(vectors), lines)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
