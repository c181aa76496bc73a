"""Searches an index, in several steps with a trained retriever.

    qrag search --index=DIR --workdir=RUN "Where was the founder of Acme born?"
    qrag search --index=DIR --retriever=EXPORT --queries=FILE --out=HITS.jsonl
    qrag search --index=DIR --encoder=FOLDER "who founded Acme"

DIR is what qrag_jax.index wrote. RUN is a trained run, EXPORT what qrag_jax.export wrote; --backend
says what computes it (torch and endpoint need no jax). FOLDER is an encoder that was not trained
here: one search for the nearest passages. Without any of them the words are compared (BM25).

FILE has one question a line, or is CSV, JSON lines or Parquet with a column "question" (or "query",
"text") and, if there is one, "id" (or "_id"). Every hit is printed with its step, score, id, title
and text; --out writes JSON lines with the question and all of its hits. --qrels=FILE prints scores
of the hits, with 95 % intervals, instead of the hits.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from qrag_jax.data.corpora import read_qrels, read_query_list
from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import well_formed
from qrag_jax.metrics.ranking import score_hits
from qrag_jax.retrieval import multi_step, protocol
from qrag_jax.runtime import commandline, retriever_config, whole_files
from qrag_jax.systems import run_flags
from qrag_jax.systems.retriever import (
    BACKENDS,
    ENDPOINT,
    JAX,
    USUAL_COUNT,
    Endpoints,
    Retriever,
    SingleStepRetriever,
)
from qrag_jax.systems.run_flags import EXPORT, PLAIN, RUN, WORDS

AT_ONCE = 256  # questions searched side by side
SHOWN = 300  # characters of a text on the screen

QUERIES = flags.DEFINE_string("queries", None, "File of questions; none: those given as words.")
OUT = flags.DEFINE_string("out", None, "File of hits to write, JSON lines; none: they are printed.")
STEPS = flags.DEFINE_integer("steps", None, "Most steps; none: as in training.", lower_bound=1)
BEAM = flags.DEFINE_integer("beam", None, "Paths kept; none: as evaluated.", lower_bound=1)
THRESHOLD = flags.DEFINE_float("threshold", None, "Q at which to stop; -inf: never, none: its own.")
PER_STEP = flags.DEFINE_integer("per_step", 1, "Passages given by each step.", lower_bound=1)
K = flags.DEFINE_integer(
    "k", USUAL_COUNT, "Without a retriever: passages per question.", lower_bound=1
)
QRELS = flags.DEFINE_string("qrels", None, "Judgements, TREC's or BEIR's file: hits are scored.")
MEASURES = flags.DEFINE_list(
    "measures", ["recall@4", "recall@10", "ndcg@10"], "With --qrels: recall@k, ap, rr, ndcg, hit."
)
WHERE = flags.DEFINE_multi_string("where", [], "FIELD=VALUE of passages; may be given again.")
BACKEND = flags.DEFINE_enum("backend", JAX, BACKENDS, "What computes the retriever.")
DEVICE = flags.DEFINE_string("device", "", "Of torch, such as cuda:0; none: the best one.")
URL = flags.DEFINE_string("url", None, "With --backend=endpoint: such as http://HOST:8000/v1.")
CHUNK_URL = flags.DEFINE_string("chunk_url", "", "Server of the chunks, if it is another one.")
STATE_MODEL = flags.DEFINE_string("state_model", "state", "Name of the state tower on it.")
CHUNK_MODEL = flags.DEFINE_string("chunk_model", "chunk", "Name of the chunk tower on it.")
API_KEY_ENV = flags.DEFINE_string("api_key_env", "", "Environment variable with the API key.")

# What only some kinds of search read, besides those of `run_flags`.
_OF_ENDPOINTS = ("url", "chunk_url", "state_model", "chunk_model", "api_key_env")
_OF_STEPS = ("steps", "beam", "threshold", "per_step", "backend", "device", *_OF_ENDPOINTS)
READ_BY = {**dict.fromkeys(_OF_STEPS, (RUN, EXPORT)), "k": (PLAIN, WORDS)}

QUESTIONS: list[str] = []  # the words that are no flags


def _asked() -> list[Sample]:
    if bool(QUESTIONS) == bool(QUERIES.value):
        raise InputError('give questions in quotes, such as "who wrote it?", or --queries=FILE.')
    if not QUERIES.value:
        for question in QUESTIONS:
            if not question.strip() or well_formed(question) != question:
                raise InputError(f"the question {question!r} is empty or no valid text; mend it.")
        return [Sample("", question) for question in QUESTIONS]
    return read_query_list(Path(QUERIES.value).expanduser(), numbered=False)


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


def _retriever() -> Retriever:
    """The retriever that the flags ask for, with its index open."""
    if run_flags.search_kind(READ_BY) in (PLAIN, WORDS):
        return run_flags.search_opener()()
    endpoints = None
    if BACKEND.value == ENDPOINT:
        if not URL.value:
            raise InputError("give --url=http://HOST:8000/v1 with --backend=endpoint.")
        models = STATE_MODEL.value, CHUNK_MODEL.value
        endpoints = Endpoints(URL.value, *models, CHUNK_URL.value, API_KEY_ENV.value)
    how: Any = {flag.name: flag.value for flag in (BACKEND, DEVICE, PER_STEP)}
    return run_flags.search_opener(endpoints=endpoints, **how)()


def _answer(
    retriever: Retriever, asked: Sequence[Sample], where: protocol.Where | None
) -> Iterator[tuple[Sample, list[multi_step.Hit]]]:
    how: Any = {"beam": BEAM.value, "threshold": THRESHOLD.value, "where": where}
    if isinstance(retriever, SingleStepRetriever):
        how["topk"] = K.value
    for start in range(0, len(asked), AT_ONCE):
        part = asked[start : start + AT_ONCE]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hits = retriever.search([one.question for one in part], STEPS.value, **how)
        for warning in caught:
            if warning.category is UserWarning:
                print(f"note: {warning.message}")
        yield from zip(part, hits, strict=True)


def _lines(asked: Sample, hits: Sequence[multi_step.Hit], separator: str) -> Iterator[str]:
    """What is shown of a question's hits."""
    yield asked.question
    if not hits:
        yield "  nothing was found"
    for hit in hits:
        text = " ".join(retriever_config.passage_text(hit.title, hit.text, separator).split())
        text = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
        yield f"  {hit.step}  {hit.score:9.4f}  {hit.id}  {text}"


def _record(asked: Sample, hits: Sequence[multi_step.Hit]) -> str:
    row: dict[str, Any] = {"id": asked.id} if asked.id else {}
    row |= {"question": asked.question, "hits": [hit._asdict() for hit in hits]}
    return json.dumps(row, ensure_ascii=False) + "\n"


def main() -> int:
    asked, where = _asked(), _where()
    qrels = read_qrels(Path(QRELS.value).expanduser()) if QRELS.value else {}
    if qrels:  # what cannot be scored is refused before anything is searched
        if not all(query.id for query in asked):
            raise InputError("--qrels needs --queries=FILE whose questions have ids.")
        score_hits({query.id: () for query in asked}, qrels, MEASURES.value)
    retriever = _retriever()
    retriever.check([one.question for one in asked])
    by_query = {}
    with contextlib.ExitStack() as stack:
        if OUT.value:
            out = Path(OUT.value).expanduser()
            stack.enter_context(whole_files.writing(out, "--out"))
            file = stack.enter_context(whole_files.replacing(out))
        for one, hits in _answer(retriever, asked, where):
            by_query[one.id] = hits
            if OUT.value:
                file.write(_record(one, hits).encode("utf-8", "backslashreplace"))
            elif not qrels:
                print("\n".join(_lines(one, hits, retriever.title_separator)))
    if OUT.value:
        print(f"{len(asked)} questions: {out}")
    scores = score_hits(by_query, qrels, MEASURES.value) if qrels else {}
    for name, (mean, low, high) in scores.items():
        print(f"{name} {mean:.4f} [{low:.4f}, {high:.4f}]")
    return 0


if __name__ == "__main__":
    commandline.run(main, define=run_flags.define_search, words=QUESTIONS)
