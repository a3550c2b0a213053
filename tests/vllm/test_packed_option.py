"""Packed reads between two vLLM engines: workers gather for their readers, and blocks wait for that."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvferry.core.owned import BlockBytes
from kvferry.core.product import Term
from kvferry.core.runs import Runs
from kvferry.endpoint.edges import open_channel
from kvferry.endpoint.gathering import GatherCalls
from kvferry.integrations.vllm.shared.stats import LoadStats
from kvferry.integrations.vllm.worker.side import WorkerSide
from kvferry.runtime.values import Record
from kvferry.transport import pack as chunk_copier
from kvferry.transport.cards import Card, GatherPoint
from kvferry.transport.pack import ChunkCopier
from kvferry.transport.stream_frames import StreamOffer
from kvferry.wire.messages import Join, decode_to_authority
from kvferry.wire.ticket import from_text, make_proofs, permits_for
from tests.vllm.conftest import Docks
from tests.vllm.engine import PREFILL, Engine, Setup, drive
from tests.vllm.pairs import FAMILIES, Pair, assert_whole

Prompt = Callable[[int], list[int]]
LENGTH = 300
SECONDS = 60.0
LEASE = ("lease_seconds", 30.0)
"""No test here is about the end of a lease, but for those that say so."""


def packed(setup: Setup, *more: tuple[str, Any]) -> Setup:
    return replace(setup, options=(*setup.options, LEASE, ("way", "packed"), *more))


def side(engine: Engine, rank: int = 0) -> WorkerSide:
    found = engine.workers[rank].connector._side
    assert isinstance(found, WorkerSide)
    return found


def status(engine: Engine, rank: int = 0) -> dict[str, Any]:
    return side(engine, rank).status()


def gathered(engine: Engine) -> list[int]:
    """How many chunks or frames each rank has gathered."""
    return [status(engine, rank)["gathering"]["gathered"] for rank in range(len(engine.workers))]


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """How the bytes of each load came, and what its digest came to, as the engine counts it."""
    seen: list[tuple[str, str]] = []
    add = LoadStats.add

    def add_and_remember(stats: LoadStats, record: Record) -> None:
        seen.append((record.way, record.digest))
        add(stats, record)

    monkeypatch.setattr(LoadStats, "add", add_and_remember)
    return seen


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A gather that does not end before it may: set when it has begun, and to be set when it may end."""
    has_begun, may_end = threading.Event(), threading.Event()

    gather = ChunkCopier.gather

    def slow_gather(*args: Any) -> None:
        has_begun.set()
        assert may_end.wait(SECONDS)
        gather(*args)

    monkeypatch.setattr(ChunkCopier, "gather", slow_gather)
    monkeypatch.setattr(chunk_copier, "are_long", lambda _: False)
    yield has_begun, may_end
    may_end.set()


@pytest.mark.parametrize(
    ("family", "src", "dst"),
    [
        ("llama", {}, {}),
        ("llama", {"tp": 2}, {}),
        ("llama", {"block": 64}, {"block": 32}),
        ("gemma3", {"tp": 2}, {"block": 64}),
        ("gemma3", {}, {"tp": 2}),
        # The toy's states are whole on each rank: between two TP sizes they would mean something else.
        ("nemotron_h", {"pp": 2}, {}),
    ],
    ids=["llama", "llama-tp2-tp1", "llama-b64-b32", "gemma3-tp2-b64", "gemma3-tp1-tp2", "nemotron_h-pp2"],
)
def test_loads_are_exact(
    docks: Docks,
    prompt: Prompt,
    ways: list[tuple[str, str]],
    family: str,
    src: dict[str, Any],
    dst: dict[str, Any],
) -> None:
    """Every rank gathers, each load is compared by its digest, and all blocks come back."""
    setup = FAMILIES[family]
    reading = packed(replace(setup, **dst), ("digest", "full"))
    pair = Pair(docks.own(packed(replace(setup, **src))), docks.own(reading))
    lengths = (5, 64, LENGTH)
    for num_tokens in lengths:
        words = prompt(num_tokens)
        pair.assert_loaded(pair.ferry(words), words)
    assert_whole(pair.src, pair.dst, seconds=SECONDS)
    assert ways == [("packed", "equal")] * (len(lengths) * len(pair.dst.workers))
    assert all(count >= len(lengths) for count in gathered(pair.src))


@pytest.mark.parametrize("lease_seconds", [30.0, 1.0], ids=["given-up", "lease-over"])
def test_blocks_are_not_freed_while_a_rank_gathers(
    docks: Docks, prompt: Prompt, hanging: tuple[threading.Event, threading.Event], lease_seconds: float
) -> None:
    """Law 6, in vLLM's own scheduler: however a lease ends, its blocks wait for what is being gathered."""
    has_begun, may_end = hanging
    setup, short = packed(FAMILIES["gemma3"]), ("lease_seconds", lease_seconds)
    src, dst = docks.own(packed(FAMILIES["gemma3"], short)), docks.own(setup)
    pair, words = Pair(src, dst), prompt(LENGTH)
    answer = dst.ask(words, params=pair.prefill(words))
    drive([src, dst], has_begun.is_set)
    num_free = src.num_free
    assert num_free < src.num_free_at_start
    if lease_seconds > 1:
        engines = [src, dst]
        dst.core.abort_requests([answer.request_id])
    else:
        engines, destination = [src], side(dst)._destination
        assert destination is not None
        destination._owner.close()  # a reader that is gone renews nothing
    scheduler = src.core.scheduler
    drive(engines, lambda: scheduler.connector._side.outgoing._ending)  # the workers are told of it now
    until = time.monotonic() + 0.2  # nothing shows that a thing will never happen
    drive(engines, lambda: time.monotonic() > until)
    assert src.num_free == num_free
    assert scheduler.requests
    assert scheduler.has_requests(), "the engine makes steps until it has the blocks back"
    may_end.set()
    assert_whole(src, seconds=SECONDS)


class Stranger:
    """A reader that asks a worker for whatever it likes."""

    def __init__(self, point: GatherPoint) -> None:
        self.calls, self._point = GatherCalls(open_channel("", None), "stranger"), point
        self._answers: list[str] = []
        self.calls.listen(self)  # type: ignore[arg-type]  # it hears what a mover hears

    def not_gathered(self, sender: str, nonce: int, error: str) -> None:
        self._answers.append(error)

    def stream_offered(self, sender: str, nonce: int, offer: StreamOffer) -> None:
        raise AssertionError("no stream is asked for")

    def lost(self, sender: str) -> None:
        pass

    def ask(self, permit: bytes, term: Term) -> str:
        number = len(self._answers) + 1
        self.calls.ask(self._point.address, number, permit, [term], bytes(16))
        deadline = time.monotonic() + SECONDS
        while len(self._answers) < number:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return self._answers[-1]


def test_a_reader_gets_no_bytes_of_another_ticket(docks: Docks, prompt: Prompt) -> None:
    src = docks.own(packed(FAMILIES["llama"]))
    worker, prefills = side(src), []
    for _ in range(2):
        prefills.append(src.ask(prompt(64), 1, dict(PREFILL)))
        src.finish(prefills[-1])
    mine, other = (from_text((prefill.params or {})["kvferry_ticket"]) for prefill in prefills)
    join = worker.join
    assert join is not None
    assert join.rank_key
    stranger = Stranger(GatherPoint.from_bytes(Card.from_bytes(join.description.card).gather))
    (permit,) = permits_for(mine, make_proofs(mine, {0: join.rank_key}), [0]).values()

    manifest = worker._manifest
    assert manifest is not None
    (_, stride), cells = next(iter(BlockBytes(manifest, manifest.ranks[0]).of_block_0.items()))
    starts = cells.starts[:1]

    def block(ticket: Any) -> Term:
        ((_, table),) = ticket.block_tables().items()
        pattern = Runs(starts, starts, cells.stops[:1] - starts)
        return Term(pattern, np.array([[int(table.block_ids[0]) * stride], [0]]))

    assert "the stream is unknown or closed" in stranger.ask(permit, block(mine)), "else it would be sent"
    assert "another request" in stranger.ask(permit, block(other))
    assert "did not grant" in stranger.ask(permit[:-1] + bytes([permit[-1] ^ 1]), block(mine))
    assert status(src)["gathering"]["refused"] == {"not-its-bytes": 1, "not-granted": 1}
    stranger.calls.close()


def test_a_rank_key_goes_to_the_scheduler_and_nowhere_else(
    docks: Docks,
    prompt: Prompt,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inside vLLM's handshake: not in the log, in a dump, in the status, nor over the control channel."""
    monkeypatch.setattr(logging.getLogger("kvferry"), "propagate", True)
    caplog.set_level(logging.DEBUG, logger="kvferry")
    setup = packed(FAMILIES["llama"], ("dump", str(tmp_path)))
    pair = Pair(docks.own(setup), docks.own(setup))
    words = prompt(64)
    pair.assert_loaded(pair.ferry(words), words)
    handshake = pair.src.workers[0].connector.get_handshake_metadata()
    join = decode_to_authority(handshake.join)
    assert isinstance(join, Join)
    key = join.rank_key
    assert len(key) == 32
    assert join.invited(b"credential").rank_key == b""
    told = [repr(handshake), repr(join), repr(side(pair.src)._gathering), str(status(pair.src))]
    told += [path.read_text() for path in tmp_path.iterdir()]
    told += [record.getMessage() for record in caplog.records]
    assert "serves packed reads at tcp://127.0.0.1:" in caplog.text
    assert not [text for text in told if repr(key)[2:-1] in text or key.hex() in text]
    assert any(tmp_path.iterdir())


def test_a_consumer_alone_opens_no_socket(docks: Docks) -> None:
    assert side(docks.own(replace(packed(FAMILIES["llama"]), role="kv_consumer")))._gathering is None
