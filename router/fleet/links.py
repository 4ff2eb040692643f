"""How fast KV moves from one replica to another: told by settings until it is measured. No clock.

What RDMA moves in a millisecond takes the kernel's TCP many, and a hand-off that pays over the one is a loss over the
other. So every pair has its own figure, and a pair of which nothing is known is taken to be slow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# What no TCP connection between two hosts reaches and any RDMA link of today exceeds, in bytes/s.
RDMA_BYTES_PER_SECOND = 8e9
# Smaller transfers measure the latency and the engine's step, not the bandwidth.
MIN_SAMPLE_BYTES = 16e6
# From the last byte of a prompt's KV to the first token: the engine's step under way, and the one that it joins.
RESUME_SECONDS = 0.025
# No link is believed to be faster than this.
MOST_BYTES_PER_SECOND = 50e9
# What waits at the end of a link makes it look slower, and nothing makes it look faster. So a transfer that was faster
# than is believed counts for so much of the difference (of logarithms), one that was slower for so much.
FASTER, SLOWER = 0.3, 0.05


@dataclass(slots=True)
class Link:
    """From one replica to another. `rdma`: whether it was told to be; None where that is left to the measurement."""

    bandwidth: float = 2.5e9
    """Bytes/s, told or measured. 25 Gb Ethernet unless something better is known."""
    latency: float = 0.001
    """Seconds before the first byte."""
    rdma: bool | None = None
    measured: bool = False

    @property
    def fast(self) -> bool:
        """Whether this is RDMA, or as good as that."""
        return self.bandwidth >= RDMA_BYTES_PER_SECOND if self.rdma is None else self.rdma

    def transfer_ms(self, size: float) -> float:
        """Time for `size` bytes on an idle link."""
        return (self.latency + size / self.bandwidth) * 1000

    def observe(self, size: float, seconds: float) -> None:
        """`size` bytes took `seconds`, latency included."""
        moving = seconds - self.latency
        if size < MIN_SAMPLE_BYTES or moving <= 0:
            return
        seen = size / moving
        gain = 1.0 if not self.measured else FASTER if seen > self.bandwidth else SLOWER
        self.bandwidth *= (seen / self.bandwidth) ** gain
        self.measured = True


class LinkError(ValueError):
    """What is told of a link cannot be; one line that says what could."""


def told(text: str) -> Link:
    """`rdma` (400 Gb/s as NIXL reaches it), `tcp`, GB/s and perhaps ms, or nothing. Raises LinkError."""
    if text == "rdma":
        return Link(45e9, 0.0003, rdma=True)
    if text == "tcp":
        return Link(rdma=False)
    if not text:
        return Link()
    bandwidth, _, latency = text.partition(",")
    try:
        link = Link(float(bandwidth) * 1e9, float(latency or 1) / 1000)
    except ValueError:
        link = Link(0.0)
    if not (0 < link.bandwidth < math.inf and 0 <= link.latency < math.inf):
        raise LinkError(f"{text}: must be rdma, tcp, or GB/s and perhaps ms, as 12,0.5")
    return link


class Links:
    """All links of a fleet, by the names of the replicas at their ends.

    `usual`: what is told of every pair that is not told apart. `bytes_per_token`: KV of one token, over all layers and
    devices (Llama 3.1 8B in 16 bits: 128 KiB).
    """

    def __init__(self, usual: Link | None = None, *, bytes_per_token: float = 131_072.0) -> None:
        self.usual = usual or Link()
        self.bytes_per_token = bytes_per_token
        self.fastest = Link(self.usual.bandwidth, self.usual.latency)
        """As good as the best link there ever was: no transfer is shorter than over this."""
        self._pairs: dict[tuple[str, str], Link] = {}

    def between(self, prefill: str, decode: str) -> Link:
        """The link from `prefill` to `decode`; the usual one until that pair is told or measured."""
        return self._pairs.get((prefill, decode), self.usual)

    def tell(self, prefill: str, decode: str, link: Link) -> None:
        """What settings say of one pair."""
        self._pairs[prefill, decode] = link
        self._bound(link)

    def observe(self, prefill: str, decode: str, *, size: float, seconds: float) -> None:
        """A transfer of `size` bytes took `seconds`."""
        link = self._pairs.get((prefill, decode))
        if link is None:
            link = Link(self.usual.bandwidth, self.usual.latency, self.usual.rdma)
            self._pairs[prefill, decode] = link
        link.observe(size, seconds)
        self._bound(link)

    def answered(self, prefill: str, decode: str, *, size: float, seconds: float) -> None:
        """A first token came `seconds` after `decode` was told to fetch `size` bytes, with no prefill before it."""
        least = self.between(prefill, decode).latency + size / MOST_BYTES_PER_SECOND
        self.observe(prefill, decode, size=size, seconds=max(seconds - RESUME_SECONDS, least))

    def measured(self) -> list[tuple[str, str, Link]]:
        """The pairs whose links were measured: prefill, decode, link."""
        return [(*pair, link) for pair, link in self._pairs.items() if link.measured]

    def forget(self, replica: str) -> None:
        """It left the fleet."""
        self._pairs = {pair: link for pair, link in self._pairs.items() if replica not in pair}

    def _bound(self, link: Link) -> None:
        self.fastest.bandwidth = max(self.fastest.bandwidth, link.bandwidth)
        self.fastest.latency = min(self.fastest.latency, link.latency)
