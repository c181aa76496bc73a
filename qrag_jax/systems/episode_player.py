"""Plays episodes of a language model: by the device that trains, or by a version on a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.environments.episode import Agent, Failed, ToolTask
from qrag_jax.feedback.llm import Checks, Patience
from qrag_jax.models.compute.lora import merge
from qrag_jax.models.pretrained_lm import LoadedLanguageModel
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.rollouts.device_sampler import DeviceSampler, RoundSampler
from qrag_jax.rollouts.schedule import Counts
from qrag_jax.rollouts.served_policy import ServedPolicy, Versioned
from qrag_jax.rollouts.token_episodes import (
    Library,
    Sampler,
    Speech,
    TokenEpisode,
    TokenRollout,
    TokenStart,
    played_by_all,
)
from qrag_jax.rollouts.token_sampler import SamplingConfig
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.systems.token_config import TokenConfig

_ADVICE = (
    "see why in their messages (a rerank service that does not answer, for example), or raise "
    "config.{section}.max_failed_share"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """What a run of a language model reads.

    Attributes:
        model: what is trained.
        agent: the environment; None: it is played elsewhere, and the device alone is used.
        library: what is searched; None likewise.
        speech: between text and ids.
        train: the questions that are learned from.
        data: content keys.
    """

    model: LoadedLanguageModel
    agent: Agent | None = None
    library: Library | None = None
    speech: Speech
    train: Any
    data: dict[str, str]


@dataclasses.dataclass
class EpisodePlayer:
    """Plays lists of episodes until few of them have failed."""

    config: TokenConfig  # with the seed of the draws, and how turns are sampled
    # Of the config: `attempts`, since an episode that fails is played again, so often in all; and
    # `max_failed_share` of a list of episodes, above which the play pauses
    section: str
    inputs: TokenInputs
    # Most tokens that a turn may sample in episodes that are learned from; 0: as in others
    turn: int
    mesh: Mesh  # where parameters play, devices of this host; each samples rows of its own
    base: Params | None  # of adapters, on these; None: all weights are trained
    # What samples episodes that are learned from; None: the device
    served: ServedPolicy | None = None
    # Over all that was played on this host
    counts: Counts = dataclasses.field(default_factory=Counts)
    # Brings parameters of training to the mesh; all hosts call it together
    here: Callable[[Params], Params] = lambda params: params

    def keys(self, step: int, tasks: int, members: int) -> np.ndarray:
        """uint32 `[task, member, 2]`, of draws that depend on the step and on the place alone."""
        key = jax.random.fold_in(jax.random.key(self.config.seed), step)
        keys = np.asarray(jax.random.key_data(jax.random.split(key, tasks * members)))
        return keys.reshape(tasks, members, -1)

    def starts(self, tasks: Sequence[ToolTask], members: int, step: int) -> list[TokenStart]:
        """Episodes whose draws depend on the step, the place in the batch and the member alone."""
        keys = self.keys(step, len(tasks), members)
        return [
            TokenStart(task, key) for task, drawn in zip(tasks, keys, strict=True) for key in drawn
        ]

    def play(
        self,
        weights: Params | Versioned,
        starts: Sequence[TokenStart],
        stop: StopSignal,
        *,
        agent: Agent | None = None,
    ) -> list[TokenEpisode]:
        """Plays episodes that are learned from, where such weights sample; tokens are drawn."""
        if isinstance(weights, Versioned):
            return self.on_server(weights, starts, stop, agent=agent)
        return self.on_device(weights, starts, stop, agent=agent, turn=self.turn)

    def on_device(
        self,
        params: Params,
        starts: Sequence[TokenStart],
        stop: StopSignal,
        *,
        greedy: bool = False,
        library: Library | None = None,
        agent: Agent | None = None,
        turn: int = 0,
    ) -> list[TokenEpisode]:
        """Plays by these parameters; of several hosts, each plays a part, and has all episodes.

        Args:
            greedy: the likeliest tokens; else they are drawn.
            library, agent: what the tools read, the environment; None: those of the inputs.
            turn: most tokens that a turn may sample; 0: those of the inputs.
        """
        sampler = self.device_sampler(params, greedy=greedy)
        rollout = self._rollout(sampler, stop, library, agent, turn=turn)
        return played_by_all(starts, lambda own: self.patience(stop).play(own, rollout.play))

    def device_sampler(self, params: Params, *, greedy: bool = False) -> RoundSampler:
        """Samples by these parameters on the devices; see `on_device`."""
        here = self.here(params)
        whole = merge(here, self.base)
        return RoundSampler(self._samplers[greedy], whole)

    def on_server(
        self,
        weights: Versioned,
        starts: Sequence[TokenStart],
        stop: StopSignal,
        *,
        agent: Agent | None = None,
    ) -> list[TokenEpisode]:
        """Plays by one version on the server, to which it is handed over first.

        Of several hosts, each asks a server for a part, and has all episodes.
        """
        served, here = self.served, weights._replace(params=self.here(weights.params))
        assert served is not None

        def play_own(own: Sequence[TokenStart]) -> list[TokenEpisode]:
            sampler, watch = served.sampler(here, stop), served.watch(stop)
            rollout = self._rollout(sampler, watch, agent=agent, turn=self.turn)

            def play(starts: Sequence[TokenStart]) -> list[TokenEpisode]:
                served.bring_back(sampler, stop)
                return rollout.play(starts)

            return self.patience(watch).play(own, play)

        return played_by_all(starts, play_own)

    def patience(self, stop: Checks, broken: type = Failed, advice: str = _ADVICE) -> Patience:
        """What plays again while too many are broken.

        Args:
            broken: the class of what an `ended` is if it broke.
            advice: what to do if playing again is in vain; `{section}` is that of the config.
        """
        most, advice = self._rules.max_failed_share, advice.format(section=self.section)
        return Patience(most, stop, log, advice, broken)

    @property
    def _rules(self) -> Any:
        return getattr(self.config, self.section)

    def _rollout(
        self,
        sampler: Sampler,
        stop: Checks,
        library: Library | None = None,
        agent: Agent | None = None,
        *,
        turn: int = 0,
    ) -> TokenRollout:
        scene, attempts = self.inputs, self._rules.attempts
        tools, speech, plays = library or scene.library, scene.speech, agent or scene.agent
        assert tools is not None
        assert plays is not None
        if turn:
            speech = dataclasses.replace(speech, turn=turn)
        rollout = TokenRollout(plays, sampler, tools, speech, stop=stop, attempts=attempts)
        rollout.counts = self.counts
        return rollout

    @cached_property
    def _samplers(self) -> dict[bool, DeviceSampler]:
        model, sampling = self.inputs.model.model, self.config.sampling
        stops = self.inputs.speech.scaffold.stop_ids
        model = dataclasses.replace(model, stop_ids=stops)
        greedy: SamplingConfig = dataclasses.replace(sampling, temperature=0.0)
        return {
            is_greedy: DeviceSampler(model, how, self.mesh)
            for is_greedy, how in ((False, sampling), (True, greedy))
        }
