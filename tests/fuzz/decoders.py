"""Everything that reads bytes from elsewhere, with good inputs to begin from.

What holds of each: whatever comes in, it returns or raises an error of ours, soon, with little memory. And
what it accepts, it writes and reads again as the same.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from kvferry import BlockTable, Request, Slack, Span
from kvferry.core.box import Box
from kvferry.core.digest import DigestPart
from kvferry.core.manifest import Outline
from kvferry.errors import KVFerryError
from kvferry.models import Topology, describe
from kvferry.testing.small import small
from kvferry.transport.cards import Card, GatherPoint, digest_of, name_in
from kvferry.transport.exports import Export, ExportedPiece, Extent
from kvferry.wire import (
    manifest_from_json,
    manifest_from_msgpack,
    manifest_to_json,
    manifest_to_msgpack,
    request_from_json,
)
from kvferry.wire import messages as m
from kvferry.wire.outline import outline_from_msgpack, outline_to_msgpack
from kvferry.wire.rank_asks import (
    FromRank,
    Gather,
    NotGathered,
    OpenStream,
    StreamOffered,
    ToRank,
    decode_from_rank,
    decode_to_rank,
    encode_rank_message,
    question_from_msgpack,
    question_to_msgpack,
)
from kvferry.wire.secret import Secret
from kvferry.wire.ticket import TableDoc, Ticket, from_text, to_text
from tests.support.requests import request_to_json

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Decoder:
    """One way in."""

    read: Callable[[bytes], object]
    """Raises nothing but KVFerryError."""
    write: Callable[[object], bytes] | None
    """None: what was read cannot be written again."""
    seeds: tuple[bytes, ...]

    def check(self, data: bytes) -> bool:
        """Whether it was accepted; raises if it was not read as it should be."""
        try:
            value = self.read(data)
        except KVFerryError:
            return False
        if self.write is not None:
            written = self.write(value)
            again = self.write(self.read(written))
            assert again == written, f"{written[:200]!r} is written as {again[:200]!r} the second time"
        return True


def _engines() -> list[object]:
    cuts = {
        "gqa": "tp=2,block=8,blocks=5",
        "mla": "tp=1,block=4,blocks=3",
        "kda-mla": "tp=2,block=8,blocks=5",
    }
    return [describe(small(name), Topology.parse(cut), "prefill") for name, cut in cuts.items()]


ENGINES = _engines()
TICKET = Ticket("prefill", 7, 1, "r", "tcp://x", 20, {"full": TableDoc((3, -1), 16)}, 30_000, b"d", b"m")
DESCRIBED = m.RankDescription(b"layout", ((4096, "cuda:0"), (0, "cpu")), b"\xff")
TO: tuple[m.Message, ...] = (
    m.Hello(m.PROTOCOL, "A"),
    m.AskStatus(m.PROTOCOL),
    m.DescribeRanks(4, 7, (0, 5)),
    m.Acquire(1, TICKET, "A", 0, 2, 5, b"token"),
    m.Renew(2, 7, "A", 0, ((1, b"a token"), (2, b""))),
    m.Settle(7, 1, "A", 0, 5, b"token", m.Outcome.UNREAD),
    m.DigestRequest(3, 7, 1, "A", 0, b"token", 1, b"question"),
    m.Join(m.PROTOCOL, "prefill", 0, "memory", b"\x00", DESCRIBED),
    m.ReleaseAck(7, 0, 12),
    m.DigestResult(7, 1, 4, b"\x00" * 16),
)
FROM: tuple[m.Message, ...] = (
    m.Welcome(m.PROTOCOL, "prefill", 7, "memory", b"o"),
    m.RankDescriptions(4, 7, {0: DESCRIBED}),
    m.Rejected("not-ready", "1 of 2"),
    m.Grant(1, 1, 30_000),
    m.Denial(1, 1, "taken"),
    m.Renewal(2, 30_000, (1,), (2, 3)),
    m.SettleAck(1, 0, 5, "lease-ended", "too late"),
    m.ReleaseNotice(7, 3, (("r", "read"),)),
    m.JoinAck("prefill", 7),
    m.StatusAnswer(b"{}"),
    m.DigestAnswer(3, b"\x00" * 16, "no"),
    m.DigestTask(7, 4, {"full": TableDoc((3, -1), 16)}, b"question"),
)
REQUEST = Request(
    {"full": BlockTable.of([4, 9, 7])}, {"full": BlockTable.of([2, 0], 8)}, {"full": (Span(16, 40),)}
)
PART = DigestPart("k", "k", Box((("head", (Span(0, 4),)), ("token", (Span(1, 2),))), 2), (Span(0, 100),))
EXPORT = Export("00" * 16, (ExportedPiece(4096, "ab" * 64),), (Extent(0, 1, 128, 1 << 40),), probe="cd" * 32)


def _ticket(data: bytes) -> Ticket:
    return from_text(data.decode("utf-8", "replace"))


def _card(data: bytes) -> object:
    card = Card.from_bytes(data)
    return card, name_in(card.metadata), GatherPoint.from_bytes(card.gather) if card.gather else None


def _secret(data: bytes) -> object:
    Secret.from_text(data.decode("utf-8", "replace"))
    return None


def _topology(data: bytes) -> object:
    return Topology.parse(data.decode("utf-8", "replace"))


def _same(write: Callable[..., bytes]) -> Callable[[object], bytes]:
    return write


GATHER = Gather(1, b"permit", ((bytes(8), bytes([8, *bytes(7)]), bytes(16)),), bytes(16))
TO_RANK: tuple[ToRank, ...] = (GATHER, OpenStream(2, b"permit", ((4096, 64), (8192, 64))))
FROM_RANK: tuple[FromRank, ...] = (
    NotGathered(1, "ended", "over"),
    StreamOffered(2, "tcp://127.0.0.1:5", bytes(16), bytes(16)),
)

DECODERS = {
    "to-rank": Decoder(decode_to_rank, _same(encode_rank_message), tuple(map(encode_rank_message, TO_RANK))),
    "from-rank": Decoder(
        decode_from_rank, _same(encode_rank_message), tuple(map(encode_rank_message, FROM_RANK))
    ),
    "to-authority": Decoder(m.decode_to_authority, _same(m.encode), tuple(map(m.encode, TO))),
    "from-authority": Decoder(m.decode_from_authority, _same(m.encode), tuple(map(m.encode, FROM))),
    "ticket": Decoder(
        _ticket,
        lambda ticket: to_text(ticket).encode(),  # type: ignore[arg-type]
        (to_text(TICKET).encode(), to_text(msgspec.structs.replace(TICKET, seal=b"x" * 32)).encode()),
    ),
    "manifest-json": Decoder(
        manifest_from_json, _same(manifest_to_json), tuple(map(_same(manifest_to_json), ENGINES))
    ),
    "manifest-msgpack": Decoder(
        manifest_from_msgpack, _same(manifest_to_msgpack), tuple(map(_same(manifest_to_msgpack), ENGINES))
    ),
    "outline": Decoder(
        lambda data: outline_from_msgpack(data, "prefill"),
        _same(outline_to_msgpack),
        tuple(outline_to_msgpack(Outline.of(engine)) for engine in ENGINES),  # type: ignore[arg-type]
    ),
    "digest-question": Decoder(question_from_msgpack, None, (question_to_msgpack(7, [PART, PART]),)),
    "request": Decoder(request_from_json, None, (request_to_json(REQUEST, slack=Slack.LEAVE),)),
    "card": Decoder(
        _card,
        None,
        (
            Card("a", b"keys" * 9, EXPORT.to_bytes()).to_bytes(),
            Card(gather=GatherPoint("tcp://127.0.0.1:5", 4096, digest_of([])).to_bytes()).to_bytes(),
        ),
    ),
    "export": Decoder(
        Export.from_bytes,
        lambda export: export.to_bytes(),  # type: ignore[attr-defined]
        (EXPORT.to_bytes(), replace(EXPORT, refusal="no").to_bytes()),
    ),
    "secret": Decoder(_secret, None, (b"0123456789abcdef0123456789ABCDEF\n",)),
    "topology": Decoder(_topology, None, (b"tp=2,pp=2,block=16,blocks=10,layout=NHD", b"tp=4,pp=3+1,cp=2")),
}


def corpus(name: str) -> list[bytes]:
    """Good inputs, and those that once reached something new."""
    return [*DECODERS[name].seeds, *kept(name)]


def kept(name: str) -> list[bytes]:
    """What the fuzzer found: a line of base64 for each input."""
    path = CORPUS / f"{name}.txt"
    return [base64.b64decode(line) for line in path.read_text().split()] if path.exists() else []


def keep(name: str, found: Iterable[bytes]) -> None:
    """Write what the fuzzer found, the shortest first."""
    CORPUS.mkdir(exist_ok=True)
    lines = [base64.b64encode(data).decode() for data in sorted(found, key=lambda data: (len(data), data))]
    (CORPUS / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
