"""vLLM's workers do not hide their pool yet, and say so before anything is registered."""

from typing import Any

import pytest

from kvferry.errors import TransportError

pytest.importorskip("vllm")

from kvferry.integrations.vllm.worker.side import WorkerSide


@pytest.mark.parametrize("expose", ["staging", "nothing"])
def test_a_hidden_pool_is_refused_by_name(monkeypatch, expose):
    monkeypatch.setenv("KVFERRY_EXPOSE", expose)
    nobody: Any = None
    with pytest.raises(
        TransportError, match=f"KVFERRY_EXPOSE='{expose}' is not built yet for vLLM's workers"
    ):
        WorkerSide(nobody, nobody, nobody).register({})
