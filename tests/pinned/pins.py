"""What is pinned: vectors, rankings, rewards and tiny trainings; how numbers are compared.

A training is a config of `configs/` with a few steps, run by `qrag_jax.train` in this process. What
is kept of it are its logged metrics at every step (loss, gradient norm, reward, return) and its
scores after the last one; times, memory and counts of compiles are not.

`make pin` writes all numbers again, `make pin ARGS="NAME …"` those that are named. What changed is
printed.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from configs import hotpotqa, rlvr
from qrag_jax.data.sample import Sample
from qrag_jax.feedback.rubric import score
from qrag_jax.models.first_encoder import EncoderConfig
from qrag_jax.models.first_language_model import TinyLMConfig, write_tiny_lm
from qrag_jax.retrieval.index_folder import BM25, BOOLEAN, EXACT, FAISS, HYBRID, SCAN, IndexAt
from qrag_jax.serving.searcher import Ask, Searcher
from qrag_jax.systems import training
from qrag_jax.systems.indexing import IndexSettings, PassageEncoder, index_corpus
from qrag_jax.systems.retriever import PlainEncoder, open_plain
from qrag_jax.systems.rlvr.config import RlvrConfig
from tests.entry_points import metric_lines
from tests.llm.model_server import ModelServer, supported_answers
from tests.support.small_models import FAMILIES, write_small_model
from tests.support.stored_episodes import closed_in_process, stories
from tests.systems.parts import samples_of

VALUES = Path(__file__).parent / "numbers.json"
Numbers = dict[str, list[float | None]]
ENGINES = (EXACT, SCAN, FAISS, BM25, HYBRID, BOOLEAN)
PASSAGES, QUESTIONS, HITS, ENTRIES, EPISODES = 60, 8, 5, 8, 200
FLOAT32 = EncoderConfig(dtype="float32")


def embeddings(family: str, folder: Path) -> Numbers:
    """The first entries of passages' vectors by a small random model of the family."""
    encoder = _model(family, folder)
    index_corpus(_corpus(folder), folder / "index", encoder)
    index = IndexAt(folder / "index", SCAN).open()
    vectors = index.vectors(range(QUESTIONS))
    return {f"vector {i}": row[:ENTRIES].tolist() for i, row in enumerate(vectors)}


def rankings(folder: Path) -> Numbers:
    """Ids and scores of the best passages of fixed questions, by every engine."""
    source, out = _corpus(folder), folder / "index"
    index_corpus(source, out, _model("bert", folder))
    index_corpus(source, out, None, IndexSettings(engine=BM25))
    draw, numbers = random.Random(1), {}
    questions = [_text(draw, 3) for _ in range(QUESTIONS)]
    for engine in ENGINES:
        encoder = None if engine in (BM25, BOOLEAN) else PlainEncoder(f"{folder}/bert", FLOAT32)
        searcher = Searcher(open_plain(IndexAt(out, engine), encoder))
        between = " OR " if engine == BOOLEAN else " "
        asked = [Ask(text.replace(" ", between), count=HITS) for text in questions]
        for i, hits in enumerate(searcher.search(asked)):
            assert isinstance(hits, list), hits
            numbers[f"{engine}: ids of {i}"] = [float(hit.id) for hit in hits]
            numbers[f"{engine}: scores of {i}"] = [hit.score for hit in hits]
    return numbers


def rewards(folder: Path) -> Numbers:
    """The rewards of stored episodes, right and wrong ones, by each rubric of RLVR."""
    episodes = stories(EPISODES)
    texts = (text for story in episodes for text in (story.task.question, *story.texts))
    sizes = TinyLMConfig(layers=1, hidden=32, heads=2, key_heads=1, intermediate=32, vocab=600)
    write_tiny_lm(folder / "model", texts, sizes, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    closed = closed_in_process(tokenizer, episodes)
    numbers = {}
    for name in filter(None, rlvr.RUBRICS):
        rubric = RlvrConfig.of(rlvr.get_config(f"tiny,{name}")).rubric
        numbers[name] = [
            rubric.reward(score(end, story.task), story.task.hops)
            for end, story in zip(closed, episodes, strict=True)
        ]
    return numbers


def _model(family: str, folder: Path) -> PassageEncoder:
    path = write_small_model(family, folder / family, max_position_embeddings=66)
    return PassageEncoder.of_folder(str(path), FLOAT32)


def _corpus(folder: Path) -> Path:
    draw = random.Random(0)
    rows = ({"id": str(i), "text": _text(draw, 4 + i % 9)} for i in range(PASSAGES))
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _text(draw: random.Random, words: int) -> str:
    known = ("the", "moth", "query", "passage", "fjord", "oslo", "red", "born", "long", "king")
    return " ".join(draw.choice(known) for _ in range(words))


# ---------------------------------------------------------------- trainings

MEASURED = ("train/", "eval/")  # keys that are kept
LEFT_OUT = "train/padding_share"  # differs by the number of devices; nothing else does


class Pinned(NamedTuple):
    """A training: its config file and variant, the fields that make it short, its stages."""

    config: str
    fields: Mapping[str, Any]
    server: Callable[[], AbstractContextManager[Any]] | None = None
    left_out: str = LEFT_OUT


_EVERY_STEP = {"train.log_every": 1, "train.checkpoint_every": 1000}
_Q_RAG = _EVERY_STEP | {"train.steps": 12, "train.eval_every": 12}
_HARR = _EVERY_STEP | {"train.steps": 10, "train.eval_every": 10, "policy.passages": 5}
# Few and short tries, so that none flips by rounding.
_LERET = _EVERY_STEP | {
    "iterations": 1,
    "questions.bridge_train": 8,
    "script.steps": 12,
    "sft.steps": 3,
    "preference.steps": 4,
    "writing.query_tokens": 32,
    "optimizer.matrices": "adam",
}


def _llm() -> AbstractContextManager[Any]:
    """A server that answers if all supporting facts are in its prompt."""
    config = hotpotqa.get_config("tiny")
    samples = [*samples_of(config, "train").all, *samples_of(config, "dev").all]
    answers: dict[str, Sample] = {sample.question: sample for sample in samples}
    return ModelServer(supported_answers(answers))


PINNED: Mapping[str, Pinned] = {
    "q_rag": Pinned("hotpotqa:tiny", _Q_RAG),
    "q_rag_imitate_pqn": Pinned(
        "two_wiki:tiny", _Q_RAG | {"stages": ("imitate", "pqn"), "imitate.steps": 6}
    ),
    "q_rag_stop_answers": Pinned(
        "own:tiny", _Q_RAG | {"reward.name": "answer_in_chunk", "env.stop_action": True}
    ),
    "q_rag_llm": Pinned(
        "hotpotqa:tiny",
        _Q_RAG | {"reward.name": "answer_em", "reward.penalize_extra_steps": False},
        _llm,
    ),
    "harr_grpo": Pinned("harr_grpo:tiny", _HARR),
    "harr_ppo": Pinned("harr_ppo:tiny", _HARR),
    # No answer is right yet, so that GRPO's groups are flat: it pins imitation and the sampler.
    "rlvr": Pinned("rlvr:tiny", _EVERY_STEP | {"sft.steps": 8, "train.steps": 3}),
    # Pairs are learned from their reference on, where a margin is 0 but for rounding, so the share
    # of those above 0 says nothing.
    "leret": Pinned("leret:tiny", _LERET, left_out=f"{LEFT_OUT} train/accuracy"),
    "deepretrieval": Pinned("deepretrieval:tiny", _EVERY_STEP | {"script.steps": 12}),
}


def trained(name: str, workdir: Path) -> Numbers:
    """Trains, and returns the numbers of all logged steps, oldest first."""
    pinned = PINNED[name]
    file, _, variant = pinned.config.partition(":")
    config = importlib.import_module(f"configs.{file}").get_config(variant).unlock()
    with pinned.server() if pinned.server else nullcontext() as server:
        config.update_from_flattened_dict(dict(pinned.fields))
        if server is not None:
            config.llm.update(url=server.url, model="tiny")
        assert training.train(config.lock(), workdir) == 0
    numbers: Numbers = {}
    for line in metric_lines(workdir):
        for key, value in line.items():
            if key.startswith(MEASURED) and key not in pinned.left_out.split():
                numbers.setdefault(key, []).append(value)
    return numbers


# ---------------------------------------------------------------- all of them, compared

PIECES: Mapping[str, Callable[[Path], Numbers]] = {
    **{f"embeddings/{name}": partial(embeddings, name) for name in FAMILIES},
    "rankings": rankings,
    "rewards": rewards,
}
TRAININGS: Mapping[str, Callable[[Path], Numbers]] = {
    name: partial(trained, name) for name in PINNED
}


def processor() -> str:
    """What rounds: the processor's model."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("model name")), "").partition(":")[2]


def differences(
    numbers: Numbers, pinned: Numbers, tolerance: float, values: int | None = None
) -> Iterator[str]:
    """Where two runs differ by more than the tolerance times the largest value of a metric.

    Metrics of less than 0.003 may differ by as much as one of 0.003: some are rounding alone.

    Args:
        values: how many of each metric's values are compared, from the first; None: all.
    """
    for key in sorted(numbers.keys() | pinned.keys()):
        one, other = numbers.get(key, []), pinned.get(key, [])
        if len(one) != len(other):
            yield f"{key}: {len(one)} values, pinned are {len(other)}"
            continue
        size = max((abs(value) for value in other if value is not None), default=0.0)
        for step, (value, expected) in enumerate(list(zip(one, other, strict=True))[:values]):
            if value is expected is None:  # a metric that nothing was measured of
                continue
            if (
                value is None
                or expected is None
                or not abs(value - expected) <= tolerance * max(size, 3e-3)
            ):
                yield f"{key}, value {step}: {value!r}, pinned is {expected!r}"
                break


def pin() -> None:
    """Writes all numbers, or those named, and prints what changed."""
    pinned = json.loads(VALUES.read_text())["numbers"] if VALUES.exists() else {}
    everything = {**PIECES, **TRAININGS}
    for name in sys.argv[1:] or everything:
        with tempfile.TemporaryDirectory() as folder:
            numbers = everything[name](Path(folder))
        for line in differences(numbers, pinned.get(name, {}), 1e-6):
            print(f"{name}: {line}")
        pinned[name] = numbers
        lines = (f"{json.dumps(key)}: {json.dumps(pinned[key])}" for key in sorted(pinned))
        head = f'{{"processor": {json.dumps(processor())}, "numbers": {{\n'
        VALUES.write_text(head + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    pin()
