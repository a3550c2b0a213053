"""The same reads by NIXL alone, in the same process and into the same memory: what kvferry is measured by."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from uuid import uuid4

import numpy as np

from benchmarks.rival_cases import RankCard
from kvferry.core.manifest import Region
from kvferry.core.product import Product, listed
from kvferry.core.runs import Runs, place
from kvferry.transport.base import Connected, DeviceEvent, ReadEnd, Transport
from kvferry.transport.cards import Card
from kvferry.transport.cuda import Cuda
from kvferry.transport.nixl_agent import Agent, SlicePair
from kvferry.transport.places import RegionTable
from kvferry.transport.process import ProcessTransport
from kvferry.transport.region_memory import RegionMemory
from kvferry.transport.settings import Expose, UcxSettings, WayChoice
from tests.support.fleet.actors import DestinationActor


@dataclass(frozen=True)
class ReadTime:
    """How long a fetch or a raw read took."""

    post_seconds: float
    """The caller's own time, until everything was submitted."""
    seconds: float
    """Until everything was in."""


class RecordingTransport:
    """A transport that remembers whom it met, and what it was asked to read since ``start``."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.peers: dict[str, RankCard] = {}
        self.start()

    def start(self) -> None:
        """Forget the reads so far."""
        self.reads: list[tuple[str, Runs]] = []
        self.post_seconds = 0.0

    @property
    def kind(self) -> str:
        return self._inner.kind

    def register(self, regions: Sequence[Region]) -> None:
        self._inner.register(regions)

    def card(self) -> bytes:
        return self._inner.card()

    def connect(self, peer: str, card: bytes, regions: Sequence[Region]) -> Connected:
        connected = self._inner.connect(peer, card, regions)
        self.peers[peer] = RankCard(card, tuple(regions))
        return connected

    def read(
        self,
        transfer: int,
        peer: str,
        runs: Runs | Product,
        *,
        after: DeviceEvent | None = None,
        permit: bytes = b"",
    ) -> None:
        started = perf_counter()
        self._inner.read(transfer, peer, runs, after=after, permit=permit)
        self.post_seconds += perf_counter() - started
        self.reads.append((peer, listed(runs)))

    def cancel(self, transfer: int) -> None:
        self._inner.cancel(transfer)

    def clear(self, transfer: int, runs: Runs | Product, *, after: DeviceEvent | None = None) -> None:
        self._inner.clear(transfer, runs, after=after)

    def poll(self) -> list[ReadEnd]:
        return self._inner.poll()

    def on_end(self, wake: Callable[[], None]) -> None:
        self._inner.on_end(wake)

    def forget(self, peer: str) -> None:
        self.peers.pop(peer, None)
        self._inner.forget(peer)

    def close(self) -> None:
        self._inner.close()


class RawNixl:
    """NIXL alone: a list of descriptors per peer, one post each, then look until all are done."""

    def __init__(
        self, regions: Sequence[Region], peers: Mapping[str, RankCard], num_scratch_bytes: int
    ) -> None:
        device = regions[0].device
        if device != "cpu":
            Cuda(int(device.partition(":")[2] or 0)).bind_thread()
        self._scratch = RegionMemory(device)
        self._scratch.add("scratch", np.zeros(num_scratch_bytes, np.uint8))
        self._scratch_index = len(regions)
        self._dst = RegionTable("dst", [*regions, *self._scratch.regions])
        self._kind = self._dst.kinds[0].name
        settings = UcxSettings.from_environment(os.environ)
        self._agent = Agent(f"raw-{uuid4().hex}", settings.engine_config)
        self._registered = self._agent.register(self._kind, self._dst.whole())
        self._peers: dict[str, tuple[str, RegionTable]] = {}
        for name, peer in peers.items():
            card = Card.from_bytes(peer.card)
            self._agent.add(card.agent, card.metadata)
            self._peers[name] = card.agent, RegionTable(name, peer.regions)

    def read(self, reads: Sequence[tuple[str, Runs]]) -> ReadTime:
        """Read these lists."""
        started = perf_counter()
        handles = [self._prepared(peer, runs) for peer, runs in reads]
        waiting = [handle for handle in handles if not self._agent.post(handle)]
        posted = perf_counter()
        while waiting:
            waiting = [handle for handle in waiting if not self._agent.check(handle)]
        ended = perf_counter()
        for handle in handles:
            self._agent.release(handle)
        return ReadTime(posted - started, ended - started)

    def whole(self, reads: Sequence[tuple[str, Runs]]) -> list[tuple[str, Runs]]:
        """As many bytes of each peer as these lists have, in as few runs as its regions allow, to scratch."""
        lists, at = [], 0
        for peer, runs in reads:
            num_bytes = _from_start(self._peers[peer][1].regions, runs.total_bytes)
            src = [place(index, 0) for index in num_bytes]
            stops = at + np.cumsum(list(num_bytes.values()))
            dst = [
                place(self._scratch_index, int(stop) - n)
                for stop, n in zip(stops, num_bytes.values(), strict=True)
            ]
            lists.append((peer, Runs(np.array(src), np.array(dst), np.array(list(num_bytes.values())))))
            at = int(stops[-1])
        return lists

    def _prepared(self, peer: str, runs: Runs) -> int:
        remote, memory = self._peers[peer]
        src = memory.descriptors(runs.src, runs.num_bytes)
        dst = self._dst.descriptors(runs.dst, runs.num_bytes)
        return self._agent.prepare(SlicePair(self._kind, self._kind, src, dst), remote)

    def close(self) -> None:
        """Give agent and memory up."""
        for remote, _ in self._peers.values():
            self._agent.remove(remote)
        self._agent.deregister(self._registered)
        del self._agent
        self._scratch.free()


def _from_start(regions: Sequence[Region], num_bytes: int) -> dict[int, int]:
    """So many bytes as region index → bytes from its beginning, the largest regions first.

    >>> _from_start([Region("a", 10), Region("b", 100), Region("c", 40)], 120)
    {1: 100, 2: 20}
    """
    taken: dict[int, int] = {}
    for index in sorted(range(len(regions)), key=lambda i: -regions[i].num_bytes):
        if num_bytes:
            taken[index] = min(num_bytes, regions[index].num_bytes)
            num_bytes -= taken[index]
    return taken


class MeasuredDestination(DestinationActor):
    """A destination rank that can do what it did last once more, by NIXL alone."""

    _raw: RawNixl | None = None

    def make_transport(self) -> Transport:
        self._recording = RecordingTransport(ProcessTransport(way=WayChoice.DIRECT, expose=Expose.FABRIC))
        return self._recording

    def start_watch(self) -> None:
        """What is fetched from now on is what the raw reads repeat."""
        self._recording.start()

    def post_seconds(self) -> float:
        """The caller's time in ``read`` since the watch began."""
        return self._recording.post_seconds

    def raw_same_runs(self) -> ReadTime:
        """The same lists of runs, into the same places."""
        return self._opened().read(self._recording.reads)

    def raw_one_run(self) -> ReadTime:
        """The same bytes from each peer in one run."""
        raw = self._opened()
        return raw.read(raw.whole(self._recording.reads))

    def _opened(self) -> RawNixl:
        if self._raw is None:
            num_bytes = max(1, sum(runs.total_bytes for _, runs in self._recording.reads))
            self._raw = RawNixl(self.memory.regions, self._recording.peers, num_bytes)
        return self._raw

    def close(self) -> None:
        if self._raw is not None:
            self._raw.close()
        super().close()
