"""Compares our configs of published runs with the public code, constant by constant.

`TABLE` has each constant with the file of the public code that sets it, from the newest version of
each file that could be read; without one, with the README or the paper: Q-RAG (GitHub griver/Q-RAG,
arXiv 2511.07328), HARR (zyc140345/HARR, its scripts first, then the defaults of its code and of the
libraries that it pins; 2602.03645), LeReT (sher222/LeReT, dspy-ai 2.4.12; 2410.23214),
DeepRetrieval (pat-jj/DeepRetrieval, SciFact by BM25 and PubMed; 2503.00223) and RLVR
(bdsaglam/rlvr, verifiers 0.1.4). Where another version of a file has another value, the source says
so. A value that differs on purpose has a reason; all others must be equal. That these models are
built, fit and compile is what the suite gpu shows.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from benchmarks.report import Case, print_table
from qrag_jax.errors import InputError


class Constant(NamedTuple):
    """One constant of a run.

    name: a field of our config, or a name in `DERIVED`.
    theirs: the value in the published run.
    source: the file, or the text, that has this value.
    expected: the value that ours must have.
    why: the reason, if it differs.
    """

    name: str
    theirs: Any
    source: str
    expected: Any
    why: str = ""


# Values that follow from several fields of our config.
DERIVED: dict[str, Callable[[ConfigDict], Any]] = {
    "transitions an update": lambda config: config.train.batch_size * config.env.max_steps,
    "transitions a micro-batch": lambda config: (
        config.train.batch_size * config.env.max_steps // config.train.accumulation
    ),
    "sources": lambda config: "+".join(sorted(config.data.sources)),
    "trained": lambda config: "adapters" if config.encoder.lora.rank else "all weights",
    "episodes an update": lambda config: (
        config.train.batch_size * config[config.get("algorithm", "grpo")].members
    ),
}
# Reasons that many constants share.
REASONS = {
    "WHOLE_EPISODES": "an update has whole episodes; theirs cuts the stream of games after "
    "so many transitions and bootstraps there",
    "ONLY_TEXT": "theirs counts the special tokens of each part, ours its text",
}
# Groups: a line "SOURCE: NAME=THEIRS; NAME=THEIRS" each, and for what differs
# "SOURCE: NAME=THEIRS -> OURS because WHY". A line that begins with a blank continues the last one.
TABLE = """
[q_rag]
configs/training.yaml: seed=42; pqn.learning_start=200
rl/bert_predictor.py: encoder.state_prefix=''; encoder.chunk_prefix=''
train_q_rag.py and the test_env of configs: eval.best_by='return_until_found'
[contriever]
configs/algo/pqn.yaml: trained='all weights'; pqn.gamma=0.99; policy.top_k_actions=5;
    optimizer.beta1=0.9; optimizer.beta2=0.98; optimizer.eps=1e-06; optimizer.clip_norm=2.0;
    optimizer.warmup_steps=1000; encoder.path='facebook/contriever'; policy.alpha=0.01;
    pqn.lambda_=0.65; pqn.tau=0.1; optimizer.learning_rate=5e-05; optimizer.weight_decay=0.01;
    optimizer.schedule='linear'; optimizer.final_ratio=0.0
rl/bert_predictor.py: encoder.pooling='mean'; encoder.normalise=False; encoder.scale=0.1
the model's config.json, in train mode: encoder.dropout=0.1; encoder.attention_dropout=0.1
configs/training.yaml: train.accumulation=2; train.steps=50000; train.eval_every=500;
    eval.samples=300; data.max_chunk_tokens=256
configs/training.yaml: data.max_chunk_tokens_in_state=64 -> 62 because ONLY_TEXT
configs/training.yaml: data.max_question_tokens=64 -> 62 because ONLY_TEXT
[babilong]
configs/envs/babilong.yaml: env.max_steps=6; env.positions='relative'; env.sort_by_index=True;
    reward.penalize_extra_steps=True; sources='babilong'; data.sources.babilong.task='qa3';
    data.sources.babilong.chunks=100
configs/training.yaml: transitions a micro-batch=64 -> 66 because WHOLE_EPISODES
configs/training.yaml: transitions an update=128 -> 132 because WHOLE_EPISODES
[never_terminate]
the paper (rl/feedback/feedback.py: False if not given): env.never_terminate=True
[e5]
rl/bert_predictor.py: encoder.pooling='mean'; encoder.normalise=False; encoder.scale=0.1
the model's config.json, in train mode: encoder.dropout=0.1; encoder.attention_dropout=0.1
configs/training_hotpotqa.yaml: transitions a micro-batch=12; transitions an update=96;
    train.accumulation=8; train.eval_every=100; eval.samples=300
the paper (configs/training_hotpotqa.yaml: 5,000): train.steps=10000
[gte]
configs/algo/pqn_gte.yaml: trained='all weights'; pqn.gamma=0.99; policy.top_k_actions=5;
    optimizer.beta1=0.9; optimizer.beta2=0.98; optimizer.eps=1e-06; optimizer.clip_norm=2.0;
    optimizer.warmup_steps=1000; encoder.path='Alibaba-NLP/gte-multilingual-base';
    policy.alpha=0.005; pqn.lambda_=0.6; pqn.tau=0.02; optimizer.learning_rate=5e-06;
    optimizer.weight_decay=0.001; optimizer.schedule='linear'; optimizer.final_ratio=0.1
rl/bert_predictor.py: encoder.pooling='mean'; encoder.normalise=False; encoder.scale=0.1
the model's config.json, in train mode: encoder.dropout=0.1; encoder.attention_dropout=0.0
configs/envs/combined_2.yaml: env.max_steps=6; env.positions='none'; env.sort_by_index=False;
    reward.penalize_extra_steps=True
envs/combined_dataset.py: data.mixture='size'
configs/training_gte_combined.yaml: data.max_chunk_tokens=512; train.accumulation=2;
    train.eval_every=100; eval.samples=300
configs/training_gte_combined.yaml (in others 50,000): train.steps=70000
configs/training_gte_combined.yaml: data.max_chunk_tokens_in_state=256 -> 254 because ONLY_TEXT
configs/training_gte_combined.yaml: data.max_question_tokens=256 -> 254 because ONLY_TEXT
configs/training_gte_combined.yaml: transitions a micro-batch=16 -> 18 because WHOLE_EPISODES
configs/training_gte_combined.yaml: transitions an update=32 -> 36 because WHOLE_EPISODES
[harr]
trl 0.18.1: seed=42
its dataclasses: encoder.pooling='last'; encoder.normalise=True; state.instruction=True;
    state.max_tokens=1024; policy.pool=30; policy.passages=3; llm.seed=42
scripts: encoder.lora.targets='all-linear'; state.stateful=True; llm.server.max_model_len=4096
transformers 4.55.4: optimizer.beta1=0.9; optimizer.beta2=0.999; optimizer.eps=1e-08;
    optimizer.weight_decay=0.0; optimizer.clip_norm=1.0; optimizer.warmup_steps=0
scripts: encoder.lora.dropout=0.05 -> 0.0 because without dropout the first importance ratio is
    exactly 1
scripts: encoder.dtype='float16' -> 'auto' because bfloat16 on GPUs, which needs no loss scaling
its dataclasses: eval.samples=16 -> 500 because 16 questions are too few to choose a checkpoint by
[harr_grpo]
scripts: encoder.lora.rank=32; encoder.lora.alpha=64.0; policy.tau=0.05; grpo.members=8;
    grpo.beta=0.0; grpo.epochs=1; grpo.minibatches=1; train.batch_size=16; train.steps=100;
    reward.mixture='f1=1'; optimizer.learning_rate=1e-05; optimizer.schedule='constant'
trl 0.18.1: grpo.clip_low=0.2; grpo.clip_high=0.2; grpo.aggregation='bnpo'; grpo.scaled=True
scripts: questions.kept='filtered' -> '' because give the file of qrag filter_data in this field
[harr_0.6b]
scripts: encoder.path='Qwen/Qwen3-Embedding-0.6B'
[harr_4b]
scripts: encoder.path='Qwen/Qwen3-Embedding-4B'
[react]
scripts: agent.name='react'; llm.server.model='Qwen/Qwen3-8B'
llama-index-core 0.12.52: agent.max_hops=3; llm.temperature=0.1
its dataclasses: llm.enable_thinking=False
[search_r1]
scripts: agent.name='search_r1';
    llm.server.model='PeterJinGo/SearchR1-nq_hotpotqa_train-qwen2.5-7b-em-ppo'
its dataclasses: agent.max_turns=5; llm.temperature=0.7; llm.max_tokens=512
[deepretrieval]
scripts: algorithm='ppo'; episodes an update=64; ppo.epochs=1; ppo.critic='own'; ppo.kl=0.001;
    ppo.kl_in='reward'; ppo.clip_low=0.2; ppo.clip_high=0.2; ppo.value_clip=0.5;
    ppo.entropy=0.001; ppo.gamma=1.0; ppo.lambda_=1.0; ppo.whiten=True;
    ppo.critic_learning_rate=1e-05; optimizer.learning_rate=1e-06; optimizer.schedule='constant';
    optimizer.warmup_steps=0; optimizer.clip_norm=1.0
scripts (SciFact's 128 of a batch of 64 is a mistake): ppo.minibatches=4
[published:contriever-babilong-em]
configs/feedback/defaults.yaml: env.never_terminate=False; reward.name='babilong_em';
    reward.scale=1.0; reward.completion_threshold=1.0; llm.max_tokens=32; llm.temperature=0.0;
    llm.top_p=0.95; llm.concurrency=20; llm.server.model='Qwen/Qwen3-1.7B';
    llm.server.memory_share=0.4; llm.server.max_model_len=2048; llm.server.dtype='bfloat16'
rl/feedback/llm_feedback.py: reward.staleness=0; llm.enable_thinking=False; llm.cut_off='score'
[published:contriever-niah]
the paper (configs/envs/niah.yaml: 3): env.max_steps=5
configs/envs/niah.yaml: env.positions='none'; env.sort_by_index=False;
    reward.penalize_extra_steps=True; sources='niah'
the paper: data.sources.niah.preset='multivalue'; data.sources.niah.tokens=4096
configs/training.yaml: transitions a micro-batch=64 -> 65 because WHOLE_EPISODES
configs/training.yaml: transitions an update=128 -> 130 because WHOLE_EPISODES
[published:e5-hotpotqa]
configs/algo/pqn_e5_hotpotqa.yaml: trained='all weights'; pqn.gamma=0.99; policy.top_k_actions=5;
    optimizer.beta1=0.9; optimizer.beta2=0.98; optimizer.eps=1e-06; optimizer.clip_norm=2.0;
    optimizer.warmup_steps=1000; encoder.path='intfloat/multilingual-e5-large'; policy.alpha=0.05;
    pqn.lambda_=0.5; pqn.tau=0.02; optimizer.learning_rate=1.5e-05; optimizer.weight_decay=0.0005;
    optimizer.schedule='quarter_cosine'; optimizer.final_ratio=0.1
configs/envs/hotpotqa.yaml: env.max_steps=2; env.positions='none'; env.sort_by_index=False;
    reward.penalize_extra_steps=False; sources='hotpotqa'
README.md (training details): data.max_chunk_tokens=220
configs/algo/pqn_e5_hotpotqa.yaml: data.max_chunk_tokens_in_state=128 -> 126 because ONLY_TEXT
configs/algo/pqn_e5_hotpotqa.yaml: data.max_question_tokens=128 -> 126 because ONLY_TEXT
[published:e5-musique]
configs/algo/pqn_e5_musique.yaml: trained='all weights'; pqn.gamma=0.99; policy.top_k_actions=5;
    optimizer.beta1=0.9; optimizer.beta2=0.98; optimizer.eps=1e-06; optimizer.clip_norm=2.0;
    optimizer.warmup_steps=1000; encoder.path='intfloat/multilingual-e5-large';
    policy.alpha=0.005; pqn.lambda_=0.6; pqn.tau=0.02; optimizer.learning_rate=1e-05;
    optimizer.weight_decay=0.001; optimizer.schedule='linear'; optimizer.final_ratio=0.1
configs/envs/musique.yaml: env.max_steps=4; env.positions='none'; env.sort_by_index=False;
    reward.penalize_extra_steps=False; sources='musique'
configs/training_hotpotqa.yaml: data.max_chunk_tokens=110
configs/algo/pqn_e5_musique.yaml: data.max_chunk_tokens_in_state=128 -> 126 because ONLY_TEXT
configs/algo/pqn_e5_musique.yaml: data.max_question_tokens=128 -> 126 because ONLY_TEXT
[published:qwen3-babilong]
configs/algo/pqn_qwen3.yaml: trained='all weights'; pqn.gamma=0.99; policy.top_k_actions=5;
    optimizer.beta1=0.9; optimizer.beta2=0.98; optimizer.eps=1e-06; optimizer.clip_norm=2.0;
    optimizer.warmup_steps=1000; encoder.path='Qwen/Qwen3-Embedding-0.6B'; policy.alpha=0.005;
    pqn.lambda_=0.65; pqn.tau=0.02; optimizer.learning_rate=5e-05; optimizer.weight_decay=0.01;
    optimizer.schedule='linear'; optimizer.final_ratio=0.0
rl/bert_predictor.py: encoder.pooling='last'; encoder.normalise=True; encoder.scale=1.0
configs/training.yaml: train.accumulation=2; train.steps=50000; train.eval_every=500;
    eval.samples=300; data.max_chunk_tokens=256
configs/training.yaml: data.max_chunk_tokens_in_state=64 -> 63 because ONLY_TEXT
configs/training.yaml: data.max_question_tokens=64 -> 63 because ONLY_TEXT
[published:gte-hotpotqa-musique]
configs/envs/combined_2.yaml: sources='hotpotqa+musique'
[published:gte-hotpotqa-musique-wiki]
the paper: sources='hotpotqa+musique+two_wiki'
[harr_ppo:hotpotqa-react-0.6b]
scripts: encoder.lora.rank=16; encoder.lora.alpha=32.0; policy.tau=0.02; ppo.kl=0.005;
    ppo.epochs=1; ppo.minibatches=1; ppo.critic_learning_rate=0.0001; train.batch_size=32;
    train.steps=313; optimizer.learning_rate=0.0001; questions.kept=''
its dataclasses: ppo.members=1; ppo.entropy=0.0; ppo.whiten=True; reward.mixture='rouge_l=1'
trl 0.18.1: ppo.gamma=1.0; ppo.lambda_=0.95; ppo.clip_low=0.2; ppo.clip_high=0.2;
    ppo.value_clip=0.2
transformers 4.55.4: optimizer.schedule='linear'; optimizer.final_ratio=0.0
[leret:llama3]
train.py and its configs: model.path='meta-llama/Meta-Llama-3-8B-Instruct'; seed=0;
    preference.averaged=False; optimizer.schedule='constant'; optimizer.warmup_steps=150;
    optimizer.clip_norm=10.0; iterations=1
the client of Together's API: sampling.temperature=0.0
README.md: sampling.room=2048; sft.learning_rate=1e-07; sft.batch_size=8; preference.loss='ipo';
    preference.beta=0.05; preference.learning_rate=1e-07; preference.batch_size=4
create_preference_dataset.py, dspy-ai: writing.hops=2; writing.k=3; writing.order='score';
    tries.prompts=3; tries.with_bare=True; tries.samples=1; few_shot.candidates=12;
    few_shot.demonstrations=3; few_shot.bootstrap_questions=50; few_shot.rank_questions=50
metrics: search.gold_by='title'; reward.measure='ap'
RMSprop, torch 2.3.0: optimizer.beta1=0.0; optimizer.beta2=0.99; optimizer.eps=1e-08
run_evals.py: eval.greedy=True
create_preference_dataset.py, dspy-ai: writing.query_tokens=1024 -> 48 because theirs reasons
    before the query, ours writes it
create_preference_dataset.py, dspy-ai: search.engine='colbert' -> 'bm25' because no engine here
    scores by late interaction
[deepretrieval:beir]
the script of SciFact: model.path='Qwen/Qwen2.5-3B-Instruct'; sampling.temperature=0.6;
    writing.query_tokens=512; reward.tiers='ir'; reward.k=50; reward.gain=False; search.k1=1.2;
    search.b=0.75; eval.best_by='ndcg@10'
Lucene's EnglishAnalyzer: search.stemmer='porter'
100 epochs of 809 queries: train.steps=1200
Lucene's EnglishAnalyzer: search.stop_words="Lucene's 33" -> 'english' because a longer list
[deepretrieval:pubmed]
the script of PubMed: model.path='Qwen/Qwen2.5-3B-Instruct'; sampling.temperature=1.0;
    writing.query_tokens=500; reward.tiers='engines'; reward.k=3000; reward.gain=False
[rlvr:qwen25]
train_musique.py: model.path='Qwen/Qwen2.5-7B-Instruct'; model.lora.rank=16;
    model.lora.alpha=32.0; episodes an update=64; grpo.members=8; grpo.aggregation='dr_grpo';
    grpo.longest=9344; grpo.beta=0.0; grpo.epochs=1; grpo.scaled=False; train.eval_every=100;
    tools.turn_tokens=1024; sampling.temperature=0.5; sampling.room=9344;
    optimizer.learning_rate=1e-05; optimizer.schedule='constant'; optimizer.warmup_steps=10;
    optimizer.beta1=0.9; optimizer.beta2=0.99; optimizer.clip_norm=0.1; seed=42
verifiers 0.1.4: grpo.clip_low=0.2; grpo.clip_high=0.2; tools.truncated='masked'
an epoch of 19,938 questions: train.steps=2492
vf_musique: tasks.easy_first=True; tasks.noise_rate=1.0; tools.max_turns=10; tools.top_n=2;
    search.engine='interleaved'; rubric.em=0.9; rubric.f1=1.0; rubric.recall=1.0;
    rubric.precision=0.4; rubric.citation=0.6; rubric.format=0.1; rubric.hops='times_half'
services: search.encoder='BAAI/bge-reranker-v2-m3' -> 'minilm' because it needs no server
verifiers 0.1.4: tools.staleness=1 -> 0 because the device that learns samples, by its weights
"""
# "CONFIG:VARIANT" → its groups, besides one of its own name; a later one's constant replaces an
# earlier one's.
RUNS: dict[str, str] = {
    "published:contriever-babilong": "q_rag contriever babilong never_terminate",
    "published:contriever-babilong-em": "q_rag contriever babilong",
    "published:contriever-niah": "q_rag contriever never_terminate",
    "published:e5-hotpotqa": "q_rag never_terminate e5",
    "published:e5-musique": "q_rag never_terminate e5",
    "published:qwen3-babilong": "q_rag babilong never_terminate",
    "published:gte-hotpotqa-musique": "q_rag never_terminate gte",
    "published:gte-hotpotqa-musique-wiki": "q_rag never_terminate gte",
    "harr_grpo:hotpotqa-react-0.6b": "harr harr_grpo harr_0.6b react",
    "harr_grpo:hotpotqa-react-4b": "harr harr_grpo harr_4b react",
    "harr_grpo:hotpotqa-search_r1-0.6b": "harr harr_grpo harr_0.6b search_r1",
    "harr_grpo:hotpotqa-search_r1-4b": "harr harr_grpo harr_4b search_r1",
    "harr_grpo:two_wiki-react-0.6b": "harr harr_grpo harr_0.6b react",
    "harr_grpo:two_wiki-react-4b": "harr harr_grpo harr_4b react",
    "harr_grpo:two_wiki-search_r1-0.6b": "harr harr_grpo harr_0.6b search_r1",
    "harr_grpo:two_wiki-search_r1-4b": "harr harr_grpo harr_4b search_r1",
    "harr_ppo:hotpotqa-react-0.6b": "harr harr_0.6b react",
    "leret:llama3": "",
    "deepretrieval:beir": "deepretrieval",
    "deepretrieval:pubmed": "deepretrieval",
    "rlvr:qwen25": "",
}
_CONSTANT = re.compile(r"([\w. -]+)=(.*)")


def groups() -> dict[str, list[Constant]]:
    """The groups of `TABLE`."""
    table: dict[str, list[Constant]] = {}
    title = ""
    for line in re.sub(r"\n +", " ", TABLE.strip()).splitlines():
        if line.startswith("["):
            title = line[1:-1]
            table[title] = []
            continue
        source, _, rest = re.fullmatch(r"(.*?)(: )(?=[a-z][\w. -]*=)(.*)", line).groups()  # type: ignore[union-attr]
        differs, _, why = rest.partition(" because ")
        parts = [differs] if why else rest.split("; ")
        for part in parts:
            match = _CONSTANT.fullmatch(part)
            assert match is not None, part
            theirs, _, ours = match[2].partition(" -> ")
            value = ast.literal_eval(theirs)
            expected = ast.literal_eval(ours) if why else value
            table[title].append(Constant(match[1], value, source, expected, REASONS.get(why, why)))
    return table


def compared(run: str) -> list[tuple[Constant, Any]]:
    """The constants of a run, each with our value."""
    every, constants = groups(), dict[str, Constant]()
    for group in (*RUNS[run].split(), run):
        constants |= {constant.name: constant for constant in every.get(group, [])}
    file, _, variant = run.partition(":")
    config = importlib.import_module(f"configs.{file}").get_config(variant)
    return [
        (constant, DERIVED[name](config) if name in DERIVED else config[name])
        for name, constant in constants.items()
    ]


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """One case for each published run.

    Args:
        only: runs, by their names.

    Raises:
        InputError: `only` names an unknown run.
    """
    if unknown := [name for name in only if name not in RUNS]:
        raise InputError(f"--only={unknown[0]}: the runs are {', '.join(RUNS)}.")
    return [_case(name, compared(name)) for name in only or RUNS]


def _case(name: str, pairs: Sequence[tuple[Constant, Any]]) -> Case:
    lines = [("constant", "theirs", "ours", "equal", "their file")]
    for const, ours in pairs:
        equal = "yes" if ours == const.theirs else "differs" if ours == const.expected else "NO"
        lines.append((const.name, str(const.theirs), str(ours), equal, const.source))
    print(f"\n{name}")
    print_table(lines)
    return Case(
        name,
        float(sum(ours == const.theirs for const, ours in pairs)),
        "constants equal",
        peer=float(len(pairs)),
        ratio=sum(ours == const.theirs for const, ours in pairs) / len(pairs),
        target="others differ with a reason",
        holds=all(ours == const.expected for const, ours in pairs),
        details={
            f"differs: {const.name}, theirs {const.theirs}, ours {ours}": (
                const.why if ours == const.expected else "unexplained"
            )
            for const, ours in pairs
            if ours != const.theirs
        },
    )
