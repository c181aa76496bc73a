"""LeReT: a language model learns to write search queries from its own tries (arXiv 2410.23214).

    qrag train --config=configs/leret.py:quick

`:quick` needs no download and no server: a decoder of 1.8 million weights, made here, imitates four
scripted styles of queries of an invented world, and then learns from its own tries which of them
finds what is missing: SFT, then IPO, twice. All gold is found for 6 % of questions after the script
and for 66 % at the end (seed 44, 15 minutes on 2 cores of an Intel Xeon, 2026-11-25). `:tiny` is
the same in a minute. `:smol` trains adapters on SmolLM2-135M-Instruct (`make llm`), `:qwen3` on
Qwen3-1.7B. `:llama3` has the published constants, whole weights; these two are for GPUs. All but
the first two want data: --config.questions.train='FOLDER,2wiki,train' and --config.questions.dev
likewise.
"""

from ml_collections import ConfigDict

from configs import common
from qrag_jax.systems.leret.config import default_config


def get_config(arg: str = "quick") -> ConfigDict:
    return common.variant(default_config(), arg, VARIANTS)


def _made_here(config: ConfigDict) -> None:
    """Minutes on two cores: the tiny model, whole weights, which can copy from the start."""
    config.model.tiny.weights = "examples/copying_heads.py:with_copying_heads"
    config.search.update(k1=0.9, b=0.4, stemmer="", stop_words="", gold_by="passage")
    config.writing.update(prompt="bare_query", query_tokens=80)
    config.styles.most_words = 16
    # Without these, some seeds learn names by heart in place of the bridge.
    config.styles.update(marked=0.6, marked_bridge=0.8, renamed=1.0)
    config.pairs.degenerate = ("[1]",)
    config.sampling.update(temperature=1.0, room=512, chunk=64)
    config.script.update(steps=1500, batch_size=8, learning_rate=2e-3, observed=True)
    # A part of an epoch; LeReT has a whole one. More imitation leaves preferences less to add.
    config.sft.update(steps=10, batch_size=16, learning_rate=3e-4)
    config.preference.update(steps=160, batch_size=16, learning_rate=5e-5)
    config.optimizer.update(beta2=0.98, matrices="muon")
    config.train.update(eval_every=10**6, checkpoint_every=100, log_every=20)


def _tiny(config: ConfigDict) -> None:
    """A minute, to see that all of it runs; it learns hardly anything."""
    config.model.tiny.update(layers=2, hidden=64, heads=2, key_heads=1, intermediate=128, vocab=600)
    config.questions.update(bridge_train=24, bridge_dev=8, bridge_corpus=24)
    config.writing.update(passage_words=10, query_tokens=48)
    config.styles.most_words = 8
    config.sampling.room = 256
    config.tries.update(questions=8, samples=4)
    config.script.update(steps=40, batch_size=8, learning_rate=4e-3)
    config.sft.update(steps=3, batch_size=4)
    config.preference.update(steps=3, batch_size=4)
    config.train.update(eval_every=40, checkpoint_every=5, log_every=1)


def _few_shot(config: ConfigDict) -> None:
    """A chat model, and prompts with examples of its own tries beside the bare one."""
    config.stages = ("sft", "preference")
    config.tries.update(ways="few_shot", prompts=3, with_bare=True)
    config.sampling.update(temperature=0.7, room=2048, chunk=256)
    config.search.gold_by = "title"
    config.train.checkpoint_every = 200


def _adapters(config: ConfigDict, path: str) -> None:
    config.model.path = path
    config.model.remat = "layers"
    config.model.lora.update(rank=16, alpha=32.0)
    config.sft.update(steps=500, batch_size=16, learning_rate=1e-4)
    config.preference.update(steps=1000, batch_size=16, learning_rate=5e-5)


def _qwen3(config: ConfigDict) -> None:
    _adapters(config, "Qwen/Qwen3-1.7B")
    config.model.thinking = "off"


def _smol(config: ConfigDict) -> None:
    """Adapters on a genuine small model, on two cores: few questions, short passages.

    At a temperature of 1, or within 24 tokens, it ends hardly a query in four.
    """
    _adapters(config, "smollm2")
    config.model.remat = "none"
    config.questions.most = 120
    config.writing.update(passage_words=40, query_tokens=64)
    config.sampling.update(temperature=0.7, room=1024, chunk=128)
    config.few_shot.update(candidates=4, demonstrations=2, bootstrap_questions=24, rank_questions=8)
    config.iterations = 1
    config.sft.update(steps=20, batch_size=8, learning_rate=3e-4)
    config.preference.update(steps=40, batch_size=8, learning_rate=5e-5)
    config.eval.samples = 64


def _published(config: ConfigDict) -> None:
    """LeReT's constants, greedy tries and evaluation among them (docs/published.md).

    Stage lengths are those of HotpotQA's 90,447 training questions, about a pair a state: SFT is
    one epoch of 8, IPO two of 4. LeReT has RMSprop, whose steps are Adam's without β₁. Two things
    differ: it reasons before each query, within 1,024 tokens, and searches by ColBERTv2.
    """
    config.seed = 0
    config.sampling.temperature = 0.0
    config.eval.greedy = True
    config.model.path = "meta-llama/Meta-Llama-3-8B-Instruct"
    config.model.remat = "layers"
    config.iterations = 1
    config.sft.update(steps=11_000, batch_size=8, learning_rate=1e-7)
    config.preference.update(steps=90_000, batch_size=4, learning_rate=1e-7, beta=0.05)
    config.optimizer.update(beta1=0.0, beta2=0.99, schedule="constant", warmup_steps=150)
    config.optimizer.clip_norm = 10.0
    config.writing.order = "score"


VARIANTS = {
    "quick": (_made_here,),
    "tiny": (_made_here, _tiny),
    "smol": (_few_shot, _smol),
    "qwen3": (_few_shot, _qwen3),
    "llama3": (_few_shot, _published),
}
