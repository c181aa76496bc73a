"""Loads newer weights into a running vLLM server, and tells which version sampled an answer.

It needs a server started with `config.llm.server.publish`. How vLLM reports versions:

- Adapters: each version has a separate model name, "MODEL@VERSION". Clients ask for this name and
  the answer repeats it, so the version is exact. Names and folders are never used twice, because
  vLLM would answer from prefixes cached with the earlier weights. The last `keep` of them stay
  loaded, so that an episode can end with the version it began with.
- All weights: vLLM keeps one version for the whole engine (/update_weight_version, /weight_info).
  Answers of /v1/chat/completions and /v1/completions do not carry it. Only answers of
  /inference/v1/generate do (`weight_versions`, span by span); this endpoint takes and returns token
  ids, and needs --enable-scale-out. So weights are exchanged while no answer is being sampled.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (gives numpy the bfloat16 that weights may be in)
import numpy as np
from safetensors.numpy import save_file

from qrag_jax.llm.endpoint import Endpoint, Reply
from qrag_jax.runtime.whole_files import MEMORY, weights_folder, writing

# If a model's head is tied to its word embeddings, vLLM's reload on CPU does not renew the head,
# which it keeps packed. There is no error, and old and new weights are mixed. So the head is also
# written as a separate tensor; then vLLM renews it.
WORDS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


_TIMEOUT = 600.0  # seconds for one step of the hand-over, with the wait for running answers


class PublishError(RuntimeError):
    """The server did not load the weights; the message says in which state it was left."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status  # of HTTP; 0 if there was no reply


class Published(NamedTuple):
    model: str  # the name to ask for
    version: str  # of its weights; "" if unknown


Weights = Callable[[Path], object] | Mapping[str, np.ndarray]
_Written = tuple[Path, Published]  # weights in a folder of ours, and what they are served as


class Publisher(contextlib.AbstractContextManager):
    """Loads versions of one model into one server, one after the other. Threads may share it.

    `current` is what is served now; clients read it before each request.
    """

    def __init__(self, url: str, model: str, api_key: str, *, keep: int) -> None:
        """Versions are written in memory, or in the temporary folder.

        Args:
            model: the name under which the server serves its original weights.
            keep: adapters that stay loaded, the newest ones. Where a batch is played by the weights
                of K steps before, K + 2: one may still be asked for when the next one comes.
        """
        self.current = Published(model, "")
        self._endpoint, self._model, self._keep = Endpoint(url, api_key), model, keep
        self._closing = contextlib.ExitStack()
        memory = MEMORY if os.access(MEMORY, os.W_OK) else None
        self._folder = self._closing.enter_context(weights_folder(memory))
        self._count = 0
        # What is served now, for `republish`: weights, if any came, and then the adapters on them,
        # the oldest first.
        self._kept: list[_Written] = []
        # vLLM may read an adapter's files again for an answer under way, even if it was unloaded
        # meanwhile. So they stay until the next version comes.
        self._unloaded: list[Path] = []
        self._lock = threading.Lock()

    def publish(self, source: Weights, version: str) -> Published:
        """Makes the server answer with these weights; returns what to ask for.

        All weights (arrays by their names in the model's files) are exchanged after the running
        answers have ended; new requests wait meanwhile. They replace the adapters too, which belong
        to the weights before. An adapter (what writes PEFT's files into a folder) is loaded without
        such a pause; only the oldest is unloaded, if more than `keep` would be loaded. A version's
        name (letters, digits, ".", "-" and "_") is never used twice. Raises `PublishError`.
        """
        with self._lock:
            adapter = callable(source)
            new = Published(f"{self._model}@{version}" if adapter else self._model, version)
            folder = self._write(source)
            for old in self._unloaded:
                shutil.rmtree(old, ignore_errors=True)
            self._unloaded.clear()
            before = [kept for kept in self._kept if kept[1].model != self._model]
            try:
                self._hand_over(folder, new, before)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            if not adapter:
                for old, _ in self._kept:
                    shutil.rmtree(old, ignore_errors=True)
                self._kept.clear()
            self._kept.append((folder, new))
            self.current = new
            if adapter and len(before) == self._keep:
                self._kept.remove(before[0])
                old, served = before[0]
                if self._unload(served):  # otherwise the server has it still, and needs its files
                    self._unloaded.append(old)
            return new

    def forget(self) -> None:
        """Makes the version unknown until `republish`. Use it as `on_down` of `Server`."""
        self.current = Published(self.current.model, "")

    def republish(self) -> None:
        """Loads what was served into the restarted server. Use it as `on_up` of `Server`."""
        with self._lock:
            for folder, served in self._kept:
                self._hand_over(folder, served, [])
            if self._kept:
                self.current = self._kept[-1][1]

    def __exit__(self, *error: object) -> None:
        """Deletes the files; the server keeps the weights that it has."""
        self._closing.close()

    # ---------------------------------------------------------------- files

    def _write(self, source: Weights) -> Path:
        """Writes the weights to a new folder of ours, with a name that was not used before."""
        self._count += 1
        target = self._folder / str(self._count)
        try:
            with writing(self._folder, "TMPDIR"):
                target.mkdir()
                if callable(source):
                    source(target)
                else:
                    tensors = {n: np.ascontiguousarray(array) for n, array in source.items()}
                    if HEAD not in tensors and WORDS in tensors:
                        tensors[HEAD] = tensors[WORDS].copy()
                    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        return target

    # ---------------------------------------------------------------- the server

    def _hand_over(self, folder: Path, new: Published, loaded: Sequence[_Written]) -> None:
        """Loads the weights; `loaded` are the adapters that the server has."""
        if new.model == self._model:
            self._exchange(folder, new.version, loaded)
        else:
            body = {"lora_name": new.model, "lora_path": str(folder)}
            self._post("/v1/load_lora_adapter", body, "the weights served are as before")

    def _unload(self, adapter: Published) -> bool:
        body = {"lora_name": adapter.model}
        return self._endpoint.post("/v1/unload_lora_adapter", body, _TIMEOUT).status == 200

    def _exchange(self, folder: Path, version: str, loaded: Sequence[_Written]) -> None:
        paused = "the server is left paused: publish again, or restart it"
        try:
            self._post("/pause?mode=wait", None, "the weights served are as before")
        except PublishError:
            self._endpoint.post("/resume")  # the server may have begun to pause
            raise
        self.current = Published(self._model, "")
        # Their names would stand for a mixture of the adapters and the new weights.
        for _, adapter in loaded:
            self._unload(adapter)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        # If it fails midway, only some weights may be new, so the server must sample nothing.
        self._post("/collective_rpc", reload, paused)
        reply = self._post("/reset_prefix_cache", None, paused)
        if isinstance(reply.json, dict) and reply.json.get("success") is False:
            raise PublishError(f"vLLM did not empty its prefix cache; {paused}.")
        self._post("/update_weight_version", {"new_version": version}, paused)
        self._post("/resume", None, paused)

    def _post(self, path: str, body: object, state: str) -> Reply:
        reply = self._endpoint.post(path, body, _TIMEOUT)
        if reply.status == 200:
            return reply
        hint = ""
        if reply.status == 404 and not path.startswith("/v1"):
            hint = " (start it with config.llm.server.publish=True)"
        raise PublishError(f"vLLM answered {path}: {reply.reason}{hint}; {state}.", reply.status)
