"""A small chat tokenizer, and a sampler whose turns are written by a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from transformers import PreTrainedTokenizerFast

from qrag_jax.llm.outcomes import Failure
from qrag_jax.models.files.tiny_lm import CHAT_TEMPLATE, END, _trained_tokenizer
from qrag_jax.rollouts.token_sampler import LENGTH, STOP, Sampled, SampleRequest

_TEXTS = ["system user assistant tool_response a few words to learn from, and numbers 0 1 2"]


def chat_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=_trained_tokenizer(_TEXTS, 400),
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


class ScriptedSampler:
    """Says what a function makes of the text so far; every token has a log-probability of its own.

    Attributes:
        drawn: the ids before each turn, and the turn.
    """

    in_rounds = True
    version = "v"

    def __init__(self, tokenizer: PreTrainedTokenizerFast, say: Callable[[str], str]) -> None:
        self.drawn: list[tuple[np.ndarray, Sampled]] = []
        self.keys: list[tuple[int, ...]] = []
        self._tokenizer, self._say, self._count = tokenizer, say, 0

    def sampled(self, request: SampleRequest) -> Sampled:
        before = self._tokenizer.decode(request.ids.tolist(), skip_special_tokens=False)
        text = self._say(before) + END
        ids = np.array(self._tokenizer(text, add_special_tokens=False).input_ids, np.int32)
        finish = STOP if len(ids) <= request.most else LENGTH
        ids = ids[: request.most]
        first = self._count
        self._count += len(ids)
        log_probs = -(np.arange(first, self._count, dtype=np.float32) + 1) / 1000
        turn = Sampled(ids, log_probs, finish)
        self.drawn.append((request.ids, turn))
        self.keys.append(tuple(request.key.tolist()))
        return turn

    def submit(self, requests: Sequence[SampleRequest]) -> list[Future[Sampled | Failure]]:
        done: list[Future[Sampled | Failure]] = []
        for request in requests:
            done.append(Future())
            done[-1].set_result(self.sampled(request))
        return done
