"""Which of these tests CI runs: ``make e2e``. All of them take most of an hour: ``make e2e-full``."""

from fnmatch import fnmatchcase

import pytest

CHOSEN = (
    # Unequal TP, blocks and packings, one family of each kind; and the control.
    "test_pairs.py::test_same_blocks?llama-tp2-tp1?",
    "test_pairs.py::test_same_blocks?deepseek_v3-tp1-tp2?",
    "test_pairs.py::test_same_blocks?nemotron_h-tp2-tp1?",
    "test_pairs.py::test_beyond_stock?llama-1kv-tp2-tp1?",
    "test_pairs.py::test_beyond_stock?gemma3-tp1b32-tp1b64?",
    "test_pairs.py::test_beyond_stock?llama-tp2b64-tp1b32?",
    "test_pairs.py::test_tokens_depend_on_what_was_moved?llama?",
    # The lives of requests, and the fault table, on a model of several groups.
    "test_requests.py::*gemma3*",
    "test_requests.py::test_a_lease_is_kept_while_its_request_waits",
    "test_requests.py::test_the_decode_engine_preempts",
    "test_faults.py::*gemma3-fail*",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    name = item.nodeid.removeprefix("tests/e2e/")
    if any(fnmatchcase(name, pattern) for pattern in CHOSEN):
        item.add_marker(pytest.mark.chosen)
