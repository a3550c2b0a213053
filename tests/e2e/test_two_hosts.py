"""Two real engines that share no network but a cable: a secret and an advertised address."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import HOST, KVFERRY, PROMPTS, Engine, Nursery, ferry
from tests.e2e.needs import needs_vllm
from tests.two_hosts import Host, two_hosts

pytestmark = [pytest.mark.slow, *needs_vllm]

SECRET = "R4tJm3k1Zz0c9Xw7QpVbS5uYhE2dNfLg"
CUTS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"tensor_parallel_size": 2, "block_size": 64}, {"block_size": 32}),
    "gemma3": ({"block_size": 32}, {"tensor_parallel_size": 2, "block_size": 32}),
    "nemotron_h": ({"block_size": 192}, {"tensor_parallel_size": 2, "block_size": 256}),
}
"""By family: the engine that prefills, and the one that decodes."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture(scope="module")
def nursery(hosts, tmp_path_factory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("logs")) as nursery:
        yield nursery


def begin(nursery: Nursery, family: str, host: Host, args: Mapping[str, Any], **extra: Any) -> Engine:
    connector = {**KVFERRY, "kv_connector_extra_config": {"listen": "tcp://0.0.0.0:*", **extra}}
    env = {HOST: host.name, "VLLM_HOST_IP": host.address}
    return nursery.begin(nursery.make(family), connector, env=env, **args)


@pytest.mark.parametrize("family", CUTS)
def test_a_pair_on_two_hosts(nursery, hosts, tmp_path: Path, family):
    """The ticket names the advertised address; who knows the secret is served."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    src, dst = (
        begin(nursery, family, host, args, advertise=host.address, secret_file=str(secret))
        for host, args in zip(hosts, CUTS[family], strict=True)
    )
    alone = nursery.begin(nursery.make(family))
    for engine in (src, dst, alone):
        engine.wait_ready()
    for prompt in PROMPTS:
        expected = alone.ask(prompt).tokens
        answer = ferry(src, dst, prompt)
        assert answer.tokens == expected
        assert answer.sources.external >= len(prompt) - 1  # states and windows compute the last one again
    assert ", packed" in dst.log.read_text()
    for engine in (src, dst, alone):
        engine.close()


def test_without_a_secret_another_host_is_told_at_once(nursery, hosts):
    """Loopback only, by default: another pod has another loopback."""
    src, dst = (
        nursery.begin(nursery.make("llama"), KVFERRY, env={HOST: host.name, "VLLM_HOST_IP": host.address})
        for host in hosts
    )
    for engine in (src, dst):
        engine.wait_ready()
    answer = ferry(src, dst, PROMPTS[1])
    assert answer.finish_reason == "error"
    log = dst.log.read_text()
    assert "listens on loopback only" in log
    assert "secret" in log
    for engine in (src, dst):
        engine.close()
