"""The fields every experiment has; other configs start from these and change what they must.

Durations are in optimizer steps, lengths in tokens, batch sizes in questions (whole episodes).
"""

from __future__ import annotations

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder

VARIANTS = ("", "tiny")


def get_config() -> ConfigDict:
    """Q-RAG's settings for a Contriever-sized encoder (arXiv 2511.07328)."""
    config = ConfigDict()
    config.seed = 42  # of the shuffle, the policy's draws and random weights
    config.profile = 0  # steps traced into workdir/profile after the first two of a start, 0: none

    config.encoder = ConfigDict()
    config.encoder.path = "facebook/contriever"  # folder, hub name, "minilm", or "": from scratch
    config.encoder.dtype = "auto"  # of the computation: float32, bfloat16; auto: as the device is
    config.encoder.remat = "none"  # computed again for gradients: none, dots (all but), layers
    # How a row's hidden states become its vector. "" and None: as the model's folder says; "minilm"
    # and folders that say nothing: as Q-RAG does (the mean, times 0.1; the last one of Qwen3).
    config.encoder.pooling = ""  # mean, last, cls
    config.encoder.normalise = placeholder(bool)  # the pooled vector to length 1
    config.encoder.scale = placeholder(float)  # factor on it; None: 1 if normalised, else 0.1
    config.encoder.state_prefix = ""  # text that states begin with, such as "query: "
    config.encoder.chunk_prefix = ""  # text that chunks begin with, such as "passage: "
    # Shares that the trunk drops in training, in the online and the target towers (Q-RAG: 0.1).
    config.encoder.dropout = 0.0  # of hidden states: embeddings, and what blocks add to them
    config.encoder.attention_dropout = placeholder(float)  # of attention's weights; None: the same
    config.encoder.length_buckets = 3  # row lengths that attention is compiled for
    config.encoder.block_tokens = 0  # tokens computed at a time; 0: 512 on CPU, else 8192
    config.encoder.block_sizes = 2  # block sizes compiled, each half of the next
    config.encoder.lora = ConfigDict()  # low-rank adapters, trained instead of the encoder
    config.encoder.lora.rank = 0  # r, 0: the encoder itself is trained
    config.encoder.lora.alpha = 16.0  # an adapter's product is scaled by alpha / r
    config.encoder.lora.dropout = 0.0  # share of an adapter's inputs dropped, in training alone
    # Linear maps that get one: "all-linear", or names as in the model's files: ("query", "value")
    config.encoder.lora.targets = FieldReference("all-linear", field_type=object)
    config.encoder.lora.path = ""  # PEFT folder to start from, whose rank, alpha, targets hold
    config.encoder.scratch = ConfigDict()  # sizes where path is ""
    config.encoder.scratch.layers = 2  # transformer layers
    config.encoder.scratch.hidden = 128  # 2D, width of an embedding
    config.encoder.scratch.heads = 4  # attention heads
    config.encoder.scratch.vocab = 8000  # word pieces at most
    config.encoder.scratch.positions = 512  # longest row

    config.data = ConfigDict()
    config.data.sources = ConfigDict()  # name → weight in the training mixture
    # weights: a source's share of the episodes is its weight. size: it is its weight times its
    # training questions, so that equal weights throw all questions into one heap, as Q-RAG does.
    config.data.mixture = "weights"
    config.data.path = ""  # file, folder, or name=path,name=path; "": from the hub
    config.data.limit = 0  # training records read per source, 0: all
    config.data.max_question_tokens = 64  # longer questions are cut
    config.data.max_chunk_tokens = 220  # a chunk's row, [CLS] and [SEP] counted
    config.data.max_chunk_tokens_in_state = 220  # a chunk's tokens inside a state
    config.data.workers = 0  # processes that build batches ahead; 0: threads
    config.data.cache = ""  # tokens are kept here; "": $QRAG_CACHE or ~/.cache/qrag_jax
    config.data.synthetic = ConfigDict()  # for the source "synthetic" and the path "synthetic"
    config.data.synthetic.hops = (2, 3, 4)  # each as likely
    config.data.synthetic.comparison = 0.2  # share of comparisons among 2 and 4 hops
    config.data.synthetic.chunks = 10  # C, passages per question
    config.data.synthetic.seed = 0  # another seed is another world
    config.data.synthetic.train = 20_000  # questions made
    config.data.synthetic.dev = 500  # questions made for evaluation
    config.data.babilong = ConfigDict()  # for the source "babilong"; path: folder of bAbI files
    config.data.babilong.task = "qa1"  # qa1 to qa20; without files qa1 to qa5
    config.data.babilong.chunks = 100  # C, sentences of a document
    config.data.babilong.noise = ""  # folder of books; "": sentences of an invented world
    config.data.babilong.noise_dev = ""  # books for dev documents; "": some of noise's, held out
    config.data.babilong.noise_repeats = 1  # uses of a sentence in one document, 0: any number
    config.data.babilong.most_facts = 0  # longer stories are left out, 0: those of over C facts
    config.data.babilong.redraw = True  # training: other noise and places in every epoch
    config.data.babilong.seed = 0  # of places, background and generated stories
    config.data.babilong.train = 10_000  # stories generated where there are no files
    config.data.babilong.dev = 1_000  # stories generated for evaluation
    config.data.niah = ConfigDict()  # for the source "niah" where the path is "" or "synthetic"
    config.data.niah.preset = "multivalue"  # or single_1 to _3, multikey_1 to _3, multiquery
    config.data.niah.chunks = 0  # C, sentences of a document, 0: what makes up `tokens`
    config.data.niah.tokens = 4096  # length of a document, roughly
    config.data.niah.noise = ""  # folder of books; "": sentences of an invented world
    config.data.niah.noise_dev = ""  # books for dev documents; "": some of noise's, held out
    config.data.niah.noise_repeats = 1  # uses of a sentence in one document, 0: any number
    config.data.niah.keys = 0  # num_needle_k; 0 or "": the preset's, here and below
    config.data.niah.values = 0  # num_needle_v, of each key
    config.data.niah.queries = 0  # num_needle_q, keys asked for
    config.data.niah.haystack = ""  # noise (a few sentences over and over), essay or needle
    config.data.niah.key_type = ""  # words, numbers or uuids
    config.data.niah.value_type = ""  # words, numbers or uuids
    config.data.niah.redraw = True  # training: another haystack and places in every epoch
    config.data.niah.seed = 0  # of everything drawn
    config.data.niah.train = 10_000  # documents made
    config.data.niah.dev = 1_000  # documents made for evaluation

    config.env = ConfigDict()
    config.env.max_steps = 2  # T, chunks taken per episode
    # Play on when all supporting facts are found or, with a language model's reward, when that
    # completes the episode (config.reward.completion_threshold).
    config.env.never_terminate = True
    config.env.sort_by_index = False  # states list chunks in document order, else as taken
    config.env.positions = (
        "none"  # chunk embeddings are rotated at: none, absolute, random, relative
    )
    config.env.stop_action = False  # an action that ends the episode, besides the chunks

    config.policy = ConfigDict()
    config.policy.alpha = 0.05  # α_0, temperature; α_t = α_0·lr_t / lr_0
    config.policy.top_k_actions = 5  # k, actions drawn from and summed over in V

    config.reward = ConfigDict()
    # r: "ground_truth" ("gt"), from the supporting facts, or of the language model of config.llm
    # at the end of an episode: "answer_em", "answer_f1", "babilong_em", "judge".
    config.reward.name = "ground_truth"
    # Of ground_truth:
    config.reward.penalize_extra_steps = True  # 0.5 + 0.5·n_facts / n_taken instead of 1
    config.reward.per_fact_reward = 0.0  # for every new supporting fact
    config.reward.step_cost = 0.0  # of a chunk that is no supporting fact; gives STOP its sense
    # Of the language model:
    config.reward.scale = 1.0  # factor on the reward
    config.reward.prompt = "auto"  # in qrag_jax/llm/text/templates, or a .txt file; auto: by data
    # None: the model is asked once, at the end. A number: after every step, and the first reward
    # (with its scale) that is not below completes the episode: no step after it has one.
    config.reward.completion_threshold = placeholder(float)
    # K, updates between an episode's play and its own: so long the model may take to answer while
    # the device goes on. 0: strictly on-policy.
    config.reward.staleness = 1
    config.reward.max_failure_share = 0.5  # of a batch without rewards, above which the run pauses

    config.pqn = ConfigDict()
    config.pqn.gamma = 0.99  # γ, discount
    config.pqn.lambda_ = 0.5  # λ of the returns
    config.pqn.tau = 0.02  # τ, step of the target towers
    config.pqn.learning_start = 200  # the first 2·this environment steps act at random

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 1.5e-5  # lr_0, peak
    config.optimizer.weight_decay = 5e-4  # decoupled, on all parameters
    config.optimizer.beta1 = 0.9  # β_1
    config.optimizer.beta2 = 0.98  # β_2
    config.optimizer.eps = 1e-6  # ε
    config.optimizer.clip_norm = 2.0  # global norm of the gradient
    # After warm-up: constant, linear, cosine (the usual half of one) or quarter_cosine (Q-RAG's).
    config.optimizer.schedule = "quarter_cosine"
    config.optimizer.final_ratio = 0.1  # last learning rate over the peak
    config.optimizer.warmup_steps = 1000  # linear rise to lr_0

    config.train = ConfigDict()
    config.train.steps = 10_000  # optimizer steps
    config.train.batch_size = 48  # questions per optimizer step
    config.train.accumulation = 4  # micro-batches a step is computed in
    config.train.log_every = 10  # steps a line of metrics averages over
    config.train.eval_every = 250  # steps between evaluations
    config.train.checkpoint_every = 250  # steps between saves of the whole state
    # Steps in a row that may be left out for a loss or gradient that is not finite; 0: any number
    config.train.max_skipped_steps = 10

    config.eval = ConfigDict()
    config.eval.path = ""  # data to evaluate on; "": the dev part of data.path
    config.eval.samples = 500  # fixed questions scored during training, 0: all
    # The best checkpoint has the highest mean "return" of the full budget, as trained for, or
    # "return_until_found": 1 for a question whose facts are all found (answer key, as in Q-RAG).
    config.eval.best_by = "return"
    config.eval.batch_size = 32  # questions played at once
    config.eval.beam = 1  # W, paths searched by qrag_jax.evaluate; 1 is greedy
    config.eval.beam_score = "policy"  # ranks paths: Σ log π (policy), Σ γ^t·Q (sum), last Q (last)
    config.eval.stop_threshold = float("-inf")  # an episode ends before a Q not above this
    config.eval.seed = 42  # draws those questions; names the retrieval log

    config.llm = ConfigDict()  # the language model beside the trainer
    config.llm.url = ""  # of a server that is there, http://127.0.0.1:8000/v1; "": one is started
    config.llm.model = ""  # name that the server knows it by; "": as its folder or on the hub
    config.llm.api_key_env = ""  # environment variable that holds its API key, "": no key
    config.llm.version = ""  # of its weights, part of what answers are kept by
    config.llm.temperature = 0.0  # of answers; 0: greedy, and kept in the cache
    config.llm.max_tokens = 256  # longest answer, thinking counted in
    config.llm.top_p = placeholder(float)  # nucleus; None: the server's
    config.llm.seed = placeholder(int)  # of draws where the temperature is not 0; None: config.seed
    # Of models that can think aloud first; None: off with a server of our own, untold to another
    config.llm.enable_thinking = placeholder(bool)
    config.llm.cut_off = "fail"  # what an answer is that max_tokens cut off: fail or score
    # Longer prompts lose their oldest chunks; 0: what a server of our own leaves, else no limit
    config.llm.max_prompt_tokens = 0
    config.llm.tokenizer = ""  # folder or hub name, counts them; "": that of llm.server.model
    config.llm.concurrency = 32  # requests sent at once
    config.llm.deadline = 300.0  # seconds for a request with all its attempts
    config.llm.attempt_timeout = 120.0  # seconds for one attempt
    config.llm.attempts = 5  # of one request at most
    config.llm.cache = "answers.sqlite"  # greedy answers, in the workdir; "": none are kept
    config.llm.server = ConfigDict()  # vLLM where the url is ""
    config.llm.server.model = ""  # folder or hub name
    config.llm.server.python = ".venv-vllm/bin/python"  # of vLLM's environment: `make sidecar`
    config.llm.server.port = 0  # on 127.0.0.1, 0: a free one
    config.llm.server.devices = ""  # CUDA_VISIBLE_DEVICES, "0,1"; "": the trainer's
    config.llm.server.memory_share = 0.45  # of a GPU's memory, weights and cache together
    config.llm.server.cpu_cache_gib = 0  # of the cache on CPU, 0: as vLLM chooses
    config.llm.server.max_model_len = 4096  # tokens of prompt and answer, 0: the model's
    config.llm.server.dtype = "auto"  # of weights and computation
    config.llm.server.lora_rank = 0  # highest of adapters served, 0: none are
    config.llm.server.publish = False  # weights are handed over: opens development endpoints
    # More of vLLM's that do no harm, by whole names: ("--tensor-parallel-size", "2")
    config.llm.server.arguments = ()
    config.llm.server.log = "vllm.log"  # in the workdir
    config.llm.server.start_timeout = 1800.0  # seconds until it must answer
    config.llm.server.restarts = 5  # in a row, then it is given up

    config.runtime = ConfigDict()
    config.runtime.mesh = (-1, 1, 1)  # devices along data, fsdp, tensor; -1: the rest
    # (regex, strategy) by parameter, the first found in its name holds: "model" is as the model's
    # own rules say, "fsdp" splits large arrays over the mesh axis fsdp, "column" and "row" the
    # outputs or inputs of a kernel over the axis tensor, too, "replicate" copies to every device.
    config.runtime.sharding = ((".*", "model"),)
    return config


def tiny(config: ConfigDict) -> ConfigDict:
    """Shrinks an experiment to seconds on any laptop, offline: small encoder, invented questions
    in the experiment's own file format."""
    config.encoder.path = ""
    config.encoder.scratch.update(layers=2, hidden=32, heads=2, vocab=500, positions=256)
    config.encoder.length_buckets = 2
    config.data.path = "synthetic"
    config.data.max_chunk_tokens = 48
    config.data.max_chunk_tokens_in_state = 48
    config.data.synthetic.update(hops=(2,), chunks=8, train=64, dev=16)
    config.env.max_steps = 2
    config.pqn.learning_start = 8
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 2
    config.train.update(
        steps=6, batch_size=8, accumulation=1, log_every=2, eval_every=3, checkpoint_every=3
    )
    config.eval.update(samples=8, batch_size=8)
    return config


def minilm(config: ConfigDict) -> ConfigDict:
    """The 22M-parameter MiniLM with settings that learn within minutes on a CPU."""
    config.encoder.path = "minilm"
    config.data.max_chunk_tokens = 128
    config.data.max_chunk_tokens_in_state = 126
    config.policy.alpha = 0.01
    config.pqn.learning_start = 0  # the pretrained encoder explores better than chance
    config.optimizer.learning_rate = 5e-5
    config.optimizer.weight_decay = 0.01
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 10
    config.train.update(
        steps=160, batch_size=4, accumulation=1, log_every=10, eval_every=80, checkpoint_every=40
    )
    config.eval.update(samples=100, batch_size=16)
    return config


def contriever(config: ConfigDict) -> ConfigDict:
    """Contriever as in Q-RAG: the mean of its hidden states, times 0.1, and that run's constants
    (BabiLong's: 128 transitions an update)."""
    config.encoder.path = "facebook/contriever"
    config.encoder.update(pooling="mean", normalise=False, scale=0.1)
    config.policy.alpha = 0.01
    config.pqn.update(lambda_=0.65, tau=0.1)
    config.optimizer.update(
        learning_rate=5e-5, weight_decay=0.01, schedule="linear", final_ratio=0.0
    )
    config.train.update(steps=50_000, batch_size=128 // config.env.max_steps, accumulation=2)
    return config


def e5(config: ConfigDict) -> ConfigDict:
    """multilingual-e5-large (XLM-R, 560M) as published: the normalised mean, its two prefixes.

    The constants stay: they are those of Q-RAG's E5 run on HotpotQA.
    """
    config.encoder.path = "intfloat/multilingual-e5-large"
    config.encoder.update(pooling="mean", normalise=True, scale=1.0)
    config.encoder.state_prefix = "query: "
    config.encoder.chunk_prefix = "passage: "
    return config


def gte(config: ConfigDict) -> ConfigDict:
    """gte-multilingual-base (NewModel, 305M) as published: the normalised state of its first token.
    Constants of Q-RAG's run with it on HotpotQA and MuSiQue."""
    config.encoder.path = "Alibaba-NLP/gte-multilingual-base"
    config.encoder.update(pooling="cls", normalise=True, scale=1.0)
    config.policy.alpha = 0.005
    config.pqn.lambda_ = 0.6
    config.optimizer.update(
        learning_rate=5e-6, weight_decay=0.001, schedule="linear", final_ratio=0.1
    )
    config.train.update(steps=70_000, batch_size=32 // config.env.max_steps, accumulation=2)
    return config


def qwen3(config: ConfigDict) -> ConfigDict:
    """Qwen3-Embedding-0.6B as published: the normalised last hidden state, an instruction before
    the question. Constants of Q-RAG's run with it; low-rank adapters as in HARR's (arXiv
    2602.03645)."""
    config.encoder.path = "Qwen/Qwen3-Embedding-0.6B"
    config.encoder.update(pooling="last", normalise=True, scale=1.0)
    config.encoder.state_prefix = (
        "Instruct: Given a question and the passages found so far, retrieve the passage that is "
        "needed next\nQuery:"
    )
    config.encoder.lora.update(rank=32, alpha=64.0)
    config.policy.alpha = 0.005
    config.pqn.lambda_ = 0.65
    config.optimizer.update(
        learning_rate=5e-5, weight_decay=0.01, schedule="linear", final_ratio=0.0
    )
    config.train.update(steps=50_000, batch_size=128 // config.env.max_steps, accumulation=2)
    return config


SIZES = {"tiny": tiny, "minilm": minilm}
# Pretrained encoders that people use; --config.encoder.path=FOLDER takes another of that kind.
ENCODERS = {"contriever": contriever, "e5": e5, "gte": gte, "qwen3": qwen3}


def variant(config: ConfigDict, arg: str, known: tuple[str, ...] = VARIANTS) -> ConfigDict:
    """Applies the part of `--config=FILE:VARIANT` after the colon.

    Raises:
        ValueError: the variant is not one of `known`.
    """
    if arg not in known:
        names = ", ".join(f":{name}" for name in known if name)
        raise ValueError(f"--config: the variant {arg!r} is unknown; use {names} or none.")
    changes = SIZES | ENCODERS
    return (changes[arg](config) if arg in changes else config).lock()
