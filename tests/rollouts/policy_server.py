"""A real HTTP server that samples from a language model, as vLLM does: ids, versions, hand-over.

Its weights and adapters come from the folders that it is given by HTTP, as a client wrote them. It
draws by the program of the device sampler, with keys from the seeds of the requests.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.models.files.peft import read_adapters
from qrag_jax.models.pretrained_lm import load_language_model, table_of
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.rollouts.device_sampler import DeviceSampler
from qrag_jax.rollouts.scored_turns import turn_log_probs
from qrag_jax.rollouts.token_sampler import SampleRequest, SamplingConfig
from tests.json_server import Call, listening

Change = Callable[[dict[str, Any], dict[str, Any]], None]


@dataclasses.dataclass
class PolicyServer:
    """Serves one folder.

    Attributes:
        folder: of the model.
        url: of its API.
        asked: bodies of the requests for turns, in the order in which they came.
        loaded: adapters by their names, the oldest first.
        unloaded: names of those that were unloaded.
        most_rank: above it an adapter is refused.
        change: (request, choice) changes a turn before it is sent.
        before: is called before each turn.
        is_raw: it gives log-probabilities at temperature 1, as vLLM does by default.
        tokenizer: that it cuts texts with.
    """

    folder: Path
    sampling: SamplingConfig
    url: str = ""
    name: str = "tiny"
    asked: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    loaded: dict[str, Params] = dataclasses.field(default_factory=dict)
    unloaded: list[str] = dataclasses.field(default_factory=list)
    most_rank: int = 8
    change: Change = lambda request, choice: None
    before: Callable[[], None] = lambda: None
    is_raw: bool = False

    def begin(self) -> None:
        """Forgets what it was asked, and all that it was told to do otherwise."""
        fields = {each.name: each for each in dataclasses.fields(self)}
        for name in ("most_rank", "change", "before", "is_raw"):
            setattr(self, name, fields[name].default)
        self.asked, self.loaded, self.unloaded = [], {}, []
        self.tokenizer = self._tokenizer

    def __post_init__(self) -> None:
        found = load_language_model(self.folder)
        self._table = table_of(found.model_config["model_type"])
        self._tokenizer = self.tokenizer = found.tokenizer
        self._model, self._base = found.model, found.params
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
                case "/tokenize":
                    ids = self.tokenizer(body["prompt"], add_special_tokens=False).input_ids
                    return 200, {"tokens": ids, "count": len(ids)}
                case "/v1/load_lora_adapter":
                    return self._load(body["lora_name"], Path(body["lora_path"]))
                case "/v1/unload_lora_adapter":
                    if self.loaded.pop(body["lora_name"], None) is None:
                        return 404, {"error": {"message": "no such adapter"}}
                    self.unloaded.append(body["lora_name"])
                    return 200, "Success"
                case "/v1/completions":
                    self.before()
                    return self._completed(body)
            return 404, {"error": {"message": f"no {call.path}"}}

    def forget(self) -> None:
        """Loses all adapters, as a server that was restarted has."""
        with self._lock:
            self.loaded.clear()

    def _load(self, name: str, folder: Path) -> tuple[int, Any]:
        if name in self.loaded or name in self.unloaded:
            return 400, {"error": {"message": f"{name} was loaded before"}}
        sizes, adapters = read_adapters(folder, self._table, self._model.trunk)
        if sizes.rank > self.most_rank:
            told = f"LoRA rank {sizes.rank} is greater than max_lora_rank {self.most_rank}"
            return 400, {"error": {"message": told}}
        self.loaded[name] = merge(Adapted(self._base, adapters), sizes.scale)
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
        (turn,) = sampler.sample(whole, [SampleRequest(ids, seed, body["max_tokens"])])
        tokens, log_probs = turn.ids.tolist(), turn.log_probs
        if self.is_raw:
            (log_probs,) = turn_log_probs(self._model, whole, [(ids, turn.ids)], (1.0,))
        choice = {
            "index": 0,
            "text": self._tokenizer.decode(tokens),
            "token_ids": tokens,
            "finish_reason": turn.finish,
            "logprobs": {
                "tokens": [str(token) for token in tokens],
                "token_logprobs": log_probs.tolist(),
            },
        }
        self.change(body, choice)
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
        return 200, {"model": body["model"], "choices": [choice], "usage": usage}

    def _sampler(self, temperature: float, stops: tuple[int, ...]) -> DeviceSampler:
        known = temperature, stops
        if known not in self._samplers:
            model = dataclasses.replace(self._model, stop_ids=stops)
            config = dataclasses.replace(self.sampling, temperature=temperature)
            self._samplers[known] = DeviceSampler(model, config)
        return self._samplers[known]
