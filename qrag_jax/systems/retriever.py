"""A retriever as programs use it: load it, index a corpus or open an index, search.

    from qrag_jax import Retriever

    retriever = Retriever.load("exported")
    retriever.open("my-index")
    for hit in retriever.search("Where was the founder of Acme born?"):
        print(hit.step, hit.score, hit.id, hit.text)

`Retriever.load("minilm")` and `Retriever.load("bm25")` search once. This module needs no jax;
`Retriever.load` imports what the backend needs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, overload

import numpy as np

from qrag_jax.errors import InputError, Weight, one_of
from qrag_jax.llm.config import ClientConfig
from qrag_jax.llm.outcomes import well_formed
from qrag_jax.retrieval import towers
from qrag_jax.retrieval.index_folder import (
    BM25,
    EXACT,
    FAISS,
    HYBRID,
    MILVUS,
    OF_WORDS,
    QDRANT,
    SCAN,
    IndexAt,
)
from qrag_jax.retrieval.multi_step import Hit, MultiStepSearch, Rules, SingleStepSearch
from qrag_jax.retrieval.protocol import FusedIndex
from qrag_jax.runtime.config_fields import CONFIG_NAME, check
from qrag_jax.runtime.retriever_config import NAME as RETRIEVER
from qrag_jax.runtime.retriever_config import TITLE_SEPARATOR, RetrieverConfig

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from qrag_jax.models.first_encoder import EncoderConfig
    from qrag_jax.systems.indexing import IndexSettings, PassageEncoder


@dataclasses.dataclass(frozen=True)
class Endpoints:
    """Where exported towers are served."""

    url: str  # of the server of states, such as http://127.0.0.1:8000/v1
    state_model: str = "state"  # name of the tower of states on it
    chunk_model: str = "chunk"  # of the tower of chunks; only the vector of STOP is asked for
    chunk_url: str = ""  # of the server of chunks; "": `url`
    api_key_env: str = ""  # environment variable with the API key; "": no key is needed
    wait_limit: float = 60.0  # seconds that an outage may last

    def clients(self) -> Iterator[ClientConfig]:
        how: Any = {"api_key_env": self.api_key_env, "wait_limit": self.wait_limit}
        yield ClientConfig(self.url, self.state_model, concurrency=8, **how)
        yield ClientConfig(self.chunk_url or self.url, self.chunk_model, concurrency=8, **how)


class Backend(NamedTuple):
    config: RetrieverConfig
    encoders: towers.Towers
    passages: Callable[[], PassageEncoder]  # embeds the passages of an index


RUN, MODEL = "run", "model"  # what a folder holds that is no export
JAX, TORCH, ENDPOINT = BACKENDS = ("jax", "torch", "endpoint")


@dataclasses.dataclass(frozen=True)
class LoadSettings:
    # "torch" is for exports, without jax; "endpoint" is a server of embeddings
    backend: Annotated[str, one_of(BACKENDS)] = JAX
    # Of a run; "": "best", if that is a trained one
    checkpoint: Annotated[str, one_of(("", "best", "last"))] = ""
    # Of jax's computation, "float32" or "bfloat16"; "": the run's, the faster one of an export
    dtype: str = ""
    device: str = ""  # of torch, such as "cuda:0"; "": the best one
    endpoints: Endpoints | None = None  # where an export's towers are served
    per_step: int = 1  # passages found at each step (`multi_step.Rules`)
    # Of a question's BM25, whose best counts 1, in each step's scores; 0: they are Q-values alone
    bm25_weight: Weight = 0.0
    question_prefix: str = ""  # of a plain encoder: text before questions, such as "query: "
    passage_prefix: str = ""  # and before passages; "": as its folder says

    def __post_init__(self) -> None:
        check(self, "")
        if (self.backend == ENDPOINT) != (self.endpoints is not None):
            raise InputError("endpoints= (the servers' URL) goes with backend=endpoint alone.")


def of_export(folder: Path, settings: LoadSettings) -> Backend:
    """Exported towers that jax or torch computes here, or the servers of `endpoints`."""
    config = RetrieverConfig.read(folder)
    tokenizer, form = towers.read_rows(folder, config)
    both, by_jax = (config.state, config.chunk), settings.backend == JAX

    def passages() -> PassageEncoder:
        if not by_jax:
            raise InputError("passages are embedded by jax; index with backend=jax or qrag index.")
        from qrag_jax.models.first_encoder import EncoderConfig
        from qrag_jax.systems.indexing import PassageEncoder

        return PassageEncoder.of_folder(str(folder), EncoderConfig(dtype=settings.dtype or "auto"))

    computed: Iterable[towers.RowEncoder]
    if settings.endpoints is not None:
        clients = zip(settings.endpoints.clients(), both)
        computed = (
            towers.EndpointTower(client, tower.width, tower.scale) for client, tower in clients
        )
    else:
        config.check_weights(folder)
        if by_jax:
            from qrag_jax.systems.indexing import exported_towers

            computed = exported_towers(folder, config, form, settings.dtype)
        else:
            how = tokenizer.pad_id, settings.device
            computed = (towers.TorchTower(folder / tower.folder, *how) for tower in both)
    return Backend(config, towers.Towers(tokenizer, form, *computed), passages)


@dataclasses.dataclass(frozen=True)
class Deployment:
    """What opens a retriever again, in another process or from a file."""

    folder: str  # of the export, or of the run
    index: str = ""  # its folder; "": none is open
    engine: str = ""  # as for `Retriever.open`
    url: str = ""
    settings: LoadSettings = dataclasses.field(default_factory=LoadSettings)

    def open(self) -> Retriever:
        retriever = Retriever.load(self.folder, self.settings)
        if self.index:
            retriever.open(self.index, self.engine, self.url)
        return retriever


class Retriever:
    """A trained retriever over one index at a time.

    Copies share weights and index. A pickle holds the `deployment` alone, whose folders must be
    there where it is read.
    """

    def __init__(self, backend: Backend, origin: Path, settings: LoadSettings) -> None:
        self.config, self.rules = backend.config, Rules.of(backend.config, settings.per_step)
        self._backend = backend
        self._begin(str(origin), settings)

    def _begin(self, origin: str, settings: LoadSettings) -> None:
        self.deployment = Deployment(origin, settings=settings)
        self._search: MultiStepSearch | SingleStepSearch | None = None
        # As in the server, engines and towers work for one thread at a time: none promises more.
        self._lock = threading.Lock()

    def __copy__(self) -> Retriever:
        copied = object.__new__(type(self))
        copied.__dict__ |= self.__dict__
        return copied

    def __deepcopy__(self, memo: object) -> Retriever:
        return self.__copy__()

    def __reduce__(self) -> tuple[Callable[[Deployment], Retriever], tuple[Deployment]]:
        return Deployment.open, (self.deployment,)

    @staticmethod
    def load(source: str | Path, settings: LoadSettings | None = None) -> Retriever:
        """Reads the retriever of an export's or a run's folder; computed by jax as usual.

        Any other encoder (a folder, a hub name, "minilm") and "bm25" search once for a question.
        """
        path, settings = Path(source).expanduser(), settings or LoadSettings()
        if (path / RETRIEVER).is_file():
            return Retriever(of_export(path, settings), path, settings)
        config = path / CONFIG_NAME  # a model's file has this name, too
        kind = config.is_file() and (MODEL if b'"model_type"' in config.read_bytes() else RUN)
        if settings.backend != JAX:
            raise InputError(
                f"{path} is no export, which the backend {settings.backend} needs; qrag export it."
            )
        if kind == RUN:
            from qrag_jax import systems
            from qrag_jax.systems.config import load_config

            if not hasattr(system := systems.kind(raw := load_config(config)), "saved"):
                raise InputError(f"{path} is a run of {raw.system}, no retriever; give an export.")
            raw.encoder.dtype = settings.dtype or raw.encoder.dtype
            of_run = system.saved(path, raw).backend(settings.checkpoint)
            return Retriever(of_run, path, settings)
        if str(source) == BM25:
            return SingleStepRetriever(None, settings)
        # A hub name has the form of a path; where its first part is a folder here, it is none.
        is_here = path.exists() or (len(path.parts) > 1 and Path(path.parts[0]).exists())
        if is_here and kind != MODEL:
            raise InputError(f"{path} holds no retriever; give an export, a run or an encoder.")
        prefixes = settings.question_prefix, settings.passage_prefix
        plain = PlainEncoder.of(str(source), *prefixes, dtype=settings.dtype or "auto")
        _ = plain.passages  # read now, so that a wrong folder is refused here
        return SingleStepRetriever(plain, settings)

    @property
    def title_separator(self) -> str:
        """What stands between the title and the text of a passage."""
        return self.config.title_separator

    def digest(self) -> str:
        """Tells it from other retrievers: its weights, and how it composes states and searches.

        Of a run, the weights are those of the tower of chunks.
        """
        about = {"config": dataclasses.asdict(self.config), "per_step": self.rules.per_step}
        about |= {"bm25_weight": self.deployment.settings.bm25_weight}
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def index(
        self, corpus: str | Path, folder: str | Path, settings: IndexSettings | None = None
    ) -> None:
        """Embeds a corpus (a file or folder) into an index, or goes on with one, and opens it."""
        from qrag_jax.systems.indexing import IndexSettings, index_corpus

        encoder = self._passages()
        if encoder is None:
            settings = dataclasses.replace(settings or IndexSettings(), engine=BM25)
        index_corpus(Path(corpus).expanduser(), Path(folder).expanduser(), encoder, settings)
        self.open(folder)

    def _passages(self) -> PassageEncoder | None:
        return self._backend.passages()

    def open(self, folder: str | Path, engine: str = "", url: str = "") -> None:
        """Opens an index; what is open stays what it is when the index grows.

        Args:
            engine: one of `index_folder.ENGINES` that compares what the retriever does; "": of
                vectors "exact" for the backend jax, else "scan".
            url: of the engine's server; "": where it was when the index was built.
        """
        index, self._search = self._opened(IndexAt(Path(folder).expanduser(), engine, url))
        self.deployment = dataclasses.replace(
            self.deployment,
            index=str(Path(folder).expanduser()),  # not the version that is open
            engine=index.engine,
            url=index.url,
        )

    def _opened(self, index: IndexAt) -> tuple[IndexAt, MultiStepSearch | SingleStepSearch]:
        first, last = (EXACT, SCAN) if self.deployment.settings.backend == JAX else (SCAN, EXACT)
        otherwise = (
            "a trained retriever compares vectors: leave it out, or index with --workdir=RUN"
        )
        index = index.settled((first, QDRANT, MILVUS, FAISS, last), otherwise)
        if index.encoder.partition(towers.TOWER_END)[0] != self.config.digest:
            raise InputError(
                f"{index.folder} was embedded by another tower of chunks than that of "
                f"{self.deployment.folder}, or by settings of its own; give the retriever that "
                "embedded it, or index the corpus with this one."
            )
        engine: Any = index.open()
        if weight := self.deployment.settings.bm25_weight:
            if self.rules.placement is not None:
                raise InputError("bm25_weight= needs env.positions=none in training; leave it out.")
            words = dataclasses.replace(index, engine=BM25, url="").settled([BM25], "")
            engine = FusedIndex(engine, words.open(), weight)
        return index, MultiStepSearch(engine, self._backend.encoders, self.rules)

    def encode(self, texts: Sequence[str], *, questions: bool = False) -> np.ndarray:
        """float32 `[texts, width]`: vectors of passages before any rotation, or of questions."""
        encoders = self._encoders()
        with self._lock:
            if questions:
                return encoders.states([(text, ()) for text in texts])
            return encoders.chunks(texts)

    def _encoders(self) -> towers.Towers:
        return self._backend.encoders

    @overload
    def search(  # a text is a sequence of texts, too
        self, questions: str, steps: int | None = None, **settings: Any
    ) -> list[Hit]: ...

    @overload
    def search(
        self, questions: Sequence[str], steps: int | Sequence[int] | None = None, **settings: Any
    ) -> list[list[Hit]]: ...

    def search(self, questions, steps=None, *, topk=None, beam=None, threshold=None, where=None):
        """The passages taken for a question, or for each of a list, in the order taken.

        A question that is longer than in training is cut as there; a warning says so. Searches of
        several threads wait for each other.

        Args:
            steps: most steps, of all questions or of each; None: as many as in training, or as
                `topk` needs.
            topk: most passages; None: those of all steps. If they are more than the steps, and
                neither steps nor a beam are given, each step gives several, its best one first.
            beam: W, paths kept at every step; None: the retriever's own.
            threshold: a search ends before a passage whose Q is not above it; None: the
                retriever's own, `-math.inf`: never.
            where: only passages whose metadata agree are taken: field → value, or list of values.
        """
        asked = [questions] if isinstance(questions, str) else list(questions)
        if topk is not None and topk < 1:
            raise InputError(f"topk is {topk}; give at least 1.")
        self.check(asked)
        if cut := len(self.engine.cut(asked)):
            warnings.warn(f"{cut} of {len(asked)} questions are too long and cut", stacklevel=2)
        rules = {"beam": beam, "threshold": threshold}
        with self._lock:
            all_hits = self._found(asked, steps, topk, rules, where)
        best = [hits[:topk] for hits in all_hits]
        return best[0] if isinstance(questions, str) else best

    def _found(self, asked, steps, topk, rules, where) -> list[list[Hit]]:
        rules = self.rules.changed(topk=topk if steps is None else None, **rules)
        limits = rules.steps_for(topk) if steps is None else steps
        return self.engine.with_rules(rules).search(asked, limits, where)

    def check(self, questions: Sequence[str]) -> None:
        """Refuses questions that cannot be searched for."""
        for question in questions:
            if well_formed(question) != question:
                raise InputError(f"question {question!r} holds half of a surrogate pair; mend it.")
            if isinstance(self.engine, SingleStepSearch):
                self.engine.check(question)

    @property
    def engine(self) -> Any:
        """The search over the open index, by the retriever's own rules."""
        if self._search is None:
            raise InputError("no index is open; call index(corpus, folder) or open(folder) first.")
        return self._search


# ---------------------------------------------------------------- searches in one step

BY_VECTORS = (EXACT, QDRANT, MILVUS, FAISS, SCAN, HYBRID)
USUAL_COUNT = 10  # passages, where nobody says how many


@dataclasses.dataclass(frozen=True)
class PlainEncoder:
    """An encoder of one kind of texts, which was not trained to search in several steps."""

    path: str  # a folder, a hub name, or "minilm"
    # How it computes, with the prefixes of questions (`state_prefix`) and of passages; the latter,
    # and the longest row, as the index was built; None, 0: as its folder says
    config: EncoderConfig | None = None
    max_tokens: int = 0
    mesh: Mesh | None = None  # None: of all devices

    @classmethod
    def of(
        cls, path: str, question_prefix: str, passage_prefix: str, max_tokens: int = 0, **how: Any
    ) -> PlainEncoder:
        """By its prefixes, and further fields of `EncoderConfig`."""
        from qrag_jax.models.first_encoder import EncoderConfig

        both: Any = {"state_prefix": question_prefix, "chunk_prefix": passage_prefix}
        return cls(path, EncoderConfig(**both, **how), max_tokens)

    @functools.cached_property
    def passages(self) -> PassageEncoder:
        from qrag_jax.systems.indexing import PassageEncoder

        how = self.path, self.config, self.mesh, self.max_tokens
        return PassageEncoder.of_folder(*how)


class SingleStepRetriever(Retriever):
    """Searches once: by an encoder that was not trained here, or (None) by words."""

    def __init__(self, encoder: PlainEncoder | None, settings: LoadSettings | None = None) -> None:
        self._encoder = encoder
        self._begin(encoder.path if encoder else BM25, settings or LoadSettings())

    @property
    def title_separator(self) -> str:
        return self._encoder.passages.title_separator if self._encoder else TITLE_SEPARATOR

    def digest(self) -> str:
        return self._encoder.passages.digest() if self._encoder else BM25

    def _passages(self) -> PassageEncoder | None:
        return self._encoder.passages if self._encoder else None

    def _opened(self, index: IndexAt) -> tuple[IndexAt, SingleStepSearch]:
        if self._encoder is None:
            otherwise = (
                "give what embeds questions: --workdir=RUN, --retriever=EXPORT or "
                "--encoder=FOLDER (a training: config.data.negatives.search)"
            )
            index = index.settled(OF_WORDS, otherwise)
            return index, SingleStepSearch(index.open())
        otherwise = "leave --encoder out, or index the corpus with the encoder"
        index, passages = index.settled(BY_VECTORS, otherwise), self._encoder.passages
        if index.encoder != passages.digest():
            raise InputError(
                f"{index.folder} was embedded by another encoder, or with another dtype, pooling, "
                "prefix or length, than those given; give the ones that it was built with."
            )
        return index, SingleStepSearch(index.open(), passages)

    def _encoders(self) -> towers.Towers:
        if self._encoder is None:
            raise InputError("encode() is for encoders: BM25 has no vectors; load one of them.")
        return self._encoder.passages.towers

    def _found(self, asked, steps, topk, rules, where) -> list[list[Hit]]:
        if steps not in (None, 1) or any(value is not None for value in rules.values()):
            raise InputError(f"{self.deployment.folder} searches once; omit steps, beam, threshold")
        return self.engine.search(asked, topk or USUAL_COUNT, where)


def open_plain(index: IndexAt, encoder: PlainEncoder | None = None) -> SingleStepSearch:
    """Opens an index with the encoder that embedded it; None: its words are compared."""
    return SingleStepRetriever(encoder)._opened(index)[1]
