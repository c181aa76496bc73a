"""The trainings and rankings of the suite, as data.

In fields and flags {data} is the folder of all data, {train}, {half0} and {half1} are the records
of `data` (half 0 of its dev questions chooses a checkpoint, half 1 is reported), {corpus}, {index},
{choosing}, {testing} and {beir} belong to a setting of the side-by-side (`corpora`),
{imitated} is the model that the part's `first` training ended with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

SEEDS = (42, 43, 44)
MAIN = "trained"
TWO_WIKI, HOTPOTQA = SETTINGS = ("2wiki", "hotpotqa-pooled")


@dataclasses.dataclass(frozen=True)
class Part:
    """One training with several seeds, or one ranking.

    Attributes:
        name: `--only` takes it for all seeds, or NAME-SEED for one.
        how: what scores it: a name in `rankings.HOW`.
        config: of the training, such as configs/hotpotqa.py:minilm; "": nothing is trained.
        fields: of the training.
        first: fields of a training before it, whose exported model is {imitated}.
        flags: of the command that scores it.
        ways: name → pattern of the log that the command wrote, or checkpoint that `predict` plays;
            the first one is the part's main way.
        scores: that are reported, the main one first.
        seeds: of the trainings; (): nothing is drawn.
        compared: baselines: a way of this part, or PART:WAY.
        gain: asked of the main score's paired difference to the first baseline; its interval must
            also be above 0.
        minutes: that a training may take.
        published: a figure from elsewhere to compare the main score with.
        data: data set with halves, or setting.
        of: the part whose training this one scores, too.
        weights: of BM25 in each step, of which one is chosen; (): none.
        optional: runs only if it is named.
    """

    name: str
    how: str = "evaluate"
    config: str = ""
    fields: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    ways: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scores: tuple[str, ...] = ()
    seeds: tuple[int, ...] = SEEDS
    compared: tuple[str, ...] = ()
    gain: float | None = None
    minutes: float | None = None
    published: float | None = None
    data: str = ""
    of: str = ""
    weights: tuple[float, ...] = ()
    optional: bool = False

    @property
    def runs(self) -> dict[str, int]:
        """Name of each run → its seed."""
        return {f"{self.name}-{seed}": seed for seed in self.seeds} or {self.name: 0}

    @property
    def main(self) -> str:
        """The way that baselines are compared with."""
        return next(iter(self.ways), MAIN)


# ---------------------------------------------------------------- Q-RAG

FACTS = ("fact_em", "fact_f1", "fact_precision")
RETRIEVERS = {
    MAIN: "best-*/eval_seed*.jsonl",
    "untrained": "untrained/eval_seed*.jsonl",
    "one look-up": "untrained/single_step_eval_seed*.jsonl",
    "trained, one look-up": "best-*/single_step_eval_seed*.jsonl",
}
LAST = {way: pattern.replace("best", "last") for way, pattern in RETRIEVERS.items()}
STAGES = ("pqn", "imitate", "imitate,pqn")
PQN_ALONE = (  # of `:minilm`, with towers as in Q-RAG
    *("encoder.normalise=False", "encoder.scale=0.1"),
    *("optimizer.learning_rate=5e-5", "policy.alpha=0.01"),
)


def _plus(stages: str) -> str:
    """Stages in the name of a part; `--only` has commas between names."""
    return stages.replace(",", "+")


PASSAGES = tuple(
    Part(
        f"{source}/{_plus(stages)}",
        config=f"configs/{source}.py:minilm",
        fields=(
            *("data.path={train}", "eval.path={half0}", f"stages={stages}"),
            *(PQN_ALONE if stages == "pqn" else ()),
        ),
        flags=("--config.eval.path={half1}",),
        ways=RETRIEVERS,
        scores=FACTS,
        compared=("untrained", "one look-up", *(f"{source}/pqn:{MAIN}",) * (stages != "pqn")),
        gain=0.0,
        data=source,
    )
    for source in ("hotpotqa", "musique", "two_wiki")
    for stages in STAGES
)
HIDDEN = Part(
    # Rewarded for the first passage with the answer; facts are shown to the scoring alone.
    "hidden-support",
    config="configs/own.py:minilm",
    fields=(
        *("data.path={own_train}", "eval.path={own_half0}", "data.columns.support="),
        *("reward.name=answer_in_chunk", "reward.penalize_extra_steps=False"),
    ),
    flags=(
        *("--checkpoint=last", "--config.eval.path={own_half1}"),
        "--config.data.columns.support=support",
    ),
    ways=LAST,
    scores=("fact_recall", "fact_em"),
    compared=("untrained",),
    gain=0.0,
    data="hotpotqa",
)
PUBLIC = Part(
    # The public PyTorch code: fact EM 0.59 on the same 189 questions (one seed, standard error
    # 0.036), measured once by hand after 1,313 transitions.
    "hotpotqa-public",
    config="configs/hotpotqa.py:minilm",
    fields=(
        "data.path={data}/hotpotqa/train.jsonl.gz",
        "eval.path={data}/hotpotqa/dev.jsonl.gz",
        *("train.steps=164", "train.eval_every=164", "stages=pqn", *PQN_ALONE),
    ),
    flags=("--checkpoint=last",),
    ways=LAST,
    scores=FACTS,
    seeds=SEEDS[:1],
    compared=("untrained",),
    published=0.59,
)
QUICK_START = Part(
    "quickstart",
    config="configs/quickstart.py",
    # Another invented world than that of training.
    flags=("--config.data.path=examples/worlds/records.py:other_world",),
    ways=RETRIEVERS,
    scores=FACTS,
    seeds=SEEDS[:1],
    compared=("untrained", "one look-up", "trained, one look-up"),
    gain=0.3,
    minutes=10,
)

# ---------------------------------------------------------------- long documents


def _long(task: str, config: str, fields: tuple[str, ...], lengths: Mapping[int, int]) -> Part:
    chunks, samples = (",".join(map(str, n)) for n in (lengths, lengths.values()))
    return Part(
        f"long/{task}",
        config=config,
        fields=fields,
        flags=(f"--chunks={chunks}", f"--samples={samples}"),
        ways={f"{length:,} chunks": f"best-*/eval_seed*_ns{length}.jsonl" for length in lengths},
        scores=(*FACTS, "fact_recall"),
        seeds=SEEDS[:1],
    )


BOOKS = "data.sources.{name}.noise={data}/gutenberg"
LENGTHS = {50: 200, 160: 200, 1200: 100, 4600: 100, 40_000: 20}  # chunks: documents
LONG = (
    *(
        _long(
            task,
            f"configs/babilong.py:{task}-minilm",
            ("data.path={data}/babi", BOOKS.replace("{name}", "babilong")),
            LENGTHS,
        )
        for task in ("qa1", "qa2")
    ),
    _long(
        "niah", "configs/niah.py:minilm", (BOOKS.replace("{name}", "niah"),), {200: 100, 6600: 50}
    ),
)

# ---------------------------------------------------------------- agents and language models

AGENT_DATA = ("data.path={data}/2wikimultihopqa",)
AGENT_CORPUS = ("search.corpus={data}/2wikimultihopqa/open_corpus.jsonl.gz",)
# 64 episodes a step by both: groups of 8 of one question, or one of each question. A step of PPO
# takes about six times as long.
BATCHES = {
    "grpo": ("train.batch_size=8", "grpo.members=8"),
    "ppo": ("train.batch_size=64", "ppo.members=1"),
}
STEPS = {"grpo": 20, "ppo": 10}
HARR = tuple(
    Part(
        f"harr/{algorithm}-{state}",
        config=f"configs/harr_{algorithm}.py:minilm",
        fields=(
            *(*AGENT_DATA, *AGENT_CORPUS, f"state.stateful={state == 'stateful'}"),
            *(f"train.{name}={STEPS[algorithm]}" for name in ("steps", "eval_every")),
            *(f"train.checkpoint_every={STEPS[algorithm]}", *BATCHES[algorithm]),
            "eval.part=all",  # the last checkpoint is scored, which no question chooses
        ),
        flags=("--checkpoint=last",),
        ways={MAIN: "last-*/agent_seed*.jsonl", "untrained": "untrained/agent_seed*.jsonl"},
        scores=("f1", "recall"),
        compared=("untrained", *(("harr/grpo-stateful:trained",) * (algorithm == "ppo"))),
        gain=0.0,
    )
    for algorithm in BATCHES
    for state in ("stateful", "stateless")
)

RLVR_SCORES = ("em", "f1", "recall", "citation", "reward")
RLVR = (
    Part(
        "rlvr/grpo",
        config="configs/rlvr.py:quick",
        fields=("eval.part=all",),
        flags=(
            *("--checkpoint=last", "--retrievers=bm25,golden,semantic,hybrid"),
            "--config.search.encoder=minilm",
        ),
        ways={
            MAIN: "last-*/bm25.jsonl",
            "after imitation": "sft-*/bm25.jsonl",
            "untrained": "untrained/bm25.jsonl",
            "trained, semantic": "last-*/semantic.jsonl",
            "trained, hybrid": "last-*/hybrid.jsonl",
            "trained, golden": "last-*/golden.jsonl",
        },
        scores=RLVR_SCORES,
        compared=("after imitation", f"rlvr/imitation:{MAIN}"),
        gain=0.2,
        minutes=25,
    ),
    Part(
        # As many steps of imitation as take as long as the whole default.
        "rlvr/imitation",
        config="configs/rlvr.py:quick",
        fields=("eval.part=all", "stages=sft", "sft.steps=5000"),
        flags=("--checkpoint=last", "--retrievers=bm25"),
        ways={MAIN: "last-*/bm25.jsonl"},
        scores=RLVR_SCORES,
    ),
)

HOPS = ("hop2/all_gold", "hop2/recall", "hop1/recall")
LERET = (
    Part(
        "leret/quick",
        config="configs/leret.py:quick",
        fields=("eval.part=all",),
        flags=("--checkpoint=last",),
        ways={
            MAIN: "last-*.jsonl",
            "after the script": "script-1500.jsonl",
            "after SFT": "sft-1510.jsonl",
            "after IPO": "preference-1670.jsonl",
            "the question, then with its first passage": "question_and_passage.jsonl",
            "untrained": "untrained.jsonl",
        },
        scores=HOPS,
        compared=("after the script", "after SFT", "after IPO"),
        gain=0.25,
        minutes=20,
    ),
    Part(
        "leret/real",
        config="configs/leret.py:smol",
        fields=tuple(
            f"questions.{part}={{data}}/2wikimultihopqa,2wiki,{part}" for part in ("train", "dev")
        ),
        flags=(
            *("--checkpoint=last", "--config.search.index={index}"),
            "--config.questions.dev={data}/2wikimultihopqa/open_dev.jsonl.gz,2wiki,dev",
        ),
        ways={
            MAIN: "last-*.jsonl",
            "after SFT": "sft-20.jsonl",
            "untrained": "untrained.jsonl",
            "the question": "question.jsonl",
            "the question, then with its first passage": "question_and_passage.jsonl",
        },
        scores=HOPS,
        seeds=SEEDS[:1],
        compared=("untrained", "after SFT", "the question, then with its first passage"),
        data=TWO_WIKI,
        optional=True,  # an hour
    ),
)

REWRITTEN = {
    MAIN: "last-????.jsonl",
    "after the script": "script-*.jsonl",
    "the queries as they are": "original.jsonl",
    "without function words": "content_words.jsonl",
}
COLLECTIONS = (
    "queries.train={data}/ir/scifact,train",
    "queries.test="
    + ";".join(f"{{data}}/ir/{name},dev" for name in ("scifact", "cranfield", "cisi", "cacm")),
)
DEEPRETRIEVAL = (
    Part(
        "deepretrieval/quick",
        config="configs/deepretrieval.py:quick",
        flags=("--checkpoint=last",),
        ways=REWRITTEN,
        scores=("ndcg@10",),
        compared=("after the script", "the queries as they are", "without function words"),
        gain=0.2,
        minutes=20,
    ),
    Part(
        "deepretrieval/grpo",
        config="configs/deepretrieval.py:quick",
        fields=("algorithm=grpo",),
        flags=("--checkpoint=last",),
        ways=REWRITTEN,
        scores=("ndcg@10",),
        compared=("after the script", f"deepretrieval/quick:{MAIN}"),
    ),
    *(
        Part(
            name,
            config="configs/deepretrieval.py:ir",
            fields=COLLECTIONS,
            flags=("--checkpoint=last", *flags),
            ways=REWRITTEN,
            scores=("ndcg@10",),
            compared=("after the script", "the queries as they are"),
            of=of,
        )
        # As it samples, which is how it learns; and greedily, which is how it would be used.
        for name, flags, of in (
            ("deepretrieval/ir-sampled", ("--config.eval.greedy=False",), ""),
            ("deepretrieval/ir-greedy", (), "deepretrieval/ir-sampled"),
        )
    ),
)

# ---------------------------------------------------------------- the five side by side

LISTS = ("all@4", "all@2", "all@6", "all@10", "recall@4", "recall@10", "ap@10", "answer@4")
UNTRAINED = "untrained"
MINILM = ("--encoder=minilm", "--max_chunk_tokens=256")
SOURCES = {TWO_WIKI: "two_wiki", HOTPOTQA: "hotpotqa"}


def _rows(where: str) -> tuple[Part, ...]:
    """Rows of one setting: each gives one ordered list of passages for each test question."""
    bm25, fused = f"{where}/bm25:{UNTRAINED}", f"{where}/bm25+minilm:{UNTRAINED}"
    simple = (bm25, fused, f"{where}/contrastive:{MAIN}")
    checkpoints = {MAIN: "best", UNTRAINED: "first"}

    def row(name: str, how: str, **fields: object) -> Part:
        return Part(f"{where}/{name}", how, scores=LISTS, data=where, **fields)  # type: ignore[arg-type]

    def search(name: str, how: str = "search", *flags: str) -> Part:
        baselines = (bm25,) if name != "bm25" else ()
        return row(name, how, ways={UNTRAINED: ""}, flags=flags, seeds=(), compared=baselines)

    rows = [
        search("bm25"),
        search("bm25-twice", "search_twice"),  # then with the first passage in the query
        search("minilm", "search", *MINILM),
        search("bm25+minilm", "search", "--engine=hybrid", *MINILM),
        row("contrastive", "contrastive", ways={MAIN: ""}, compared=(bm25, fused)),
        row("multi_step_peer", "multi_step_peer", ways={MAIN: ""}, compared=(UNTRAINED, *simple)),
        row(
            "q_rag/untrained",
            "q_rag",
            config=f"configs/{SOURCES[where]}.py:minilm",
            # One step at a rate that changes nothing, so the run has the weights it began with.
            fields=(
                *("data.path={choosing}", "stages=pqn", *PQN_ALONE),
                *("train.steps=1", "optimizer.learning_rate=1e-30"),
            ),
            flags=("--checkpoint=last",),
            ways={UNTRAINED: ""},
            seeds=SEEDS[:1],
        ),
    ]
    rows += [
        row(
            f"q_rag/{_plus(stages)}",
            "q_rag",
            config=f"configs/{SOURCES[where]}.py:minilm",
            fields=(
                *("data.path={choosing}", f"stages={stages}"),
                *(PQN_ALONE if stages == "pqn" else ()),
            ),
            ways={MAIN: ""},
            # Of a cosine between 0 and 1; PQN alone has Q-values without bounds.
            weights=(0.0, 0.05, 0.1, 0.2) if stages != "pqn" else (),
            compared=(
                f"{where}/q_rag/untrained:{UNTRAINED}",
                *simple,
                f"{where}/multi_step_peer:{MAIN}",
                *(f"{where}/q_rag/pqn:{MAIN}",) * (stages != "pqn"),
            ),
            gain=0.0,
        )
        for stages in STAGES
    ]
    if where == TWO_WIKI:  # HotpotQA has no decompositions, which the scripted agent follows
        rows += [
            row(
                f"harr/{algorithm}",
                "agent",
                config=f"configs/harr_{algorithm}.py:minilm",
                fields=(
                    *("data.path={choosing}", "search.corpus={corpus}", "eval.best_by=recall"),
                    *("eval.part=all", *BATCHES[algorithm]),
                ),
                flags=("--checkpoint=best", "--config.data.path={testing}"),
                ways={
                    MAIN: "best-*/agent_seed*.jsonl",
                    UNTRAINED: "untrained/agent_seed*.jsonl",
                    "untrained, sub-queries alone": (
                        "untrained-the-sub-query-alone/agent_seed*.jsonl"
                    ),
                },
                compared=("untrained, sub-queries alone", *simple),
                gain=0.0,
            )
            for algorithm in BATCHES
        ]
    asked = f"{{testing}},{SOURCES[where]},dev"
    named = tuple(
        f"questions.{part}={{choosing}},{SOURCES[where]},{part}" for part in ("train", "dev")
    )
    rewriting = (
        *("search.k1=1.5", "search.b=0.75", "search.stemmer=english", "search.stop_words=english"),
        *(f"queries.{part}={{beir}},{part}" for part in ("train", "dev", "test")),
    )
    rows += [
        row(
            "leret",
            "predict",
            config="configs/leret.py:smol",
            fields=(*named, "search.index={index}", "eval.part=all"),
            flags=(f"--questions={asked}", "--config.search.index={index}"),
            ways=checkpoints,
            compared=(UNTRAINED, bm25),
        ),
        row(
            "deepretrieval",
            "predict",
            config="configs/deepretrieval.py:smol",
            fields=rewriting,
            ways=checkpoints,
            compared=(UNTRAINED, bm25),
        ),
        row(
            "deepretrieval-small",  # a decoder of 1.8 million weights
            "predict",
            config="configs/deepretrieval.py:ir",
            fields=rewriting,
            ways=checkpoints,
            compared=(UNTRAINED, bm25),
            optional=where != TWO_WIKI,
        ),
        row(
            "rlvr",
            "predict",
            config="configs/rlvr.py:smol",
            # Untrained, SmolLM2 calls no tool: it imitates the invented world first. Genuine
            # passages are longer than those of that world, for which the config has room.
            first=("stages=sft",),
            fields=(
                *("model.path={imitated}", "stages=grpo", "sampling.room=1280", *named),
                *("search.index={index}", "eval.best_by=recall", "eval.part=all"),
            ),
            flags=(f"--questions={asked}", "--config.search.index={index}"),
            ways={MAIN: "best", "after imitation": "first"},
            compared=("after imitation", bm25),
            optional=where != TWO_WIKI,  # an hour a training
        ),
    ]
    return tuple(rows)


PARTS = (
    *(*PASSAGES, HIDDEN, PUBLIC, QUICK_START, *LONG, *HARR, *RLVR, *LERET, *DEEPRETRIEVAL),
    *(part for where in SETTINGS for part in _rows(where)),
)

# ---------------------------------------------------------------- --quick

SMALL = (
    *("train.steps=3", "train.eval_every=100", "train.checkpoint_every=100"),
    *("encoder.length_buckets=1", "encoder.block_sizes=1"),
)
QUICK = (
    Part(
        "tiny/imitate+pqn",
        config="configs/hotpotqa.py:tiny",
        fields=(
            *SMALL,
            *("stages=imitate,pqn", "imitate.steps=3"),
            *("encoder.scratch.layers=1", "encoder.scratch.hidden=16"),
        ),
        flags=("--checkpoint=last",),
        ways=LAST,
        scores=FACTS,
        seeds=SEEDS[:1],
        compared=("untrained", "one look-up"),
    ),
    Part(
        "tiny/harr",
        config="configs/harr_grpo.py:tiny",
        fields=("train.steps=2", "train.eval_every=2", "train.checkpoint_every=2"),
        flags=("--checkpoint=last",),
        ways=HARR[0].ways,
        scores=("f1", "recall"),
        seeds=SEEDS[:1],
        compared=("untrained",),
    ),
    *_rows(TWO_WIKI)[:2],
)
