"""Makes the prompts with examples of a run (LeReT's first step), and keeps them in its folder.

The bare prompt, or the best one of the round before, plays the bootstrap's questions; its tries
with full credit become examples; sets of these are ranked on other questions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from qrag_jax.environments.query_writing.few_shot import (
    FewShotConfig,
    Split,
    Tried,
    drawn_candidates,
    full_credit,
    kept_variants,
    ranked,
)
from qrag_jax.environments.query_writing.few_shot_file import (
    NAME,
    FewShotPrompts,
    read_few_shot,
    write_few_shot,
)
from qrag_jax.environments.query_writing.prompt import QueryPrompt, Variant
from qrag_jax.environments.query_writing.state import QueryState
from qrag_jax.errors import InputError
from qrag_jax.evaluators.query_scores import HopRow
from qrag_jax.feedback.pool_scores import AP
from qrag_jax.rollouts.token_episodes import TokenEpisode, TokenStart
from qrag_jax.runtime import hosts
from qrag_jax.runtime.run import log
from qrag_jax.systems.leret_hops import HopPlayer

_STREAM = 2**31 - 10_000  # of the draws; each list of tries has the next

PlayBy = Callable[[QueryPrompt, Sequence[TokenStart]], list[TokenEpisode]]


@dataclasses.dataclass(frozen=True)
class PromptMaker:
    """Makes few-shot prompts.

    Attributes:
        config: how many of what.
        bare: the prompt without examples.
        questions: states of the first hop.
        split: which of them are played.
        hops: plays them.
        gold_by: what a page is known by.
    """

    config: FewShotConfig
    bare: QueryPrompt
    questions: Sequence[QueryState]
    split: Split
    hops: HopPlayer
    gold_by: str

    def prompts(self, workdir: Path, play: PlayBy) -> tuple[Variant, ...]:
        """The best prompts, from the run's file if they are there.

        Args:
            play: plays tries, asked by a prompt.

        Raises:
            Stopped: the run is told to stop; finished rounds are kept.
            FeedbackLost: too many tries fail.
        """
        path, template = workdir / NAME, self.bare.prompt.fingerprint
        made = read_few_shot(path, template) if path.exists() else FewShotPrompts(template)
        if made.kept:
            return made.variants
        for number in range(len(made.rounds) + 1, self.config.rounds + 1):
            log(
                f"examples, round {number}: {self.config.bootstrap_questions} questions, then "
                f"{self.config.candidates} prompts on {self.config.rank_questions} others"
            )
            made = dataclasses.replace(made, rounds=(*made.rounds, self._round(made, number, play)))
            # A round that leaves no prompt is refused here, before it is kept: it can be mended.
            kept_variants(made.rounds, self.bare, self.config.kept)
            _write(path, made)
        kept = kept_variants(made.rounds, self.bare, self.config.kept)
        made = dataclasses.replace(made, kept=tuple(each.name for each in kept))
        _write(path, made)
        scores = {each.candidate.name: each.score for one in made.rounds for each in one}
        told = ", ".join(f"{name} ({scores[name]:.3f})" for name in made.kept)
        log(f"prompts with examples by mean AP on questions held out: {told}")
        return made.variants

    def _round(self, made: FewShotPrompts, number: int, play: PlayBy):
        best = () if not made.rounds else (made.rounds[-1][0].candidate.variant,)
        stream = _STREAM + 100 * number
        tried = self._tried(self.split.bootstrap, best, play, stream)
        solved = full_credit(map(_as_tried, tried), self.hops.hops, self.gold_by)
        candidates = drawn_candidates(solved, self.config, number)
        rewards = []
        for place, each in enumerate(candidates, start=1):
            rows = self._tried(self.split.rank, (each.variant,), play, stream + place)
            rewards.append([_as_tried(row).reward for row in rows])
        return ranked(candidates, rewards)

    def _tried(
        self, places: Sequence[int], variants: tuple[Variant, ...], play: PlayBy, stream: int
    ) -> list[HopRow]:
        """The tries of questions at all hops, by the bare prompt or by one other."""
        prompt = dataclasses.replace(self.bare, variants=variants)

        def by_prompt(starts: Sequence[TokenStart]) -> list[TokenEpisode]:
            return play(prompt, starts)

        states = [self.questions[place] for place in places]
        rows = self.hops.by_model(states, by_prompt, stream, len(variants))
        return [row for hop in rows for row in hop if row.made is not None]


def _write(path: Path, made: FewShotPrompts) -> None:
    hosts.first_does(lambda: write_few_shot(path, made))


def kept_prompts(workdir: Path, bare: QueryPrompt) -> tuple[Variant, ...]:
    """The prompts with examples that a run has made.

    Args:
        bare: the prompt without examples.
    """
    path = workdir / NAME
    made = read_few_shot(path, bare.prompt.fingerprint)
    if not made.kept:
        raise InputError(
            f"the prompts in {path} are not finished, and the weights that make them are gone; "
            "bring the finished file back, or begin a new --workdir."
        )
    return made.variants


def _as_tried(row: HopRow) -> Tried:
    made = row.made
    reward = made.scores[AP] if made is not None and made.scored else None
    return Tried(row.before, row.query, row.after.pool, reward)
