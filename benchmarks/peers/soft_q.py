"""Twin soft Q-values, policy, soft state value, rewards and λ-returns in PyTorch."""

from __future__ import annotations

import itertools

import torch

MASKED = -1e30


def twin_q(state: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """state `[N, 2D]`, chunks `[N, C, 2D]` → the two critics' values `[N, C, 2]`."""
    state = state.unflatten(-1, (2, -1))
    return torch.einsum("nhd,nchd->nch", state, chunks.unflatten(-1, (2, -1)))


def rotate(chunks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates embeddings `[C, 2D]` by positions `[C]`: RoPE on each half, interleaved pairs."""
    half = chunks.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(0, half, 2, dtype=torch.float64) / half)
    angle = positions.double()[:, None, None] * frequency.to(chunks.device)
    cos, sin = angle.cos().float(), angle.sin().float()
    even, odd = chunks.unflatten(-1, (2, -1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-3)


def positions(kind: str, taken: list[int], chunks: int) -> torch.Tensor:
    """Positions `[C]` of a document's chunks: 0, absolute, or relative to the chunks taken."""
    if kind == "none":
        return torch.zeros(chunks)
    if kind != "relative":
        return torch.arange(chunks)
    cuts = [0, *sorted(taken), chunks]
    # 1e-9 guards floor() against 17.999… for 18; the gaps between positions are far larger.
    parts = [
        20 * number + torch.linspace(0, 18, end - start, dtype=torch.float64) + 1e-9
        for number, (start, end) in enumerate(itertools.pairwise(cuts))
    ]
    return torch.cat(parts).floor()


def chosen_twin_q(state: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
    """Twin values of one chunk per state: state, chunk `[N, 2D]` → `[N, 2]`."""
    return (state * chunk).unflatten(-1, (2, -1)).sum(-1)


def draw(
    q: torch.Tensor, available: torch.Tensor, alpha: float, top_k: int, uniform: bool
) -> torch.Tensor:
    """One action per row from softmax(q / α) over the top k available actions; `[N, C]` → `[N]`.

    With `uniform`, all available actions are equally likely.
    """
    q = torch.where(available, q, MASKED)
    worst = q.topk(min(top_k, q.shape[1]), dim=1).values[:, -1:]
    logits = torch.where(available & (q >= worst), (q - q.amax(1, keepdim=True)) / alpha, MASKED)
    probabilities = available.float() if uniform else logits.softmax(1)
    return torch.multinomial(probabilities, 1)[:, 0]


def soft_value(
    twin: torch.Tensor, available: torch.Tensor, alpha: float, top_k: int
) -> torch.Tensor:
    """`Σ_i α·logsumexp(q_i / α)` over the top k of each critic; `[N, C, 2]` → `[N]`."""
    q = torch.where(available[..., None], twin, MASKED)
    best = q.topk(min(top_k, q.shape[1]), dim=1).values
    top = best[:, :1]
    value = top[:, 0] + alpha * ((best - top) / alpha).logsumexp(1)
    return torch.where(available.any(1), value.sum(1), 0.0)


def ground_truth(
    support: torch.Tensor, actions: torch.Tensor, valid: torch.Tensor, penalize: bool, fact: float
) -> torch.Tensor:
    """Rewards `[B, T]`: 1 (or less for extra steps) when the last missing fact is taken.

    Each fact taken adds `fact`.
    """
    hit = support.gather(1, actions) & valid
    facts = support.sum(1, keepdim=True)
    completes = hit & (hit.cumsum(1) == facts)
    steps = torch.arange(1, actions.shape[1] + 1, device=actions.device, dtype=torch.float32)
    reward = 0.5 + 0.5 * facts / (steps + 1e-5) if penalize else torch.ones_like(hit).float()
    return torch.where(completes, reward, 0.0) + fact * hit


def lambda_returns(
    rewards: torch.Tensor, discount: torch.Tensor, values: torch.Tensor, lambda_: float
) -> torch.Tensor:
    """λ-returns; all arrays are `[B, T]`, `values[:, t]` is the value of the state at step t."""
    returns = torch.zeros_like(rewards)
    following = value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        mixed = (1 - lambda_) * value + lambda_ * following
        following = returns[:, t] = rewards[:, t] + discount[:, t] * mixed
        value = values[:, t]
    return returns
