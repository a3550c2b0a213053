"""Which of these tests CI runs: ``make e2e``. All of them take most of an hour: ``make e2e-full``."""

from fnmatch import fnmatchcase

import pytest

from tests.e2e.docks import Docks
from tests.e2e.harness import Nursery

CHOSEN = (
    # Unequal TP, stages, blocks and packings, one family of each kind; and the controls.
    "test_pairs.py::test_same_blocks?deepseek_v3-tp1-tp2?",
    "test_pairs.py::test_same_blocks?nemotron_h-tp2-tp1?",
    "test_pairs.py::test_beyond_stock?llama-1kv-tp2-tp1?",
    "test_pairs.py::test_beyond_stock?gemma3-tp1b32-tp1b64?",
    "test_pairs.py::test_beyond_stock?llama-tp2b64-tp1b32?",
    "test_pairs.py::test_beyond_stock?llama-tp1b64bf16-tp1b32bf16?",
    "test_pairs.py::test_beyond_stock?llama-tp1b64bf16fp8-tp1b32bf16fp8?",
    "test_pairs.py::test_beyond_stock?deepseek_v3-tp1b32bf16-tp1b64bf16?",
    "test_pairs.py::test_beyond_stock?nemotron_h-tp1b192-tp2b256?",
    "test_pairs.py::test_stages?llama-tp1pp1+3-tp1pp3+1?",
    "test_pairs.py::test_shared_caches_and_draft_layers?gemma3n-tp1b64-tp1b32?",
    "test_pairs.py::test_digests_of_every_load?llama-tp1b64-tp1b32?",
    "test_pairs.py::test_workers_gather_for_their_readers?llama-tp1b64-tp1b32?",
    "test_pairs.py::test_a_draft_goes_on_from_the_cache_that_was_moved",
    "test_pairs.py::test_tokens_depend_on_what_was_moved?gemma3?",
    # What a load leaves in a prefix cache.
    "test_prefix_cache.py::*gemma3-tp1b64*-tp1b32*",
    # The lives of requests, and the fault table, on a model of several groups.
    "test_requests.py::*gemma3*",
    "test_requests.py::test_a_lease_is_kept_while_its_request_waits",
    "test_requests.py::test_the_decode_engine_preempts",
    "test_give_back.py::*",
    "test_faults.py::*gemma3-fail*",
    # The same model, or another one.
    "test_same_model.py::test_the_same_weights*",
    "test_same_model.py::test_other_weights*",
    # Both legs at once.
    "test_overlap.py::*gemma3*",
    # Two hosts, by a secret and an advertised address.
    "test_two_hosts.py::*llama-tcp*",
    "test_two_hosts.py::*nemotron_h-cma*",
    "test_two_hosts.py::test_without_a_secret*",
    # What an operator sees.
    "test_watching.py::*",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    name = item.nodeid.removeprefix("tests/e2e/")
    if any(fnmatchcase(name, pattern) for pattern in CHOSEN):
        item.add_marker(pytest.mark.chosen)


@pytest.fixture(scope="module")
def docks(tmp_path_factory):
    with Nursery(tmp_path_factory.mktemp("logs")) as nursery:
        yield Docks(nursery)
