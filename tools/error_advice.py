"""What to do about failed loads, transports, sources that say no, and tickets: for docs/errors.md.

What a ``FailureCode`` means is said beside it. The other codes here are plain words where they are raised, so
that they are explained as well. What to do about two engines that were refused is in
``kvferry.cli.remedies``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.runtime import FailureCode

BUG = "Report it, with the log's traceback and both manifests."
CALLER = "Correct the engine that calls kvferry: the detail names the group and the tokens."


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


_NEVER, _LATER, _AS_IT_IS = "never", "later", "never as it is"
SOURCE_TABLES = FailureAdvice(_NEVER, "Correct the source engine: its ticket does not fit its own manifest.")
FETCH_TABLES = FailureAdvice(_AS_IT_IS, CALLER)
_SAME_SECRET = (
    "Give both engines the same secret (`KVFERRY_SECRET_FILE`; `kvferry keygen -o FILE` makes one)."
)

FAILURES: dict[FailureCode, FailureAdvice] = {
    FailureCode.ABORTED: FailureAdvice(
        "", "Nothing: the client went away, or the engine gave the request up."
    ),
    FailureCode.REFUSED: FailureAdvice(
        "never, until one side changes", "Read the findings in the detail: each is a code of the table below."
    ),
    FailureCode.NO_ANSWER: FailureAdvice(
        _LATER,
        "Check that the decode host reaches the address in the source's line `requests can be fetched from`:"
        " routes, firewalls, `advertise`. Right after a start, wait until all ranks are up.",
    ),
    FailureCode.SOURCE_GONE: FailureAdvice(
        "once it answers again",
        "Look at the source's own log: it was killed, stopped or cut off. Restart it; the router sends the"
        " request to another.",
    ),
    FailureCode.RESTARTED: FailureAdvice(
        _NEVER, "Prefill again. Nothing else: the old engine's cache is gone."
    ),
    FailureCode.PROTOCOL: FailureAdvice(_NEVER, "Run releases of kvferry that speak a common version."),
    FailureCode.FORGED: FailureAdvice(
        _NEVER,
        f"{_SAME_SECRET} If they have it: somebody between the engines changes tickets, or a client sends"
        " its own; let the router drop `kv_transfer_params` of clients.",
    ),
    FailureCode.ELSEWHERE: FailureAdvice("never, until both have a secret", _SAME_SECRET),
    FailureCode.NO_SECRET: FailureAdvice("never, until it has one", _SAME_SECRET),
    FailureCode.NOT_ALLOWED: FailureAdvice(
        _NEVER, "Add the source's address to `authorities` of the decode engine, or remove the list."
    ),
    FailureCode.ENDED: FailureAdvice(
        _NEVER,
        "Prefill again. If it happens often, requests wait longer between prefill and decode than"
        " `lease_seconds`: raise it, or look for what makes the router or the decode engine slow.",
    ),
    FailureCode.TAKEN: FailureAdvice(
        _NEVER, "One ticket is one request at one engine: let the router send it to a single decode engine."
    ),
    FailureCode.SPENT: FailureAdvice(
        _NEVER, "One ticket is one request: let the router prefill again for each try."
    ),
    FailureCode.TICKET: FailureAdvice(_NEVER, "Fetch with the ticket that was held under this handle."),
    FailureCode.READER: FailureAdvice(
        _NEVER, "Give all ranks of the destination one reader name, and each its own rank number."
    ),
    FailureCode.DENIED: FailureAdvice(
        "", "Read the detail; it is a code of [a source that says no](#a-source-that-says-no)."
    ),
    FailureCode.LEASE_ENDED: FailureAdvice(
        _NEVER,
        "Prefill again. If it happens often: the source was stopped or very busy for longer than"
        " `lease_seconds`, or the read takes too long for this link.",
    ),
    FailureCode.LEASE_LAPSED: FailureAdvice(
        _NEVER, "Prefill again. If it happens often, raise `lease_seconds`: the control channel is slow."
    ),
    FailureCode.UNCONFIRMED: FailureAdvice(
        _NEVER,
        "Prefill again. The source fell silent right after the read: see its log.",
    ),
    FailureCode.DIGEST_DIFFERS: FailureAdvice(
        _NEVER,
        "Prefill again. If it happens twice, take the two hosts out of service and test their memory, network"
        " cards and drivers: bytes change on the way. Keep the line: it names state, rank and tokens.",
    ),
    FailureCode.NO_DIGEST: FailureAdvice(
        "never, until both sides can",
        "Read the detail. Both sides digest host memory and CUDA's, and a source rank must be a"
        " `SourceRank` or a worker of vLLM's; else leave `digest_every` at 0, or vLLM's option `digest` at"
        " `off`.",
    ),
    FailureCode.TRANSPORT: FailureAdvice(
        "yes, if the ticket is still good",
        "Read what the fabric says in the detail: most often the source's process died, or a link went"
        " down. The peer is met anew before its next read.",
    ),
    FailureCode.OVERDUE: FailureAdvice(
        "yes, if the ticket is still good",
        "The link is too slow for this request, or stalls. Compare with `kvferry plan`. With the library,"
        " raise `Timing.read` only if the time is expected.",
    ),
    FailureCode.TOO_MANY_PEERS: FailureAdvice(
        _LATER,
        "Let one decode engine serve fewer prefill engines; or somebody sends tickets of invented engines.",
    ),
    FailureCode.NOT_CONNECTED: FailureAdvice(
        _LATER, "Read the detail: it begins with a code of [the transport](#the-transport)."
    ),
    FailureCode.BAD_MANIFEST: FailureAdvice(
        _NEVER,
        "Correct what describes the source engine; vLLM's connector: report it, with the dumped manifest.",
    ),
    FailureCode.BAD_TABLES: FailureAdvice(_NEVER, CALLER),
    FailureCode.UNEXPECTED: FailureAdvice("", BUG),
    FailureCode.SRC_GROUP_UNKNOWN: SOURCE_TABLES,
    FailureCode.SRC_TABLE_MISSING: SOURCE_TABLES,
    FailureCode.SRC_TABLE_SHORT: SOURCE_TABLES,
    FailureCode.SRC_TABLE_START: SOURCE_TABLES,
    FailureCode.SRC_TABLE_LENGTH: SOURCE_TABLES,
    FailureCode.SRC_RING_SHORT: SOURCE_TABLES,
    FailureCode.SRC_HOLE: SOURCE_TABLES,
    FailureCode.SRC_BLOCK_RANGE: SOURCE_TABLES,
    FailureCode.SRC_BLOCK_TWICE: SOURCE_TABLES,
    FailureCode.DST_GROUP_UNKNOWN: FETCH_TABLES,
    FailureCode.DST_TABLE_MISSING: FETCH_TABLES,
    FailureCode.DST_TABLE_SHORT: FETCH_TABLES,
    FailureCode.DST_TABLE_START: FETCH_TABLES,
    FailureCode.DST_TABLE_LENGTH: FETCH_TABLES,
    FailureCode.DST_RING_SHORT: FETCH_TABLES,
    FailureCode.DST_HOLE: FETCH_TABLES,
    FailureCode.DST_BLOCK_RANGE: FETCH_TABLES,
    FailureCode.DST_BLOCK_TWICE: FETCH_TABLES,
    FailureCode.NEED_GROUP_UNKNOWN: FETCH_TABLES,
    FailureCode.KEPT_GROUP_UNKNOWN: FETCH_TABLES,
    FailureCode.KEPT_SLOT: FETCH_TABLES,
    FailureCode.NEED_MISSING: FETCH_TABLES,
    FailureCode.NEED_KEPT: FETCH_TABLES,
    FailureCode.NOT_PROVED: FailureAdvice(
        _AS_IT_IS,
        "Report it with the message and both engines' manifests (vLLM's option `dump`). Until it is fixed,"
        " give both engines the same block size and layout.",
    ),
    FailureCode.TOO_MANY_RUNS: FailureAdvice(
        _AS_IT_IS, "Give both sides the same layout or larger blocks, or load the request in parts."
    ),
    FailureCode.REQUEST: FETCH_TABLES,
}
"""What to do about a load that failed."""


_OTHER_WAY = "Not urgent: mend what the detail says, for speed."
_ORDER = "Correct the code that calls the transport: connect, submit and close in order."

TRANSPORT: dict[str, Explained] = {
    "bad-card": Explained(
        "What a source gave out to be read by makes no sense.",
        "Run the same release of kvferry and of NIXL on both sides. If they are: somebody else answers at"
        " that address.",
    ),
    "bad-key": Explained(
        "A source named a stream whose key has the wrong length.",
        "Run the same release of kvferry on both sides. If they are: somebody else answers at that address.",
    ),
    "bad-device": Explained(
        "A region lies on something other than the host or one CUDA device.",
        "Describe regions on `cpu` or `cuda:N`, one CUDA device for each rank.",
    ),
    "bad-frame": Explained(
        "What came over a stream is not what its source was asked for, or was changed on its way.",
        "If it comes again: somebody or something changes bytes between the two hosts.",
    ),
    "bad-probe": Explained("Memory that was mapped is not the source's.", _OTHER_WAY),
    "bad-setting": Explained(
        "A variable of the environment has a value that is not understood, or not built yet for this rank.",
        "Correct the variable that the message names; it says what is allowed.",
    ),
    "broken": Explained(
        "The thread that calls NIXL has stopped after repeated errors.",
        "Restart the engine; the log has the reason.",
    ),
    "closed": Explained("The transport was closed.", "Nothing, while an engine shuts down."),
    "cuda": Explained(
        "A call to CUDA failed.",
        "Not urgent where two engines of one host meet. Else read the detail: it is CUDA's own word.",
    ),
    "failed": Explained("A read of a benchmark failed.", "Read the detail: it is the fabric's own word."),
    "kind": Explained(
        "The two sides use different transports.", "Use one: `nixl` on both sides (`memory` is for tests)."
    ),
    "known-peer": Explained("A peer is connected a second time.", _ORDER),
    "late": Explained(
        "A read of a benchmark did not end in time.", "Look for a link that stalls: `kvferry bench --quick`."
    ),
    "nixl": Explained(
        "A call to NIXL failed.",
        "Read the detail: it is NIXL's own word. `UCX_LOG_LEVEL=info` makes UCX say more.",
    ),
    "no-address": Explained(
        "A region has no address.", "Use the manifest of a running engine: one made offline has no addresses."
    ),
    "no-connection": Explained(
        "The source's memory could not be reached in time.",
        "The detail names the way. Direct: check that UCX may use a network that both hosts share. Otherwise"
        " check that the ports of the source's ranks can be reached.",
    ),
    "no-cuda": Explained(
        "CUDA's driver, or its Python bindings, cannot be loaded.",
        'Not urgent: for speed, install `"kvferry[cuda]"` beside a driver.',
    ),
    "no-descriptors": Explained("The source's device memory could not be opened.", _OTHER_WAY),
    "no-device": Explained("Somebody waits for a device, and this rank's memory is the host's.", _ORDER),
    "no-export": Explained(
        "The source cannot share its device memory.",
        "Not urgent: for speed, allocate it so that it can be shared; the detail says what was tried.",
    ),
    "no-regions": Explained("A rank registers no memory.", _ORDER),
    "not-here": Explained(
        "The way that `KVFERRY_WAY` names is not open between these two ranks.",
        "Leave `KVFERRY_WAY` unset: mapped reads need device memory on one host, direct ones"
        " `KVFERRY_EXPOSE=fabric` on both sides.",
    ),
    "not-direct": Explained(
        "NIXL cannot read the source's memory by itself, and no other way is allowed (`KVFERRY_WAY=direct`).",
        "Set `KVFERRY_EXPOSE=fabric` on both sides; use RDMA, or on one host a shared PID namespace; or leave"
        " `KVFERRY_WAY` unset.",
    ),
    "not-installed": Explained(
        "NIXL cannot be imported.",
        'Install it: `pip install "kvferry[nixl]"`; the wheel must fit the CUDA of torch (`nixl-cu12`,'
        " `nixl-cu13`).",
    ),
    "not-mapped": Explained(
        "The source's device memory cannot be mapped here: it is on another host, or on a device that this"
        " process does not see.",
        "Not urgent: on one host, let both processes see both devices (`CUDA_VISIBLE_DEVICES`).",
    ),
    "not-packed": Explained(
        "The source's rank sends nothing to readers, or this one has no channel to ask it.",
        "Use a `SourceRank` and a `Destination`, which open both; in vLLM the source's role must not be"
        " `kv_consumer`.",
    ),
    "not-registered": Explained("A transport is used before its memory is registered.", _ORDER),
    "out-of-bounds": Explained("A read would leave its region.", BUG),
    "registered": Explained("Memory is registered a second time.", _ORDER),
    "still-under-way": Explained(
        "Reads had not ended when the transport was closed: their memory must stay.",
        "Keep the memory until the process ends; look for a link that stalls.",
    ),
    "too-much": Explained("A reader asks for more at once than a source rank sends.", BUG),
    "bad-chunk": Explained("A chunk of the packed way is too short or too long.", _ORDER),
    "under-way": Explained("A transfer's number is used again before its end was collected.", _ORDER),
    "unexpected": Explained("A bug.", BUG),
    "unknown-peer": Explained("A read names a peer that is not connected.", _ORDER),
    "unknown-region": Explained("A read names a region that does not exist.", BUG),
}
"""The codes of ``TransportError``."""

ANSWERS: dict[str, Explained] = {
    "join": Explained(
        "A process asked to be a rank of this engine, and is not, or does not fit to the others.",
        "Start all ranks of an engine from one configuration; the detail says what does not fit.",
    ),
    "not-joined": Explained(
        "A rank speaks that this start of the engine does not know.", "Nothing: it joins again."
    ),
    "not-ready": Explained(
        "Not all ranks of the source have joined.", "Wait; if it stays, look for the rank that did not start."
    ),
    "protocol": Explained(
        "The two sides speak different versions of the protocol.", "Run releases that speak a common version."
    ),
    "status": Explained(
        "Somebody asked over the network how the engine is, and may not know.",
        "Ask on the engine's host, or with the fleet's secret (`kvferry status --secret-file FILE ADDRESS`).",
    ),
    "too-long": Explained(
        "A message was longer than its kind may be.",
        "A request with very many blocks, or junk at the port. If it is a request of yours, report it.",
    ),
}
"""What a source says when it turns somebody away."""

TICKETS: dict[str, Explained] = {
    "no-ticket": Explained(
        "The request says that somebody else prefilled it, and carries no ticket.",
        "Use kvferry on the prefill side too, and a router that passes all of `kv_transfer_params` on.",
    ),
    "unreadable": Explained(
        "The text is no ticket, or was changed or cut on its way.",
        "Use kvferry on the prefill side too; then look at what the router does to `kv_transfer_params`.",
    ),
    "other-prompt": Explained(
        "The ticket was made for another prompt or LoRA adapter; the words say which, if that can be told.",
        "Let the router send the same body to both engines; use one tokenizer and chat template on both.",
    ),
    "state-too-long": Explained(
        "The recurrent state includes more tokens than may be loaded for this prompt.",
        "Let the router ask the prefill engine for one token: `max_tokens` and `max_completion_tokens` of 1.",
    ),
}
"""Tickets that vLLM's connector does not use, as its metrics name them."""
