"""Reads the final answer, a judge's verdict or a JSON object from a model's text.

The prompts ask for a last line `Final answer: …`. Models put it in bold, in a heading, in the
middle of a line, several times or not at all, and may think aloud first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from qrag_jax.llm.outcomes import Failure

_THINK, _END_OF_THINK = "<think>", "</think>"
_DECORATION = r"[ \t*_`#>]*"
_COLON = r"[:：꞉]"
# "Final answer:", "**Final Answer**:", "final answer is:"; the answer follows.
_MARKED = re.compile(
    rf"final[ \t_-]+answer[ \t*_`\"']*(?:(?:is|was|would[ \t]+be)\b[ \t*_]*|=[ \t]*)?{_COLON}",
    re.IGNORECASE,
)
# Less clear: "the final answer is Paris", "Final answer - Paris", a heading "Final answer" on a
# separate line, and a line "Answer: Paris".
_LOOSELY_MARKED = re.compile(
    rf"final[ \t_-]+answer[ \t*_`\"']*(?:is\b|=|[-–—](?=\s))|"
    rf"^{_DECORATION}(?:the[ \t]+)?final[ \t_-]+answer{_DECORATION}$|"
    rf"^{_DECORATION}answer{_DECORATION}{_COLON}",
    re.IGNORECASE | re.MULTILINE,
)
_FENCE = re.compile(r"^\s*(?:```|~~~)[\w+-]*[ \t]*$")
_BOXED = re.compile(r"\\boxed\{(?:\\text\{)?([^{}]*)\}?\}")
_LIST_ITEM = re.compile(r"^\s*(?:[#>]+\s+|[-*+•]\s+)*")
# Characters that may enclose an answer: first → last.
_WRAPPERS = dict(zip("$\"'“‘«„「([<", "$\"'”’»“」)]>", strict=True))
_TRAILING = " \t.,;:!…。、"

_YES = ("yes", "true", "correct", "right", "agree")
_NO = ("no", "false", "incorrect", "wrong", "disagree")
_YES_OR_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_VERDICT = re.compile(
    r"(?:(?:answer|verdict)\s*:\s*)?(yes|no)(?=$|\s*[,.;:!–—(\n-])", re.IGNORECASE
)


def final_answer(text: str, finish_reason: str = "stop", thinks: bool = False) -> str | Failure:
    """The answer that a model's text ends with, without markdown, quotes and trailing punctuation.

    Only the text after the last `</think>` is read. The answer is the first of these that exists:

    1. The first line after the last "Final answer:" that has text after it, on the same line or
       below. A code fence there is skipped.
    2. The same after a less clear mark: "final answer is …", "Final answer - …", a heading "Final
       answer" or a line "Answer: …".
    3. The last line, because a model asked for a short answer often says nothing else.

    A line without a letter or digit does not count as text. If `finish_reason` is "length", the
    text was cut off, and an answer counts only if its line is complete. `thinks`: the chat template
    may have opened the thinking in the prompt, so that a text that was cut off before any
    `</think>` is all thinking.
    """
    said = without_thinking(text, thinks and finish_reason == "length")
    if isinstance(said, Failure):
        return said
    lines = _lines(said, 0, len(said))
    if not lines:
        return Failure("no_text", "there is no text to read an answer from.")
    line, end = _marked(said) or lines[-1]
    if finish_reason == "length" and not said[end:]:
        return Failure("cut_off", "the text was cut off before the answer's end; raise max_tokens.")
    return line


def is_marked(text: str) -> bool:
    """Whether the text after the thinking has a mark such as "Final answer:" with text after it."""
    said = without_thinking(text)
    return isinstance(said, str) and _marked(said) is not None


def verdict(text: str, finish_reason: str = "stop", thinks: bool = False) -> bool | Failure:
    """A judge's yes (True) or no (False); an unclear verdict is a `Failure`, never a no.

    The final answer must be yes or no, alone or before punctuation ("No, because …"), without the
    other word after it; or true, false, correct, incorrect, right, wrong, agree or disagree, alone.
    If the text has no mark such as "Final answer:", the verdicts on all its lines count, and they
    must agree.
    """
    answer = final_answer(text, finish_reason, thinks)
    if isinstance(answer, Failure):
        return answer
    said = without_thinking(text)
    assert isinstance(said, str)
    lines = [answer] if _marked(said) else [bare_line(line) for line in said.splitlines()]
    verdicts = {polarity for line in lines if (polarity := _polarity(line)) is not None}
    if len(verdicts) != 1:
        return Failure("unclear_verdict", f"the verdict {answer[:80]!r} is neither yes nor no.")
    return verdicts.pop()


def without_thinking(text: str, opened: bool = False) -> str | Failure:
    """What a model says after it has thought; `opened`: the prompt may have opened the thinking."""
    _, closed, said = text.rpartition(_END_OF_THINK)
    if _THINK in said or (opened and not closed):
        return Failure("unfinished_thinking", "the thinking has no end; raise max_tokens.")
    return said


def _marked(said: str) -> tuple[str, int] | None:
    """The first line after the last mark that has text after it, and where the line ends."""
    for mark in (_MARKED, _LOOSELY_MARKED):
        end = len(said)
        for match in reversed(list(mark.finditer(said))):
            if lines := _lines(said, match.end(), end):
                return lines[0]
            end = match.start()
    return None


def _lines(said: str, start: int, end: int) -> list[tuple[str, int]]:
    """The bare lines of `said[start:end]` that have text, and where each ends in `said`."""
    lines = []
    for line in said[start:end].splitlines(keepends=True):
        text = line.rstrip("\r\n")
        bare = "" if _FENCE.match(text) else bare_line(text)
        if any(map(str.isalnum, bare)):
            lines.append((bare, start + len(text)))
        start += len(line)
    return lines


def bare_line(line: str) -> str:
    """The line without markdown, quotes or brackets around it, and without trailing punctuation."""
    if boxed := _BOXED.search(line):
        line = boxed[1]
    line = _LIST_ITEM.sub("", line.replace("**", ""))
    before = None
    while line != before:
        before = line
        line = line.strip(" \t*_`").rstrip(_TRAILING)
        closing = _WRAPPERS.get(line[:1])
        if closing and len(line) > 1 and line.endswith(closing):
            inner = line[1:-1]
            if line[0] not in inner and closing not in inner:
                line = inner
    return line


def _polarity(line: str) -> bool | None:
    if (word := line.casefold()) in _YES + _NO:
        return word in _YES
    words = {token.casefold() for token in _YES_OR_NO.findall(line)}
    if len(words) == 1 and _VERDICT.match(line):
        return words.pop() == "yes"
    return None


_DECODER = json.JSONDecoder()
_MOST_DEEP = 20


def last_object(text: str, names: Collection[str]) -> dict[str, Any] | None:
    """The last JSON object in the text that has all these names; None if there is none.

    Objects inside of other objects do not count. Code fences and words around it do not matter.
    After a few objects that are nested too deep, the rest of the text is not looked at: each of a
    long row of open braces would be tried.
    """
    last, start, deep = None, text.find("{"), 0
    while start >= 0 and deep < _MOST_DEEP:
        value, end = None, start + 1
        try:
            value, end = _DECODER.raw_decode(text, start)
        except ValueError:
            pass
        except RecursionError:
            deep += 1
        if isinstance(value, dict) and value.keys() >= set(names):
            last = value
        start = text.find("{", end)
    return last
