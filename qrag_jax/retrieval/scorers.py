"""What scores texts for a query one by one: vectors, a model server, or a cross-encoder here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.llm.client.client import Client
from qrag_jax.llm.outcomes import Answer, RerankRequest

# Texts → float `[texts, width]`.
Embed = Callable[[Sequence[str]], np.ndarray]


class Scorer(Protocol):
    """Scores pairs of a query and a passage."""

    def scores(
        self, queries: Sequence[str], passages: Sequence[Sequence[str]]
    ) -> list[np.ndarray | None]:
        """For each query, the scores of its own passages, float `[passages]`, higher is better.

        None for a query whose scores could not be had; this is no error.
        """


class EmbeddingScorer:
    """Inner products of vectors.

    Args:
        queries, passages: embed texts; called once for all of a call's different texts.
    """

    def __init__(self, queries: Embed, passages: Embed) -> None:
        self._queries, self._passages = queries, passages

    def scores(
        self, queries: Sequence[str], passages: Sequence[Sequence[str]]
    ) -> list[np.ndarray | None]:
        """See `Scorer`; never None.

        Raises:
            ValueError: an embedding function does not give one vector for each text.
        """
        places = {text: at for at, text in enumerate(dict.fromkeys(t for p in passages for t in p))}
        if not places:
            return [np.zeros(0, np.float32) for _ in queries]
        of_passages = _vectors(self._passages, list(places))
        of_queries = _vectors(self._queries, queries)
        found: list[np.ndarray | None] = []
        for vector, texts in zip(of_queries, passages, strict=True):
            # A product may round otherwise in another row: equal texts share theirs, and tie.
            rows, row_of = np.unique([places[text] for text in texts], return_inverse=True)
            found.append((of_passages[rows.astype(np.int64)] @ vector)[row_of])
        return found


class EndpointScorer:
    """A cross-encoder behind `/rerank`, as vLLM, Cohere and Jina serve one.

    One request a query, with all its passages. The client tries again as its settings say; what
    then has no answer is None, and counted by cause in `client.counters()`. Give the client a
    `wait_limit`: without one, it waits for a server that is down for as long as it takes.

    Args:
        client: to the server; closed by whoever made it.
        extra: further fields of every request; see `RerankRequest`.
    """

    def __init__(self, client: Client, extra: Mapping[str, Any] | None = None) -> None:
        self._client, self._extra = client, dict(extra or {})

    def scores(
        self, queries: Sequence[str], passages: Sequence[Sequence[str]]
    ) -> list[np.ndarray | None]:
        """See `Scorer`."""
        found: list[np.ndarray | None] = [np.zeros(0, np.float32) for _ in queries]
        asked = [at for at, texts in enumerate(passages) if texts]
        outcomes = self._client.ask_blocking(
            [RerankRequest(queries[at], tuple(passages[at]), extra=self._extra) for at in asked]
        )
        for at, outcome in zip(asked, outcomes, strict=True):
            found[at] = (
                np.array(json.loads(outcome.text), np.float32)
                if isinstance(outcome, Answer)
                else None
            )
        return found


class CrossEncoderScorer:
    """A cross-encoder in this process, by sentence-transformers (Reimers and Gurevych, 2019).

    The scores are the model's logits: a sigmoid would make high ones equal.

    Args:
        folder: the model, with its weights as safetensors; nothing is downloaded.
        batch: pairs at a time.
        longest: tokens of a pair; what is beyond is cut. None: as the model says.
        device: as torch names it; None: as the library chooses.

    Raises:
        InputError: the package is missing, or the folder holds no cross-encoder with one score.
    """

    def __init__(
        self, folder: str, batch: int = 32, longest: int | None = None, device: str | None = None
    ) -> None:
        try:
            from sentence_transformers import CrossEncoder  # optional, slow to import
        except ImportError:
            raise InputError(
                "a cross-encoder in this process needs the package sentence-transformers: run pip "
                "install 'qrag_jax[rerank]'"
            ) from None
        try:
            self._model = CrossEncoder(
                folder,
                device=device,
                max_length=longest,
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},
            )
        except (OSError, ValueError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(
                f"{folder} cannot be loaded as a cross-encoder ({reason}); give a folder that "
                "sentence-transformers has saved"
            ) from None
        if (labels := self._model.num_labels) != 1:
            raise InputError(
                f"the cross-encoder in {folder} gives {labels} scores for a pair; give one that "
                "has a single output"
            )
        self._batch = batch

    def scores(
        self, queries: Sequence[str], passages: Sequence[Sequence[str]]
    ) -> list[np.ndarray | None]:
        """See `Scorer`; never None."""
        import torch

        pairs = [(query, text) for query, texts in zip(queries, passages) for text in texts]
        flat = np.zeros(0, np.float32)
        if pairs:
            flat = self._model.predict(
                pairs,
                batch_size=self._batch,
                show_progress_bar=False,
                activation_fn=torch.nn.Identity(),
            )
        ends = np.cumsum([len(texts) for texts in passages], dtype=np.int64)
        return [flat[end - len(texts) : end] for end, texts in zip(ends, passages)]


def _vectors(embed: Embed, texts: Sequence[str]) -> np.ndarray:
    vectors = np.asarray(embed(texts), np.float32)
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise ValueError(f"{len(texts)} texts were embedded as an array of shape {vectors.shape}")
    return vectors
