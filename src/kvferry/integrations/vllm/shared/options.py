"""The options in ``kv_connector_extra_config``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, TypeVar

from kvferry.endpoint.secret_source import secret_from_environment, secret_from_file
from kvferry.errors import SpecError
from kvferry.integrations.known_vllm import LEASE, READ_BACK, TEXTS, unknown_options
from kvferry.runtime import Timing
from kvferry.transport.nixl_agent import UCX
from kvferry.transport.settings import WAY_SETTING, Expose, WayChoice
from kvferry.wire.secret import Trust

C = TypeVar("C", bound=Enum)
_Rule = tuple[Callable[[Any], bool], str]
"""A check of the value, and its description for the error."""

HOST = "cpu"
_DIGESTS: dict[Any, int] = {"off": 0, "full": 1}
_PORT_OF_VLLM = 14579
"""vLLM's default ``kv_port``."""
UNCHECKED = "unchecked"
"""The ``identity`` that accepts unidentified models."""
REQUIRED = "required"
"""The default ``identity``. Any other text replaces the engine's identity."""


@dataclass(frozen=True)
class Options:
    """The connector's options, checked at start; unknown keys are rejected by name.

    >>> Options.of({"lease_seconds": 10}, host="10.0.0.7").listen
    'tcp://127.0.0.1:*'
    >>> Options.of({"insecure": True}, host="10.0.0.7").listen
    'tcp://10.0.0.7:*'
    >>> Options.of({"leese_seconds": 10}, host="10.0.0.7")
    Traceback (most recent call last):
    kvferry.errors.SpecError: kv_connector_extra_config: unknown leese_seconds (did you mean ...
    """

    listen: str
    """The lease authority's address; ``*`` selects a free port."""
    advertise: str = ""
    """The host that readers connect to, if not the one in ``listen``."""
    trust: Trust = field(default_factory=Trust)
    """Accepted peers: by default, only engines on this host."""
    dump: str = ""
    """Folder for manifests: of this engine at start, and of both sides of a rejected pair."""
    identity: str = ""
    """``unchecked`` accepts unidentified models; other text is this engine's identity."""
    timing: Timing = field(default_factory=Timing)
    backend: str = UCX
    """The NIXL backend."""
    digest_every: int | None = None
    """Both engines compare a digest for one in this many loads; 0: never; None: the default."""
    way: WayChoice = WayChoice.AUTO
    expose: Expose = Expose.HOST
    is_layout_required: bool = False
    """Whether an unexpected cache layout stops the engine; otherwise blocks are transferred as a whole."""
    is_reading_back: bool = False
    """Whether earlier turns of a conversation are read back from the engine that decoded them."""
    must_version_be_tested: bool = False
    """Whether untested versions of vLLM are rejected."""

    @property
    def rank_listen(self) -> str:
        """A worker's address for packed reads: the same host with a free port."""
        return f"{self.listen.rpartition(':')[0]}:*"

    @property
    def is_identity_unchecked(self) -> bool:
        """Whether unidentified models and LoRA adapters are accepted."""
        return self.identity == UNCHECKED

    @property
    def stated_identity(self) -> str:
        """The configured identity; empty if it is determined from the model's files."""
        return "" if self.identity in (UNCHECKED, REQUIRED) else self.identity

    @classmethod
    def of(cls, extra: Mapping[str, Any], *, host: str, is_through_host: bool = False) -> Options:
        """Options from the configuration; ``host`` is this machine's address.

        ``is_through_host``: whether transfers of device caches are staged in host memory.
        """
        if "secret" in extra:
            raise SpecError(
                "kv_connector_extra_config: vLLM logs these options, so the secret must not be one: write"
                " it to a file (kvferry keygen -o FILE) and set secret_file or KVFERRY_SECRET_FILE"
            )
        if unknown := unknown_options(extra):
            raise SpecError(unknown)
        _check(extra)
        path = extra.get("secret_file")
        secret = secret_from_file(path) if path else secret_from_environment()
        trust = Trust(secret, extra.get("insecure", False), tuple(extra.get("authorities", ())))
        address = "127.0.0.1" if trust.is_one_host else f"[{host}]" if ":" in host else host
        way = _chosen("way", extra, WayChoice.from_environment(os.environ))
        expose = _chosen("expose", extra, Expose.from_environment(os.environ))
        digest = extra.get("digest")
        return cls(
            listen=extra.get("listen") or f"tcp://{address}:*",
            advertise=extra.get("advertise", ""),
            trust=trust,
            dump=extra.get("dump", ""),
            identity=extra.get("identity", ""),
            timing=Timing(lease=float(extra[LEASE])) if LEASE in extra else Timing(),
            backend=extra.get("backends", [UCX])[0],
            digest_every=_DIGESTS.get(digest, digest),
            way=WayChoice.PACKED if is_through_host else way,
            expose=Expose.NOTHING if is_through_host else expose,
            is_layout_required="layout_check" in extra,
            is_reading_back=extra.get(READ_BACK, False),
            must_version_be_tested="vllm_version" in extra,
        )


class TransferConfig(Protocol):
    """The part of vLLM's transfer configuration that other connectors use."""

    kv_buffer_device: str
    kv_port: int
    enable_permute_local_kv: bool
    kv_connector_extra_config: dict[str, Any]


def check_transfer_config(config: TransferConfig, device: str) -> None:
    """Reject settings that this connector does not support; ``device`` is vLLM's.

    One error lists all of them, because each start of an engine takes minutes.
    """
    if refused := list(_refused_keys(config, device)):
        raise SpecError("; ".join(refused))


def is_through_host(config: TransferConfig, device: str) -> bool:
    return device != HOST and config.kv_buffer_device == HOST


def _refused_keys(config: TransferConfig, device: str) -> Iterator[str]:
    extra = config.kv_connector_extra_config or {}
    if config.kv_buffer_device not in (device, HOST):
        yield (
            f"kv_buffer_device: {config.kv_buffer_device!r} is not supported for caches on {device!r}:"
            f" use {device!r} or {HOST!r}, or remove it"
        )
    way = extra.get("way", os.environ.get(WAY_SETTING, WayChoice.AUTO.value))
    if is_through_host(config, device) and way not in (WayChoice.AUTO.value, WayChoice.PACKED.value):
        yield (
            f"kv_buffer_device: {HOST!r} needs packed reads, but way is {way!r}: use"
            f" {WayChoice.PACKED.value!r}, or remove one of them"
        )
    if config.enable_permute_local_kv:
        yield "enable_permute_local_kv: remove it: layouts may differ without it"
    if config.kv_port != _PORT_OF_VLLM:
        yield (
            f"kv_port: {config.kv_port} is not used by kvferry: remove it. For a fixed port, set"
            f' "listen": "tcp://HOST:{config.kv_port}" in kv_connector_extra_config'
        )
    if (unknown := unknown_options(extra)) and "secret" not in extra:
        yield unknown


def _is_digest(value: Any) -> bool:
    return value in ("off", "full") or (type(value) is int and value > 0)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_SWITCH: _Rule = (lambda value: isinstance(value, bool), "true or false")
_TEXT: _Rule = (lambda value: isinstance(value, str), "text")
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(TEXTS, _TEXT),
    "insecure": _SWITCH,
    READ_BACK: _SWITCH,
    "authorities": (_is_list_of_texts, "a list of addresses"),
    "backends": (
        lambda value: _is_list_of_texts(value) and len(value) == 1 and bool(value[0]),
        f'a list with the name of one of NIXL\'s backends, as in ["{UCX}"]',
    ),
    "digest": (_is_digest, '"off", "full", or a whole number N, which checks one in N loads'),
    LEASE: (lambda value: type(value) in (int, float), "a number of seconds"),
    "layout_check": (lambda value: value == REQUIRED, f"{REQUIRED!r}, or left out"),
    "vllm_version": (lambda value: value == "tested", "'tested', or left out"),
}
"""Valid values of each option; ``way`` and ``expose`` have enums."""


def _check(extra: Mapping[str, Any]) -> None:
    for name, (is_good, rule) in _RULES.items():
        if name in extra and not is_good(extra[name]):
            raise SpecError(f"kv_connector_extra_config: {name} must be {rule}, got {extra[name]!r}")


def _chosen(name: str, extra: Mapping[str, Any], default: C) -> C:
    choices = [*type(default)]
    for choice in choices:
        if choice.value == extra.get(name, default.value):
            return choice
    words = ", ".join(choice.value for choice in choices)
    raise SpecError(f"kv_connector_extra_config: {name} must be one of {words}, got {extra[name]!r}")
