"""What ``kv_connector_extra_config`` may say."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from typing import Any, Protocol, TypeVar

from kvferry.endpoint.secret_source import secret_from_environment, secret_from_file
from kvferry.errors import SpecError
from kvferry.runtime import Timing
from kvferry.transport.nixl_agent import UCX
from kvferry.transport.settings import WAY_SETTING, Expose, WayChoice
from kvferry.wire.secret import Secret, Trust

C = TypeVar("C", bound=Enum)

_TEXTS = ("listen", "advertise", "secret_file", "dump", "identity")
HOST = "cpu"
_PORT_OF_VLLM = 14579
"""What ``kv_port`` is if nobody sets it."""
UNCHECKED = "unchecked"
"""The identity that accepts what is not known."""
REQUIRED = "required"
"""What is the default. Any other text is an identity by itself."""
_LEASE = "lease_seconds"
_WORDS = ("insecure", "authorities", "backends", "digest", "expose", "way", "layout_check", "vllm_version")
_KNOWN = {*_TEXTS, _LEASE, *_WORDS}
_INSTEAD = {
    "num_threads": "leave it out: as many threads read as there are cores for",
    "kv_lease_duration": "say lease_seconds",
    "enforce_handshake_compat": "leave it out: engines are compared part by part; identity says it for you",
    "engine_ttl": "leave it out: engines that are gone are forgotten",
    "kv_recompute_threshold": "leave it out: a router that wants no transfer asks for no ticket",
    "bidirectional_kv_xfer": "leave it out: nothing goes back to the prefill engine",
    "decoder_kv_blocks_ttl": "leave it out: nothing goes back to the prefill engine",
    "push_registration_timeout": "leave it out: kvferry pulls",
}
"""Options of vLLM's NixlConnector, and what to do with them here."""


@dataclass(frozen=True)
class Options:
    """The connector's few options, checked at start-up; unknown keys are refused by name.

    >>> Options.of({"lease_seconds": 10}, host="10.0.0.7").listen
    'tcp://127.0.0.1:*'
    >>> Options.of({"insecure": True}, host="10.0.0.7").listen
    'tcp://10.0.0.7:*'
    >>> Options.of({"leese_seconds": 10}, host="10.0.0.7")
    Traceback (most recent call last):
    kvferry.errors.SpecError: kv_connector_extra_config: unknown leese_seconds (did you mean ...
    """

    listen: str
    """Where the lease authority listens; ``*`` takes a free port."""
    advertise: str = ""
    """The host that readers call, where it is not the one of ``listen``."""
    trust: Trust = field(default_factory=Trust)
    """Whom this engine talks to: by default, engines of this host only."""
    dump: str = ""
    """A folder for manifests: of this engine at the start, and of both sides where a peer is refused."""
    identity: str = ""
    """``unchecked`` accepts engines whose model is not wholly known; other text is this engine's identity."""
    timing: Timing = field(default_factory=Timing)
    backend: str = UCX
    """Which of NIXL's backends moves the bytes."""
    digest_every: int = 0
    """Of one in so many loads both engines compare a digest of the bytes; 0: of none."""
    way: WayChoice = WayChoice.AUTO
    """By which way workers read."""
    expose: Expose = Expose.HOST
    """What of a worker its readers can reach by themselves."""
    is_layout_required: bool = False
    """Whether an engine whose caches do not lie as expected is to end, rather than to move whole blocks."""
    must_version_be_tested: bool = False
    """Whether a version of vLLM that was not tested is refused."""

    @property
    def rank_listen(self) -> str:
        """Where a worker is asked for bytes: at the same host, by a port of its own."""
        return f"{self.listen.rpartition(':')[0]}:*"

    @property
    def is_identity_unchecked(self) -> bool:
        """Whether an engine, or a LoRA adapter, of which something is not known is accepted."""
        return self.identity == UNCHECKED

    @property
    def stated_identity(self) -> str:
        """The text that stands for this engine's model; empty if its files do."""
        return "" if self.identity in (UNCHECKED, REQUIRED) else self.identity

    @classmethod
    def of(cls, extra: Mapping[str, Any], *, host: str, is_through_host: bool = False) -> Options:
        """Options from the configuration; ``host`` is where this machine can be reached.

        ``is_through_host``: whether caches on a device are to pass through the host's memory.
        """
        if "secret" in extra:
            raise SpecError(
                "kv_connector_extra_config: vLLM prints these options, so a secret must not be one: write it"
                " to a file (kvferry keygen -o FILE) and say secret_file, or set KVFERRY_SECRET_FILE"
            )
        if unknown := _unknown_options(extra):
            raise SpecError(unknown)
        texts = {name: _text(name, extra.get(name, "")) for name in _TEXTS}
        trust = Trust(_secret(texts["secret_file"]), _insecure(extra), _authorities(extra))
        address = "127.0.0.1" if trust.is_one_host else f"[{host}]" if ":" in host else host
        way = _chosen("way", extra, WayChoice.from_environment(os.environ))
        expose = _chosen("expose", extra, Expose.from_environment(os.environ))
        return cls(
            listen=texts["listen"] or f"tcp://{address}:*",
            advertise=texts["advertise"],
            trust=trust,
            dump=texts["dump"],
            identity=texts["identity"],
            timing=_timing(extra),
            backend=_backend(extra),
            digest_every=_digest_every(extra),
            way=WayChoice.PACKED if is_through_host else way,
            expose=Expose.NOTHING if is_through_host else expose,
            is_layout_required=_is_said("layout_check", REQUIRED, extra),
            must_version_be_tested=_is_said("vllm_version", "tested", extra),
        )


class TransferConfig(Protocol):
    """The part of vLLM's own configuration that other connectors use."""

    kv_buffer_device: str
    kv_port: int
    enable_permute_local_kv: bool
    kv_connector_extra_config: dict[str, Any]


def check_transfer_config(config: TransferConfig, device: str) -> None:
    """Refuse by name what is asked for, and this connector does not do; ``device`` is vLLM's.

    All of it at once: an engine that was started for nothing costs minutes.
    """
    if refused := list(_refused_keys(config, device)):
        raise SpecError("; ".join(refused))


def is_through_host(config: TransferConfig, device: str) -> bool:
    return device != HOST and config.kv_buffer_device == HOST


def _refused_keys(config: TransferConfig, device: str) -> Iterator[str]:
    extra = config.kv_connector_extra_config or {}
    if config.kv_buffer_device not in (device, HOST):
        yield (
            f"kv_buffer_device: {config.kv_buffer_device!r} asks for copies in other memory, but these caches"
            f" are on {device!r}, and move from there or through {HOST!r}: say one of them, or leave it out"
        )
    way = extra.get("way", os.environ.get(WAY_SETTING, WayChoice.AUTO.value))
    if is_through_host(config, device) and way not in (WayChoice.AUTO.value, WayChoice.PACKED.value):
        yield (
            f"kv_buffer_device: through {HOST!r}, workers send to each other, and way is {way!r}: say"
            f" {WayChoice.PACKED.value!r}, or leave one of them out"
        )
    if config.enable_permute_local_kv:
        yield "enable_permute_local_kv: kvferry moves between any two layouts without it: leave it out"
    if config.kv_port != _PORT_OF_VLLM:
        yield (
            f"kv_port: {config.kv_port} is for other connectors; kvferry takes a free port. If it must be"
            f' this one, say "listen": "tcp://HOST:{config.kv_port}" in kv_connector_extra_config'
        )
    if (unknown := _unknown_options(extra)) and "secret" not in extra:
        yield unknown


def _unknown_options(extra: Mapping[str, Any]) -> str:
    """The options that nobody here knows, each with what to do instead; empty if there are none."""
    unknown = sorted(set(extra) - _KNOWN)
    if not unknown:
        return ""
    names = ", ".join(f"{name}{_advice(name)}" for name in unknown)
    return f"kv_connector_extra_config: unknown {names}; known are {', '.join(sorted(_KNOWN))}"


def _advice(name: str) -> str:
    if name in _INSTEAD:
        return f" (NixlConnector's; {_INSTEAD[name]})"
    alike = get_close_matches(name, _KNOWN, n=1, cutoff=0.7)
    return f" (did you mean {alike[0]}?)" if alike else ""


def _backend(extra: Mapping[str, Any]) -> str:
    """As vLLM's own connector spells it: a list, of one here."""
    match extra.get("backends", [UCX]):
        case [str(name)] if name:
            return name
        case other:
            raise SpecError(
                "kv_connector_extra_config: backends must be a list with the name of one of NIXL's backends,"
                f' as in ["{UCX}"], got {other!r}'
            )


def _digest_every(extra: Mapping[str, Any]) -> int:
    match extra.get("digest", "off"):
        case "off":
            return 0
        case "full":
            return 1
        case int(every) if not isinstance(every, bool) and every > 0:
            return every
        case other:
            raise SpecError(
                'kv_connector_extra_config: digest must be "off", "full", or a whole number N, which checks'
                f" one in N loads; got {other!r}"
            )


def _chosen(name: str, extra: Mapping[str, Any], default: C) -> C:
    """An option that is one word of a few."""
    choices = [*type(default)]
    for choice in choices:
        if choice.value == extra.get(name, default.value):
            return choice
    words = ", ".join(choice.value for choice in choices)
    raise SpecError(f"kv_connector_extra_config: {name} must be one of {words}, got {extra[name]!r}")


def _is_said(name: str, word: str, extra: Mapping[str, Any]) -> bool:
    """An option that is one word, or left out."""
    if name in extra and extra[name] != word:
        raise SpecError(
            f"kv_connector_extra_config: {name} must be {word!r}, or left out, got {extra[name]!r}"
        )
    return name in extra


def _secret(path: str) -> Secret | None:
    return secret_from_file(path) if path else secret_from_environment()


def _insecure(extra: Mapping[str, Any]) -> bool:
    value = extra.get("insecure", False)
    if not isinstance(value, bool):
        raise SpecError(f"kv_connector_extra_config: insecure must be true or false, got {value!r}")
    return value


def _authorities(extra: Mapping[str, Any]) -> tuple[str, ...]:
    value = extra.get("authorities", [])
    if not isinstance(value, list) or not all(isinstance(address, str) for address in value):
        raise SpecError(f"kv_connector_extra_config: authorities must be a list of addresses, got {value!r}")
    return tuple(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SpecError(f"kv_connector_extra_config: {name} must be text, got {value!r}")
    return value


def _timing(extra: Mapping[str, Any]) -> Timing:
    """How long leases last is the deployment's; the other waits are those that every engine has."""
    if _LEASE not in extra:
        return Timing()
    value = extra[_LEASE]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"kv_connector_extra_config: {_LEASE} must be a number of seconds, got {value!r}")
    return Timing(lease=float(value))
