"""Prompts: text files with named slots, which are filled with texts and fitted to a token budget.

A file holds the messages one after the other, each below a line `[system]`, `[user]` or
`[assistant]`. `{name}` is a slot; any other brace is text. The package's files are in `templates/`.
Slots are not filled inside inserted texts: a chunk that contains "{question}" stays as it is.

A slot between marks, `<name>{name}</name>`, is fenced: its text is put on one line. If the marks
stand on lines of their own, the text keeps its lines. If a prompt has marks, all its inserted texts
lose every `<` before the name of a mark, so that they can neither end a slot nor begin another. In
all inserted texts, a space is put after the bracket of the marks that chat templates use
(`<|im_end|>`, `[INST]`, `</think>` …). Half surrogate pairs become U+FFFD.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure, well_formed
from qrag_jax.runtime import whole_files

Messages = tuple[tuple[str, str], ...]  # (role, content) pairs

FOLDER = Path(__file__).parent / "templates"
_ROLE = re.compile(r"^\[(system|user|assistant)\]\n", re.MULTILINE)
_SLOT = re.compile(r"\{([a-z_]+)\}")
_WORD = re.compile(r"\S+")
# Characters without width: a word looks the same with and without them.
_UNSEEN = "[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]*"
_FENCED = re.compile(r"<([a-z_]+)>(\n?)\{\1\}\2</\1>")
# How chat templates mark turns and thoughts; a tokenizer finds these marks in any text.
_CONTROL = re.compile(
    r"(<(?=\||/?s>|/?think>|(?:start|end)_of_turn>|/?SYS>>)|\[(?=/?INST\]))", re.IGNORECASE
)

# The slots that take chunks, and how each joins them.
CHUNK_SLOTS: dict[str, Callable[[Sequence[str]], str]] = {
    "passages": lambda chunks: "\n\n".join(
        f"[{number}] {chunk.strip()}" for number, chunk in enumerate(chunks, 1)
    ),
    "facts": lambda chunks: "\n".join(chunk.strip() for chunk in chunks),
}


@dataclasses.dataclass(frozen=True)
class Prompt:
    path: Path  # the file it comes from
    fingerprint: str  # digest of the file's text
    messages: Messages  # (role, content) pairs, the contents with their slots
    slots: frozenset[str]  # the names of all slots

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def chunk_slot(self) -> str:
        slots = sorted(self.slots & set(CHUNK_SLOTS))
        if len(slots) != 1:
            wanted = " or ".join(f"{{{slot}}}" for slot in CHUNK_SLOTS)
            raise InputError(f"{self.path} has {len(slots)} slots for chunks; write one, {wanted}")
        return slots[0]

    def check(self, *slots: str, optional: Iterable[str] = ()) -> None:
        """Refuses a file that lacks one of the slots, or has another one."""
        if not {*slots} <= self.slots <= {*slots, *optional}:
            raise InputError(
                f"{self.path} has the slots {', '.join(sorted(self.slots)) or 'none'}; write "
                f"{' and '.join(f'{{{slot}}}' for slot in slots)}, and no other"
            )

    def fill(self, texts: Mapping[str, str]) -> Messages:
        self.check(*texts)
        fences = [fence for _, content in self.messages for fence in _FENCED.findall(content)]
        marks = {name for name, _ in fences}
        safe = {slot: harmless(text, marks) for slot, text in texts.items()}
        for name, newline in fences:
            if not newline:
                safe[name] = one_line(safe[name])
        filled = functools.partial(_SLOT.sub, lambda slot: safe[slot[1]])
        return tuple((role, filled(content)) for role, content in self.messages)

    def with_chunks(self, question: str, chunks: Sequence[str]) -> Messages:
        """The messages with the question and the chunks, in the order given."""
        joined = CHUNK_SLOTS[self.chunk_slot](chunks)
        return self.fill({"question": question, self.chunk_slot: joined})


def load(name: str) -> Prompt:
    """Loads the package's prompt `name`, or the file `name` if `name` ends in `.txt`."""
    path = Path(name) if name.endswith(".txt") else FOLDER / f"{name}.txt"
    names = ", ".join(sorted(file.stem for file in FOLDER.glob("*.txt")))
    fix = f"give one of the prompts {names}, or a .txt file"
    with whole_files.reading(path, fix), path.open("rb") as file:
        text = whole_files.bounded_content(file, path).decode()
    before, *parts = _ROLE.split(text)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    messages = tuple((role, content.strip()) for role, content in pairs)
    if not messages or before.strip():
        raise InputError(f"{path} does not begin with a message; start it with a line [user]")
    if messages[-1][0] != "user":
        raise InputError(f"{path} ends with a message of the {messages[-1][0]}; end with [user]")
    slots = frozenset(slot for _, content in messages for slot in _SLOT.findall(content))
    return Prompt(path, hashlib.sha256(text.encode()).hexdigest()[:16], messages, slots)


def harmless(text: str, marks: Iterable[str] = ()) -> str:
    """The text as it may stand in a prompt: it can end nothing and begin nothing there.

    `marks` are the names of the tags that mean something in the prompt, such as "passages".
    """
    safe = _CONTROL.sub(r"\1 ", well_formed(text))
    pattern = _marks(tuple(sorted(marks)))
    return safe if pattern is None else pattern.sub("", safe)


def one_line(text: str) -> str:
    return " ".join(text.split())


@functools.cache
def _marks(names: tuple[str, ...]) -> re.Pattern[str] | None:
    """Matches the opening bracket of what a model could take for a mark with one of these names.

    Characters other than letters and digits may stand between the bracket and the name, and between
    the words of the name. Invisible characters may stand inside its words.
    """
    if not names:
        return None
    words = "|".join(r"[\W_]*".join(map(_UNSEEN.join, name.split("_"))) for name in names)
    return re.compile(rf"[<＜‹〈⟨](?=[\W_]*(?:{words})(?![^\W_]))", re.IGNORECASE)


class Fitted(NamedTuple):
    messages: Messages
    cut_chunks: int = 0  # number of whole chunks left out
    cut_characters: int = 0  # of these chunks and of the chunk that was shortened, together


def fit(
    prompt: Prompt,
    question: str,
    chunks: Sequence[str],
    max_prompt_tokens: int,
    count: Callable[[Messages], int],
) -> Fitted | Failure:
    """Fills the prompt with the whole question and the chunks that fit; cuts the oldest first.

    It leaves out as few whole chunks as possible, from the first one on. Of the next one it keeps
    the beginning, with as many words as fit. If the question does not fit even without any chunk,
    the result is a `Failure` with cause "too_long".

    Args:
        chunks: the oldest first; they are shown in this order.
        max_prompt_tokens: 0: no limit.
        count: counts the tokens of messages as the model reads them. More text must not have fewer
            tokens.
    """
    sizes = [max(len(_WORD.findall(chunk)), 1) for chunk in chunks]
    ends = [0, *itertools.accumulate(sizes)]

    def kept(lost: int) -> list[str]:
        """The chunks without so many words."""
        first = bisect.bisect_right(ends, lost) - 1
        left = [*chunks[first:]]
        if lost > ends[first]:
            words = [*_WORD.finditer(left[0])]
            left[0] = left[0][: words[ends[first + 1] - lost - 1].end()]
        return left

    def tokens(lost: int) -> int:
        return count(prompt.with_chunks(question, kept(lost)))

    lost = 0
    if max_prompt_tokens and tokens(0) > max_prompt_tokens:
        lost = least(0, ends[-1], lambda number: tokens(number) <= max_prompt_tokens)
        if (fewest := tokens(lost)) > max_prompt_tokens:
            message = f"the question alone has {fewest} tokens of {max_prompt_tokens} allowed."
            return Failure("too_long", message, attempts=0)
    shown = kept(lost)
    characters = sum(map(len, chunks)) - sum(map(len, shown))
    return Fitted(prompt.with_chunks(question, shown), len(chunks) - len(shown), characters)


def least(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The smallest number from `low` to `high` from which on `holds` is true; else `high`."""
    return low + bisect.bisect_left(range(low, high), True, key=holds)
