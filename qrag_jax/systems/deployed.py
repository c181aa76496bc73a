"""Exported towers without jax: through torch, or behind a server of embeddings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NoReturn

from qrag_jax.errors import InputError
from qrag_jax.llm.config import ClientConfig
from qrag_jax.retrieval.exported import chunk_digest, read_rows
from qrag_jax.retrieval.torch_tower import TorchTower
from qrag_jax.retrieval.tower_rows import RowEncoder, Towers
from qrag_jax.runtime import bounded_json
from qrag_jax.runtime.retriever_config import RetrieverConfig
from qrag_jax.runtime.whole_files import write_whole

NOTE = "chunk_tower.json"


def write_note(index: Path, encoder: str, chunk_tower: str) -> None:
    """Notes what embedded an index.

    Args:
        index: its folder.
        encoder: the digest in the manifest of its vectors.
        chunk_tower: the digest of the exported tower.

    Raises:
        OSError: the folder cannot be written.
    """
    said = {"encoder": encoder, "chunk_tower": chunk_tower}
    write_whole(index / NOTE, json.dumps(said, indent=1) + "\n")


def noted(index: Path, encoder: str) -> str:
    """The digest of the exported tower that the vectors of this encoder are of; "": unknown.

    A note on other vectors, which were in the folder before, is not read.
    """
    try:
        said = bounded_json.load(index / NOTE)
        return str(said["chunk_tower"]) if said["encoder"] == encoder else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


@dataclasses.dataclass(frozen=True)
class Endpoints:
    """Where exported towers are served.

    Attributes:
        url: of the server of states, such as http://127.0.0.1:8000/v1.
        state_model: name of the tower of states on it.
        chunk_model: name of the tower of chunks. A search asks it for the vector of STOP alone.
        chunk_url: of the server of chunks; "": `url`.
        api_key_env: name of the environment variable with the API key; "": no key is needed.
        wait_limit: seconds that an outage may last.
    """

    url: str
    state_model: str = "state"
    chunk_model: str = "chunk"
    chunk_url: str = ""
    api_key_env: str = ""
    wait_limit: float = 60.0

    def client(self, model: str, url: str) -> ClientConfig:
        """How one of the towers is asked."""
        return ClientConfig(
            url, model, api_key_env=self.api_key_env, wait_limit=self.wait_limit, concurrency=8
        )


class DeployedTowers:
    """Exported towers that something else than jax computes.

    Attributes:
        config: `retriever.json`.
        towers: the encoders.

    Args:
        folder: of the export. With endpoints, only its tokenizers and settings are used.
        endpoints: where the towers are served; None: torch computes them here.
        device: of torch, such as "cuda:0"; "": the best one.
    """

    def __init__(self, folder: Path, endpoints: Endpoints | None = None, device: str = "") -> None:
        self._folder, self.config = folder, RetrieverConfig.read(folder)
        tokenizer, form = read_rows(folder, self.config)
        state: RowEncoder
        chunk: RowEncoder
        if endpoints is None:
            self.config.check_weights(folder)
            state, chunk = (
                TorchTower(folder / tower.folder, tokenizer.pad_id, device)
                for tower in (self.config.state, self.config.chunk)
            )
        else:
            from qrag_jax.retrieval.endpoint_tower import EndpointTower  # slow to import

            at = endpoints.client(endpoints.state_model, endpoints.url)
            state = EndpointTower(at, self.config.state.width, self.config.state.scale)
            at = endpoints.client(endpoints.chunk_model, endpoints.chunk_url or endpoints.url)
            chunk = EndpointTower(at, self.config.chunk.width, self.config.chunk.scale)
        self.towers = Towers(tokenizer, form, state, chunk)

    def chunk_digest(self) -> str:
        """The digest of the tower of chunks."""
        return chunk_digest(self._folder / self.config.chunk.folder)

    def passage_encoder(self) -> NoReturn:
        """There is none."""
        raise InputError(
            "passages are embedded by jax; build the index with backend=jax (or qrag index)."
        )

    def embedded(self, encoder: str) -> NoReturn:
        """That cannot be known: the digest is of weights as jax has them."""
        raise InputError(
            f"the index has no {NOTE} that says what embedded it; open it once with the backend "
            "jax and this retriever, which then writes that file."
        )
