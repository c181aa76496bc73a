"""BM25 (Robertson and Zaragoza, 2009): ranks passages by the query's words in them.

The library is bm25s (Lù, 2024, arXiv 2407.03618), which computes the score of every word in every
passage when the index is built. A search adds up what the query's words have. With tf the count of
word w in passage p, |p| its length in words, df the number of passages with w, N that of all, and
K = k1 (1 - b + b |p| / mean |p|), the score of p is the sum, over the words of the query, a word
twice if it is there twice, of ln(1 + (N - df + 0.5) / (df + 0.5)) tf / (tf + K), as in Lucene.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import itertools
import logging
import re
import sys
import unicodedata
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.errors import InputError, Rule, library, one_of
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.index_folder import BM25, Manifest, emptied, read_manifest, write_manifest
from qrag_jax.retrieval.protocol import Hits, Queries, Where, as_hits, best

# Name → bm25s' list: Lucene's 33 English words; 179 English ones and those of others from NLTK.
STOP_WORDS = {"english": "STOPWORDS_EN", "english_plus": "STOPWORDS_EN_PLUS"}
_OTHERS = "chinese danish dutch french german italian korean norwegian portuguese russian spanish"
for _other in f"{_OTHERS} swedish turkish".split():
    STOP_WORDS[_other] = f"STOPWORDS_{_other.upper()}"
NO_LANGUAGE = "none"


@dataclasses.dataclass(frozen=True)
class BM25Config:
    """How words are found and weighed; the index keeps it and reads queries in the same way.

    The defaults are those of bm25s, and the English stemmer. nDCG@10 on SciFact's dev queries was
    0.701 with them, 0.674 with Anserini's k1 0.9 and b 0.4, and 0.673 without stemmer and stop
    words.
    """

    k1: float = 1.5  # how much further occurrences of a word add; at least 0
    b: float = 0.75  # how much long passages are held back, from 0 to 1
    stemmer: str = "english"  # a language of Snowball, or "porter"; "": words stay whole
    stop_words: str = "english"  # words left out, one of `STOP_WORDS`; "": none

    @classmethod
    def of_language(cls, language: str) -> BM25Config:
        """With the stemmer and the stop words of a language, as far as there are any.

        With "none" words stay whole, and none is left out.
        """
        stemmers, listed = _snowball().algorithms(), STOP_WORDS.keys()
        if language not in {NO_LANGUAGE, *stemmers, *listed}:
            known = ", ".join(sorted({*stemmers, *listed}))
            raise InputError(f"--language is {language!r}; give {NO_LANGUAGE} or one of {known}.")
        return cls(
            stemmer=language if language in stemmers else "",
            stop_words=language if language in listed else "",
        )


# Rules of config fields that become those of `BM25Config`. Without Stemmer any name passes, since a
# training that compares no words does without the package.
STEMMER = Rule(
    lambda name: not name or not find_spec("Stemmer") or name in _snowball().algorithms(),
    "use a language of Snowball, such as english, or porter, or leave it empty",
)
STOPPED = one_of(("", *STOP_WORDS))


# Latin, Greek and Cyrillic letters and usual punctuation have no marks, joiners or runs. Most texts
# hold nothing else, and are read fast.
_RARE = re.compile("[^\0-\xac\xae-\u012f\u0131-\u02ff\u0370-\u0482\u048a-\u0590\u2010-\u2027]")
_JOINERS = str.maketrans(dict.fromkeys("\xad\u200b\u200c\u200d"))  # invisible within words
# Thai, Lao, Burmese, Khmer, Hangul, kana, bopomofo, Chinese characters and their like. Korean has
# spaces, but its particles are joined to the words.
_SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\u3005-\u3007\u3031-\u3035"
    "\u3041-\u30ff\u3105-\u318f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f"
    "\ua9e0-\ua9ff\uaa60-\uaa7f\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff"
)
_ASCII_WORD, _PLAIN_WORD = re.compile(r"\w\w+", re.ASCII), re.compile(r"\w\w+")


def unicode_words(text: str) -> list[str]:
    """The words of a text that `normalised` has read, in order.

    A word has two characters or more, letters, digits and `_`, and the marks that combine with
    them. Of a run of characters of a script without spaces, each two neighbours are a word, with
    their marks; one that is alone is a word, too. ASCII has the words of bm25s, `\\w\\w+`.
    """
    if text.isascii():
        return _ASCII_WORD.findall(text)
    if not _RARE.search(text):
        return _PLAIN_WORD.findall(text)
    piece, unit = _patterns()
    words: list[str] = []
    for part in text.split():  # most parts of a rare text are usual, too
        if not _RARE.search(part):
            words += _PLAIN_WORD.findall(part)
            continue
        for run, word in piece.findall(part):
            units = unit.findall(run)
            words += [word] if word else map("".join, itertools.pairwise(units))
            words += units if len(units) == 1 else []
    return words


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A run of a script without spaces, or a word; and a character of a run with its marks."""
    codes = range(0x300, 0x1F000)
    marks = "".join(chr(code) for code in codes if unicodedata.category(chr(code))[0] == "M")
    unit, letter = rf"(?=\w)[{_SPACELESS}][{marks}]*", rf"[^\W{_SPACELESS}]"
    return re.compile(rf"((?:{unit})+)|({letter}(?:{letter}+|[{marks}]+)+)"), re.compile(unit)


class Words:
    """Reads texts as words. PyStemmer's stemmers are not safe to share: one for each thread."""

    def __init__(self, config: BM25Config) -> None:
        name = config.stop_words
        stop = getattr(_bm25s().stopwords, STOP_WORDS[name]) if name else ()
        self._stop = frozenset[str](stop)
        self._stemmer = _snowball().Stemmer(config.stemmer) if config.stemmer else None

    def __call__(self, text: str) -> list[str]:
        """The words of a text in order; stop words are left out before words are stemmed."""
        words = [form for form in self.forms(text) if form not in self._stop]
        return self._stemmer.stemWords(words) if self._stemmer else words

    def forms(self, text: str) -> list[str]:
        """All words of a text in order, as they stand there: not stemmed, and stop words, too."""
        return unicode_words(self.normalised(text))

    def normalised(self, text: str) -> str:
        """The text in which forms are looked for: lower case, and each character in one spelling.

        That is NFKC: composed, of usual width, without ligatures. The Turkish İ is i in lower case.
        """
        if not text.isascii():
            text = unicodedata.normalize("NFKC", text)
            if _RARE.search(text):
                text = text.translate(_JOINERS).replace("\u0130", "i")
        return text.lower()

    def word(self, form: str) -> str | None:
        """The word that one of `forms` counts as; None: it is a stop word."""
        if form in self._stop:
            return None
        return self._stemmer.stemWord(form) if self._stemmer else form


class BM25Index:
    """BM25 over a corpus; see `protocol.Index`. Several threads may search.

    Passages that score 0 are not hits: BM25 says nothing of them. A query without a word that the
    corpus knows has no hits. A filter leaves the weights of words as they are in the whole corpus.
    """

    def __init__(self, corpus: StoredCorpus, config: BM25Config, weights: Any) -> None:
        """Use `build` or `open`; `weights` is a `bm25s.BM25` over the corpus."""
        self.corpus, self.config, self.weights = corpus, config, weights

    @classmethod
    def build(cls, corpus: StoredCorpus, config: BM25Config | None = None) -> BM25Index:
        """Reads the corpus once.

        In memory are not the texts, but 4 bytes for every word of the corpus and, at the end,
        about 50 for every passage that a word is in: bm25s makes its arrays whole.
        """
        config = config or BM25Config()
        weights = weights_of((passage.whole for passage in corpus), config)
        if weights is None:
            raise InputError("no passage has a word of two letters, no stop word; give others.")
        return cls(corpus, config, weights)

    @classmethod
    def open(cls, folder: Path, corpus: StoredCorpus) -> BM25Index:
        """Opens what `save` wrote; the arrays are mapped, the words are read into memory."""
        manifest = read_manifest(folder, engine=BM25, corpus=corpus.digest)
        how = {"mmap": True, "load_corpus": False, "allow_pickle": False, "backend": "numpy"}
        weights = _bm25s().BM25.load(folder, **how)
        return cls(corpus, BM25Config(**manifest.settings["words"]), weights)

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The k passages with the highest scores above 0, of those that agree with `where`.

        Scores are bm25s' sums in float32, in the order of the query's words, so that passages of
        the same words tie exactly.
        """
        words = Words(self.config)
        allowed = self.corpus.matching(where) if where else None
        rows = [best_by_words(self.weights, words(text), k, allowed) for text in queries.texts]
        return as_hits(rows, k)

    def save(self, folder: Path) -> None:
        """Writes the arrays as plain .npy files, the words and settings as JSON; no pickle."""
        self.weights.save(emptied(folder), allow_pickle=False, show_progress=False)
        settings = {"words": dataclasses.asdict(self.config)}
        manifest = Manifest(BM25, self.corpus.digest, len(self.corpus), settings=settings)
        write_manifest(folder, manifest, sorted(folder.iterdir()))


def weights_of(texts: Iterable[str], config: BM25Config) -> Any:
    """A `bm25s.BM25` of texts; None: they have no word."""
    words, known = Words(config), dict[str, int]()
    numbers = [
        array.array("i", [known.setdefault(word, len(known)) for word in words(text)])
        for text in texts
    ]
    if not known:
        return None
    scores = _bm25s().BM25(k1=config.k1, b=config.b, method="lucene", backend="numpy")
    scores.index((numbers, known), create_empty_token=False, show_progress=False)
    return scores


def best_by_words(
    weights: Any, words: list[str], k: int, allowed: np.ndarray | None = None
) -> Hits:
    """The k best texts of `weights_of` with a score above 0; `allowed`: bool `[texts]`."""
    known = weights.get_tokens_ids(words) if weights is not None else []
    if not known:
        return Hits(np.zeros(0, np.int64), np.zeros(0, np.float32))
    scores = weights.get_scores_from_ids(list(known))
    hit = scores > 0 if allowed is None else (scores > 0) & allowed
    numbers = np.flatnonzero(hit)
    return best(numbers, scores[numbers], k)


@functools.cache
def _bm25s() -> Any:
    """The library, imported without JAX.

    It asks JAX for a device when it is imported. JAX would then take most of an accelerator's
    memory, also in processes that only search words, and before a cluster of processes is set up.
    """
    hidden = {name: sys.modules.get(name) for name in ("jax", "jax.lax")}
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        bm25s = library("bm25s", "retrieval")
    finally:
        for name, module in hidden.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it asks for all its debugging lines
    return bm25s


def _snowball() -> Any:
    return library("Stemmer", "retrieval")
