#!/usr/bin/env bash
# Start a prefill server, a decode server and a proxy, with kvferry between the servers. Then ask two questions, and
# compare every token with the answers of a single server.
#   examples/vllm/serve.sh           start, ask, stop; needs no GPU and no model; fails if a token differs
#   examples/vllm/serve.sh --stay    keep serving until Ctrl-C
# Environment:
#   MODEL            name or folder of a model; default: a tiny random model on a CPU
#   PREFILL_ARGS     further arguments of `vllm serve` for each side, quoted as in a shell; the two sides may differ
#   DECODE_ARGS      in parallelism, block size and layout
#   PREFILL_DEVICES  CUDA_VISIBLE_DEVICES of each side
#   DECODE_DEVICES
#   PORT             port of the proxy; default: a free one
#   TINY_HOME        folder in which the tiny model is kept; default: it is created each time
#   BIN              folder of `vllm` and `python`; default: the PATH
# Example:
#   MODEL=Qwen/Qwen3-8B PORT=8000 PREFILL_DEVICES=0,1 PREFILL_ARGS='--tensor-parallel-size 2' \
#     DECODE_DEVICES=2 DECODE_ARGS='--block-size 64' examples/vllm/serve.sh --stay
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ $# -gt 0 && "$*" != --stay ]]; then
  sed -n '2,/^set/s/^#//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
bin=${BIN:+$BIN/}
work=$(mktemp -d -t kvferry-serve.XXXXXX)
verdict=
declare -A pids=()

say() { printf '==> %s\n' "$*"; }

# start NAME COMMAND...: in a new process group, which Ctrl-C does not reach and `finish` ends as a whole.
start() {
  setsid "${@:2}" > "$work/$1.log" 2>&1 < /dev/null &
  pids[$1]=$!
}

# serve NAME ROLE PORT DEVICES ARGUMENTS...
serve() {
  local transfer='{"kv_connector": "KVFerryConnector", "kv_role": "'$2'"}'
  start "$1" env ${4:+"CUDA_VISIBLE_DEVICES=$4"} "${bin}vllm" serve "$MODEL" --host 127.0.0.1 --port "$3" \
    --kv-transfer-config "$transfer" "${@:5}"
}

# await NAME PORT: wait until the server is healthy; fails if it exits before that.
await() {
  local said=$SECONDS
  until "${bin}python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' \
    "http://127.0.0.1:$2/health" 2> /dev/null; do
    kill -0 "${pids[$1]}" 2> /dev/null || { say "$1 did not start"; return 1; }
    if ((SECONDS >= said + 10)); then
      said=$SECONDS
      say "waiting for $1, $said s: $(tail -n 1 "$work/$1.log" | cut -c -100)"
    fi
    sleep 1
  done
  say "$1 (process group ${pids[$1]}) is ready on port $2, after $SECONDS s"
}

# make_tiny_model: create a random model in TINY_HOME unless it exists. Its name depends on the code that creates it.
make_tiny_model() {
  local home=${TINY_HOME:-$work} tiny=$here/tiny.py made
  [[ -e $tiny ]] || tiny=$here/../../tests/support/vllm/tiny.py
  MODEL=$home/llama-$(cksum < "$tiny" | cut -d ' ' -f 1)
  [[ ! -d $MODEL ]] || return 0
  say "making a tiny model"
  mkdir -p "$home"
  made=$(mktemp -d "$home/making.XXXXXX")
  "${bin}python" -P "$tiny" llama "$made" > "$work/model.log" 2>&1 || { cat "$work/model.log"; exit 1; }
  mv -T "$made/llama" "$MODEL" 2> /dev/null || [[ -d $MODEL ]] # another run may have created it meanwhile
  rm -rf "$made"
}

# Stop the started processes, and only these: SIGTERM first, then SIGKILL.
finish() {
  local status=$? name
  trap '' HUP INT TERM
  for name in "${!pids[@]}"; do
    if ((status != 0 && status < 128)); then
      printf '\n--- the end of %s.log\n' "$name"
      tail -n 25 "$work/$name.log"
    fi
    kill "${pids[$name]}" 2> /dev/null || true
  done
  for name in "${!pids[@]}"; do
    for _ in {1..100}; do
      kill -0 -- "-${pids[$name]}" 2> /dev/null || break
      sleep 0.2
    done
    kill -KILL -- "-${pids[$name]}" 2> /dev/null || true
  done
  say "all ended"
  if ((status != 0 && status < 128)); then
    say "failed; all logs are in $work"
  else
    rm -rf "$work"
  fi
  [[ -z $verdict ]] || say "$verdict"
  exit "$status"
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

export VLLM_HOST_IP=${VLLM_HOST_IP:-127.0.0.1} # both sides run on this host
tiny_args=() prefill_args=() decode_args=()
own_model=${MODEL:-}
if [[ -z $own_model ]]; then
  make_tiny_model
  export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1 VLLM_NO_USAGE_STATS=1
  export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
  export VLLM_ENABLE_V1_MULTIPROCESSING=0 # saves one process per server
  tiny_args=(--dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs 8 --num-gpu-blocks-override 512
    --served-model-name tiny --chat-template '{% for m in messages %}{{ m.role }}: {{ m.content }}{{ "\n" }}{% endfor %}')
  prefill_args=(--block-size 64) decode_args=(--block-size 32) # unequal on purpose
fi
eval "prefill_args+=(${PREFILL_ARGS:-})" "decode_args+=(${DECODE_ARGS:-})"

read -r prefill_port decode_port free_port < <("${bin}python" -c '
import socket
probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(probe.getsockname()[1] for probe in probes))')
port=${PORT:-$free_port}

say "starting two servers and a proxy; their logs are in $work while they run"
serve prefill kv_producer "$prefill_port" "${PREFILL_DEVICES:-}" "${tiny_args[@]}" "${prefill_args[@]}"
serve decode kv_consumer "$decode_port" "${DECODE_DEVICES:-}" "${tiny_args[@]}" "${decode_args[@]}"
start proxy "${bin}python" -m kvferry proxy --listen "127.0.0.1:$port" \
  --prefill "http://127.0.0.1:$prefill_port" --decode "http://127.0.0.1:$decode_port"
await prefill "$prefill_port"
await decode "$decode_port"
await proxy "$port"

answered=0
"${bin}python" "$here/ask.py" "http://127.0.0.1:$port" "http://127.0.0.1:$prefill_port" \
  "http://127.0.0.1:$decode_port" | tee "$work/answers.log" || answered=1
# With a model of your own in bf16, rounding may change a token: with --stay the servers keep running nevertheless.
if [[ $# -gt 0 && ($answered == 0 || -n $own_model) ]]; then
  say "serving on http://127.0.0.1:$port/v1 until Ctrl-C"
  wait
fi
verdict=$(tail -n 1 "$work/answers.log")
exit "$answered"
