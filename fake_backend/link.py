"""A link that concurrent transfers share, in modelled time."""

from dataclasses import dataclass

PRESETS = {
    # 400 Gb/s InfiniBand as NIXL over UCX reaches it; 25 GbE through the kernel.
    "rdma": (45e9, 0.0003),
    "tcp": (2.5e9, 0.001),
}


class LinkError(ValueError):
    """``--kv-link`` or a bandwidth that cannot be; one clear line."""


@dataclass(slots=True)
class _Transfer:
    name: str
    left: float
    """Bytes."""
    begins: float


class Link:
    """Bandwidth in bytes/s, shared evenly by what is under way; latency in seconds before a transfer's first byte."""

    def __init__(self, bandwidth: float, latency: float) -> None:
        if bandwidth <= 0 or latency < 0:
            raise LinkError(f"a link needs bandwidth above 0 and latency from 0 up, got {bandwidth}, {latency}")
        self.bandwidth = bandwidth
        self.latency = latency
        self._transfers: list[_Transfer] = []
        self._now = 0.0

    @classmethod
    def parse(cls, text: str) -> "Link":
        """``rdma``, ``tcp`` or ``GB/s,latency in ms``. Raises LinkError."""
        if text in PRESETS:
            return cls(*PRESETS[text])
        bandwidth, _comma, latency = text.partition(",")
        try:
            return cls(float(bandwidth) * 1e9, float(latency or 0) / 1000)
        except LinkError:
            raise
        except ValueError:
            raise LinkError(f"--kv-link must be rdma, tcp or GB/s,latency in ms, got {text!r}") from None

    def start(self, name: str, size: float, now: float) -> None:
        """Begin to move ``size`` bytes."""
        self._advance(now)
        self._transfers.append(_Transfer(name, max(size, 1.0), now + self.latency))

    def cancel(self, name: str, now: float) -> None:
        self._advance(now)
        self._transfers = [transfer for transfer in self._transfers if transfer.name != name]

    def done(self, now: float) -> list[str]:
        """Names of the transfers that have ended by now, each told once."""
        self._advance(now)
        # A moment computed from a rate can fall short of the end by a rounding error, never by a nanosecond's worth.
        ended = [transfer for transfer in self._transfers if transfer.left <= 1e-9 * self.bandwidth]
        self._transfers = [transfer for transfer in self._transfers if transfer not in ended]
        return [transfer.name for transfer in ended]

    def next_event(self) -> float | None:
        """When a transfer will end, or one will begin to move, if nothing else happens."""
        moving = [transfer for transfer in self._transfers if transfer.begins <= self._now]
        moments = [transfer.begins for transfer in self._transfers if transfer.begins > self._now]
        if moving:
            share = self.bandwidth / len(moving)
            moments.append(self._now + min(transfer.left for transfer in moving) / share)
        return min(moments, default=None)

    def _advance(self, now: float) -> None:
        while self._now < now:
            moving = [transfer for transfer in self._transfers if transfer.begins <= self._now and transfer.left > 0]
            begins = [transfer.begins for transfer in self._transfers if transfer.begins > self._now]
            until = min([now, *begins])
            if moving:
                share = self.bandwidth / len(moving)
                until = min(until, self._now + min(transfer.left for transfer in moving) / share)
                for transfer in moving:
                    transfer.left = max(0.0, transfer.left - share * (until - self._now))
                if until <= self._now:
                    until = min([now, *begins])
            self._now = until
