"""From a call to another host's doctor to diagnoses."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.cli.doctor.diagnosis import Condition, Diagnosis, Level
from kvferry.cli.doctor.seen import Observed, PeerSeen, SecretSeen

COMPARED = ("kvferry", "nixl", "nixl-cu12", "nixl-cu13", "vllm")


def check_peer(observed: Observed) -> Iterator[Diagnosis]:
    """Whether the control channel works, and whether both hosts have the same versions."""
    peer = observed.peer
    if peer is None:
        return
    if peer.tcp_error:
        yield _unreachable(peer)
    elif not peer.is_connected:
        yield _wrong_secret(peer, observed.secret)
    elif peer.theirs is None:
        yield _no_doctor(peer)
    else:
        yield from _versions(peer)


def _unreachable(peer: PeerSeen) -> Diagnosis:
    return Diagnosis(
        Condition.UNREACHABLE,
        Level.PROBLEM,
        f"{peer.address} cannot be reached: {peer.tcp_error}.",
        "Engines find each other by the control channel; without it nothing is read.",
        "Start `kvferry doctor --listen ADDRESS` there first. If it runs, check the address and the port,"
        " the route, and"
        " that no firewall or network policy stops TCP to that port.",
    )


def _wrong_secret(peer: PeerSeen, secret: SecretSeen) -> Diagnosis:
    ours = (
        f"our secret has the fingerprint {secret.fingerprint}" if secret.fingerprint else "we have no secret"
    )
    return Diagnosis(
        Condition.WRONG_SECRET,
        Level.PROBLEM,
        f"Somebody listens at {peer.address}, and does not speak with us: {ours}.",
        "Engines talk only if both know one secret, or neither has one.",
        "Compare the fingerprints: `kvferry doctor --listen` prints its own when it starts. If they differ,"
        " give both"
        " hosts the same file (KVFERRY_SECRET_FILE). If they are equal, something else listens at that port.",
    )


def _no_doctor(peer: PeerSeen) -> Diagnosis:
    return Diagnosis(
        Condition.NO_DOCTOR,
        Level.PROBLEM,
        f"{peer.address} took our secret, and gave no answer that we know: {peer.answer_error}.",
        "Without its help no read between the two hosts can be tried.",
        "Start `kvferry doctor --listen` there, of the same version of kvferry: an engine at that port does"
        " not answer.",
    )


def _versions(peer: PeerSeen) -> Iterator[Diagnosis]:
    theirs = peer.theirs.versions if peer.theirs is not None else {}
    unlike = [
        f"{name} {peer.ours.versions.get(name, 'is missing')} here and {theirs.get(name, 'is missing')} there"
        for name in COMPARED
        if peer.ours.versions.get(name) != theirs.get(name)
    ]
    if unlike:
        yield Diagnosis(
            Condition.OTHER_VERSIONS,
            Level.NOTE,
            f"The two hosts differ: {'; '.join(unlike)}.",
            "Versions next to each other work together; which others do, nobody has tried.",
            "Install the same versions on both hosts, at least of kvferry and nixl.",
        )
