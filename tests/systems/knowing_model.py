"""A language model that knows how each question is taken apart, behind a real HTTP server.

It plays the part of a model that follows every prompt. So an agent that asks it does what the
scripted agent does, and the two can be compared number by number.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping

from qrag_jax.data.sample import Decomposition
from qrag_jax.environments.rag import named
from tests.llm.model_server import Call, Reply

GIVEN_UP = "none of them"


@dataclasses.dataclass(frozen=True)
class KnowingModel:
    """The script of a `ModelServer`."""

    decompositions: Mapping[str, Decomposition]  # by the text of the question

    def __call__(self, call: Call) -> Reply:
        return Reply() if call.path.endswith("/rerank") else Reply(self._text(call))

    def _text(self, call: Call) -> str:
        if "messages" not in call.body:
            return self._search_r1(call.body["prompt"])
        messages = [message["content"] for message in call.body["messages"]]
        if "<passages>" in messages[1]:
            return self._read(messages[1])
        if "<prediction>" in messages[1]:
            golds, said = _between("golds", messages[1]), _between("prediction", messages[1])
            return f"Final answer: {'yes' if said in golds.split('; ') else 'no'}"
        if "<searches>" in messages[1]:
            return f"Final answer: {GIVEN_UP}"
        found = [line.removeprefix("FOUND: ") for line in messages if line.startswith("FOUND: ")]
        whole = self.decompositions[_between("question", messages[1])]
        if "sub_query" in messages[0]:  # the planner's
            found = re.findall(r"FOUND: (.+)", messages[1])
            if len(found) == len(whole.hops):
                return '{"action": "STOP"}'
            sub_query = whole.hops[len(found)].filled(found)
            return json.dumps({"action": "ASK", "sub_query": sub_query})
        if len(found) == len(whole.hops):
            return f"Thought: That is all.\nAnswer: {found[-1]}"
        return f"Thought: The next one.\nSearch: {whole.hops[len(found)].filled(found)}"

    def _read(self, message: str) -> str:
        answer = self._named(_between("question", message), _between("passages", message))
        status = "FOUND" if answer else "NOT_FOUND"
        return f"I have read them.\n{json.dumps({'status': status, 'answer': answer})}"

    def _search_r1(self, text: str) -> str:
        question = next(q for q in self.decompositions if f"{q}<end>" in text)
        whole, found = self.decompositions[question], list[str]()
        turns = re.findall(r"<search>(.*?)</search>\s*<information>(.*?)</information>", text, re.S)
        for sub_query, passages in turns:
            if answer := self._named(sub_query.strip(), passages):
                found.append(answer)
        thought = f"<think>I know {found[-1] if found else 'nothing'}.</think>"
        if text.endswith("<answer>"):
            return f"{GIVEN_UP}</answer>"
        if len(found) == len(whole.hops):
            return f"{thought}<answer>{found[-1]}</answer>"
        return f"{thought}<search>{whole.hops[len(found)].filled(found)}</search>"

    def _named(self, sub_query: str, text: str) -> str:
        """The answer of the hop that asks this, if the text names it."""
        for whole in self.decompositions.values():
            for hop in whole.hops:
                pattern = re.escape(hop.text).replace(r"\#1", ".+").replace(r"\#2", ".+")
                if re.fullmatch(pattern, sub_query) and (found := named(hop.answers, [text])):
                    return found
        return ""


def _between(mark: str, text: str) -> str:
    found = re.search(rf"<{mark}>(.*?)</{mark}>", text, re.S)
    assert found is not None
    return found[1].strip()
