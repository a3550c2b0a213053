"""What to do about failed loads, transports, sources that say no, and tickets: for docs/errors.md.

What a ``FailureCode`` means is said beside it. The other codes here are plain words where they are raised, so
that they are explained as well. What to do about two engines that were refused is in
``kvferry.cli.output``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.runtime import FailureCode

BUG = "Report it with the traceback and both manifests."
CALLER = "Fix the calling engine; the detail names the group and the tokens."


@dataclass(frozen=True, slots=True)
class FailureAdvice:
    """What to do about a load that failed."""

    again: str
    """Whether the same ticket can be loaded by another try."""
    cure: str


@dataclass(frozen=True, slots=True)
class Explained:
    """A code that has no docstring of its own."""

    meaning: str
    cure: str


_NEVER, _LATER, _AS_IT_IS = "never", "later", "never, unless changed"
_SAME_SECRET = "Give both engines the same secret (`kvferry keygen -o FILE`, `KVFERRY_SECRET_FILE`)."

FAILURES: dict[FailureCode, FailureAdvice] = {
    FailureCode.ABORTED: FailureAdvice(
        "", "None: the client disconnected, or the engine aborted the request."
    ),
    FailureCode.REFUSED: FailureAdvice(
        "never, until one side changes",
        "See the findings in the detail; their codes are under [refusals](#incompatible-engines).",
    ),
    FailureCode.NO_ANSWER: FailureAdvice(
        _LATER,
        "Check that the decode host reaches the address in the source's log line `requests can be fetched"
        " from`. After a start, wait until all ranks are up.",
    ),
    FailureCode.SOURCE_GONE: FailureAdvice(
        "once it answers again",
        "Check the source's log and restart it.",
    ),
    FailureCode.RESTARTED: FailureAdvice(_NEVER, "Prefill again: the cache is gone."),
    FailureCode.PROTOCOL: FailureAdvice(_NEVER, "Run kvferry releases with a common protocol version."),
    FailureCode.FORGED: FailureAdvice(
        _NEVER,
        f"{_SAME_SECRET} If both have it, tickets are modified in transit or forged by clients: let"
        f" the router drop `kv_transfer_params` sent by clients.",
    ),
    FailureCode.ELSEWHERE: FailureAdvice("never, until both have a secret", _SAME_SECRET),
    FailureCode.NO_SECRET: FailureAdvice("never, until it has one", _SAME_SECRET),
    FailureCode.NOT_ALLOWED: FailureAdvice(
        _NEVER, "Add the source to `authorities` of the decode engine, or remove the list."
    ),
    FailureCode.ENDED: FailureAdvice(
        _NEVER,
        "Prefill again. If it recurs, requests wait longer than `lease_seconds` between prefill and"
        " decode: raise it, or find the delay.",
    ),
    FailureCode.TAKEN: FailureAdvice(_NEVER, "Let the router send each ticket to one decode engine."),
    FailureCode.SPENT: FailureAdvice(_NEVER, "Let the router prefill again for each attempt."),
    FailureCode.TICKET: FailureAdvice(_NEVER, "Fetch with the ticket held under this handle."),
    FailureCode.READER: FailureAdvice(
        _NEVER, "Use one reader name for all ranks, and a unique rank number for each."
    ),
    FailureCode.DENIED: FailureAdvice(
        "", "See the detail; its code is under [rejections by a source](#rejections-by-a-source)."
    ),
    FailureCode.LEASE_ENDED: FailureAdvice(
        _NEVER,
        "Prefill again. If it recurs, the source was suspended or busy for longer than `lease_seconds`, or"
        " the link is too slow.",
    ),
    FailureCode.LEASE_LAPSED: FailureAdvice(
        _NEVER, "Prefill again. If it recurs, raise `lease_seconds`: the control channel is slow."
    ),
    FailureCode.UNCONFIRMED: FailureAdvice(
        _NEVER,
        "Prefill again. The source stopped answering after the read: check its log.",
    ),
    FailureCode.DIGEST_DIFFERS: FailureAdvice(
        _NEVER,
        "Prefill again. If it recurs, take the hosts out of service and test memory, network cards and"
        " drivers. Keep the log line.",
    ),
    FailureCode.NO_DIGEST: FailureAdvice(
        "never, until both sides can",
        "See the detail. Digests need host or CUDA memory on both sides, and a `SourceRank` or vLLM worker"
        " as source; otherwise set `digest_every` to 0 (vLLM: `digest` to `off`).",
    ),
    FailureCode.TRANSPORT: FailureAdvice(
        "yes, while the ticket is valid",
        "See the detail; usually the source's process died or a link went down. kvferry reconnects before"
        " the next read.",
    ),
    FailureCode.OVERDUE: FailureAdvice(
        "yes, while the ticket is valid",
        "The link is too slow or stalls. Compare with `kvferry plan`. Raise `Timing.read` only if the"
        " duration is expected.",
    ),
    FailureCode.TOO_MANY_PEERS: FailureAdvice(
        _LATER,
        "Connect fewer prefill engines to one decode engine, or check for forged tickets.",
    ),
    FailureCode.NOT_CONNECTED: FailureAdvice(
        _LATER, "See the detail; it starts with a [transport](#transport) code."
    ),
    FailureCode.BAD_MANIFEST: FailureAdvice(
        _NEVER,
        "Fix the source's manifest. With vLLM, report it with the dumped manifest.",
    ),
    FailureCode.BAD_TABLES: FailureAdvice(_NEVER, CALLER),
    FailureCode.UNEXPECTED: FailureAdvice("", BUG),
    FailureCode.NOT_PROVED: FailureAdvice(
        _AS_IT_IS,
        "Report it with both manifests (vLLM: option `dump`). As a workaround, use equal block sizes and"
        " layouts.",
    ),
    FailureCode.TOO_MANY_RUNS: FailureAdvice(
        _AS_IT_IS, "Use the same layout or larger blocks, or load the request in parts."
    ),
    FailureCode.SRC_TABLES: FailureAdvice(
        _NEVER, "Fix the source engine: its ticket does not match its manifest."
    ),
    FailureCode.REQUEST: FailureAdvice(_AS_IT_IS, CALLER),
}
"""What to do about a load that failed."""


_OTHER_WAY = "Optional, for speed: fix the cause in the detail."
_ORDER = "Fix the order of calls to the transport."

TRANSPORT: dict[str, Explained] = {
    "bad-card": Explained(
        "The source's card is invalid.",
        "Run the same kvferry and NIXL releases on both sides, and check which process listens at the"
        " address.",
    ),
    "bad-key": Explained(
        "The stream's key has the wrong length.",
        "Run the same kvferry release on both sides, and check which process listens at the address.",
    ),
    "bad-device": Explained(
        "A region is neither on the host nor on the rank's CUDA device.",
        "Use `cpu` or `cuda:N`, one CUDA device per rank.",
    ),
    "bad-frame": Explained(
        "A frame does not match the request, or was modified in transit.",
        "If it recurs, check the network between the two hosts.",
    ),
    "bad-probe": Explained("The mapped memory is not the source's.", _OTHER_WAY),
    "bad-setting": Explained(
        "An environment variable has an invalid or unsupported value.",
        "Correct the variable; the message lists the valid values.",
    ),
    "broken": Explained(
        "The NIXL thread stopped after repeated errors.",
        "Restart the engine; the log has the reason.",
    ),
    "closed": Explained("The transport was closed.", "None during shutdown."),
    "cuda": Explained(
        "A call to CUDA failed.",
        "Optional during first contact on one host; otherwise see CUDA's error in the detail.",
    ),
    "failed": Explained("A benchmark read failed.", "See the fabric's error in the detail."),
    "kind": Explained("The two sides use different transports.", "Use the same transport on both sides."),
    "known-peer": Explained("A peer is connected twice.", _ORDER),
    "late": Explained("A benchmark read timed out.", "Check the link: `kvferry bench --quick`."),
    "nixl": Explained(
        "A call to NIXL failed.",
        "See NIXL's error in the detail; `UCX_LOG_LEVEL=info` adds UCX logs.",
    ),
    "no-address": Explained(
        "A region has no address.",
        "Use the manifest of a running engine; offline manifests have no addresses.",
    ),
    "no-connection": Explained(
        "Connecting to the source's memory timed out.",
        "The detail names the mode. Direct: check that UCX uses a network that both hosts share. Otherwise"
        " check that the ports of the source's ranks are reachable.",
    ),
    "no-cuda": Explained(
        "The CUDA driver or its Python bindings cannot be loaded.",
        "Optional, for speed: install the extra `cuda` and a driver.",
    ),
    "no-descriptors": Explained("The source's device memory cannot be opened.", _OTHER_WAY),
    "no-device": Explained("A call refers to a device, but this rank uses host memory.", _ORDER),
    "no-export": Explained(
        "The source cannot share its device memory.",
        "Optional, for speed: allocate it as shareable memory; the detail lists the attempts.",
    ),
    "no-regions": Explained("A rank registers no memory.", _ORDER),
    "not-here": Explained(
        "The mode in `KVFERRY_WAY` is not available between these two ranks.",
        "Unset `KVFERRY_WAY`. Mapped reads need device memory on one host, direct reads"
        " `KVFERRY_EXPOSE=fabric` on both sides.",
    ),
    "not-direct": Explained(
        "NIXL cannot read the source's memory one-sidedly, and `KVFERRY_WAY=direct` excludes other modes.",
        "Set `KVFERRY_EXPOSE=fabric` on both sides; use RDMA or, on one host, a shared PID namespace; or"
        " unset `KVFERRY_WAY`.",
    ),
    "not-installed": Explained(
        "NIXL cannot be imported.",
        'Install it: `pip install ".[nixl]"`; the wheel must match torch (`nixl-cu12`, `nixl-cu13`).',
    ),
    "not-mapped": Explained(
        "The source's device memory is on another host, or on a device that is not visible to this process.",
        "Optional: on one host, make both devices visible to both processes (`CUDA_VISIBLE_DEVICES`).",
    ),
    "not-packed": Explained(
        "The source rank does not send, or this reader has no channel to it.",
        "Use `SourceRank` and `Destination`; in vLLM the source's role must not be `kv_consumer`.",
    ),
    "not-registered": Explained("The transport is used before memory is registered.", _ORDER),
    "out-of-bounds": Explained("A read would leave its region.", BUG),
    "registered": Explained("Memory is registered twice.", _ORDER),
    "still-under-way": Explained(
        "Reads were in flight when the transport was closed.",
        "Keep the memory until the process ends; check the link.",
    ),
    "too-much": Explained("A reader requested more than the limit at once.", BUG),
    "bad-chunk": Explained("A packed chunk has an invalid size.", _ORDER),
    "under-way": Explained("A transfer number is reused before its result was polled.", _ORDER),
    "unexpected": Explained("A bug.", BUG),
    "unknown-peer": Explained("A read refers to an unconnected peer.", _ORDER),
    "unknown-region": Explained("A read refers to an unknown region.", BUG),
}
"""The codes of ``TransportError``."""

ANSWERS: dict[str, Explained] = {
    "join": Explained(
        "A process asked to join the engine and does not belong to it, or does not match the other ranks.",
        "Start all ranks from one configuration; the detail names the mismatch.",
    ),
    "not-joined": Explained(
        "A rank is unknown to this engine process.", "None: the rank rejoins automatically."
    ),
    "not-ready": Explained(
        "Not all ranks of the source have joined.", "Wait; if it persists, find the rank that did not start."
    ),
    "protocol": Explained(
        "The protocol versions are incompatible.", "Run releases with a common protocol version."
    ),
    "status": Explained(
        "A status request over the network is not authorised.",
        "Run `kvferry status` on the engine's host, or with `--secret-file FILE ADDRESS`.",
    ),
    "too-long": Explained(
        "A message exceeds the limit of its type.",
        "If it was your own request, report it; otherwise, foreign traffic reaches the port.",
    ),
}
"""What a source says when it turns somebody away."""

TICKETS: dict[str, Explained] = {
    "no-ticket": Explained(
        "The request refers to a remote prefill, but has no ticket.",
        "Use kvferry on the prefill engine, and a router that passes `kv_transfer_params` unchanged.",
    ),
    "unreadable": Explained(
        "The ticket is invalid, modified or truncated.",
        "Use kvferry on the prefill engine, then check how the router handles `kv_transfer_params`.",
    ),
    "other-prompt": Explained(
        "The ticket was issued for another prompt, LoRA adapter or `cache_salt`.",
        "Let the router send the same body to both engines; use the same tokenizer and chat template.",
    ),
    "state-too-long": Explained(
        "The recurrent state includes more tokens than may be loaded for this prompt.",
        "Let the router set `max_tokens` and `max_completion_tokens` to 1 for the prefill.",
    ),
}
"""Tickets that vLLM's connector does not use, as its metrics name them."""
