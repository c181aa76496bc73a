"""Measures the encoder's forward pass against Hugging Face's BertModel on the same rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.measure import Work, details, forward_flops, interleave, ratio
from benchmarks.ours import Embedder, Encoder, Texts, chunk_rows, computed_tokens
from benchmarks.peers.towers import Rows, Tower
from benchmarks.report import Case
from benchmarks.speed_cases.setting import Setting, verdict


def ragged_case(setting: Setting, texts: Texts, encoder: Encoder, questions: int) -> Case:
    """Chunk rows of unequal length: ours in blocks, theirs in one padded batch."""
    tokens, lengths = chunk_rows(texts, encoder, questions)
    embed = Embedder(texts, encoder)
    computed = computed_tokens(embed.blocks, lengths)
    case, _ = _case(setting, texts, encoder, embed, tokens, lengths, computed)
    return case


def full_cases(setting: Setting, texts: Texts, encoder: Encoder, rows: int) -> list[Case]:
    """Rows of 128 tokens without any padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1000, encoder.sizes.vocab_size, (rows, 128)).astype(np.int32)
    lengths = np.full(rows, 128, np.int32)
    embed = Embedder(texts, encoder, full=True)
    case, rate = _case(setting, texts, encoder, embed, tokens, lengths, tokens.size, full=True)
    if not setting.gpu:
        return [case]
    share = rate * forward_flops(encoder.sizes, [128]) / 128 / setting.peaks.jax
    absolute = setting.at_least(0.0, 2e6)
    return [
        case,
        Case("encoder forward, full batch", rate, "tokens/s", **verdict(rate, absolute)),
        Case(
            "encoder forward, full batch: share of matmul peak",
            share,
            "share",
            **verdict(share, setting.at_least(0.0, 0.45)),
        ),
    ]


def _case(
    setting: Setting,
    texts: Texts,
    encoder: Encoder,
    embed: Embedder,
    tokens: np.ndarray,
    lengths: np.ndarray,
    computed: float,
    *,
    full: bool = False,
) -> tuple[Case, float]:
    """The case and our text tokens per second."""
    device = torch.device(setting.device)
    tower = Tower(encoder.encoder, encoder.params, device)
    padded = tokens[:, : lengths.max()]
    rows = Rows(torch.tensor(padded, device=device), torch.tensor(lengths, device=device))
    on_device = jnp.asarray(tokens), jnp.asarray(lengths)
    found: dict[str, np.ndarray] = {}

    def ours(_: int) -> None:
        found["ours"] = np.asarray(embed(*on_device))

    def theirs(_: int) -> None:
        with torch.inference_mode():
            found["torch"] = tower(rows, full=full).cpu().numpy()

    timings = interleave({"ours": ours, "torch": theirs}, setting.rounds, setting.warmups)
    mine, peer = timings["ours"], timings["torch"]
    text = float(lengths.sum())
    flops = forward_flops(encoder.sizes, lengths)
    works = Work(text, computed, flops), Work(text, float(padded.size), flops)
    gain = ratio(mine, peer)
    kind = "full batch" if full else "ragged rows"
    shape = f"{len(tokens)} x {padded.shape[1]}"
    name = "full rows" if full else texts.origin
    return Case(
        f"encoder forward, {kind}, {shape}, {encoder.name}",
        text / mine.median,
        "text tokens/s",
        peer=text / peer.median,
        ratio=gain,
        **verdict(gain, setting.at_least(1.0, 1.0), "x"),
        details={
            "encoder": encoder.name,
            "rows": f"{shape}, {name}",
            "peer": "Hugging Face BertModel, sdpa, one padded batch",
            **details((works[0], mine), (works[1], peer), setting.peaks.jax),
            "largest difference of embeddings": float(np.abs(found["ours"] - found["torch"]).max()),
        },
    ), text / mine.median
