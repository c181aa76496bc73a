"""What devices can do at best: products, bytes, starts of kernels, and sending to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Links:
    """How devices reach each other.

    Attributes:
        host: devices of one host.
        inside: bytes/s that a device sends within its host, in one direction.
        between: bytes/s that a device sends to another host, through a network card of its own.
        inside_latency: seconds until the first byte of a collective is there, within a host.
        between_latency: the same between hosts.
    """

    host: int
    inside: float
    between: float
    inside_latency: float
    between_latency: float


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The peaks of one device.

    Attributes:
        title: its name for people.
        products: FLOP/s of matrix products by the type of the factors; "f32" must be there, and
            stands for types that are not.
        other: float32 FLOP/s outside of products.
        bandwidth: bytes/s of its memory.
        launch: seconds that a kernel costs besides its work.
        host_wait: seconds that the host takes to read how a loop or a branch goes on; 0 where the
            device decides itself.
        links: to other devices; None: there are none.
        sort_tile: elements that a sort keeps on the chip, see `sort_passes`; 0: a sort goes once
            over its data.
    """

    title: str
    products: Mapping[str, float]
    other: float
    bandwidth: float
    launch: float
    host_wait: float = 0.0
    links: Links | None = None
    sort_tile: int = 0

    def sort_passes(self, count: int) -> int:
        """How often a sort of so many elements goes over its data, by a kernel each.

        XLA sorts on a GPU by a bitonic network (Batcher, 1968): of 2^k elements, step j compares at
        the distances 2^(j-1) to 1. Distances within the tile share a kernel, the others have one
        each.
        """
        if not self.sort_tile or count < 2:
            return 1
        in_tile = (self.sort_tile - 1).bit_length()
        beyond = max((count - 1).bit_length() - in_tile, 0)
        return 1 + beyond + beyond * (beyond + 1) // 2

    def peak(self, dtype: str) -> float:
        """FLOP/s of products of factors of this type."""
        return self.products.get(dtype, self.products["f32"])


# 400 Gb/s (NDR InfiniBand) are 50 GB/s; a DGX H100 has such a card for each of its 8 GPUs. The
# latencies, the 3 µs of a kernel (2 to 4 are usual) and the 10 µs of a host's answer are
# assumptions: none was measured here.
_NVLINK_4 = Links(8, 450e9, 50e9, 15e-6, 30e-6)  # 18 links, 900 GB/s in both directions
_NVLINK_3 = Links(8, 300e9, 50e9, 15e-6, 30e-6)  # 12 links, 600 GB/s in both directions
_LAUNCH, _HOST_WAIT, _TILE = 3e-6, 10e-6, 2048

# NVIDIA's data sheets of the H100 and H200 (SXM) and the A100 (80 GB, SXM), without sparsity.
_HOPPER = {"bf16": 989e12, "f16": 989e12, "tf32": 495e12, "f32": 67e12}
_AMPERE = {"bf16": 312e12, "f16": 312e12, "tf32": 156e12, "f32": 19.5e12}
SPEEDS = {
    "h100": Speeds(
        "NVIDIA H100 SXM", _HOPPER, 67e12, 3.35e12, _LAUNCH, _HOST_WAIT, _NVLINK_4, _TILE
    ),
    "h200": Speeds(
        "NVIDIA H200 SXM", _HOPPER, 67e12, 4.8e12, _LAUNCH, _HOST_WAIT, _NVLINK_4, _TILE
    ),
    "a100": Speeds(
        "NVIDIA A100 SXM", _AMPERE, 19.5e12, 2.039e12, _LAUNCH, _HOST_WAIT, _NVLINK_3, _TILE
    ),
}


def speeds_of(device_kind: str) -> Speeds | None:
    """The peaks of a device by JAX's name of it, such as "NVIDIA H100 80GB HBM3"; None: unknown.

    The slower cards of the same names, for PCIe, are unknown.
    """
    words = device_kind.lower().replace("-", " ").split()
    if {"pcie", "nvl"} & set(words):
        return None
    return next((SPEEDS[word] for word in words if word in SPEEDS), None)
