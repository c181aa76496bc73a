"""DeepRetrieval: a language model learns to rewrite queries by what they find (arXiv 2503.00223).

    qrag train --config=configs/deepretrieval.py:quick

`:quick` needs no download and no server: a decoder of 1.8 million weights, made here, imitates five
scripted ways to rewrite talkative questions of an invented world, and then learns by PPO which of
them finds the passage: nDCG@10 rises from 0.35 to 0.87 (three seeds, 18 minutes on 2 cores of an
AMD EPYC, 2026-11-26). `:tiny` is the same in a minute. `:ir` is a decoder of that size on real
collections (--config.queries.train='FOLDER/scifact,train' and --config.queries.test likewise): it
imitates sentences of which words are dropped. `:smol` trains adapters on SmolLM2-135M-Instruct
(`make llm`). `:beir`, `:pubmed` and `:remake` have the published constants, and are for GPUs.
--config.algorithm=grpo learns by groups instead.
"""

from ml_collections import ConfigDict

from configs import common
from qrag_jax.systems.deepretrieval.config import default_config


def get_config(arg: str = "quick") -> ConfigDict:
    return common.variant(default_config(), arg, VARIANTS)


def _made_here(config: ConfigDict) -> None:
    """Minutes on two cores: the tiny model, whole weights, which can copy from the start."""
    config.model.tiny.weights = "examples/copying_heads.py:with_copying_heads"
    config.writing.update(prompt="bare_rewrite", query_tokens=224)
    config.sampling.update(temperature=1.0, room=512, chunk=64, rows=32)
    config.script.update(steps=1200, batch_size=8, learning_rate=2e-3, observed=True)
    config.ppo.update(critic_learning_rate=5e-4, critic_warmup=10, kl=0.001, entropy=0.0)
    config.grpo.update(members=8, clip_low=0.2, clip_high=0.28, longest=224)
    config.train.update(steps=300, batch_size=32)
    config.train.update(eval_every=10**6, checkpoint_every=50, log_every=10)
    config.optimizer.update(learning_rate=2e-4, schedule="linear", warmup_steps=5, beta2=0.98)
    config.optimizer.matrices = "muon"
    config.eval.update(samples=100, greedy=False)


def _tiny(config: ConfigDict) -> None:
    """A minute, to see that all of it runs; it learns hardly anything."""
    config.model.tiny.update(layers=2, hidden=64, heads=2, key_heads=1, intermediate=128, vocab=600)
    config.queries.update(made_train=24, made_test=8, held_out=8, made_corpus=50, clauses=1)
    config.script.update(steps=40, batch_size=4)
    config.ppo.critic_warmup = 1
    config.grpo.members = 4
    config.train.update(steps=4, batch_size=4, eval_every=40, checkpoint_every=5, log_every=1)


def _ir(config: ConfigDict) -> None:
    """Real collections in BEIR's layout.

    Some of CISI's queries have 200 words, so demonstrations are up to five sentences long, and an
    output may be as long; SciFact's training queries have 40 words at most. Frequent words change
    a ranking little, but a search reads most of its index for them, so this has a small cost.
    """
    config.model.tiny.vocab = 2048
    config.queries.update(train="", test="")
    config.writing.query_tokens = 384
    config.sampling.room = 1024
    config.dropped.update(together=5, most_words=150, kinds=("any", "frequent"), share=0.4)
    config.script.update(steps=1200, batch_size=8, observed=False)
    config.reward.reading_cost = 0.1
    config.rollout.query_tokens = 128
    config.train.steps = 500
    config.grpo.longest = 128
    config.eval.greedy = True


def _smol(config: ConfigDict) -> None:
    """Adapters on a genuine small model, on two cores."""
    config.model.path = "smollm2"
    config.model.lora.update(rank=16, alpha=32.0)
    config.queries.update(train="", test="")
    config.stages = ("rl",)
    config.algorithm = "grpo"
    config.writing.update(prompt="rewrite_plain", query_tokens=48)
    config.sampling.update(temperature=1.0, room=512, chunk=64, rows=16)
    config.grpo.update(members=8, clip_low=0.2, clip_high=0.28, longest=48)
    config.train.update(steps=60, batch_size=16, eval_every=30, checkpoint_every=15, log_every=2)
    config.optimizer.update(learning_rate=1e-4, warmup_steps=2)
    config.eval.samples = 64


def _published(config: ConfigDict) -> None:
    """SciFact by BM25, 100 epochs; other sets have a K of their own (NFCorpus 1000).

    Lucene's analyzer drops 33 stop words, ours a longer list (docs/published.md).
    """
    config.model.path = "Qwen/Qwen2.5-3B-Instruct"
    config.model.remat = "layers"
    config.queries.update(train="", test="")
    config.stages = ("rl",)
    config.writing.update(prompt="rewrite_bm25", query_tokens=512)
    config.sampling.update(temperature=0.6, room=1024, chunk=256)
    config.reward.update(tiers="ir", measure="ndcg", k=50, gain=False)
    config.search.update(k1=1.2, b=0.75, stemmer="porter", stop_words="english")
    config.ppo.minibatches = 4
    config.train.update(steps=1200, batch_size=64, eval_every=100, checkpoint_every=100)
    config.eval.measures = ("ndcg@10", "recall@100")


def _pubmed(config: ConfigDict) -> None:
    """PubMed by its own interface; queries are rows with PICO, their documents and dates."""
    config.writing.update(prompt="rewrite_pico", query_tokens=500)
    config.search.engine = "remote"
    config.train.steps = 2000
    config.sampling.temperature = 1.0
    config.reward.update(tiers="engines", measure="recall", k=3000)
    config.eval.update(measures=("recall@3000",), best_by="recall@3000")


def _remake(config: ConfigDict) -> None:
    """The README of the TRL remake: recall@5 by BM25, 32 tokens, PPO with λ 0.95.

    The remake's critic is a linear map on the policy's trunk; here it is a model of its own.
    """
    config.model.path = "Qwen/Qwen2-0.5B-Instruct"
    config.queries.update(train="", test="")
    config.stages = ("rl",)
    config.writing.update(prompt="rewrite_plain", query_tokens=32)
    config.sampling.update(temperature=0.7, room=512, chunk=128)
    config.reward.update(measure="recall", k=5, gain=False)
    config.ppo.update(lambda_=0.95, value_clip=0.2, kl=0.05, entropy=0.0, epochs=4)
    config.train.update(steps=200, batch_size=4, eval_every=50, checkpoint_every=50)
    config.optimizer.learning_rate = 1e-5
    config.eval.update(measures=("recall@5", "ndcg@10"), best_by="recall@5")


VARIANTS = {
    "quick": (_made_here,),
    "tiny": (_made_here, _tiny),
    "ir": (_made_here, _ir),
    "smol": (_smol,),
    "beir": (_published,),
    "pubmed": (_published, _pubmed),
    "remake": (_remake,),
}
