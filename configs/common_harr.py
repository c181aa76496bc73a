"""What HARR's experiments share."""

from ml_collections import ConfigDict

from qrag_jax.systems.harr_config import default_config, with_scratch

VARIANTS = ("tiny", "minilm")


def get_config(algorithm: str, arg: str) -> ConfigDict:
    """The config of a variant.

    Raises:
        ValueError: the variant is not one of `VARIANTS`.
    """
    if arg not in VARIANTS:
        names = ", ".join(f":{name}" for name in VARIANTS)
        raise ValueError(f"--config: the variant {arg!r} is unknown; use {names}.")
    config = tiny(algorithm) if arg == "tiny" else minilm(algorithm)
    return config.lock()


def tiny(algorithm: str) -> ConfigDict:
    """Seconds on any laptop, offline: a small encoder, and questions of an invented world."""
    config = default_config(algorithm, "synthetic")
    with_scratch(config, layers=2, hidden=32, heads=2, vocab=500, positions=160)
    config.data.path = "synthetic"
    config.data.max_chunk_tokens = 64
    config.data.synthetic.update(hops=(2,), comparison=0.0, chunks=8, train=64, dev=16)
    config.state.update(max_tokens=128, instruction=False)
    config.encoder.update(pooling="mean", length_buckets=1, block_sizes=1)
    config.policy.update(pool=10, passages=2)
    config.agent.max_hops = 3
    config[algorithm].members = 4
    config.reward.mixture = "f1=1,recall=1"
    config.optimizer.update(learning_rate=1e-3)
    config.train.update(steps=6, batch_size=4, log_every=2, eval_every=3, checkpoint_every=3)
    config.eval.samples = 8
    return config


def minilm(algorithm: str) -> ConfigDict:
    """The 22M-parameter MiniLM over 2WikiMultiHopQA's open corpus; give both paths."""
    config = default_config(algorithm, "two_wiki")
    config.encoder.path = "minilm"
    config.encoder.update(pooling="mean", normalise=True, scale=1.0)
    config.encoder.lora.rank = 0
    config.data.max_chunk_tokens = 256
    config.state.update(max_tokens=160, instruction=False)
    config.optimizer.update(learning_rate=2e-5, weight_decay=0.01)
    config.train.update(steps=60, batch_size=8, log_every=1, eval_every=20, checkpoint_every=20)
    config.eval.samples = 0
    return config
