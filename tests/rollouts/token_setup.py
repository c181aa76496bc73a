"""Token batches by hand, a random model that calls tools, and a server that samples from one."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file

from examples.worlds.scripts import bridge_question
from qrag_jax.environments.tools import COMPLETE, RETRIEVE
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.tool_calls import HERMES, ToolCall, write_call
from qrag_jax.models.compute.lora import Adapted, folded
from qrag_jax.models.first_language_model import (
    END,
    TinyLMConfig,
    load_language_model,
    write_tiny_lm,
)
from qrag_jax.models.trunks.families import DECODERS
from qrag_jax.models.trunks.transformer import Params
from qrag_jax.rollouts.device_sampler import DeviceSampler, RoundSampler
from qrag_jax.rollouts.token_episodes import Episode
from qrag_jax.rollouts.trajectories import Sampled, SampleRequest, SamplingConfig, TokenBatch
from tests.json_server import Call, listening
from tests.support.adapters import read_adapters

GROUPS, MEMBERS, VOCAB, LENGTH = 4, 3, 29, 24


def made_batch(seed: int = 0) -> TokenBatch:
    """`GROUPS` × `MEMBERS` episodes, one of them with a second row, and a row of padding.

    Episode 4 has no reward, and of episode 7 nothing trains.
    """
    draw = np.random.default_rng(seed)
    episodes = GROUPS * MEMBERS
    rows = episodes + 2
    tokens = draw.integers(1, VOCAB, (rows, LENGTH)).astype(np.int32)
    lengths = draw.integers(14, 21, rows).astype(np.int32)
    log_prob_mask = np.zeros((rows, LENGTH), bool)
    leader, shared = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
    episode = np.append(np.arange(episodes), [5, episodes]).astype(np.int32)
    for row in range(episodes):
        group = row // MEMBERS
        prompt, first = 4 + group, group * MEMBERS
        tokens[row, :prompt] = tokens[first, :prompt]
        leader[row], shared[row] = first, prompt
        end = lengths[row]
        log_prob_mask[row, prompt : prompt + 4] = True  # a call; then a result; then the answer
        log_prob_mask[row, prompt + 7 : end] = True
    log_prob_mask[episodes, 6:12] = True
    scored = np.arange(episodes) != 4
    loss_mask = (
        log_prob_mask
        & (scored & (np.arange(episodes) != 7))[np.minimum(episode, episodes - 1)][:, None]
    )
    sampler = np.where(log_prob_mask, draw.normal(-3.3, 0.2, tokens.shape), 0).astype(np.float32)
    rewards = draw.random(episodes).astype(np.float32)
    rewards[:MEMBERS] = 0.5  # nothing can be learned from the first group
    return TokenBatch(
        tokens=tokens,
        lengths=lengths,
        log_prob_mask=log_prob_mask,
        loss_mask=loss_mask,
        sampler_log_probs=sampler,
        episode=episode,
        leader=leader,
        shared=shared,
        rewards=rewards,
        scored=scored,
    )


PAIRS, LONGEST = 7, 24
CUT_OFF, APART = 4, 5  # a pair whose loser is masked, and one apart


def made_pairs() -> TokenBatch:
    """Winners and losers with a common prompt, of different lengths; a row of padding behind.

    Rows of the pair `APART` are not known to share anything.
    """
    draw, episodes = np.random.default_rng(5), 2 * PAIRS
    rows = episodes + 1
    tokens = draw.integers(1, VOCAB, (rows, LONGEST)).astype(np.int32)
    number = np.arange(rows, dtype=np.int32)
    leader, shared = number.copy(), np.zeros(rows, np.int32)
    lengths, mask = np.full(rows, 3, np.int32), np.zeros((rows, LONGEST), bool)
    for row in range(episodes):
        prompt, winner = 5 + row // 2, row - row % 2
        tokens[row, :prompt] = tokens[winner, :prompt]
        if row // 2 != APART:
            leader[row], shared[row] = winner, prompt
        lengths[row] = prompt + draw.integers(2, 11)
        mask[row, prompt : lengths[row]] = True
    loser = 2 * CUT_OFF + 1
    return TokenBatch(
        tokens=tokens,
        lengths=lengths,
        log_prob_mask=mask,
        loss_mask=mask & (number != loser)[:, None],
        sampler_log_probs=np.zeros(tokens.shape, np.float32),
        episode=number,
        leader=leader,
        shared=shared,
        rewards=np.zeros(episodes, np.float32),
        scored=number[:-1] != loser,
    )


# vLLM's attention on CPU wants heads of 32 numbers.
_WIDTHS = {"layers": 1, "hidden": 64, "heads": 2, "key_heads": 1, "head_dim": 32}
SIZES = TinyLMConfig(intermediate=64, vocab=400, positions=700, **_WIDTHS)
_QUESTIONS = 6  # whose names are searched for
_LIKELY = 0.4  # standard deviation of the head's rows of calls; others have 0.05
_TENSORS, _CONFIG, _TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


def write_calling_model(folder: Path, seed: int = 0, more: Sequence[ToolCall] = ()) -> Path:
    """Writes the folder of such a model; returns it. With `more` calls it says little else."""
    questions = [bridge_question(0, "train", index) for index in range(_QUESTIONS)]
    texts = [f"{q.question} {p.text}" for q in questions for p in q.passages]
    write_tiny_lm(folder, texts, SIZES, seed=seed)
    calls = [_call(RETRIEVE, query=question.passages[0].text[:30]) for question in questions]
    calls += [_call(COMPLETE, final_answer="Oslo"), _call(COMPLETE, reasoning="So it is.")]
    calls += [_call(COMPLETE, final_answer="x", cited_doc_ids=[str(n)]) for n in range(1, 5)]
    calls += [write_call(call, HERMES) for call in more]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / _TOKENIZER))
    tokenizer.add_tokens([tokenizers.AddedToken(call, normalized=False) for call in calls])
    tokenizer.save(str(folder / _TOKENIZER))
    draw, words = np.random.default_rng(seed), tokenizer.get_vocab_size()
    tensors = load_file(folder / _TENSORS)
    width = SIZES.hidden
    vectors = draw.normal(0, 0.5, (words, width))
    head = draw.normal(0, 0.05, (words, width))
    likely = [tokenizer.token_to_id(item) for item in (END, *calls)]
    head[likely] = draw.normal(0, _LIKELY, (len(likely), width))
    if more:  # all tokens have one large number, by which the rows of calls are likely
        vectors[:, 0] = 4
        head[likely] *= 0.25
        head[likely, 0] += 0.9
        head[likely[0], 0] += 0.4
    tensors["model.embed_tokens.weight"] = vectors.astype(np.float32)
    tensors["lm_head.weight"] = head.astype(np.float32)
    save_file(tensors, folder / _TENSORS, metadata={"format": "pt"})
    config = json.loads((folder / _CONFIG).read_text())
    config |= {"vocab_size": words, "tie_word_embeddings": False}
    (folder / _CONFIG).write_text(json.dumps(config))
    return folder


def _call(name: str, **arguments: object) -> str:
    return write_call(ToolCall(name, arguments), HERMES)


@dataclasses.dataclass
class PolicyServer:
    """Serves one folder.

    Attributes:
        asked: bodies of the requests for turns.
        loaded: adapters by their names, the oldest first.
    """

    folder: Path
    sampling: SamplingConfig
    url: str = ""
    name: str = "tiny"
    asked: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    loaded: dict[str, Params] = dataclasses.field(default_factory=dict)
    unloaded: list[str] = dataclasses.field(default_factory=list)

    def begin(self) -> None:
        """Forgets what it was asked."""
        self.asked, self.loaded, self.unloaded = [], {}, []

    def __post_init__(self) -> None:
        result = load_language_model(self.folder)
        self._table = DECODERS[result.model_config["model_type"]]
        self._tokenizer = result.tokenizer
        self._model, self._base = result.model, result.params
        self._samplers: dict[tuple[float, tuple[int, ...]], DeviceSampler] = {}
        self._lock = threading.Lock()

    @classmethod
    @contextmanager
    def started(cls, folder: Path, sampling: SamplingConfig, **options: Any) -> Iterator[Any]:
        """Serves while the block runs."""
        server = cls(folder, sampling, **options)
        with listening(server.answer) as url:
            server.url = f"{url}/v1"
            yield server

    def answer(self, call: Call) -> tuple[int, Any]:
        """The status and the body of a reply; calls are answered one at a time."""
        with self._lock:
            body = json.loads(call.body) if call.body else {}
            match call.path:
                case "/v1/models":
                    return 200, {"data": [{"id": name} for name in (self.name, *self.loaded)]}
                case "/v1/load_lora_adapter":
                    return self._load(body["lora_name"], Path(body["lora_path"]))
                case "/v1/unload_lora_adapter":
                    if self.loaded.pop(body["lora_name"], None) is None:
                        return 404, {"error": {"message": "no such adapter"}}
                    self.unloaded.append(body["lora_name"])
                    return 200, "Success"
                case "/v1/completions":
                    return self._completed(body)
            return 404, {"error": {"message": f"no {call.path}"}}

    def _load(self, name: str, folder: Path) -> tuple[int, Any]:
        if name in self.loaded or name in self.unloaded:
            return 400, {"error": {"message": f"{name} was loaded before"}}
        sizes, adapters = read_adapters(folder, self._table, self._model.trunk)
        self.loaded[name] = folded(Adapted(self._base, adapters), sizes.scale)
        return 200, "Success"

    def _completed(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(body)
        whole = self._base if body["model"] == self.name else self.loaded.get(body["model"])
        if whole is None:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        stops = tuple(body["stop_token_ids"])
        sampler = self._sampler(body["temperature"], stops)
        seed = np.array([body["seed"]], np.uint64).view(np.uint32)
        ids = np.array(body["prompt"], np.int32)
        (turn,) = RoundSampler(sampler, whole).sample(
            [SampleRequest(ids, seed, body["max_tokens"])]
        )
        tokens, log_probs = turn.ids.tolist(), turn.log_probs.tolist()
        choice = {
            "index": 0,
            "text": self._tokenizer.decode(tokens),
            "token_ids": tokens,
            "finish_reason": turn.finish,
            "logprobs": {"tokens": [*map(str, tokens)], "token_logprobs": log_probs},
        }
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
        return 200, {"model": body["model"], "choices": [choice], "usage": usage}

    def _sampler(self, temperature: float, stops: tuple[int, ...]) -> DeviceSampler:
        known = temperature, stops
        if known not in self._samplers:
            model = dataclasses.replace(self._model, stop_ids=stops)
            config = dataclasses.replace(self.sampling, temperature=temperature)
            self._samplers[known] = DeviceSampler(model, config)
        return self._samplers[known]


class ScriptedSampler:
    """Says what a function makes of the text so far; no two tokens have one log-probability.

    With `letters` it is not encoded as tokenizers do. `asked` are the requests of each call,
    `drawn` pairs of a request and its turn.
    """

    version = "7"

    def __init__(
        self, tokenizer: Any, say: Callable[[str], str | Failure], *, letters: bool = False
    ) -> None:
        self.tokenizer, self.say, self.letters, self.in_rounds = tokenizer, say, letters, True
        self.asked = list[list[SampleRequest]]()
        self.drawn = list[tuple[SampleRequest, Sampled]]()

    def submit(self, requests: Sequence[SampleRequest]) -> list[Future[Sampled | Failure]]:
        self.asked.append([*requests])
        futures: list[Future[Sampled | Failure]] = [Future() for _ in requests]
        for future, request in reversed([*zip(futures, requests, strict=True)]):
            future.set_result(self.sampled(request))
        return futures

    def read(self, request: SampleRequest, result: Sampled | Failure) -> Sampled | Failure:
        return result

    def sampled(self, request: SampleRequest) -> Sampled | Failure:
        text, stop = self.tokenizer.decode(request.ids.tolist()), self.tokenizer.eos_token_id
        said = self.say(text)
        if isinstance(said, Failure):
            return said
        encode = partial(self.tokenizer, add_special_tokens=False)
        ids = [i for part in (said if self.letters else [said]) for i in encode(part).input_ids]
        ids = [*ids, stop][: request.most]
        first = 1 + sum(len(turn.ids) for _, turn in self.drawn)
        log_probs = -np.arange(first, first + len(ids), dtype=np.float32) / 1000
        finish = "stop" if ids[-1] == stop else "length"
        self.drawn.append((request, Sampled(np.array(ids, np.int32), log_probs, finish)))
        return self.drawn[-1][1]

    def check(self, episodes: Sequence[Episode]) -> None:
        """What trains is what was drawn, each turn once, behind the ids that were asked for."""
        drawn = {turn.log_probs.tobytes(): (request.ids, turn) for request, turn in self.drawn}
        for segment in (segment for episode in episodes for segment in episode.segments):
            row = np.zeros(0, np.int32)
            for turn in segment:
                row = np.concatenate([row, turn.observed])
                context, expected = drawn.pop(turn.log_probs.tobytes())
                np.testing.assert_array_equal(row, context)
                np.testing.assert_array_equal(turn.sampled, expected.ids)
                assert (turn.finish, turn.version) == (expected.finish, self.version)
                row = np.concatenate([row, turn.sampled])
        assert not drawn
