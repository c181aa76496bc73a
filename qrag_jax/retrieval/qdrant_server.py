"""Asks a Qdrant server, again while it cannot be reached; its errors become one sentence.

The library is optional (`pip install 'qrag_jax[qdrant]'`) and imported when it is first used.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.errors import InputError
from qrag_jax.llm.client.api_key import read_key
from qrag_jax.llm.server_url import is_local
from qrag_jax.retrieval.libraries import engine_library
from qrag_jax.retrieval.qdrant_pickles import check_storage
from qrag_jax.retrieval.qdrant_settings import KEY_VARIABLE, QdrantServer

STORAGE = "qdrant"  # folder of the library's own files, where there is no server
_LONGEST_PAUSE = 8.0
_LONGEST_WAIT = 60.0  # seconds that a server may ask for
_LONGEST_TEXT = 200
_REFUSED = (401, 403)
_PASSING = (408, 425, 429, 500, 502, 503, 504)
# The same of gRPC, by the names of its codes.
_GRPC_REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED")
_GRPC_PASSING = (
    *("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "INTERNAL"),
    *("CANCELLED", "UNKNOWN"),
)


def library() -> Any:
    """The module `qdrant_client`.

    Raises:
        InputError: it is not installed.
    """
    return engine_library("qdrant_client", "qdrant-client", "qdrant")


def check_named(server: QdrantServer) -> None:
    """Refuses to send the API key to another machine that only an index folder names.

    The folder may be anyone's, and whoever wrote it would get the key.

    Raises:
        InputError: there is a key, or it cannot be one.
    """
    if server.url and not is_local(server.url) and _key():
        raise InputError(
            f"the index names the Qdrant server at {server.url}, and {KEY_VARIABLE} holds a key; "
            "name the server yourself (--qdrant=URL, or server of the settings) if the key may go "
            "there, or unset the variable."
        )


class Connection:
    """A collection of a server, or of the library's own files in a folder.

    Several threads may ask a server. A folder is open in one process at a time; within it, all
    connections to the folder share what was read.

    Args:
        server: where the collection is.
        folder: the index's, in which the files are if there is no server.

    Attributes:
        server: as given.
        local: whether there is no server.
        what: names the collection in errors; without a key.

    Raises:
        InputError: the library is not installed, the API key cannot be one, another process has
            the folder open, or its files are not the library's own (see `qdrant_pickles`).
    """

    def __init__(self, server: QdrantServer, folder: Path) -> None:
        self.server, self.local = server, not server.url
        self._key = "" if self.local else _key()
        self._where = str(folder / STORAGE) if self.local else f"the Qdrant server at {server.url}"
        self.what = f"the collection {server.collection} of {self._where}"
        self._client = _opened(folder / STORAGE) if self.local else _connected(server, self._key)

    def ask(self, method: str, **arguments: Any) -> Any:
        """Calls a method of the library's client for the collection, and returns what it returns.

        Raises:
            InputError: the server cannot be reached or is broken, also after all attempts; or it
                refuses the key or the request.
        """
        attempts = 0
        while True:
            try:
                call = getattr(self._client, method)
                return call(collection_name=self.server.collection, **arguments)
            except Exception as error:
                failure = _failure(error)
                if failure is None:
                    raise
            attempts += 1
            if not failure.passing or attempts == self.server.attempts:
                raise self._error(failure, method)
            pause = min(self.server.pause * 2 ** (attempts - 1), _LONGEST_PAUSE)
            time.sleep(max(pause, min(failure.wait, _LONGEST_WAIT)))

    def quicken(self) -> None:
        """Lets the library write to its own files without waiting for the disk at every passage.

        SQLite then keeps what was written when the process is killed. When the machine fails it
        may lose the last passages, but the file stays whole.
        """
        # These attributes are not public: without them, writing is slower and not wrong.
        with contextlib.suppress(AttributeError, KeyError):
            database = self._client._client.collections[self.server.collection].storage.storage
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")

    def _error(self, failure: _Failure, method: str) -> InputError:
        why = failure.why.replace(self._key, "***") if self._key else failure.why
        if failure.refused:
            fix = f"export its API key in the environment variable {KEY_VARIABLE}"
            return InputError(f"{self._where} refuses the API key ({why}); {fix}.")
        if failure.passing:
            fix = "start it, or give the url of one that runs"
            return InputError(f"{self._where} does not answer as it should ({why}); {fix}.")
        return InputError(
            f"{self._where} refuses {method} for the collection {self.server.collection} ({why}); "
            "change the setting that it names, or the server's."
        )


class _Failure(NamedTuple):
    """Why a call failed.

    why: on one line.
    passing: whether the same call may succeed later.
    refused: whether the key is at fault.
    wait: seconds that the server asks to wait.
    """

    why: str
    passing: bool
    refused: bool = False
    wait: float = 0.0


def _failure(error: Exception) -> _Failure | None:
    """What an error of the library means; None: it is not about the server."""
    import grpc
    from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
    from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

    if isinstance(error, UnexpectedResponse):
        status = error.status_code or 0
        why = f"HTTP {status}: {_line(error.content.decode('utf-8', 'replace'))}".rstrip(": ")
        return _Failure(why, status in _PASSING, status in _REFUSED)
    if isinstance(error, ResourceExhaustedResponse):
        return _Failure(f"HTTP 429: {_line(error.message)}", True, wait=error.retry_after_s)
    if isinstance(error, ResponseHandlingException):
        source = error.source
        return _Failure(f"{type(source).__name__}: {_line(str(source))}".rstrip(": "), True)
    if isinstance(error, grpc.RpcError):
        code = getattr(error, "code", lambda: None)()
        name = getattr(code, "name", "UNKNOWN")
        text = _line(str(getattr(error, "details", lambda: "")()))
        return _Failure(f"gRPC {name}: {text}", name in _GRPC_PASSING, name in _GRPC_REFUSED)
    return None


def _line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_TEXT]


def _key() -> str:
    set_at_all = os.environ.get(KEY_VARIABLE, "").strip()
    return read_key(KEY_VARIABLE if set_at_all else "", KEY_VARIABLE)


def _connected(server: QdrantServer, key: str) -> Any:
    return library().QdrantClient(
        url=server.url,
        port=443 if server.url.startswith("https:") else 6333,  # where the URL has none
        api_key=key or None,
        prefer_grpc=server.grpc,
        grpc_port=server.grpc_port,
        timeout=server.timeout,
        check_compatibility=False,  # it asks the server before anything is wanted of it
        trust_env=not is_local(server.url),  # proxies
    )


# By path. A second client of one folder is refused by the library, also in one process.
_open_clients: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def _opened(path: Path) -> Any:
    name = str(path.resolve())
    with _opening:
        client = _open_clients.get(name)
        if client is None:
            check_storage(path)
            try:
                client = library().QdrantClient(path=name, force_disable_check_same_thread=True)
            except RuntimeError:
                raise InputError(
                    f"{path} is open in another process; end that one, or use a Qdrant server (url "
                    "of the settings)."
                ) from None
            _open_clients[name] = client
        return client
