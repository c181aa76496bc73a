"""Boolean search: the passages that a query's tree matches, ranked by BM25.

Words are read as BM25 reads them, so that case and, with a stemmer, endings do not matter. What
holds several words, such as `well-known`, is a phrase, and so is a run of Chinese characters. A
word that BM25 leaves out, which is a stop word or too short for its expression, is left out of the
query, too: `the AND cat` and `the OR cat` are `cat`. Within a phrase a stop word stands for any
word: "bank of Norway" finds "bank in Norway", and not "bank Norway". `cardio*` is all words of the
corpus that begin so, stop words left out, joined by OR; they count as what they are stemmed to. A
field has no effect.

Passages that match are ranked by BM25 of the words that are looked for, which are those under no
NOT. Those that match with a score of 0, such as those that `cat OR NOT dog` finds for want of dogs,
come last.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
import json
import re
import unicodedata
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Index, Words
from qrag_jax.retrieval.index_folder import BOOLEAN, NAME, Manifest, read_manifest, write_manifest
from qrag_jax.retrieval.protocol import Hits, Queries, Where, as_hits, best
from qrag_jax.runtime.whole_files import reason, replacing, write_whole

AND, OR, NOT, LEAF, FIELD = "AND", "OR", "NOT", "leaf", "field"
_OPENING = (LEAF, NOT, "(")  # kinds that an operand begins with
_ARRAYS, _FORMS = ("passages", "places", "ends", "words"), "forms.json"
DEEPEST = 50  # NOTs and parentheses within each other; the reader calls itself for each
_QUOTES = '"\u201c\u201d\u201e\u201f'
# Each alternative goes on for one class of characters, so that nothing is read twice.
_TOKEN = re.compile(
    rf"""(?P<parenthesis>[()])
    |[{_QUOTES}](?P<phrase>[^{_QUOTES}]*)[{_QUOTES}]
    |\[(?P<field>[^\[\]]*)\]
    |(?P<word>[^\s()\[\]{_QUOTES}]+)
    |(?P<stray>\S)""",
    re.VERBOSE | re.DOTALL,
)
_NOTHING = Hits(np.zeros(0, np.int64), np.zeros(0, np.float32))


class Operator(NamedTuple):
    """AND or OR of two operands or more, or NOT of one."""

    kind: str
    nodes: tuple[Node, ...]


# A text is a word, or the words of a phrase with one space between; `*` ends the beginning of one.
Node: TypeAlias = str | Operator


def parse_boolean(text: str) -> Node:
    """Reads a query; takes time in proportion to its length.

        query:      and ("OR" and)*
        and:        neighbours ("AND" neighbours)*
        neighbours: operand operand*
        operand:    "NOT" operand | "(" query ")" | (word | phrase) field?

    So NOT binds closest, then AND, then OR. Neighbours without an operator mean AND; `a NOT b` is
    `a AND NOT b`. Operators are upper case only: `and` is a word. Other marks are none: `-cat` is
    the word cat. A phrase stands in straight or curly quotes. An asterisk behind a letter or a
    digit ends the beginning of a word, also in a phrase. A field in brackets, such as PubMed's
    [tiab] or [MeSH Terms], belongs to the word or phrase before it, and is left out of the tree.
    """
    try:
        tokens = deque([*_tokens(text), ("", "")])
        node = _query(tokens, 0)
        if tokens[0][0]:
            raise ValueError(f"{tokens[0][0]} belongs to nothing before it")
        if next(sought(node), None) is None:
            raise ValueError("all words are under NOT; give what to look for, too")
    except ValueError as error:
        raise InputError(f"the query {text!r:.200} cannot be read: {error}.") from None
    return node


def sought(node: Node, negated: bool = False) -> Iterator[str]:
    """The words and phrases that are looked for, in order: under no NOT, or an even number."""
    if isinstance(node, Operator):
        for inner in node.nodes:
            yield from sought(inner, negated != (node.kind == NOT))
    elif not negated:
        yield node


_Tokens = deque[tuple[str, str]]  # kinds and texts that are left; the last one is the end, ("", "")


def _query(tokens: _Tokens, depth: int, level: int = 0) -> Node:
    """Recursive descent: level 0 is `query` of the grammar, 1 `and`, 2 `neighbours`."""
    kind = (OR, AND, AND)[level]
    nodes = [_operand(tokens, depth) if level == 2 else _query(tokens, depth, level + 1)]
    while level == 2 and tokens[0][0] in _OPENING:
        nodes.append(_operand(tokens, depth))
    while level < 2 and _takes(tokens, kind):
        nodes.append(_query(tokens, depth, level + 1))
    return nodes[0] if len(nodes) == 1 else Operator(kind, tuple(nodes))


def _operand(tokens: _Tokens, depth: int) -> Node:
    kind, text = tokens[0]
    if kind not in _OPENING:
        raise ValueError(f"a word is missing before {kind or 'the end'}")
    if depth >= DEEPEST and kind != LEAF:
        raise ValueError(f"there are more than {DEEPEST} NOTs and parentheses in each other")
    tokens.popleft()
    if kind == NOT:
        return Operator(NOT, (_operand(tokens, depth + 1),))
    if kind == LEAF:
        _takes(tokens, FIELD)
        return text
    node = _query(tokens, depth + 1)
    if not _takes(tokens, ")"):
        raise ValueError("a parenthesis is not closed")
    return node


def _takes(tokens: _Tokens, kind: str) -> bool:
    if tokens[0][0] != kind:
        return False
    tokens.popleft()
    return True


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Kinds and texts; the kind of an operator or a parenthesis is its text."""
    for match in _TOKEN.finditer(text):
        kind, said = str(match.lastgroup), " ".join(match[match.lastgroup or 0].split())
        if kind == "stray" or not said:
            raise ValueError(f"{match[0]} has no other half, or nothing within it")
        if kind in ("word", "phrase"):
            for star in re.finditer(r"\*", said):
                at = star.start()
                if not _is_letter(said[max(at - 1, 0) : at]) or _is_letter(said[at + 1 : at + 2]):
                    raise ValueError("an asterisk ends the beginning of a word: cardio*")
            kind = said if kind == "word" and said in (AND, OR, NOT) else LEAF
        yield said if kind == "parenthesis" else kind, said


def _is_letter(character: str) -> bool:
    combines = character and unicodedata.category(character)[0] == "M"
    return bool(combines) or character.isalnum() or character == "_"


# A place of a phrase: how many words the phrase's first one is before it, and the numbers of the
# words of which one stands there, int64 `[n]`.
Slot = tuple[int, np.ndarray]


class BooleanIndex:
    """Boolean search over an index of words; see `protocol.Index`. Several threads may search.

    A query that cannot be read has no hits, for it shall not end a batch of others: read it with
    `parse_boolean` before, to show its writer why. A query has no hits either if of what it looks
    for nothing is left: `the`, and also `the NOT cat`.

    It is an inverted index with places, in memory. Words are BM25's, by their numbers in its
    vocabulary; the occurrences of word w lie from `ends[w]` to `ends[w + 1]`. The place of a word
    is how many words stand before it in its passage, stop words counted, so that a stop word within
    a phrase leaves a gap. The forms, which are the words as passages have them, are kept to find
    those that begin alike: a stemmed word may be shorter than the beginning that is asked for.

    Args:
        ranking: its corpus is read once. At the end, memory holds 40 bytes for each occurrence. A
            KeyError is a word that the index lacks: another version of PyStemmer has built it.
        folder: in a cache, keeps the arrays, which later processes map; None: nothing is kept.
    """

    def __init__(self, ranking: BM25Index, folder: Path | None = None) -> None:
        self.corpus, self.config, self._ranking = ranking.corpus, ranking.config, ranking
        settings = {"words": dataclasses.asdict(self.config)}
        if folder is not None and (folder / NAME).is_file():
            manifest = read_manifest(folder, engine=BOOLEAN)
            if (manifest.corpus, manifest.settings) == (self.corpus.digest, settings):
                self._passages, self._places, self._ends, self._words = (
                    np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS
                )
                self._forms = json.loads((folder / _FORMS).read_text(encoding="utf-8"))
                return
        self._read()
        if folder is None:
            return
        try:
            arrays = self._passages, self._places, self._ends, self._words
            for name, array_of in zip(_ARRAYS, arrays, strict=True):
                with replacing(folder / f"{name}.npy") as file:
                    np.save(file, array_of)
            write_whole(folder / _FORMS, json.dumps(self._forms))
            manifest = Manifest(BOOLEAN, self.corpus.digest, len(self.corpus), settings=settings)
            files = [folder / _FORMS, *(folder / f"{name}.npy" for name in _ARRAYS)]
            write_manifest(folder, manifest, files)
        except OSError as error:  # no right to write there, or a full disk
            print(f"{folder} cannot be written ({reason(error)}), so each process reads the corpus")

    def _read(self) -> None:
        ranking = self._ranking
        words, numbers = Words(ranking.config), ranking.weights.vocab_dict
        known: dict[str, int] = {}  # form → number of its word; -1: a stop word
        ids, places, lengths = array.array("i"), array.array("i"), array.array("i")
        for passage in ranking.corpus:
            before = len(ids)
            for place, form in enumerate(words.forms(passage.whole)):
                number = known.get(form)
                if number is None:
                    word = words.word(form)
                    number = known[form] = -1 if word is None else numbers[word]
                if number >= 0:
                    ids.append(number)
                    places.append(place)
            lengths.append(len(ids) - before)
        flat = np.array(ids, np.int32)
        order = np.argsort(flat, kind="stable")
        passages = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        # `[occurrences]`: the passage of each, in order within a word; its place there, in order.
        self._passages, self._places = passages[order], np.array(places, np.int32)[order]
        self._ends = np.append(0, np.cumsum(np.bincount(flat, minlength=len(numbers))))
        # All but stop words, in order, and the word that each counts as.
        self._forms = sorted(form for form, number in known.items() if number >= 0)
        self._words = np.array([known[form] for form in self._forms], np.int64)

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The k best passages that match and agree with `where`; of equal scores by number."""
        words = Words(self.config)
        allowed = self.corpus.matching(where) if where else None
        return as_hits([self._row(text, words, k, allowed) for text in queries.texts], k)

    def _row(self, text: str, words: Words, k: int, allowed: np.ndarray | None) -> Hits:
        try:
            node = parse_boolean(text)
        except InputError:
            return _NOTHING
        slots = [slot for text in sought(node) for slot in self._slots(text, words)]
        mask = self._matching(node, words)
        if mask is None or not slots:
            return _NOTHING
        numbers = np.flatnonzero(mask if allowed is None else mask & allowed)
        scores = np.zeros(len(self.corpus), np.float32)
        if wanted := np.concatenate([numbers_of for _, numbers_of in slots]).tolist():
            scores = self._ranking.weights.get_scores_from_ids(wanted)
        return best(numbers, scores[numbers], k)

    def _matching(self, node: Node, words: Words) -> np.ndarray | None:
        """bool `[passages]`; None: all words of the node are left out."""
        if isinstance(node, Operator):
            parts = (self._matching(part, words) for part in node.nodes)
            masks = [mask for mask in parts if mask is not None]
            if not masks:
                return None
            if node.kind == NOT:
                return ~masks[0]
            return (np.logical_and if node.kind == AND else np.logical_or).reduce(masks)
        slots = self._slots(node, words)
        if not slots:
            return None
        mask = np.zeros(len(self.corpus), bool)
        if len(slots) == 1:
            for word in slots[0][1]:
                mask[self._passages[self._ends[word] : self._ends[word + 1]]] = True
            return mask
        # The rarest first: each place only thins out what the ones before have left.
        at_place, *others = sorted(map(self._starts, slots), key=len)
        for starts in others:
            at = np.minimum(np.searchsorted(starts, at_place), len(starts) - 1)
            at_place = at_place[starts[at] == at_place] if len(starts) else starts
        mask[at_place >> 32] = True
        return mask

    def _slots(self, phrase: str, words: Words) -> list[Slot]:
        """The places that are not left out, the first one being 0."""
        pairs: list[Slot] = []
        before = 0
        *begun, last = phrase.split("*")
        for piece, is_begun in [*((piece, True) for piece in begun), (last, False)]:
            forms = words.forms(piece)
            for place, form in enumerate(forms, before):
                # Else the asterisk is behind no word.
                ends = place == before + len(forms) - 1 and words.normalised(piece).endswith(form)
                if is_begun and ends:
                    pairs.append((place, self._beginning(form)))
                elif (word := words.word(form)) is not None:
                    number = self._ranking.weights.vocab_dict.get(word)
                    pairs.append((place, np.array([] if number is None else [number], np.int64)))
            before += len(forms)
        return [(place - pairs[0][0], numbers) for place, numbers in pairs]

    def _beginning(self, start: str) -> np.ndarray:
        """int64 `[n]`: the words, each once, that have a form with this beginning."""
        cut = len(start)
        low = bisect.bisect_left(self._forms, start, key=lambda form: form[:cut])
        high = bisect.bisect_right(self._forms, start, low, key=lambda form: form[:cut])
        return np.unique(self._words[low:high])

    def _starts(self, slot: Slot) -> np.ndarray:
        """int64 `[n]`, in order: the starts of a phrase, passage above 32 bits, place below."""
        place, numbers = slot
        pieces = [np.zeros(0, np.int64)]
        for word in numbers:
            span = slice(self._ends[word], self._ends[word + 1])
            # A start before its passage is no place of the phrase's first word, so it drops out.
            starts = self._places[span].astype(np.int64) - place
            pieces.append((self._passages[span].astype(np.int64) << 32) + starts)
        return np.concatenate(pieces) if len(pieces) == 2 else np.sort(np.concatenate(pieces))
