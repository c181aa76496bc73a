"""Readers of what comes from outside: data, model folders, requests and replies, models' texts.

Each has a small sound sample, written by this package or by hand, that `mutated` damages.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qrag_jax.data.files import babi, beir, corpora, query_lists, records
from qrag_jax.data.query_questions import read_query_questions
from qrag_jax.data.sources.registry import SOURCES, load_samples
from qrag_jax.environments.query_rewriting.output import FORMS, OUTCOMES, read_output
from qrag_jax.environments.rag import reading, search_r1
from qrag_jax.errors import InputError
from qrag_jax.llm.client import replies
from qrag_jax.llm.outcomes import Answer, ChatRequest, CompletionRequest, EmbeddingRequest, Request
from qrag_jax.llm.text.extraction import final_answer, verdict
from qrag_jax.llm.text.json_objects import last_object
from qrag_jax.llm.text.tool_calls import FORMATS, ToolCall, check_call, read_calls, write_call
from qrag_jax.llm.text.tool_specs import Parameter, ToolSpec
from qrag_jax.metrics import trec
from qrag_jax.models.files.sentence_transformers import write_modules
from qrag_jax.models.files.tiny_lm import TinyLMConfig, write_tiny_lm
from qrag_jax.models.pretrained import load_encoder
from qrag_jax.models.pretrained_lm import load_language_model
from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.boolean_query import BooleanError, parse_boolean
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.judged_queries import read_judged_queries
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.retrieval.single_step import SingleStepSearch
from qrag_jax.serving.measures import Measures
from qrag_jax.serving.searcher import SingleStep
from qrag_jax.serving.worker import Worker
from tests.support.mutated import Reader

_TEXTS = ["Oslo is the capital of Norway.", "Ada Berg was born in Oslo.", "The fjord is long."]
_PARAGRAPHS = [
    ("Oslo", ["Oslo is the capital of Norway.", "It lies on a fjord."]),
    ("Norway", ["Norway is in Europe.", "Its king is Harald."]),
    ("Ada Berg", ["Ada Berg was born in Oslo."]),
]
_QUERY = {"id": "q1", "query": "aspirin for pain", "relevant_doc_ids": ["11"], "pub_date": "2015"}
_STORY = "1 Mary moved to the hall.\n2 John went to the garden.\n3 Where is Mary?\thall\t1\n"
_TABLE = (
    b"question,chunks,support,answers\n"
    b'"Where, then?","[""Oslo is in Norway."", ""A fjord.""]",[0],Norway\n'
    b'Who?,"[""Ada Berg.""]","[0]","[""Ada"", ""A. Berg""]"\n'
)


def _lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _files(name: str, files: dict[str, bytes], read: Callable[[Path], Any]) -> Reader:
    """A reader of files of this content; one that ends in .gz is packed."""

    def make(folder: Path) -> Sequence[Path]:
        for file, data in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            packed = gzip.compress(data, mtime=0) if file.endswith(".gz") else data
            (folder / file).write_bytes(packed)
        return [folder / file for file in files]

    return Reader(name, make, read)


def _one(name: str, data: bytes, read: Callable[[Path], Any], title: str = "") -> Reader:
    """A reader of one file, by its path."""
    return _files(title or name, {name: data}, lambda folder: read(folder / name))


def data_readers() -> list[Reader]:
    """Data sets, questions, collections, stories, lists of queries, judgements."""
    documents = [
        {"_id": "d1", "title": "Oslo", "text": "It lies on a fjord.", "metadata": {"year": 2020}},
        {"_id": "d2", "title": "", "text": "Norway is in Europe.", "metadata": {}},
    ]
    queries = [{"_id": "q1", "text": "Where is Oslo?"}, {"_id": "q2", "text": "Who?"}]
    qrels = f"{trec.BEIR_HEADER}\nq1\td1\t1\nq2\td2\t2\n".encode()
    rows = [_QUERY, {**_QUERY, "id": "q2"}]
    run = b"q1 Q0 d1 1 2.5 tag\nq1 Q0 d2 2 1.5 tag\nq2 Q0 d1 1 0.5 tag\n"
    asked = {"id": "1", "question": "Who?", "answer": "Ada", "supporting_facts": [["Ada Berg", 0]]}

    def source_rows(source: str) -> bytes:
        make = SOURCES[source].to_record
        question = "Where was Ada Berg born?"
        return _lines(make(f"{source}{n}", question, "Oslo", _PARAGRAPHS, [0, 2]) for n in range(3))

    def collection(folder: Path) -> Any:
        list(beir.read_documents(folder))
        beir.read_queries(folder)
        return read_judged_queries(f"{folder},test")

    layout = {"corpus.jsonl": _lines(documents), "queries.jsonl": _lines(queries)}
    return [
        _one("rows.jsonl", _lines(rows), lambda path: list(records.read_records(path))),
        _one("list.json", json.dumps(rows).encode(), lambda path: list(records.read_records(path))),
        _one("rows.jsonl.gz", _lines(rows), lambda path: list(records.read_records(path))),
        _one("rows.csv", _TABLE, lambda path: list(records.read_records(path))),
        *(
            _one(
                "train.jsonl",
                source_rows(source),
                lambda path, source=source: load_samples(source, str(path.parent), "train"),
                f"data set {source}",
            )
            for source in SOURCES
        ),
        _one("train.csv", _TABLE, lambda path: load_samples("own", str(path), "train")),
        _one(
            "dev.jsonl", _lines([asked]), lambda path: read_query_questions(f"{path},default,dev")
        ),
        _one("qa1_train.txt", _STORY.encode(), babi.read_stories),
        _files("a collection in BEIR's layout", layout | {"qrels/test.tsv": qrels}, collection),
        _one(
            "wiki.jsonl",
            _lines([{"id": 1, "contents": '"Oslo"\nIt lies.'}, {"id": 2, "contents": "None."}]),
            lambda path: list(corpora.read_corpus(path)),
        ),
        _one("judged.jsonl", _lines(rows), lambda path: read_judged_queries(f"{path},judged")),
        _one("queries.txt", b"where is oslo\nwho is king\n", query_lists.read_query_list),
        _one("qrels.tsv", qrels, trec.read_qrels),
        _one("run.txt", run, trec.read_run),
    ]


@functools.cache
def _model(kind: str) -> tuple[Any, Path]:
    """A model folder, made once: an initialisation is compiled; its owner, who removes it."""
    owner = tempfile.TemporaryDirectory()
    folder = Path(owner.name) / kind
    if kind == "language model":
        sizes = dict(hidden=16, layers=1, heads=2, key_heads=1, intermediate=16, head_dim=8)
        config = TinyLMConfig(vocab=300, positions=64, copies=False, **sizes)
        write_tiny_lm(folder, _TEXTS, config, seed=0)
    else:
        make_scratch_folder(folder, _TEXTS, ScratchConfig(1, 8, 2, 80, 32), 0)
        write_modules(
            folder, pooling="mean", normalise=True, scale=0.5, width=8, max_tokens=32, pooler=False
        )
    return owner, folder


def model_readers() -> list[Reader]:
    """Configs, weights, tokenizers and modules of a model folder."""

    def copied(kind: str, *names: str) -> Callable[[Path], Sequence[Path]]:
        def write(folder: Path) -> Sequence[Path]:
            shutil.copytree(_model(kind)[1], folder, dirs_exist_ok=True)
            return [path for path in sorted(folder.rglob("*")) if path.name in names]

        return write

    def load_lm(folder: Path) -> Any:
        loaded = load_language_model(folder)
        loaded.tokenizer("Where is Oslo?")
        return [np.asarray(leaf).shape for leaf in jax.tree.leaves(loaded.params)]

    def encoder(folder: Path) -> Any:
        return [np.asarray(leaf).shape for leaf in jax.tree.leaves(load_encoder(folder).params)]

    weights, tokenizer = "model.safetensors", ("tokenizer.json", "tokenizer_config.json")
    lm, modules = "language model", ("modules.json", "config_sentence_transformers.json")
    return [
        Reader("a language model", copied(lm, "config.json", weights), load_lm),
        Reader("a tokenizer", copied(lm, *tokenizer), load_lm),
        Reader(
            "an encoder", copied("encoder", "config.json", weights, *modules), encoder, (), True
        ),
    ]


# ---------------------------------------------------------------- servers

_CHAT = {
    "model": "m",
    "choices": [
        {
            "message": {"role": "assistant", "content": "Oslo"},
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": "Oslo", "logprob": -0.5}]},
            "token_ids": [1],
        }
    ],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2},
}
_COMPLETION = {"choices": [{"text": "Oslo", "finish_reason": "length"}]}
_VECTORS = {"data": [{"index": 0, "embedding": [0.5, 1.0]}]}


@functools.cache
def _worker() -> tuple[Worker, Any]:
    """A worker over a real index of words; and the owner of its folder, who removes it."""
    owner = tempfile.TemporaryDirectory()
    passages = (Passage(f"p{n}", text, "", {"page": n}) for n, text in enumerate(_TEXTS))
    search = SingleStepSearch(BM25Index.build(write_corpus(Path(owner.name) / "corpus", passages)))
    worker = Worker(lambda: SingleStep(search))
    worker.start()
    worker.await_loaded()
    return worker, owner


def server_readers() -> list[Reader]:
    """Replies of language models, and the bodies of requests to `qrag serve`."""

    def reply(request: Request) -> Callable[[str], Any]:
        return lambda text: replies.read_outcome(request, text, "v1")

    def error(text: str) -> None:
        for status in (400, 413, 429, 500):
            replies.read_error(status, text)
        replies.retry_after({"retry-after": text})

    def post(path: str) -> Callable[[str], Any]:
        async def ask(text: str) -> tuple[int, Any]:
            import httpx

            from qrag_jax.serving.app import make_app

            app = make_app(_worker()[0], Measures(lambda: 0), only_here=True)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1"
            ) as client:
                body = text.encode("utf-8", "surrogatepass")
                headers = {"Content-Type": "application/json"}
                answer = await client.post(path, content=body, headers=headers)
                return answer.status_code, answer.json()

        def read(text: str) -> None:
            status, body = asyncio.run(ask(text))
            assert status < 500, f"status {status}: {body}"
            if status >= 400:
                raise InputError(body["error"])

        return read

    retrieve = {"queries": ["oslo", "fjord"], "topk": 2, "return_scores": True}
    search = {"questions": ["oslo"], "topk": 2, "steps": 1, "beam": 1, "where": {"page": [0, 1]}}
    chat = ChatRequest((("user", "Where?"),), model="m")
    return [
        Reader("a reply to a chat", (json.dumps(_CHAT),), reply(chat)),
        Reader("a completion", (json.dumps(_COMPLETION),), reply(CompletionRequest("Where?"))),
        Reader("vectors", (json.dumps(_VECTORS),), reply(EmbeddingRequest(((1, 2),)))),
        Reader("an error of a server", ('{"error": {"message": "busy"}}', "busy", "3"), error),
        Reader("requests to /retrieve", (json.dumps(retrieve),), post("/retrieve")),
        Reader("requests to /search", (json.dumps(search),), post("/search")),
    ]


# ---------------------------------------------------------------- texts

_TOOLS = (
    ToolSpec(
        "find",
        "Finds passages.",
        (
            Parameter("query", "string", "what for"),
            Parameter("count", "integer", "how many", required=False, least=1),
            Parameter("fields", "strings", "where", required=False),
        ),
    ),
)


def rewritten(text: str) -> None:
    """Reads a query in both forms; whatever the text is, there is an outcome."""
    for form in FORMS:
        for cut_off in (False, True):
            found = read_output(text, form, cut_off=cut_off)
            assert found.outcome in OUTCOMES
            assert bool(found.query) == (found.outcome == OUTCOMES[0]), found


def called(text: str) -> None:
    """Reads and checks tool calls in all forms."""
    for form in FORMATS:
        for call in read_calls(text, form):
            checked = check_call(call, _TOOLS) if isinstance(call, ToolCall) else call
            if isinstance(checked, ToolCall):
                write_call(checked, form)


def answered(text: str) -> None:
    """Reads a final answer, a verdict, a planner's and a reader's reply, and Search-R1's."""
    final_answer(text)
    verdict(text)
    last_object(text, ("action",))
    reading.read("where", text)
    search_r1.read(Answer(text))


def text_readers() -> list[Reader]:
    """What a model wrote: rewritten and Boolean queries, tool calls, final answers."""
    tagged = '<think>In Norway.</think><answer>{"query": "oslo AND (fjord OR sea)"}</answer>'
    query = '(aspirin OR "acetyl acid"[Title]) AND pain* NOT child[MeSH Terms]'
    call = ToolCall("find", {"query": "oslo fjord", "count": 3, "fields": ["title", "text"]})
    status = json.dumps({"status": "FOUND", "answer": "A"})
    written = ("<think>So.</think>\n**Final answer:** Oslo", "<search>oslo</search>", status)
    return [
        Reader("rewritten queries", (tagged, '{"query": "oslo"}', "oslo AND fjord"), rewritten),
        Reader("tool calls", tuple(write_call(call, form) for form in FORMATS), called),
        Reader("final answers", written, answered),
        Reader("Boolean queries", (query, "oslo fjord"), parse_boolean, (BooleanError,)),
    ]
