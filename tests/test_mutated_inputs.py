"""Readers of models, replies and requests, on damaged inputs: a value, or a one-line error.

Formats of data are damaged in `conformance/test_sources.py`. A reader is tested by a line in
`READERS`, with a small sound sample. What is damaged depends on its name alone, so that a fault can
be had again.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import gzip
import json
import random
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qrag_jax.environments import rag
from qrag_jax.environments.queries import FORMS, REWRITE_OUTCOMES, read_output
from qrag_jax.errors import InputError
from qrag_jax.llm import outcomes
from qrag_jax.llm.outcomes import Answer, ChatRequest, CompletionRequest, EmbeddingRequest, Failure
from qrag_jax.llm.text.extraction import final_answer, last_object, verdict
from qrag_jax.llm.text.tool_calls import FORMATS, ToolCall, check_call, read_calls, tool, write_call
from qrag_jax.models.files.sentence_transformers import write_modules
from qrag_jax.models.first_encoder import ScratchConfig, make_scratch_folder
from qrag_jax.models.first_language_model import TinyLMConfig, write_tiny_lm
from qrag_jax.models.pretrained import load_encoder, load_language_model
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.boolean_search import parse_boolean
from qrag_jax.retrieval.multi_step import SingleStepSearch
from qrag_jax.serving.app import make_app
from qrag_jax.serving.searcher import Searcher, Worker
from tests.serving.served import words_index

FEW = 4  # mutants of each file or text
SECONDS = 30  # for one input
MEMORY, DEEP, HUGE = 2**30, 100_000, 2**34  # bytes beyond those in use, brackets, a sparse file


class Reader(NamedTuple):
    """A reader of files or of texts, with a sound sample of them."""

    name: str
    sample: Callable[[], dict[str, bytes]] | tuple[str, ...]
    read: Callable[[Any], Any]  # of the folder or a text; it uses what it reads as programs do
    damaged: tuple[str, ...] = ()  # the files that are; (): all
    mapped: bool = False  # its files are mapped, which takes addresses and no memory


# ---------------------------------------------------------------- what is damaged

VALUES = (  # in the place of a value of JSON; some are none
    *("null", "true", "0", "-1", "0.5", "1e308", "1e999", "NaN", "Infinity", "9" * 5000, '""'),
    *('"x"', '"\\u0000"', '"\\ud800"', '"\\n"', '"../../etc/passwd"', "[]", "{}", "[[]]", "[null]"),
    *('[""]', "[-1]", '{"": null}', "[" * 500 + "]" * 500, "[" * DEEP, "(1,)", "01", "0x10"),
    *("[" + "1," * 9_999 + "1]", '"' + "y" * 9_999 + '"'),
)
PIECES = (
    *(b"\x00" * 100, b"\xff", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\r", b"\n" * 50, b"<"),
    *map(str.encode, ("\u2028", "\x1c", "\x85", "\u202e", "\ufeff")),
    *(b"[" * DEEP, b'{"a":' * DEEP, b"(" * DEEP, b"}", b'"', b"y" * 2**20, b"9" * 5_000),
)
NUMBERS = (b"-", b"9" * 20, b"1e999", b"0.5", b"", b"NaN", b"\xd9\xa3")


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    at, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    flipped, piece = bytearray(data), draw.choice(PIECES)
    for _ in range(draw.choice((1, 4, 32)) if data else 0):
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    digit = draw.choice([i for i, byte in enumerate(data) if 48 <= byte <= 57] or [0])
    lines = data.splitlines(keepends=True)
    recoded = draw.choice(("utf-16", "utf-32", "utf-16-le", "utf-8-sig"))
    return draw.choice(
        (
            *(data[:at], data[:at] + data[end:], data[end:] + data[:at], data + data),
            *(data[:at] + piece + data[at:], piece + data, data + piece, bytes(flipped)),
            data[:digit] + draw.choice(NUMBERS) + data[digit + 1 :],
            data.decode("utf-8", "replace").encode(recoded),
            b"".join(draw.sample(lines, len(lines))),
            *(codecs.BOM_UTF8 + data, b"", b" \n\t", draw.randbytes(100)),
        )
    )


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    inside: Any = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value[:20]) if isinstance(value, list) else inside:
        yield from places(item, (*place, key))


def damaged_json(data: bytes, draw: random.Random) -> bytes:
    """Another value at one place, or a field that is dropped or stands there twice."""
    value, mark = json.loads(data), "\x7fhere\x7f"
    *way, key = draw.choice([*places(value)]) or (None,)
    if key is None:
        return draw.choice(VALUES).encode()
    inside = functools.reduce(lambda inner, step: inner[step], way, value)
    kind = draw.choice(("other", "other", "dropped", "twice"))
    other = draw.choice(VALUES)
    if kind == "dropped":
        del inside[key]
    elif kind == "twice" and isinstance(inside, dict):
        inside[mark], other = inside[key], json.dumps(key)
    else:
        inside[key] = mark
    return json.dumps(value).replace(json.dumps(mark), other).encode()


def mutants(data: bytes, draw: random.Random, name: str, count: int = FEW) -> Iterator[bytes]:
    """Damaged copies; what ends in .gz is damaged packed or unpacked."""
    if name.endswith(".gz"):
        for inner in mutants(gzip.decompress(data), draw, name.removesuffix(".gz"), count - 2):
            yield gzip.compress(inner, compresslevel=1, mtime=0)
        count = 2
    for number in range(count):
        if name.endswith(".jsonl") and number % 3:
            lines = data.splitlines()
            at = draw.randrange(len(lines))
            lines[at] = damaged_json(lines[at], draw)
            yield b"\n".join(lines)
        elif name.endswith(".json") and number % 3:
            yield damaged_json(data, draw)
        else:
            yield damaged_bytes(data, draw)


def as_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


FILE_DAMAGES: tuple[Callable[[Path], Any], ...] = (
    lambda path: None,  # missing
    lambda path: path.mkdir(),
    lambda path: path.symlink_to(path.name),
    lambda path: path.symlink_to("there-is-no-such-file"),
    as_huge,
    lambda path: path.write_bytes(gzip.compress(bytes(2**24), mtime=0) * 64),  # of 2**30 bytes
)


class TooLongError(BaseException):
    """One input took too long; no reader catches this."""


@contextlib.contextmanager
def limited(further: int = 0) -> Iterator[None]:
    """Limits time and memory; beyond them the reader gets an error, which is a fault."""

    def ring(*_: object) -> None:
        raise TooLongError

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY + further
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    kept = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, kept)
        resource.setrlimit(resource.RLIMIT_AS, before)


def check(reader: Reader, sample: Any) -> None:
    """Reads a damaged sample: a value, or an error of one line."""
    try:
        with limited(HUGE if reader.mapped else 0):
            reader.read(sample)
    except InputError as error:
        said = str(error)
        assert said.strip(), "an empty sentence"
        assert not any(mark in said for mark in "\n\r\x00"), said[:300]
        assert len(said) <= 4_000


# ---------------------------------------------------------------- the readers

TEXTS = ["Oslo is the capital of Norway.", "Ada Berg was born in Oslo.", "The fjord is long."]


@functools.cache
def model_files(kind: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "language model":
            sizes = dict(hidden=16, layers=1, heads=2, key_heads=1, intermediate=16, head_dim=8)
            config = TinyLMConfig(vocab=300, positions=64, **sizes)
            write_tiny_lm(folder, TEXTS, config, seed=0)
        else:
            make_scratch_folder(folder, TEXTS, ScratchConfig(1, 8, 2, 80, 32), 0)
            more = {"pooling": "mean", "normalise": True, "scale": 1.0, "pooler": False}
            write_modules(folder, width=8, max_tokens=32, **more)
        files = (path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def read_lm(folder: Path) -> None:
    loaded = load_language_model(folder)
    loaded.tokenizer("Where is Oslo?")
    jax.tree.map(np.asarray, loaded.params)


def read_encoder(folder: Path) -> None:
    jax.tree.map(np.asarray, load_encoder(folder).params)


@functools.cache
def worker() -> tuple[Worker, Any]:
    """A worker over a real index of words, and the owner of its folder, who removes it."""
    owner = tempfile.TemporaryDirectory()
    search = SingleStepSearch(BM25Index.build(words_index(Path(owner.name))))
    found = Worker(lambda: Searcher(search))
    found.start()
    found.await_loaded()
    return found, owner


def served(path: str) -> Callable[[str], None]:
    async def ask(text: str) -> tuple[int, Any]:
        transport = httpx.ASGITransport(make_app(worker()[0], only_here=True))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
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


def reply(request: Any) -> Callable[[str], Any]:
    def read(text: str) -> None:
        if isinstance(outcomes.read_outcome(request, text, "v1"), Failure):
            raise InputError("a failure")

    return read


def error_reply(text: str) -> None:
    for status in (400, 413, 429, 500):
        outcomes.read_error(status, text)
    outcomes.retry_after({"retry-after": text})


FIELDS: dict[str, Any] = {
    "query": {"type": "string"},
    "count": {"type": "integer", "minimum": 1},
    "fields": {"type": "array", "items": {"type": "string"}},
}
TOOLS = (tool("find", "Finds.", FIELDS, optional=("count", "fields")),)


def rewritten(text: str) -> None:
    """Whatever the text is, there is an outcome, and a query with the good one alone."""
    for form in FORMS:
        for cut_off in (False, True):
            query, outcome = read_output(text, form, cut_off=cut_off)
            assert outcome in REWRITE_OUTCOMES
            assert bool(query) == (outcome == REWRITE_OUTCOMES[0]), (query, outcome)


def called(text: str) -> None:
    for form in FORMATS:
        for call in read_calls(text, form):
            checked = check_call(call, TOOLS) if isinstance(call, ToolCall) else call
            if isinstance(checked, ToolCall):
                write_call(checked, form)


def answered(text: str) -> None:
    final_answer(text)
    verdict(text)
    last_object(text, ("action",))
    rag.read_evidence("where", text)
    rag.read_turn(Answer(text))


CHOICE = {"message": {"role": "assistant", "content": "Oslo"}, "finish_reason": "stop"}
CHOICE |= {"logprobs": {"content": [{"token": "Oslo", "logprob": -0.5}]}, "token_ids": [1]}
CHAT = {"model": "m", "choices": [CHOICE], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
SEARCH = {"questions": ["oslo"], "topk": 2, "steps": 1, "beam": 1, "where": {"page": [0, 1]}}
RETRIEVE = {"queries": ["oslo", "fjord"], "topk": 2, "return_scores": True}
COMPLETION = ('{"choices": [{"text": "Oslo", "finish_reason": "length"}]}',)
VECTORS = ('{"data": [{"index": 0, "embedding": [0.5, 1.0]}]}',)
WEIGHTS = ("config.json", "model.safetensors")
OF_MODEL = (*WEIGHTS, "tokenizer.json", "tokenizer_config.json")
MODULES = (*WEIGHTS, "modules.json", "config_sentence_transformers.json")
READERS = [
    Reader("a language model", lambda: model_files("language model"), read_lm, OF_MODEL),
    Reader("an encoder", lambda: model_files("encoder"), read_encoder, MODULES, True),
    Reader("a chat", (json.dumps(CHAT),), reply(ChatRequest((("user", "Where?"),), model="m"))),
    Reader("a completion", COMPLETION, reply(CompletionRequest("Where?"))),
    Reader("vectors", VECTORS, reply(EmbeddingRequest(((1, 2),)))),
    Reader("an error", ('{"error": {"message": "busy"}}', "busy", "3"), error_reply),
    Reader("/retrieve", (json.dumps(RETRIEVE),), served("/retrieve")),
    Reader("/search", (json.dumps(SEARCH),), served("/search")),
]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_damaged_input_is_read_or_refused(reader: Reader, tmp_path: Path) -> None:
    draw = random.Random(reader.name)
    if isinstance(reader.sample, tuple):
        for text in reader.sample:
            reader.read(text)  # the sound one
            name = "text.json" if text.startswith("{") else "text"
            for data in mutants(text.encode(), draw, name):
                check(reader, data.decode("utf-8", "replace"))
        return

    def write() -> Path:
        shutil.rmtree(tmp_path)
        for name, data in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(data)
        return tmp_path

    files = reader.sample()
    reader.read(write())
    for name in reader.damaged or files:
        for data in mutants(files[name], draw, name):
            (write() / name).write_bytes(data)
            check(reader, tmp_path)
        for damage in FILE_DAMAGES:
            (write() / name).unlink()
            damage(tmp_path / name)
            check(reader, tmp_path)


# ---------------------------------------------------------------- any text at all

MARKS = (  # texts of these are near to what is read
    *("<think>", "</think>", "<answer>", "</answer>", '{"query": "', '"}', "{", "}", "[", "]"),
    *("<tool_call>", "</tool_call>", '"name"', '"arguments"', ":", ",", '<tool name="find">'),
    *("</tool>", "<query>", "</query>", "(", ")", " AND ", " OR ", " NOT ", '"', "*", "[Title]"),
    *("<search>", "</search>", "**Final answer:** ", '{"status": "FOUND"}'),
)
NEAR = st.lists(st.sampled_from(MARKS) | st.text(max_size=8), max_size=25).map("".join)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(NEAR)
@example("[" * DEEP)
@example('<tool_call>{"name": "find", "arguments": ' + '{"a":' * DEEP)
@example("(" * DEEP)
def test_any_text_is_a_query_an_answer_or_calls(text: str) -> None:
    with limited():
        rewritten(text)
        called(text)
        answered(text)
        with contextlib.suppress(InputError):
            parse_boolean(text)
