"""Searches an index, in several steps with a trained retriever.

    python -m qrag_jax.search --index=DIR --workdir=RUN "Where was the founder of Acme born?"
    python -m qrag_jax.search --index=DIR --retriever=EXPORT --queries=FILE --out=HITS.jsonl
    python -m qrag_jax.search --index=DIR --encoder=FOLDER "who founded Acme"

DIR is what qrag_jax.index wrote. RUN is a trained run, EXPORT what qrag_jax.export wrote; --backend
says what computes it (torch and endpoint need no jax). FOLDER is an encoder that was not trained
here: one search for the nearest passages. Without any of them the words are compared (BM25).

FILE has one question a line, or JSON lines with the field "question" (or "text") and, if there is
one, "id" (or "_id"). Every hit is printed with its step, score, id, title and text; --out writes
JSON lines with the question and all of its hits.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from qrag_jax.data.files.text_files import read_text
from qrag_jax.errors import InputError
from qrag_jax.retrieval.multi_step import Hit
from qrag_jax.runtime import commandline
from qrag_jax.runtime.whole_files import replacing
from qrag_jax.systems.deployed import Endpoints
from qrag_jax.systems.retriever import BACKENDS, ENDPOINT, ENGINES, JAX, LoadSettings, Retriever

AT_ONCE = 256  # questions searched side by side
SHOWN = 300  # characters of a text on the screen

INDEX = flags.DEFINE_string("index", None, "Folder of the index.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a trained run.")
RETRIEVER = flags.DEFINE_string("retriever", None, "Folder of an exported run.")
ENCODER = flags.DEFINE_string("encoder", None, "Encoder that was not trained: folder, hub name.")
QUERIES = flags.DEFINE_string("queries", None, "File of questions; none: those given as words.")
OUT = flags.DEFINE_string("out", None, "File of hits to write, JSON lines; none: they are printed.")
STEPS = flags.DEFINE_integer("steps", None, "Most steps; none: as in training.", lower_bound=1)
BEAM = flags.DEFINE_integer("beam", None, "Paths kept; none: as evaluated.", lower_bound=1)
THRESHOLD = flags.DEFINE_float("threshold", None, "Q at which to stop; -inf: never, none: its own.")
PER_STEP = flags.DEFINE_integer("per_step", 1, "Passages given by each step.", lower_bound=1)
K = flags.DEFINE_integer("k", 10, "Without a retriever: passages per question.", lower_bound=1)
WHERE = flags.DEFINE_multi_string("where", [], "FIELD=VALUE of passages; may be given again.")
ENGINE = flags.DEFINE_enum("engine", "", ["", *ENGINES], "What searches; none: by the backend.")
BACKEND = flags.DEFINE_enum("backend", JAX, BACKENDS, "What computes the retriever.")
CHECKPOINT = flags.DEFINE_enum("checkpoint", "", ["", "best", "last"], "Of --workdir.")
COMPUTE = flags.DEFINE_enum("compute", "", ["", "float32", "bfloat16"], "dtype of jax.")
DEVICE = flags.DEFINE_string("device", "", "Of torch, such as cuda:0; none: the best one.")
URL = flags.DEFINE_string("url", None, "With --backend=endpoint: such as http://HOST:8000/v1.")
CHUNK_URL = flags.DEFINE_string("chunk_url", "", "Server of the chunks, if it is another one.")
STATE_MODEL = flags.DEFINE_string("state_model", "state", "Name of the state tower on it.")
CHUNK_MODEL = flags.DEFINE_string("chunk_model", "chunk", "Name of the chunk tower on it.")
API_KEY_ENV = flags.DEFINE_string("api_key_env", "", "Environment variable with the API key.")
QUERY_PREFIX = flags.DEFINE_string("query_prefix", "", "With --encoder: text before questions.")
CHUNK_PREFIX = flags.DEFINE_string("chunk_prefix", "", "With --encoder: as in qrag_jax.index.")
MAX_TOKENS = flags.DEFINE_integer("max_chunk_tokens", 0, "With --encoder: as in qrag_jax.index.")
POOLING = flags.DEFINE_string("pooling", "", "With --encoder: as in qrag_jax.index.")

# What only one kind of search reads.
OF_RETRIEVER = ("steps", "beam", "threshold", "per_step", "backend", "checkpoint", "engine")
OF_ENCODER = ("query_prefix", "chunk_prefix", "max_chunk_tokens", "pooling")

QUESTIONS: list[str] = []  # the words that are no flags

Search = Callable[[Sequence[str]], list[list[Hit]]]


class Asked(NamedTuple):
    """A question and its id; "": it has none."""

    id: str
    question: str


def _asked() -> list[Asked]:
    if bool(QUESTIONS) == bool(QUERIES.value):
        raise InputError('give questions in quotes, such as "who wrote it?", or --queries=FILE.')
    if not QUERIES.value:
        return [Asked("", question) for question in QUESTIONS]
    path = Path(QUERIES.value).expanduser()
    found = list(_read(path))
    if not found:
        raise InputError(f"{path} holds no question; give one a line.")
    return found


def _read(path: Path) -> Iterator[Asked]:
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            yield Asked("", line.strip())
            continue
        try:
            record = json.loads(line)
            question = record["question"] if "question" in record else record["text"]
        except (ValueError, KeyError):
            question = None
        if not isinstance(question, str):
            raise InputError(
                f'{path}, line {number}: is no JSON object with a text in the field "question" or '
                '"text"; write one, or the question alone.'
            )
        yield Asked(str(record.get("id", record.get("_id", ""))), question)


def _where() -> dict[str, list[Any]] | None:
    wanted: dict[str, list[Any]] = {}
    for word in WHERE.value:
        field, equals, value = word.partition("=")
        if not field or not equals:
            raise InputError(f"--where={word} must be FIELD=VALUE, for example --where=year=1984.")
        values = wanted.setdefault(field, [])
        values.append(value)
        with contextlib.suppress(ValueError):
            values.append(json.loads(value))  # 1984 is the number and the text
    return wanted or None


def _search() -> Search:
    """The search that the flags ask for."""
    if not INDEX.value:
        raise InputError("give the folder of an index, for example --index=indexes/wiki.")
    folder, where = Path(INDEX.value).expanduser(), _where()
    named = [name for name in ("workdir", "retriever", "encoder") if flags.FLAGS[name].value]
    if len(named) > 1:
        raise InputError(f"give one of --{' and --'.join(named)}.")
    trained = bool(WORKDIR.value or RETRIEVER.value)
    refused = [*(OF_ENCODER if trained else OF_RETRIEVER), *(["k"] if trained else [])]
    if given := [name for name in refused if flags.FLAGS[name].present]:
        kind = "--encoder, not with a retriever" if trained else "--workdir and --retriever"
        raise InputError(f"--{given[0]} is for a search with {kind}; leave it out.")
    if not trained:
        return _nearest(folder, where)
    endpoints = None
    if BACKEND.value == ENDPOINT:
        if not URL.value:
            raise InputError("give --url=http://HOST:8000/v1 with --backend=endpoint.")
        endpoints = Endpoints(
            URL.value,
            STATE_MODEL.value,
            CHUNK_MODEL.value,
            chunk_url=CHUNK_URL.value,
            api_key_env=API_KEY_ENV.value,
        )
    settings = LoadSettings(
        backend=BACKEND.value,
        checkpoint=CHECKPOINT.value,
        dtype=COMPUTE.value,
        device=DEVICE.value,
        endpoints=endpoints,
        per_step=PER_STEP.value,
    )
    retriever = Retriever.load(WORKDIR.value or RETRIEVER.value or "", settings)
    retriever.open(folder, ENGINE.value)

    def search(questions: Sequence[str]) -> list[list[Hit]]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = retriever.search(
                list(questions),
                STEPS.value,
                beam=BEAM.value,
                threshold=THRESHOLD.value,
                where=where,
            )
        for warning in told:
            if warning.category is UserWarning:
                print(f"note: {warning.message}")
        return found

    return search


def _nearest(folder: Path, where: dict[str, list[Any]] | None) -> Search:
    # They need jax, which a deployed retriever does not.
    from qrag_jax.models.encoder_config import EncoderConfig
    from qrag_jax.systems.nearest import Nearest
    from qrag_jax.systems.passage_encoder import PassageEncoder

    encoder = None
    if ENCODER.value:
        config = EncoderConfig(
            dtype=COMPUTE.value or "auto",
            pooling=POOLING.value,
            state_prefix=QUERY_PREFIX.value,
            chunk_prefix=CHUNK_PREFIX.value,
        )
        encoder = PassageEncoder.of_folder(ENCODER.value, config, max_tokens=MAX_TOKENS.value)
    elif not (folder / "bm25").is_dir():
        raise InputError(
            f"{folder} holds vectors, which its own encoder must search; give --workdir=RUN, "
            "--retriever=EXPORT or --encoder=FOLDER."
        )
    nearest = Nearest(folder, encoder)
    return lambda questions: nearest.search(questions, K.value, where)


def _lines(asked: Asked, hits: Sequence[Hit]) -> Iterator[str]:
    """What is shown of a question's hits."""
    yield asked.question
    for hit in hits:
        text = " ".join(hit.text.split())
        text = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
        title = f"{hit.title}: " if hit.title else ""
        yield f"  {hit.step}  {hit.score:9.4f}  {hit.id}  {title}{text}"
    if not hits:
        yield "  nothing was found"


def _record(asked: Asked, hits: Sequence[Hit]) -> str:
    named = {"id": asked.id} if asked.id else {}
    said = {**named, "question": asked.question, "hits": [hit._asdict() for hit in hits]}
    return json.dumps(said, ensure_ascii=False) + "\n"


def main() -> int:
    """Reads the flags and searches."""
    asked = _asked()
    search = _search()

    def found() -> Iterator[tuple[Asked, list[Hit]]]:
        for start in range(0, len(asked), AT_ONCE):
            part = asked[start : start + AT_ONCE]
            yield from zip(part, search([one.question for one in part]), strict=True)

    if not OUT.value:
        for one, hits in found():
            print("\n".join(_lines(one, hits)))
        return 0
    out = Path(OUT.value).expanduser()
    with commandline.writing(out, "--out"), replacing(out) as file:
        for one, hits in found():
            file.write(_record(one, hits).encode("utf-8", "backslashreplace"))
    print(f"{len(asked)} questions: {out}")
    return 0


if __name__ == "__main__":
    commandline.run(main, words=QUESTIONS)
