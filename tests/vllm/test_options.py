"""What the connector may be told: a closed door unless somebody opens it, no secret where vLLM prints it."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvferry.errors import SpecError, TransportError
from kvferry.integrations.vllm.shared.options import Options, check_transfer_config, is_through_host
from kvferry.transport.settings import Expose, WayChoice

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
    with pytest.raises(SpecError, match="vLLM logs these options") as refused:
        options(secret=TEXT)
    assert TEXT not in str(refused.value)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"insecure": "yes"}, "insecure must be true or false"),
        ({"authorities": "tcp://10.0.0.7"}, "authorities must be a list"),
        ({"authorities": ["10.0.0.7"]}, "authorities must be addresses"),
        ({"secret_file": "/nowhere"}, "cannot be read"),
        ({"backends": "UCX"}, "backends must be a list"),
        ({"digest": "some"}, 'digest must be "off", "full", or a whole number N'),
        ({"digest": 0}, "digest must be"),
        ({"digest": None}, "digest must be"),
        ({"digest": True}, "digest must be"),
        ({"digest": 1.5}, "digest must be"),
        ({"backends": ["UCX", "GDS"]}, "backends must be a list with the name of one"),
        ({"way": "off"}, "way must be one of auto, mapped, direct, packed, got 'off'"),
        ({"way": True}, "way must be one of"),
        ({"way": ["auto"]}, "way must be one of"),
        ({"lease_seconds": "10"}, "lease_seconds must be a number of seconds, got '10'"),
        ({"meet_seconds": 10}, "unknown meet_seconds"),
        ({"expose": "all"}, "expose must be one of nothing, host, fabric, got 'all'"),
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
    assert [each.digest_every for each in chosen] == [None, 0, 1, 100]


def test_way_and_exposure_are_options_or_variables_and_the_option_counts(monkeypatch):
    for name in ("KVFERRY_WAY", "KVFERRY_EXPOSE"):
        monkeypatch.delenv(name, raising=False)
    assert (options().way, options().expose) == (WayChoice.AUTO, Expose.HOST)
    monkeypatch.setenv("KVFERRY_WAY", "packed")
    monkeypatch.setenv("KVFERRY_EXPOSE", "nothing")
    assert (options().way, options().expose) == (WayChoice.PACKED, Expose.NOTHING)
    assert options(way="auto", expose="host").way is WayChoice.AUTO
    monkeypatch.setenv("KVFERRY_WAY", "yes")
    with pytest.raises(
        TransportError, match="KVFERRY_WAY='yes': must be one of auto, mapped, direct, packed"
    ):
        options()


def through_host(**extra):
    return Options.of(extra, host="10.0.0.7", is_through_host=True)


def test_caches_of_a_device_pass_through_the_host_if_vllm_says_so(monkeypatch):
    """RA-4."""
    for name in ("KVFERRY_WAY", "KVFERRY_EXPOSE"):
        monkeypatch.delenv(name, raising=False)
    asked = transfer(kv_buffer_device="cpu")
    check_transfer_config(asked, "cuda")
    assert is_through_host(asked, "cuda")
    assert not is_through_host(asked, "cpu")
    chosen = through_host()
    assert (chosen.way, chosen.expose) == (WayChoice.PACKED, Expose.NOTHING)


@pytest.mark.parametrize("is_option", [False, True])
def test_through_the_host_workers_have_to_send(monkeypatch, is_option):
    if not is_option:
        monkeypatch.setenv("KVFERRY_WAY", "mapped")
    extra = {"way": "direct"} if is_option else {}
    with pytest.raises(SpecError, match="kv_buffer_device: 'cpu' needs packed reads"):
        check_transfer_config(transfer(kv_buffer_device="cpu", kv_connector_extra_config=extra), "cuda")


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
        ({"kv_buffer_device": "cuda"}, "kv_buffer_device: 'cuda' is not supported for caches"),
        ({"kv_port": 5600}, '"listen": "tcp://HOST:5600"'),
        ({"enable_permute_local_kv": True}, "layouts may differ without it"),
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
    for words in (
        "kv_buffer_device: 'cuda'",
        "kv_port: 5600",
        "the number of cores decides",
        "mean lease_seconds?",
    ):
        assert words in str(refused.value)


def test_a_secret_among_wrong_options_is_not_repeated():
    with pytest.raises(SpecError) as refused:
        check_transfer_config(
            transfer(kv_port=5600, kv_connector_extra_config={"secret": TEXT, "num_threads": 4}), "cpu"
        )
    assert TEXT not in str(refused.value)
