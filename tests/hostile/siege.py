"""The attack kit against an engine, from another host; good loads meanwhile, and a table of how they fared.

    python -m tests.hostile.siege --seconds 10               each attack for so long
    python -m tests.hostile.siege --code CHECKOUT            the engine and its reader run other code
    python -m tests.hostile.siege --as user                  another user of the same host, without a secret
    python -m tests.hostile.siege --soak 30                  30 minutes, attacked and left alone in turns

The source engine runs in one network namespace, its reader and the kit in another one, joined by a cable:
root is needed. The proxy is attacked on loopback.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.listeners import ProxyWorld, secret_in
from tests.hostile.kit import HTTP_CLIENTS, MEMBERS, OUTSIDERS
from tests.hostile.world import MORE_MIB, ROOT, Fared, World, environment
from tests.transport.listening import listeners_of
from tests.two_hosts import two_hosts

NOBODY = 65534
ALLOWED_MIB = {"member-open-streams": 128, "member-big": 128, "member-deaf": 128, "http-large-bodies": 512}
"""Documented limits allow these more: messages that wait, answers that are not read, bodies under way."""
NICE = 5
"""On a machine of its own the kit would not take the engine's processors."""


@dataclass(frozen=True)
class Besieged:
    """One attack, and how the engine and its reader fared."""

    attack: str
    counts: Counter[str]
    fared: Fared

    @property
    def is_fine(self) -> bool:
        is_refused = not self.counts["CACHE SEEN"] and not self.counts["ANSWERED"]
        return self.fared.is_fine and is_refused and self.num_tries > 0

    @property
    def num_tries(self) -> int:
        return self.counts["connections"] + self.counts["messages"]

    def row(self) -> str:
        fared, counts = self.fared, self.counts
        return (
            f"| {self.attack} | {self.num_tries:,} | {'YES' if counts['CACHE SEEN'] else 'no'} |"
            f" {'YES' if fared.is_written else 'no'} | {'no' if fared.is_alive else 'YES'} |"
            f" {fared.num_loads} | {len(fared.errors)} | {fared.starved_seconds:.2f} |"
            f" {fared.stall_seconds:.2f} | {fared.peak_mib:+} | {fared.grown_mib:+} |"
            f" {'ok' if self.is_fine else 'NOT FINE'} |"
        )


HEAD = (
    "| attack | tries | cache seen | cache changed | process ended | good loads | failed |"
    " longest wait s | stall s | peak MiB | kept MiB | |\n|" + " --- |" * 12
)


class Siege:
    """An engine, its reader, and where attackers are."""

    def __init__(self, stack: ExitStack, code: Path, *, is_same_host: bool, **settings: str) -> None:
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.chmod(self._folder, 0o755)
        if is_same_host:
            self._attacker_in, self.host, self.secret_file = list[str](), "127.0.0.1", ""
            source_in, self._user = list[str](), NOBODY
        else:
            here, there = stack.enter_context(two_hosts())
            source_in, self._attacker_in = (["ip", "netns", "exec", host.name] for host in (here, there))
            self.host, self.secret_file, self._user = here.address, secret_in(str(self._folder)), 0
        self._env = environment(self.secret_file, code=code) | settings
        self.world = World(
            self.host, self._env, source_in=source_in, reader_in=self._attacker_in, logs=self._folder
        )
        stack.callback(self.world.close)
        self.targets = [f"{kind}={address}" for kind, address in self.world.addresses.items()]

    def scan(self) -> dict[str, str]:
        """Open ports, and what is there."""
        (found,) = self._kit("--scan", self.host)
        return {str(place): str(kind) for place, kind in found.items()}

    def local(self) -> dict[str, str]:
        """What another user of the same host can do to the engine's process."""
        (found,) = self._kit("--local", str(self.world.source.pid), "--user", str(self._user))
        return {str(what): str(became) for what, became in found.items()}

    def documented(self) -> set[str]:
        return {*self.world.addresses.values()}

    def owned(self) -> set[str]:
        """Where the engine's process listens for TCP, as its kernel has it."""
        return {each.address for each in listeners_of([self.world.source.pid]) if each.kind == "tcp"}

    def attack(self, name: str, seconds: float) -> Besieged:
        member = ["--secret-file", self.secret_file] if name in MEMBERS and self.secret_file else []
        with self.world.loading(more_mib=ALLOWED_MIB.get(name, MORE_MIB)) as fared:
            (counts,) = self._kit(
                "--only", name, "--seconds", str(seconds), *member, *self.targets, "--user", str(self._user)
            )
        counts.pop("attack")
        return Besieged(name, Counter(counts), fared)

    def _kit(self, *words: str) -> list[dict[str, Any]]:
        command = [*self._attacker_in, "nice", "-n", str(NICE), sys.executable, "-m", "tests.hostile.kit"]
        done = subprocess.run(
            [*command, *words], env=self._env, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
        )
        return [json.loads(line) for line in done.stdout.splitlines()] or [{"attack": "failed"}]


@contextmanager
def besieged(code: Path = ROOT, *, is_same_host: bool = False, **settings: str) -> Iterator[Siege]:
    with ExitStack() as stack:
        yield Siege(stack, code, is_same_host=is_same_host, **settings)


def attack_proxy(name: str, seconds: float) -> Besieged:
    """A proxy on loopback."""
    world = ProxyWorld()
    try:
        command = [
            "nice",
            "-n",
            str(NICE),
            sys.executable,
            "-m",
            "tests.hostile.kit",
            f"http={world.address}",
        ]
        with world.loading(more_mib=ALLOWED_MIB.get(name, MORE_MIB)) as fared:
            done = subprocess.run(
                [*command, "--only", name, "--seconds", str(seconds)],
                env=environment(),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
        return Besieged(name, Counter({**json.loads(done.stdout), "attack": 0}), fared)
    finally:
        world.close()


def names_for(siege: Siege, chosen: Sequence[str]) -> list[str]:
    known = {target.partition("=")[0] for target in siege.targets}
    all_of_them = OUTSIDERS | MEMBERS
    return [
        name
        for name, (_, kinds) in all_of_them.items()
        if (not chosen or name in chosen) and known & {*kinds}
    ]


def quantile(seconds: Sequence[float], share: float) -> float:
    """The time that this share of the loads took at most."""
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


def soak(siege: Siege, minutes: float, seconds: float) -> bool:
    """One engine under all attacks, again and again; between them it is left alone, to compare."""
    names, before = names_for(siege, ()), siege.world.state()["rss"]
    quiet, attacked, errors = list[float](), list[float](), Counter[str]()
    is_fine, longest, ends_at = True, 0.0, time.monotonic() + 60 * minutes
    for turn in itertools.count():
        with siege.world.loading() as alone:
            time.sleep(seconds / 2)
        one = siege.attack(names[turn % len(names)], seconds)
        quiet += alone.seconds
        attacked += one.fared.seconds
        errors.update(one.fared.errors)
        longest = max(longest, one.fared.starved_seconds)
        is_fine &= one.is_fine and alone.is_fine
        if not one.is_fine:
            print(one.row(), flush=True)
        print(f"{turn} {one.attack}: {siege.world.state().get('rss', 0)} MiB", file=sys.stderr, flush=True)
        if time.monotonic() > ends_at or not siege.world.source.is_alive:
            break
    time.sleep(10)
    after = siege.world.state().get("rss", 0)
    for name, times in (("left alone", quiet), ("attacked", attacked)):
        figures = ", ".join(f"p{100 * share:g} {quantile(times, share):.3f} s" for share in (0.5, 0.99))
        print(f"{name}: {len(times)} good loads, {figures}, longest {max(times):.2f} s")
    print(f"attacks: {turn + 1}; failed: {dict(errors)}; longest wait {longest:.2f} s")
    print(f"memory: {before} MiB before, {after} MiB after, x {after / before:.2f}", flush=True)
    return is_fine


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.hostile.siege", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--code", type=Path, default=ROOT)
    parser.add_argument("--as", dest="who", choices=["host", "user"], default="host")
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an engine's setting"
    )
    given = parser.parse_args()
    settings = dict(setting.split("=", 1) for setting in given.set)
    is_fine, is_same_host = True, given.who == "user"
    with ExitStack() as stack:
        siege = stack.enter_context(besieged(given.code, is_same_host=is_same_host, **settings))
        if not is_same_host:
            found = siege.scan()
            print(f"open from elsewhere: {found}")
            print(f"listened at: {sorted(siege.owned())}; documented: {sorted(siege.documented())}")
            siege.targets += [f"ucx={place}" for place in found if place not in siege.documented()]
            is_fine &= {*found} == siege.documented() and "ucx" not in found.values()
        else:
            siege.world.source.ask("descriptors")
            print(f"another user: {siege.local()}")
        if given.soak:
            return 0 if soak(siege, given.soak, given.seconds) and is_fine else 1
        print(HEAD, flush=True)
        for name in names_for(siege, given.only):
            if not siege.world.source.is_alive or not siege.world.reader.is_alive:
                stack.pop_all().close()
                siege = stack.enter_context(besieged(given.code, is_same_host=is_same_host, **settings))
            one = siege.attack(name, given.seconds)
            print(one.row(), flush=True)
            if not one.is_fine or one.fared.errors:
                print(f"  {sorted({*one.fared.errors})[:2]} {dict(one.counts)}", flush=True)
            is_fine &= one.is_fine
        state = siege.world.state()
        print(f"the authority: {state.get('engine')}; the rank: {state.get('rank')}")
    for name in HTTP_CLIENTS if not given.only else [name for name in given.only if name in HTTP_CLIENTS]:
        if given.who == "host" and given.code == ROOT:
            one = attack_proxy(name, given.seconds)
            print(one.row(), flush=True)
            if not one.is_fine or one.fared.errors:
                print(f"  {sorted({*one.fared.errors})[:2]} {dict(one.counts)}", flush=True)
            is_fine &= one.is_fine
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
