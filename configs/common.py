"""What experiments share: the settings they start from, and the variants that many of them have.

`qrag train --help` lists every field with its comment and its value. Durations are
in optimizer steps, lengths in tokens, batch sizes in questions (whole episodes).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

WORLD = "examples/worlds/records.py"
Variants = Mapping[str, Sequence[Callable[[ConfigDict], Any]]]  # name → changes, in their order


def variant(config: ConfigDict, arg: str, known: Variants) -> ConfigDict:
    """Applies the part of `--config=FILE:VARIANT` after the colon, and locks the config.

    Raises:
        ValueError: the variant is not one of `known`.
    """
    if arg not in known:
        names = ", ".join(f":{name}" for name in known if name)
        none = " or none" if "" in known else ""
        raise ValueError(f"--config: the variant {arg!r} is unknown; use one of {names}{none}.")
    for change in known[arg]:
        change(config)
    return config.lock()


def get_config(*sources: str) -> ConfigDict:
    """Q-RAG's settings for a Contriever-sized encoder (arXiv 2511.07328) on these data sources."""
    from qrag_jax.systems.q_rag.config import QRagConfig  # which other systems do not need

    return QRagConfig.default(*sources)


def tiny(config: ConfigDict) -> None:
    """Shrinks an experiment to seconds on any laptop, offline: small encoder, invented questions
    in the experiment's own file format."""
    config.encoder.update(path="", length_buckets=2)
    config.encoder.scratch.update(layers=2, hidden=32, heads=2, vocab=500, positions=256)
    config.data.update(max_chunk_tokens=48, max_chunk_tokens_in_state=48, path=invented(config))
    config.env.max_steps = min(config.env.max_steps, 2)  # 0 stays: the data settle it
    config.pqn.learning_start = 8
    config.optimizer.update(learning_rate=1e-3, warmup_steps=2)
    config.train.update(
        steps=6, batch_size=8, accumulation=1, log_every=2, eval_every=3, checkpoint_every=3
    )
    config.eval.update(samples=8, batch_size=8)


def invented(config: ConfigDict) -> str:
    """A path with a few questions for each source; those that make their documents need none."""
    with_files = ("hotpotqa", "musique", "two_wiki", "own")
    paths = {name: f"{WORLD}:tiny_{name}" for name in config.data.sources if name in with_files}
    if len(paths) > 1:
        return ",".join(f"{name}={path}" for name, path in paths.items())
    return next(iter(paths.values()), "")


def minilm(config: ConfigDict) -> None:
    """The 22M-parameter MiniLM with settings that learn within minutes on a CPU."""
    config.encoder.path = "minilm"
    config.data.update(max_chunk_tokens=128, max_chunk_tokens_in_state=126)
    config.policy.alpha = 0.01
    config.pqn.learning_start = 0  # the pretrained encoder explores better than chance
    config.optimizer.update(
        learning_rate=5e-5, weight_decay=0.01, schedule="linear", warmup_steps=10
    )
    config.train.update(
        steps=160, batch_size=4, accumulation=1, log_every=10, eval_every=80, checkpoint_every=40
    )
    config.eval.update(samples=100, batch_size=16)


def from_labels(config: ConfigDict) -> None:
    """Learns from the supporting facts, by which MiniLM finds more in the same minutes than by PQN.

    PQN alone has other towers, rate and temperature: docs/training.md gives them.
    """
    config.stages = ("imitate",)
    config.encoder.update(normalise=True, scale=1.0)  # Q is the cosine
    # Many questions with few passages each teach more in the same minutes than few with all: two of
    # the own distractors, and the passages of the other questions in the batch.
    config.imitate.update(
        steps=45, batch_size=24, learning_rate=1e-4, temperature=0.05, distractors=2, shared_by=24
    )
    # A state of four passages is then as long as what MiniLM was trained on.
    config.data.max_chunk_tokens_in_state = 64
    config.train.eval_every = 45
    config.optimizer.learning_rate, config.policy.alpha = 1e-5, 0.05  # of PQN, should it follow


def contriever(config: ConfigDict) -> None:
    """Contriever as in Q-RAG's BabiLong run (128 transitions per update)."""
    config.encoder.path = "facebook/contriever"
    config.encoder.update(pooling="mean", normalise=False, scale=0.1)
    contriever_constants(config)
    config.train.update(steps=50_000, batch_size=_questions(128, config), accumulation=2)


def contriever_constants(config: ConfigDict) -> None:
    """Those of Q-RAG's runs with Contriever (its configs/algo/pqn.yaml)."""
    constants(config, alpha=0.01, lambda_=0.65, rate=5e-5, decay=0.01, final=0.0)
    config.pqn.tau = 0.1


def constants(
    config: ConfigDict, *, alpha: float, lambda_: float, rate: float, decay: float, final: float
) -> None:
    """The temperature, λ and the optimizer of a run, whose learning rate falls by a line.

    Args:
        rate, decay: peak of the learning rate, and weight decay.
        final: share of the peak with which it ends.
    """
    config.policy.alpha, config.pqn.lambda_ = alpha, lambda_
    config.optimizer.update(
        learning_rate=rate, weight_decay=decay, schedule="linear", final_ratio=final
    )


def e5(config: ConfigDict) -> None:
    """multilingual-e5-large (XLM-R, 560M) as published: the normalised mean, its two prefixes.

    The default constants stay: they are those of Q-RAG's E5 run on HotpotQA.
    """
    config.encoder.path = "intfloat/multilingual-e5-large"
    config.encoder.update(pooling="mean", normalise=True, scale=1.0)
    config.encoder.update(state_prefix="query: ", chunk_prefix="passage: ")


def gte(config: ConfigDict) -> None:
    """gte-multilingual-base (NewModel, 305M) as published: the normalised state of its first token.

    The constants are those of Q-RAG's run with this model on HotpotQA and MuSiQue.
    """
    config.encoder.path = "Alibaba-NLP/gte-multilingual-base"
    config.encoder.update(pooling="cls", normalise=True, scale=1.0)
    constants(config, alpha=0.005, lambda_=0.6, rate=5e-6, decay=0.001, final=0.1)
    config.train.update(steps=70_000, batch_size=_questions(32, config), accumulation=2)


def qwen3(config: ConfigDict) -> None:
    """Qwen3-Embedding-0.6B as published: the normalised last hidden state, an instruction before
    the question.

    The constants are those of Q-RAG's run with this model. Low-rank adapters are trained, as in
    HARR (arXiv 2602.03645).
    """
    config.encoder.path = "Qwen/Qwen3-Embedding-0.6B"
    config.encoder.update(pooling="last", normalise=True, scale=1.0)
    config.encoder.state_prefix = (
        "Instruct: Given a question and the passages found so far, retrieve the passage that is "
        "needed next\nQuery:"
    )
    config.encoder.lora.update(rank=32, alpha=64.0)
    constants(config, alpha=0.005, lambda_=0.65, rate=5e-5, decay=0.01, final=0.0)
    config.train.update(steps=50_000, batch_size=_questions(128, config), accumulation=2)


def _questions(transitions: int, config: ConfigDict) -> int:
    """Questions with so many transitions; two of each where the data settle the number of steps."""
    return transitions // (config.env.max_steps or 2)


# Of data sets with files, for common pretrained encoders too; --config.encoder.path=FOLDER takes
# another one of the same kind.
VARIANTS: Variants = {
    "": (),
    "tiny": (tiny,),
    "minilm": (minilm,),
    "contriever": (contriever,),
    "e5": (e5,),
    "gte": (gte,),
    "qwen3": (qwen3,),
}
LABELLED: Variants = {**VARIANTS, "minilm": (minilm, from_labels)}
