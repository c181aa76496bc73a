"""Few-shot prompts out of a model's own tries: LeReT's first step (arXiv 2410.23214).

In each round the questions of `Split.bootstrap` are played by the bare prompt, or by the best one
of the round before; `full_credit` says which tries may be shown (LeReT shows any that found
something), `drawn_candidates` makes prompts of them, and these are `ranked` by their tries at the
questions of `Split.rank`. A file keeps the finished rounds.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.data.sample import Draw
from qrag_jax.environments.queries import Example, Pool, QueryPrompt, QueryState, Variant, key_of
from qrag_jax.errors import Count, InputError, Natural
from qrag_jax.runtime import bounded_json, config_fields, whole_files

NAME = "few_shot.json"
_STREAM = 4  # of `Draw`; 0 to 3 draw questions, demonstrations and their styles
_PATIENCE = 100  # draws for each candidate, until sets are said to be used up
_RANKED_FROM = 0.5  # share of a candidate's tries that must be scored


@dataclasses.dataclass(frozen=True)
class FewShotConfig:
    """Section `few_shot`: how prompts with examples are made."""

    candidates: Count = 12  # prompts that are tried in a round
    rounds: Count = 1  # each further one makes examples by the best prompt of the one before
    demonstrations: Count = 3  # examples in a prompt, each one hop of another question
    bootstrap_questions: Count = 50  # questions whose tries become examples
    rank_questions: Count = 50  # other questions, by which prompts are ranked
    kept: int = config_fields.internal(3)  # best prompts, which are used next to the bare one
    seed: Natural = 0  # draws the questions and the examples

    def __post_init__(self) -> None:
        if self.bootstrap_questions < self.demonstrations:
            raise InputError("config.few_shot.bootstrap_questions < demonstrations; raise it.")
        if self.candidates < self.kept:
            raise InputError("config.few_shot.candidates is below config.tries.prompts; raise it.")


class Split(NamedTuple):
    bootstrap: tuple[int, ...]  # those whose tries become examples
    rank: tuple[int, ...]  # those by which prompts are ranked
    training: tuple[int, ...]  # all others, in their order


class Tried(NamedTuple):
    """A try, as far as it says whether it may be shown."""

    state: QueryState  # what the query was written for
    query: str  # "" if there is none
    pool: Pool  # that of the state, grown by what the query found
    reward: float | None  # average precision of this pool; None: the try was masked


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    name: str  # unique over all rounds
    shown: tuple[Example, ...]  # of different questions, by hop
    score: float = 0.0  # mean average precision of its scored tries

    @property
    def variant(self) -> Variant:
        return Variant(self.name, self.shown)


def split_questions(count: int, config: FewShotConfig) -> Split:
    """Draws the questions of the bootstrap and of the ranking out of `count` ones."""
    first, then = config.bootstrap_questions, config.rank_questions
    if count <= first + then:
        raise InputError(
            f"config.few_shot.bootstrap_questions and rank_questions take all {count}: lower them."
        )
    drawn = Draw(config.seed, _STREAM, 0).shuffled(range(count))
    shown, ranks, others = drawn[:first], drawn[first:][:then], drawn[first + then :]
    return Split(tuple(shown), tuple(ranks), tuple(sorted(others)))


def full_credit(tries: Iterable[Tried], hops: int, key: str) -> list[Example]:
    """The tries with full credit as examples, each once, in the order of the tries.

    A try at hop h of H has full credit if

    - its query found a gold page that the pool did not have;
    - the pool now holds at least the share h / H of the gold pages: all of them at the last hop;
    - no other try at the same state has a higher reward.

    Pages are known by a `key` of `queries.KEYS`.
    """
    scored = [(t, t.reward) for t in tries if t.reward is not None]

    def place(state: QueryState) -> tuple[str, int, tuple[str, ...]]:
        return state.id, state.hop, tuple(d.id for d in state.pool)

    best = collections.defaultdict[Any, float](float)
    for tried, reward in scored:
        best[place(tried.state)] = max(best[place(tried.state)], reward)
    examples: dict[Example, None] = {}
    for tried, reward in scored:
        state, pages = tried.state, set(tried.state.pages)
        pools = ({key_of(document, key) for document in pool} for pool in (state.pool, tried.pool))
        before, after = (len(pages & keys) for keys in pools)
        on_course = after * hops >= len(pages) * min(state.hop, hops)
        if before < after and on_course and reward == best[place(state)]:
            passages = tuple(document.text for document in state.pool)
            examples[Example(state.question, passages, tried.query, state.hop)] = None
    if not examples:
        raise InputError(
            f"none of {len(scored)} scored tries has full credit; raise config.few_shot."
            "bootstrap_questions, or give a model or a search that finds more."
        )
    return list(examples)


def drawn_candidates(
    solved: Sequence[Example], config: FewShotConfig, number: int
) -> tuple[Candidate, ...]:
    """Draws different sets of examples; fewer than `config.candidates` if there are no more.

    In one set are different questions, and the hops in turn, as far as they have examples. Rounds
    are numbered from 1.
    """
    questions = len({e.question for e in solved})
    if questions < config.demonstrations:
        raise InputError(
            f"config.few_shot.demonstrations is {config.demonstrations}, and {questions} questions "
            "have a try with full credit; lower it, or raise bootstrap_questions."
        )
    draw = Draw(config.seed, _STREAM, number)
    sets: dict[frozenset[Example], tuple[Example, ...]] = {}
    for _ in range(_PATIENCE * config.candidates):
        shown = _drawn_set(solved, config.demonstrations, draw)
        sets.setdefault(frozenset(shown), shown)
        if len(sets) == config.candidates:
            break
    numbered = enumerate(sets.values(), 1)
    return tuple(Candidate(f"few_shot_{number}_{place}", shown) for place, shown in numbered)


def ranked(
    candidates: Sequence[Candidate], rewards: Sequence[Sequence[float | None]]
) -> tuple[Candidate, ...]:
    """The candidates by the mean of their rewards, best first; equal ones as they were drawn.

    Left out are those of whose tries fewer than half were scored: their mean says little, and they
    often write no query at all. Rewards are average precisions at the same hops of the same
    questions; None: the try was masked.
    """
    scored_prompts = []
    for candidate, rewards_of_one in zip(candidates, rewards, strict=True):
        scored = [r for r in rewards_of_one if r is not None]
        if scored and len(scored) >= _RANKED_FROM * len(rewards_of_one):
            scored_prompts.append(dataclasses.replace(candidate, score=sum(scored) / len(scored)))
    return tuple(sorted(scored_prompts, key=lambda p: -p.score))


def kept_variants(
    rounds: Sequence[Sequence[Candidate]], prompt: QueryPrompt, most: int
) -> tuple[Variant, ...]:
    """The best prompts of all rounds that read differently, best first; equal ones by rounds."""
    every = sorted((p for one in rounds for p in one), key=lambda p: -p.score)
    different: dict[Any, Variant | None] = {prompt.tried(None): None}  # the bare prompt
    for chosen in every:
        different.setdefault(prompt.tried(chosen.variant), chosen.variant)
    kept = [*filter(None, different.values())][:most]
    if not kept:
        raise InputError(
            "fewer than half of the tries of all prompts with examples were scored; see the masked "
            "ones, raise the tokens of a turn, or lower config.few_shot.demonstrations."
        )
    return tuple(kept)


def _drawn_set(solved: Sequence[Example], size: int, draw: Draw) -> tuple[Example, ...]:
    hops = sorted({e.hop for e in solved})
    first, shown = draw.below(len(hops)), list[Example]()
    for place in range(size):
        used = {e.question for e in shown}
        unused = [e for e in solved if e.question not in used]
        hop = hops[(first + place) % len(hops)]
        questions = collections.defaultdict[str, list[Example]](list)
        for x in [x for x in unused if x.hop == hop] or unused:
            questions[x.question].append(x)
        shown.append(draw.choice(questions[draw.choice([*questions])]))
    return tuple(sorted(shown, key=lambda e: e.hop))


@dataclasses.dataclass(frozen=True)
class FewShotPrompts:
    template: str  # fingerprint of the prompt's file, see `prompts.Prompt`
    rounds: tuple[tuple[Candidate, ...], ...] = ()  # the ranked prompts of each finished round


def write_few_shot(path: Path, prompts: FewShotPrompts) -> None:
    whole_files.write_json(path, dataclasses.asdict(prompts))


def read_few_shot(path: Path, template: str) -> FewShotPrompts:
    """Reads what `write_few_shot` wrote; `template`: fingerprint of the prompt that is in use."""
    with whole_files.reading(path, "remove it, and make the prompts again"):
        prompts = bounded_json.typed(FewShotPrompts, bounded_json.content(path))
    if prompts.template != template:
        raise InputError(f"{path} is of another prompt than {template}; make it again.")
    return prompts
