"""Questions with the chunks that a retriever found: how a model is asked and its answer scored.

If there is no answer (the call failed, the prompt is too long, the text cannot be read), the result
is a value with a `cause`, never a wrong answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qrag_jax.data.sample import Sample
from qrag_jax.data.sources import answer_rule
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import ChatRequest, Failure, Outcome
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.extraction import NoAnswer
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import Prompt
from qrag_jax.metrics import answers
from qrag_jax.metrics.answers import Scores

AUTO = "auto"
JUDGE = "judge"


@dataclasses.dataclass(frozen=True)
class Question:
    id: str  # the sample's id
    question: str  # the question's text
    # (index in the document, text) pairs in the order taken, the oldest first; for prompts that
    # tell a story, in the order of the document
    chunks: tuple[tuple[int, str], ...]
    gold: tuple[str, ...]  # the right answers
    rule: str  # how the answer is scored
    prompt: Prompt  # how the question is asked
    hops: int  # number of facts that the answer needs
    type: str  # of the question; "" if unknown


class Asking:
    """How the questions of one data set, or of several, are asked and scored.

    The prompt is a name or a file; "auto": that of the task for BABILong documents, "open_qa" for
    others. The metric is a rule of `metrics.answers`; "auto": that of the data set.
    """

    def __init__(self, prompt: str = AUTO, metric: str = AUTO) -> None:
        self.prompt, self.metric = prompt, metric
        self.prompts: dict[str, Prompt] = {}

    def of(self, sample: Sample, taken: Sequence[int]) -> Question:
        """The question of a sample, with the chunks that were taken; see `question`.

        `taken` are chunk indices in the order taken; an index beyond the chunks is STOP.
        """
        chunks = [(index, sample.chunks[index]) for index in taken if index < len(sample.chunks)]
        asked = sample.source, sample.id, sample.question, chunks, sample.answers
        return self.question(*asked, hops=len(sample.support), source=sample.source)

    def question(
        self,
        place: str,
        sample_id: str,
        text: str,
        chunks: Sequence[tuple[int, str]],
        golds: Sequence[str],
        *,
        hops: int,
        type_: str = "",
        source: str = "",
    ) -> Question:
        """The question of one sample, with (index, text) pairs of chunks in the order taken.

        `place` is for errors. Of MuSiQue and BABILong, ids say the hops and the type; a `source` of
        "" is unknown, as of data of one's own.
        """
        right = tuple(dict.fromkeys(gold.strip() for gold in golds if gold.strip()))
        if not right:
            raise InputError(
                f"{place}: sample {sample_id} has no right answer to score against (field 'answer' "
                "is empty); give data with answers"
            )
        usual = answer_rule(source)
        rule = usual if self.metric == AUTO else self.metric
        try:
            answers.score(rule, sample_id, text, "", right)  # check that it can be scored
        except InputError as error:
            raise InputError(f"{place}: sample {sample_id}: {error}") from None
        task = answers.babilong_task(sample_id) if "babilong" in (rule, usual) else ""
        of_musique = sample_id if "musique" in (rule, usual) else ""
        name = self.prompt if self.prompt != AUTO else f"babilong_{task}" if task else "open_qa"
        if (prompt := self.prompts.get(name)) is None:
            self.prompts[name] = prompt = prompts.load(name)
            prompt.with_chunks("", [])  # check that it can be filled
        return Question(
            id=sample_id,
            question=text,
            chunks=tuple(sorted(chunks) if prompt.chunk_slot == "facts" else chunks),
            gold=right,
            rule=rule,
            prompt=prompt,
            hops=answers.musique_hops(of_musique) or hops,
            type=type_ or answers.musique_type(of_musique) or task,
        )


def fitted(question: Question, generation: Generation) -> prompts.Fitted | Failure:
    """Fills the prompt with as much of the chunks as the token budget allows."""
    texts = [text for _, text in question.chunks]
    budget = generation.max_prompt_tokens if generation.count else 0
    count = generation.count or (lambda messages: 0)
    return prompts.fit(question.prompt, question.question, texts, budget, count)


def read_answer(
    question: Question, outcome: Outcome, generation: Generation
) -> tuple[str, Scores] | Failure | NoAnswer:
    found = outcome if isinstance(outcome, Failure) else generation.final_answer(outcome)
    if isinstance(found, Failure | NoAnswer):
        return found
    scored = answers.score(question.rule, question.id, question.question, found, question.gold)
    return found, scored


def judge_request(
    prompt: Prompt, question: str, golds: Sequence[str], prediction: str, generation: Generation
) -> ChatRequest:
    texts = {"question": question, "golds": "; ".join(golds), "prediction": prediction}
    return generation.request(prompt.fill(texts), generation.reads_verdict)
