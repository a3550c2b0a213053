"""What the connector may be told: a closed door unless somebody opens it, no secret where vLLM prints it."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvferry.errors import SpecError, TransportError
from kvferry.integrations.vllm.shared.options import Options, check_transfer_config, is_through_host
from kvferry.transport.expose import Expose
from kvferry.transport.ring_options import RingMemory
from kvferry.transport.staging import PackedReads

TEXT = "3q2-7wAAq83vEjRWeJCrzf7cuph2VDIQ"


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch):
    for name in ("KVFERRY_SECRET", "KVFERRY_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


def options(**extra):
    return Options.of(extra, host="10.0.0.7")


def test_one_host_works_with_one_flag():
    assert options().trust.is_one_host
    assert options().listen == "tcp://127.0.0.1:*"


def test_a_secret_opens_the_door_for_those_who_know_it(monkeypatch, tmp_path):
    path = tmp_path / "secret"
    path.write_text(TEXT)
    by_option = options(secret_file=str(path))
    monkeypatch.setenv("KVFERRY_SECRET_FILE", str(path))
    by_file = options()
    monkeypatch.delenv("KVFERRY_SECRET_FILE")
    monkeypatch.setenv("KVFERRY_SECRET", TEXT)
    for chosen in (by_option, by_file, options()):
        assert (chosen.listen, chosen.trust.is_one_host) == ("tcp://10.0.0.7:*", False)
        assert chosen.trust.ticket_key == by_option.trust.ticket_key
        assert TEXT not in repr(chosen)


def test_a_secret_among_the_options_is_refused_and_not_repeated():
    with pytest.raises(SpecError, match="vLLM prints these options") as refused:
        options(secret=TEXT)
    assert TEXT not in str(refused.value)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"insecure": "yes"}, "insecure must be true or false"),
        ({"authorities": "tcp://10.0.0.7"}, "authorities must be a list"),
        ({"authorities": ["10.0.0.7"]}, "authorities are addresses"),
        ({"secret_file": "/nowhere"}, "cannot be read"),
        ({"backends": "UCX"}, "backends must be a list"),
        ({"digest": "some"}, 'digest must be "off", "full", or a whole number N'),
        ({"digest": 0}, "digest must be"),
        ({"digest": True}, "digest must be"),
        ({"digest": 1.5}, "digest must be"),
        ({"backends": ["UCX", "GDS"]}, "backends must be a list with the name of one"),
        ({"packed_reads": "off"}, "packed_reads must be one of never, auto, require, got 'off'"),
        ({"packed_reads": True}, "packed_reads must be one of"),
        ({"packed_reads": ["auto"]}, "packed_reads must be one of"),
        ({"expose": "all"}, "expose must be one of pool, staging, nothing, got 'all'"),
        ({"expose": "staging", "packed_reads": "never"}, "expose 'staging' needs workers that gather"),
    ],
)
def test_senseless_options_are_refused_by_name(extra, words):
    with pytest.raises(SpecError, match=words):
        options(**extra)


def test_an_open_door_is_said_explicitly():
    chosen = options(insecure=True, authorities=["tcp://10.0.0.8"])
    assert chosen.trust.insecure
    assert chosen.listen == "tcp://10.0.0.7:*"
    assert not chosen.trust.may_call("tcp://10.0.0.9:5555")


def test_the_backend_is_nixls_name():
    """RA-5."""
    assert options().backend == "UCX"
    assert options(backends=["LIBFABRIC"]).backend == "LIBFABRIC"


def test_a_digest_is_off_full_or_of_one_in_so_many():
    chosen = [options(), options(digest="off"), options(digest="full"), options(digest=100)]
    assert [each.digest_every for each in chosen] == [0, 0, 1, 100]


def test_packed_reads_are_an_option_or_a_variable_and_the_option_counts(monkeypatch):
    monkeypatch.delenv("KVFERRY_PACKED_READS", raising=False)
    assert options().packed_reads is PackedReads.NEVER
    monkeypatch.setenv("KVFERRY_PACKED_READS", "require")
    assert options().packed_reads is PackedReads.REQUIRE
    assert options(packed_reads="auto").packed_reads is PackedReads.AUTO
    monkeypatch.setenv("KVFERRY_PACKED_READS", "yes")
    with pytest.raises(TransportError, match="KVFERRY_PACKED_READS='yes': one of never, auto, require"):
        options()


def test_caches_of_a_device_may_be_gathered_and_hidden():
    """vLLM's default for ``kv_buffer_device`` is where the caches are."""
    for extra in ({"packed_reads": "require"}, {"packed_reads": "auto"}, {"expose": "staging"}):
        asked = transfer(kv_buffer_device="cuda", kv_connector_extra_config=extra)
        check_transfer_config(asked, "cuda")
        assert not is_through_host(asked, "cuda")


def through_host(**extra):
    return Options.of(extra, host="10.0.0.7", is_through_host=True)


def test_caches_of_a_device_pass_through_the_host_if_vllm_says_so(monkeypatch):
    """RA-4."""
    for name in ("KVFERRY_PACKED_READS", "KVFERRY_EXPOSE", "KVFERRY_RING_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    asked = transfer(kv_buffer_device="cpu")
    check_transfer_config(asked, "cuda")
    assert is_through_host(asked, "cuda")
    assert not is_through_host(asked, "cpu")
    chosen = through_host()
    assert (chosen.rings.memory, chosen.packed_reads) == (RingMemory.HOST, PackedReads.REQUIRE)
    assert chosen.expose is Expose.STAGING, "the fabric may not be able to register the device's memory"
    assert through_host(expose="pool").expose is Expose.POOL
    assert options().rings.memory is RingMemory.OWN


@pytest.mark.parametrize("is_option", [False, True])
def test_through_the_host_workers_have_to_gather(monkeypatch, is_option):
    if not is_option:
        monkeypatch.setenv("KVFERRY_PACKED_READS", "never")
    extra = {"packed_reads": "auto"} if is_option else {}
    with pytest.raises(SpecError, match="kv_buffer_device: through 'cpu', workers gather for each other"):
        check_transfer_config(transfer(kv_buffer_device="cpu", kv_connector_extra_config=extra), "cuda")


def test_who_hides_its_pool_gathers(monkeypatch):
    monkeypatch.delenv("KVFERRY_PACKED_READS", raising=False)
    monkeypatch.delenv("KVFERRY_EXPOSE", raising=False)
    chosen = [options(), options(expose="staging"), options(expose="nothing", packed_reads="auto")]
    assert [(each.expose.value, each.packed_reads.value) for each in chosen] == [
        ("pool", "never"),
        ("staging", "require"),
        ("nothing", "auto"),
    ]
    monkeypatch.setenv("KVFERRY_EXPOSE", "staging")
    assert (options().expose, options().packed_reads) == (Expose.STAGING, PackedReads.REQUIRE)
    assert options(expose="pool").expose is Expose.POOL


@pytest.mark.parametrize(
    ("listen", "ranks"),
    [
        ("", "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:5600", "tcp://127.0.0.1:*"),
        ("tcp://[::1]:5600", "tcp://[::1]:*"),
    ],
)
def test_ranks_listen_beside_their_authority(listen, ranks):
    assert options(listen=listen).rank_listen == ranks


def transfer(**keys):
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_connector="KVFerryConnector", kv_role="kv_both", **keys)


def test_what_vllm_says_if_nobody_sets_it_is_fine():
    check_transfer_config(transfer(), "cpu")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"kv_buffer_device": "cuda"}, "kv_buffer_device: 'cuda' asks for copies in other memory"),
        ({"kv_port": 5600}, '"listen": "tcp://HOST:5600"'),
        ({"enable_permute_local_kv": True}, "between any two layouts without it"),
    ],
)
def test_what_is_for_other_connectors_is_refused_by_name(keys, words):
    """RA-4: never ignored, whoever sets it expects something."""
    with pytest.raises(SpecError, match=words):
        check_transfer_config(transfer(**keys), "cpu")


def test_everything_that_is_refused_is_said_at_once():
    """A second start to learn of the second key costs minutes."""
    asked = transfer(
        kv_buffer_device="cuda",
        kv_port=5600,
        kv_connector_extra_config={"num_threads": 4, "leese_seconds": 9},
    )
    with pytest.raises(SpecError) as refused:
        check_transfer_config(asked, "cpu")
    for words in ("kv_buffer_device: 'cuda'", "kv_port: 5600", "KVFERRY_READ_AGENTS", "mean lease_seconds?"):
        assert words in str(refused.value)


def test_a_secret_among_wrong_options_is_not_repeated():
    with pytest.raises(SpecError) as refused:
        check_transfer_config(
            transfer(kv_port=5600, kv_connector_extra_config={"secret": TEXT, "num_threads": 4}), "cpu"
        )
    assert TEXT not in str(refused.value)
