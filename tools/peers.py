"""README's table of peers: what other connectors make of unequal tensor-parallel sizes, by their own code.

    python tools/peers.py                   the versions that README names; downloads 360 MB, takes a minute
    python tools/peers.py --wheels FOLDER   wheels that are there already (pip download --no-deps)
    python tools/peers.py --vllm 0.33.0 --sglang 0.5.23

pip fetches each peer's published wheel into a temporary folder. A few functions are taken out of its files by
name, and run: nothing of a peer is in this repository. What they need around them (an engine's sizes, its one
layer) are stand-ins; a function that asks for anything else ends the run with an error, so that a package
that has changed cannot pass for one that refuses.

For each of the pairs of tests/test_sweep.py the copies that a peer would make are carried out head by head.
*Right*: every destination rank has its heads, each in its place. *Refused*: the peer raises, returns an error
or asks a rank that does not exist. *Silently wrong*: neither. Maps are judged, not whole engines: what else
an engine may check at its start, or when a request ends, is not looked at.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

HEADS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
TPS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""As in tests/test_sweep.py; a test compares them."""

REFUSALS = (AssertionError, RuntimeError, NotImplementedError, ValueError)


class Pair(NamedTuple):
    """A prefill engine and a decode engine of one model."""

    heads: int
    src_tp: int
    dst_tp: int


class Copy(NamedTuple):
    """Heads that a peer moves: from a place in a source rank's block to one in a destination rank's."""

    src_rank: int
    src_start: int
    dst_rank: int
    dst_start: int
    num_heads: int


Peer = Callable[[Pair], Iterable[Copy]]
"""The copies that a peer makes for a pair; raises where the peer refuses."""


def pairs() -> list[Pair]:
    """Every legal pair of unequal sizes: heads divide over the ranks, or ranks over the heads."""
    legal = {heads: [tp for tp in TPS if heads % tp == 0 or tp % heads == 0] for heads in HEADS}
    return [Pair(heads, a, b) for heads in HEADS for a in legal[heads] for b in legal[heads] if a != b]


def held(heads: int, tp: int, rank: int) -> list[int]:
    """The heads of a rank, in the order of its block; ranks beyond the number of heads share one."""
    count = max(1, heads // tp)
    first = rank * heads // tp
    return list(range(first, first + count))


def verdict(pair: Pair, peer: Peer) -> str:
    """What a peer makes of a pair."""
    wanted = {rank: held(pair.heads, pair.dst_tp, rank) for rank in range(pair.dst_tp)}
    found: dict[int, list[int | None]] = {rank: [None] * len(heads) for rank, heads in wanted.items()}
    try:
        copies = list(peer(pair))
    except REFUSALS:
        return "refused"
    if any(copy.src_rank >= pair.src_tp for copy in copies):
        return "refused"  # a rank that is not there does not answer, and the request fails
    for copy in copies:
        has = held(pair.heads, pair.src_tp, copy.src_rank)
        for step in range(copy.num_heads):
            src, dst = copy.src_start + step, copy.dst_start + step
            if not (0 <= src < len(has) and 0 <= dst < len(wanted[copy.dst_rank])):
                return "silently wrong"  # bytes of another block
            found[copy.dst_rank][dst] = has[src]
    return "right" if found == wanted else "silently wrong"


# -------------------------------------------------------------------------------------- out of a package


class Package:
    """A peer's wheel."""

    def __init__(self, wheel: Path) -> None:
        self.version = wheel.name.split("-")[1]
        self._files = zipfile.ZipFile(wheel)

    def take(self, path: str, names: Sequence[str], **surroundings: Any) -> SimpleNamespace:
        """Functions, methods (as functions) and classes of a file, by name; nothing else of it is run."""
        tree = ast.parse(self._files.read(path))
        everywhere = [*tree.body, *(line for node in tree.body for line in getattr(node, "body", ()))]
        defined = {
            node.name: node
            for node in reversed(everywhere)
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        if missing := [name for name in names if name not in defined]:
            raise LookupError(f"{path} of version {self.version} has no {', '.join(missing)}")
        module = ast.Module([defined[name] for name in names], [])
        flags = __future__.annotations.compiler_flag
        space = {"logger": logging.getLogger("peer"), "np": np, "dataclass": dataclass, **surroundings}
        exec(compile(module, path, "exec", flags), space)
        return SimpleNamespace(**{name: space[name] for name in names})


def fetch(requirement: str, folder: Path) -> Path:
    """A published wheel, by the indexes that pip knows."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", folder, requirement], check=True)
    (wheel,) = folder.glob(f"{requirement.partition('=')[0]}-*.whl")
    return wheel


# --------------------------------------------------------------------------------------- vLLM's connectors

KV = "vllm/distributed/kv_transfer/kv_connector"


class _Attention:
    """Stands for vLLM's specification of an attention layer."""


class _State:
    """Stands for that of a state."""


def vllm_topology(package: Package) -> Callable[..., Any]:
    """vLLM's own description of a rank: heads, TP size, rank; and the other engine's TP size, if known."""
    taken = package.take(f"{KV}/utils.py", ["EngineTransferInfo", "TransferTopology"])

    def make(heads: int, tp: int, rank: int, remote_tp: int = 0) -> Any:
        topology = taken.TransferTopology(
            tp_rank=rank,
            tp_size=tp,
            block_size=1,
            engine_id="here",
            is_mla=False,
            is_mamba=False,
            total_num_kv_heads=heads,
            attn_backends=[],
        )
        if remote_tp:
            topology.register_remote_engine("there", taken.EngineTransferInfo(remote_tp, 1, 1, 1))
        return topology

    return make


def vllm_nixl(package: Package) -> Peer:
    """NixlConnector: its check of a peer, its map of ranks, its remote addresses and its local splits."""
    make = vllm_topology(package)
    names = ("TPMapping", "_is_attention_spec", "_is_ssm_spec", "compute_head_offset", "compute_tp_mapping")
    specs = {"AttentionSpec": _Attention, "MambaSpec": _State}
    tp = package.take(f"{KV}/v1/nixl/tp_mapping.py", names, **specs)
    worker = package.take(
        f"{KV}/v1/nixl/base_worker.py",
        [
            "_validate_remote_agent_handshake",
            "_build_fa_remote",
            "_pack_strided_descs",
            "_is_region_replicated",
        ],
        _is_attention_spec=tp._is_attention_spec,
        KVCacheLayout={"LBHNC": SimpleNamespace(is_block_contiguous=True)},
    )

    def copies(pair: Pair) -> Iterator[Copy]:
        for rank in range(pair.dst_tp):
            topology = make(pair.heads, pair.dst_tp, rank, pair.src_tp)
            num_heads = len(held(pair.heads, pair.dst_tp, rank))
            here = _nixl_worker(topology, num_heads, worker)
            there = _nixl_metadata(len(held(pair.heads, pair.src_tp, 0)))
            topology.handshake_target_ranks(pair.src_tp)
            plan = tp.compute_tp_mapping(topology, pair.src_tp, (_Attention,))
            worker._validate_remote_agent_handshake(here, there, pair.src_tp)
            ((address, length, *_),) = worker._build_fa_remote(here, plan, there, 1)
            for src_rank in plan.all_source_ranks:
                slot = plan.rank_to_attention_slot[src_rank]
                yield Copy(src_rank, int(address), rank, slot * int(length), int(length))

    return copies


def _nixl_worker(topology: Any, num_heads: int, worker: SimpleNamespace) -> SimpleNamespace:
    """A worker of one layer whose block has a byte per head, heads outermost."""
    here = SimpleNamespace(
        transfer_topo=topology,
        dcp_size=1,
        _has_mamba=False,
        use_mla=False,
        use_host_buffer=False,
        enable_permute_local_kv=False,
        kv_cache_layout="LBHNC",
        backend_name="FLASH_ATTN",
        region_group_ids=[],
        region_names=[],
        block_len_per_layer=[num_heads],
        dst_num_blocks={"there": 1},
        _physical_blocks_per_logical_kv_block=1,
        _transfer_layer_region_indices=(),
        _transfer_layer_names=(),
        _region_is_mla=[False],
        _group_spec_types=(_Attention,),
        _pack_strided_descs=worker._pack_strided_descs,
        _head_sharded_draft_regions=(),
        _layer_specs={},
    )
    here._is_region_replicated = lambda region: worker._is_region_replicated(here, region)
    return here


def _nixl_metadata(num_heads: int) -> SimpleNamespace:
    return SimpleNamespace(
        engine_id="there",
        device_id=0,
        block_size=1,
        num_blocks=1,
        block_lens=[num_heads],
        block_strides=[num_heads],
        kv_caches_base_addr=[0],
        kv_cache_layout="LBHNC",
        attn_backend_name="FLASH_ATTN",
        physical_blocks_per_logical_kv_block=1,
        region_num_blocks=None,
        region_group_ids=None,
        region_names=None,
        region_mem_types=None,
    )


def vllm_mooncake(package: Package) -> Peer:
    """MooncakeConnector: the sender's plan for each pair of ranks that meet, and its check of lengths."""
    make = vllm_topology(package)
    names = ("_get_tp_ratio", "_compute_sender_transfer_plan", "_validate_asymmetric_region_lengths")
    taken = package.take(f"{KV}/v1/mooncake/mooncake_connector.py", names)

    def copies(pair: Pair) -> Iterator[Copy]:
        src_len, dst_len = (len(held(pair.heads, tp, 0)) for tp in (pair.src_tp, pair.dst_tp))
        regions = ([SimpleNamespace(kv_block_len=length)] for length in (src_len, dst_len))
        is_replicated = make(pair.heads, pair.src_tp, 0).local_replicates_kv_cache
        sizes = (pair.src_tp, pair.dst_tp)
        if error := taken._validate_asymmetric_region_lengths(*regions, *sizes, is_replicated, pair.heads):
            raise RuntimeError(error)
        for dst_rank in range(pair.dst_tp):
            for src_rank in make(pair.heads, pair.dst_tp, dst_rank).handshake_target_ranks(pair.src_tp):
                sender = make(pair.heads, pair.src_tp, src_rank)
                if dst_rank not in sender.handshake_target_ranks(pair.dst_tp):
                    raise RuntimeError(f"{dst_rank} is not paired with {src_rank}")
                does_send, src_start, dst_start, length = taken._compute_sender_transfer_plan(
                    src_rank, pair.src_tp, dst_rank, pair.dst_tp, src_len, dst_len, is_replicated, pair.heads
                )
                if does_send:
                    yield Copy(src_rank, src_start, dst_rank, dst_start, length)

    return copies


# ------------------------------------------------------------------------------------------------ SGLang

DISAGGREGATION = "sglang/srt/disaggregation/common"


def sglang(package: Package) -> Peer:
    """SGLang: which ranks a decode rank asks, and which heads each of them sends."""
    logger = SimpleNamespace(warning_once=lambda text: None)
    ranks = package.take(f"{DISAGGREGATION}/conn.py", ["_resolve_rank_mapping"], logger=logger)
    heads = package.take(
        f"{DISAGGREGATION}/staging_buffer.py", ["compute_head_slice_params"], Tuple=tuple, List=list
    )

    def copies(pair: Pair) -> Iterator[Copy]:
        for rank in range(pair.dst_tp):
            here = SimpleNamespace(
                attn_tp_size=pair.dst_tp,
                attn_cp_size=1,
                attn_cp_rank=0,
                pp_size=1,
                pp_rank=0,
                is_mla_backend=False,
                is_hybrid_mla_backend=False,
                kv_args=SimpleNamespace(engine_rank=rank),
            )
            info = SimpleNamespace(
                attn_tp_size=pair.src_tp, attn_cp_size=1, pp_size=1, enable_kv_cache_sharding=False
            )
            ranks._resolve_rank_mapping(here, info)
            for src_rank in info.target_tp_ranks:
                src_start, num_heads, dst_start, _ = heads.compute_head_slice_params(
                    pair.src_tp, pair.dst_tp, src_rank, rank, pair.heads
                )
                if num_heads > len(held(pair.heads, pair.dst_tp, rank)):
                    raise RuntimeError("the slice does not fit")  # said by the sender, which sends nothing
                yield Copy(src_rank, src_start, rank, dst_start, num_heads)

    return copies


# ------------------------------------------------------------------------------------------------ table


def row(name: str, peer: Peer) -> str:
    """A line of the table."""
    counts = Counter(verdict(pair, peer) for pair in pairs())
    return f"| {name} | {counts['right']} | {counts['refused']} | {counts['silently wrong']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vllm", default="0.33.0", metavar="VERSION")
    parser.add_argument("--sglang", default="0.5.23", metavar="VERSION")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        packages = {}
        for name, version in (("vllm", args.vllm), ("sglang", args.sglang)):
            found = list(args.wheels.glob(f"{name}-{version}-*.whl")) if args.wheels else []
            packages[name] = Package(found[0] if found else fetch(f"{name}=={version}", Path(made)))
        vllm, others = packages["vllm"], packages["sglang"]
        print(f"| all {len(pairs())} legal pairs of unequal TP | correct | rejected | silently wrong |")
        print("| --- | --- | --- | --- |")
        print(row(f"vLLM {vllm.version}, NixlConnector", vllm_nixl(vllm)))
        print(row(f"vLLM {vllm.version}, MooncakeConnector", vllm_mooncake(vllm)))
        print(row(f"SGLang {others.version}", sglang(others)))


if __name__ == "__main__":
    main()
