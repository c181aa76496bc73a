"""Answers the questions of a retrieval log with a language model, and scores the answers.

    python -m qrag_jax.answer --log=LOG --out=ANSWERS.jsonl --llm.url=URL --llm.model=NAME

URL is for example http://127.0.0.1:8000/v1. The model sees each question with the chunks that the
retriever took; `--filter` drops some of them first. A file that was begun with the same settings is
resumed: questions without an answer are asked again. LOG may be one of a query writer (LeReT); then
the model sees the passages found in the end, and --corpus=RUN/search, or the index, has these.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from absl import flags
from ml_collections import config_flags

from qrag_jax.errors import InputError
from qrag_jax.evaluators.answers import answer_log_questions, answer_settings
from qrag_jax.feedback.llm import AUTO
from qrag_jax.llm.config import FAIL, SCORE
from qrag_jax.metrics import answers
from qrag_jax.metrics.facts import FILTERS
from qrag_jax.runtime import commandline

LOG = flags.DEFINE_string("log", None, "Retrieval log with the questions and the chunks taken.")
OUT = flags.DEFINE_string("out", None, "File of answers to write or to go on with.")
DATA = flags.DEFINE_string("data", None, "File the questions are from: for aliases and types.")
CORPUS = flags.DEFINE_string("corpus", None, "Of a query writer's log: what was searched.")
SAMPLES = flags.DEFINE_integer("samples", 0, "Questions to answer, 0 for all.", lower_bound=0)
FILTER = flags.DEFINE_string("filter", "none", f"Chunk filter: one of {', '.join(FILTERS)}.")
THRESHOLD = flags.DEFINE_float("threshold", None, "For qvalue: stop at the first Q <= this.")
STEPS = flags.DEFINE_integer("steps", None, "For retrieval_step: how many chunks to keep.")
PROMPT = flags.DEFINE_string("prompt", AUTO, "Name of a prompt, or a .txt file; auto: by the data.")
METRIC = flags.DEFINE_enum(
    "metric", AUTO, (AUTO, *answers.RULES), "How answers are scored; auto: as the data set's are."
)
CUT_OFF = flags.DEFINE_enum("cut_off", FAIL, (FAIL, SCORE), "Answers cut by max_tokens.")
BATCH = flags.DEFINE_integer("batch", 0, "Answers written at once, 0: concurrency.", lower_bound=0)
WITH_JUDGE = flags.DEFINE_bool("judge", False, "Ask whether each answer is right, too.")
RESTART = flags.DEFINE_bool("restart", False, "Throw a partial file away instead of resuming it.")
OPTIONS: tuple[Any, ...] = (LOG, OUT, DATA, CORPUS, SAMPLES, FILTER, THRESHOLD, STEPS, PROMPT)
OPTIONS += (METRIC, CUT_OFF, BATCH, WITH_JUDGE, RESTART)


def _define(argv: Sequence[str]) -> None:
    """Defines `--llm.FIELD`; unlike other flags, it is checked as soon as it is defined."""
    config_flags.DEFINE_config_dict(
        "llm", answer_settings(), "The server, and how texts are drawn."
    )


def main() -> int:
    """Reads the flags and answers."""
    if not (LOG.value and OUT.value):
        raise InputError("give --log=RETRIEVAL_LOG and --out=ANSWERS.jsonl.")
    llm = flags.FLAGS.llm
    if not (llm.url and llm.model):
        raise InputError("give --llm.url=http://127.0.0.1:8000/v1 and --llm.model=NAME.")
    given = {flag.name: flag.value for flag in OPTIONS}
    paths = {name: Path(given[name]) for name in ("log", "out", "data", "corpus") if given[name]}
    return answer_log_questions(SimpleNamespace(**given | paths, llm=llm.to_dict()))


if __name__ == "__main__":
    commandline.run(main, define=_define)
