"""Readers of models, replies and texts, on damaged inputs: a value, or a one-line error.

Formats of data are damaged in `conformance/test_sources.py`. What is damaged is drawn from a fixed
seed, so that a fault can be had again.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import gzip
import json
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from qrag_jax.models.first_encoder import ScratchConfig, load_encoder, make_scratch_folder
from qrag_jax.models.first_language_model import TinyLMConfig, load_language_model, write_tiny_lm
from qrag_jax.retrieval.boolean_search import parse_boolean

FEW = 4  # mutants of each file or text
SECONDS = 30  # for one input
MEMORY, DEEP, HUGE = 2**30, 100_000, 2**34  # bytes beyond those in use, brackets, a sparse file


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


def check(read: Callable[[Any], Any], sample: Any, further: int) -> None:
    """Reads a damaged sample: a value, or an error of one line."""
    try:
        with limited(further):
            read(sample)
    except InputError as error:
        said = str(error)
        assert said.strip(), "an empty sentence"
        assert not any(mark in said for mark in "\n\r\x00"), said[:300]
        assert len(said) <= 4_000


# ---------------------------------------------------------------- folders of models

TEXTS = ["Oslo is the capital of Norway.", "Ada Berg was born in Oslo.", "The fjord is long."]
WEIGHTS = ("config.json", "model.safetensors")
OF_MODEL = (*WEIGHTS, "tokenizer.json", "tokenizer_config.json")
MODULES = (*WEIGHTS, "modules.json", "config_sentence_transformers.json")


def write_language_model(folder: Path) -> None:
    sizes = dict(hidden=16, layers=1, heads=2, key_heads=1, intermediate=16, head_dim=8)
    write_tiny_lm(folder, TEXTS, TinyLMConfig(vocab=300, positions=64, **sizes), seed=0)


def read_language_model(folder: Path) -> None:
    loaded = load_language_model(folder)
    loaded.tokenizer("Where is Oslo?")
    jax.tree.map(np.asarray, loaded.params)


def write_encoder(folder: Path) -> None:
    make_scratch_folder(folder, TEXTS, ScratchConfig(1, 8, 2, 80, 32), 0)
    encoder = load_encoder(folder).encoder
    write_modules(folder, encoder, scale=1.0, max_tokens=32, pooler=False)


def read_encoder(folder: Path) -> None:
    jax.tree.map(np.asarray, load_encoder(folder).params)


@pytest.mark.parametrize(
    ("write", "read", "names", "further"),
    [
        (write_language_model, read_language_model, OF_MODEL, 0),
        # Its files are mapped, which takes addresses and no memory.
        (write_encoder, read_encoder, MODULES, HUGE),
    ],
)
def test_a_damaged_model_is_read_or_refused(
    write: Any, read: Any, names: tuple[str, ...], further: int, tmp_path: Path
) -> None:
    sound, damaged, draw = tmp_path / "sound", tmp_path / "damaged", random.Random(0)
    write(sound)
    read(sound)
    for name in names:
        data = mutants((sound / name).read_bytes(), draw, name)
        of_bytes = [lambda path, mutant=mutant: path.write_bytes(mutant) for mutant in data]
        for damage in (*of_bytes, *FILE_DAMAGES):
            shutil.rmtree(damaged, ignore_errors=True)
            shutil.copytree(sound, damaged)
            (damaged / name).unlink()
            damage(damaged / name)
            check(read, damaged, further)


# ---------------------------------------------------------------- replies of servers

CHOICE = {"message": {"role": "assistant", "content": "Oslo"}, "finish_reason": "stop"}
CHOICE |= {"logprobs": {"content": [{"token": "Oslo", "logprob": -0.5}]}, "token_ids": [1]}
CHAT = {"model": "m", "choices": [CHOICE], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
COMPLETION = {"choices": [{"text": "Oslo", "finish_reason": "length"}]}
VECTORS = {"data": [{"index": 0, "embedding": [0.5, 1.0]}]}


@pytest.mark.parametrize(
    ("asked", "reply"),
    [
        (ChatRequest((("user", "Where?"),), model="m"), CHAT),
        (CompletionRequest("Where?"), COMPLETION),
        (EmbeddingRequest(((1, 2),)), VECTORS),
    ],
)
def test_a_damaged_reply_is_an_outcome(asked: Any, reply: dict[str, Any]) -> None:
    sound, draw = json.dumps(reply), random.Random(0)
    assert not isinstance(outcomes.read_outcome(asked, sound, "v1"), Failure)
    for data in mutants(sound.encode(), draw, "reply.json", 12):
        text = data.decode("utf-8", "replace")
        with limited():
            outcomes.read_outcome(asked, text, "v1")
            for status in (400, 413, 429, 500):
                outcomes.read_error(status, text)
            outcomes.retry_after({"retry-after": text})


# ---------------------------------------------------------------- any text at all

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
