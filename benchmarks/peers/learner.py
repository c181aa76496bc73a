"""The parts that both PQN peers share: settings, towers, optimizer and the update step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.peers import soft_q
from benchmarks.peers.towers import Counter, Pair
from qrag_jax.errors import InputError
from qrag_jax.learners.optimizers import OptimizerConfig
from qrag_jax.learners.pqn import PQNConfig
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.rollouts.chunks import RolloutConfig


@dataclasses.dataclass(frozen=True)
class Settings:
    """The constants of a run.

    `learning_rates[i]` is the learning rate of optimizer step i; later steps have the last rate.
    """

    encoder: TextEncoder
    rollout: RolloutConfig
    pqn: PQNConfig
    optimizer: OptimizerConfig
    learning_rates: tuple[float, ...]
    penalize_extra_steps: bool
    per_fact_reward: float


class StepResult(NamedTuple):
    """Figures of one update and of the episodes that it played; arrays are NumPy's.

    Attributes:
        loss: loss of the update.
        grad_norm: gradient norm before clipping.
        transitions: number of transitions.
        state_lengths: tokens of each state.
        chunk_lengths: tokens of each chosen chunk.
        steps: the time t of each state.
    """

    loss: float
    grad_norm: float
    transitions: int
    state_lengths: np.ndarray
    chunk_lengths: np.ndarray
    steps: np.ndarray


def check_positions(rollout: RolloutConfig, known: Sequence[str]) -> None:
    """Refuses positions that a peer does not compute.

    Raises:
        InputError: the kind of the positions is not in `known`.
    """
    if rollout.positions not in known:
        raise InputError(
            f"config.env.positions is {rollout.positions!r}, which this PyTorch peer does not "
            f"compute; use {' or '.join(known)}."
        )


class Learner:
    """Online and target towers with their optimizer.

    Raises:
        InputError: there is an action STOP, which no peer has.
    """

    def __init__(self, settings: Settings, params: Params, device: str = "cpu") -> None:
        if settings.rollout.stop_action:
            raise InputError(
                "config.env.stop_action is on, but the PyTorch peers have no action STOP; turn it "
                "off."
            )
        self.settings = settings
        self.device = torch.device(device)
        self.online = Pair(settings.encoder, params, self.device)
        self.target = Pair(settings.encoder, params, self.device).requires_grad_(False)
        constants = settings.optimizer
        self.optimizer = torch.optim.AdamW(
            self.online.parameters(),
            lr=constants.learning_rate,
            betas=(constants.beta1, constants.beta2),
            eps=constants.eps,
            weight_decay=constants.weight_decay,
            fused=True,
        )
        self.steps = self.env_steps = 0

    def compile_towers(self) -> None:
        """Runs every tower through torch.compile."""
        for pair in (self.online, self.target):
            for tower in pair.towers():
                tower.compile_model()

    def count_tokens(self) -> Counter:
        """A counter of all tokens that the towers compute from now on."""
        counter = Counter()
        for pair in (self.online, self.target):
            for tower in pair.towers():
                tower.counter = counter
        return counter

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        rates = self.settings.learning_rates
        return rates[min(self.steps, len(rates) - 1)]

    @property
    def alpha(self) -> float:
        """The temperature of the next step."""
        peak = self.settings.optimizer.learning_rate
        return self.settings.pqn.alpha * max(self.learning_rate / peak, 1e-6)

    @property
    def uniform(self) -> bool:
        """Whether the next step acts at random."""
        return self.env_steps < 2 * self.settings.pqn.learning_start

    def loss(
        self, states: torch.Tensor, chunks: torch.Tensor, returns: torch.Tensor
    ) -> torch.Tensor:
        """Mean over N transitions: states, chunks `[N, 2D]`, returns `[N]`."""
        twin = soft_q.chosen_twin_q(states, chunks)
        return 0.5 * (2.0 * twin - returns[:, None]).square().sum() / len(returns)

    def returns(
        self,
        support: torch.Tensor,
        actions: torch.Tensor,
        valid: torch.Tensor,
        done: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """λ-returns `[B, T]`; values `[B, T]`: of the states acted in, by the target towers."""
        settings = self.settings
        rewards = soft_q.ground_truth(
            support, actions, valid, settings.penalize_extra_steps, settings.per_fact_reward
        )
        discount = settings.pqn.gamma * (~done).float()
        return soft_q.lambda_returns(rewards, discount, values, settings.pqn.lambda_)

    def update(self, loss: torch.Tensor, transitions: int) -> torch.Tensor:
        """One optimizer step, then `target ← (1-τ)·target + τ·online`.

        Returns:
            The gradient norm before clipping.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        online: list[torch.Tensor] = list(self.online.parameters())
        clip = self.settings.optimizer.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(online, clip, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.optimizer.step()
        with torch.no_grad():
            target: list[torch.Tensor] = list(self.target.parameters())
            torch._foreach_lerp_(target, online, self.settings.pqn.tau)
        self.steps += 1
        self.env_steps += transitions
        return norm
