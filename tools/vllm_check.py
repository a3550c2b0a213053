"""Whether an environment made by ``vllm_env.sh`` works. Prints its versions, or ends with what is wrong."""

import importlib.metadata
import sys

import nixl
import torch
import vllm
from nixl._api import nixl_agent, nixl_agent_config
from vllm.platforms import current_platform

from kvferry.integrations.vllm import KVFerryConnector


def check_vllm() -> str:
    """vLLM takes itself for a CPU build, and its kernels load with this torch."""
    if not current_platform.is_cpu():
        sys.exit(f"vLLM {vllm.__version__} does not take itself for a CPU build")
    current_platform.import_kernels()  # a failure is no more than a line in vLLM's log
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        sys.exit(
            f"vLLM {vllm.__version__}'s kernels do not load with torch {torch.__version__}; a line above says"
            " why. If it names libnuma.so.1, install that library (Debian and Ubuntu: apt install libnuma1)."
        )
    return f"vLLM {vllm.__version__} with {KVFerryConnector.__name__}"


def check_nixl() -> str:
    """NIXL makes an agent that can reach others."""
    nixl_agent("check", nixl_agent_config(backends=["UCX"]))
    return f"{nixl._pkg.__name__.replace('_', '-')} {importlib.metadata.version('nixl')}"


if __name__ == "__main__":
    print(", ".join((f"torch {torch.__version__}", check_vllm(), check_nixl())))
