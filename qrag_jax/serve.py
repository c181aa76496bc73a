"""Serves a search to other programs over HTTP, or as a tool of a language model, until stopped.

    qrag serve --index=DIR --retriever=EXPORT
    qrag serve --index=DIR --encoder=FOLDER
    qrag serve --index=DIR --engine=bm25
    qrag serve --index=DIR --mcp

DIR is what `qrag index` wrote. EXPORT is what `qrag export` wrote; --workdir=RUN is a run itself.
When the index is loaded, the server's URL is printed. POST /retrieve takes and gives what
Search-R1's server does; POST /search also takes steps, beam, threshold and where. Whoever reaches
the address may search: there is no password.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from qrag_jax.errors import needs
from qrag_jax.llm.endpoint import is_local
from qrag_jax.retrieval import index_folder
from qrag_jax.runtime import commandline
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.serving.searcher import LARGEST_COUNT, USUAL_COUNT, Searcher, Worker
from qrag_jax.systems import run_flags

HOST = flags.DEFINE_string("host", "127.0.0.1", "Address that the server listens on.")
PORT = flags.DEFINE_integer("port", 8000, "Its port; 0: a free one.", 0, 65535)
EXPOSE = flags.DEFINE_bool("expose", False, "Let --host be one that other machines reach.")
TOPK = flags.DEFINE_integer(
    "topk", USUAL_COUNT, "Passages of a query to /retrieve without topk.", 1, LARGEST_COUNT
)
BATCH = flags.DEFINE_integer("max_batch", 64, "Most questions searched at once.", lower_bound=1)
WAIT = flags.DEFINE_float("max_wait_ms", 2.0, "How long one waits for others.", lower_bound=0)
QUEUE = flags.DEFINE_integer("max_queue", 1024, "Most questions that wait.", lower_bound=1)
MCP = flags.DEFINE_bool("mcp", False, "Be an MCP server on standard input and output instead.")


def _serve_http(opener: Callable[[], Searcher], limits: dict[str, Any], stop: StopSignal) -> None:
    with needs("serve"):
        from qrag_jax.serving.app import bound_socket, make_app, serve_http, url_of
    with bound_socket(HOST.value, PORT.value, EXPOSE.value) as listening:
        worker = Worker(opener, **limits)
        url, out = url_of(listening), sys.stdout
        app = make_app(worker, TOPK.value, only_here=is_local(url))
        # The one line on standard output, for scripts; what loading prints is for people.
        with contextlib.redirect_stdout(sys.stderr):
            serve_http(app, listening, worker, stop, lambda: print(url, file=out, flush=True))


def _serve_mcp(opener: Callable[[], Searcher], limits: dict[str, Any], stop: StopSignal) -> None:
    with needs("mcp"):
        from qrag_jax.serving.mcp_tool import serve_stdio
    serve_stdio(Worker(opener, **limits), stop)


def main() -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, force=True)
    if not flags.FLAGS["verbosity"].present:  # as in other commands; basicConfig undoes theirs
        logging.getLogger("absl").setLevel(logging.CRITICAL)
    if flags.FLAGS.verbosity > 0:
        logging.getLogger("qrag_jax").setLevel(logging.DEBUG)
    limits: dict[str, Any] = {
        "max_batch": BATCH.value,
        "max_queue": QUEUE.value,
        "max_wait": WAIT.value / 1000,
    }
    try:
        with StopSignal() as stop:
            run_flags.search_kind()
            opened = run_flags.search_opener()
            folder = Path(flags.FLAGS.index).expanduser()
            print(f"loading {folder}", file=sys.stderr, flush=True)
            limits["version"] = functools.partial(index_folder.version, folder)
            (_serve_mcp if MCP.value else _serve_http)(
                lambda: Searcher(opened().engine), limits, stop
            )
    except KeyboardInterrupt:
        return 130
    if stop.requested:
        print(f"stopped by {stop.name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    commandline.run(main, define=run_flags.define_search)
