"""What comes out for each pair of the corpus, and the command that takes manifests of live engines into it:

    python -m tests.vllm.corpus.golden [DIRECTORY]

Copies the manifests of a directory (``make gpu`` leaves one: ``build/gpu/cuda.manifests``) into this folder,
each with ``gpu-`` before its name, and writes ``golden.txt`` anew. Needs neither a GPU nor vLLM.
"""

import sys
from itertools import permutations
from pathlib import Path

import kvferry
from kvferry.cli.link_profile import Traffic, link_profile
from kvferry.core.manifest import Manifest, compare
from kvferry.core.sample import Placement, sample_request
from kvferry.core.select import Selection
from kvferry.wire import manifest_from_json, manifest_to_json

CORPUS = Path(__file__).parent
GOLDEN = "golden.txt"
OF_GPUS = "gpu-"
NUM_TOKENS = 300
LINKS = ("same-gpu", "400Gb")
"""Links by which times are predicted."""


def manifests(folder: Path = CORPUS) -> dict[str, Manifest]:
    """All of a folder, by name."""
    names = sorted(path.stem for path in folder.glob("*.json"))
    return {name: manifest_from_json((folder / f"{name}.json").read_bytes()) for name in names}


def pairs(corpus: dict[str, Manifest]) -> list[tuple[str, str]]:
    """Those of one model, both ways."""
    return [(src, dst) for src, dst in permutations(corpus, 2) if corpus[src].model == corpus[dst].model]


def selections(src: Manifest, dst: Manifest) -> list[Selection]:
    """What each rank of the destination reads of a request in scattered blocks."""
    request = sample_request(src, dst, NUM_TOKENS, placement=Placement.SCATTERED)
    plans = [kvferry.plan(src, dst, dst_rank=rank.rank) for rank in dst.ranks]
    return [kvferry.select(kvferry.lower(kvferry.prove(plan)), request) for plan in plans]


def outcome(src: Manifest, dst: Manifest) -> str:
    """The runs that each rank of the destination reads and what the slowest should take, or why not."""
    if findings := compare(src, dst):
        return f"refused, {len(findings)} findings, the first: {findings[0]}"
    selected = selections(src, dst)
    counts = [sum(len(runs.src) for runs in one.reads.values()) for one in selected]
    traffics = [Traffic.of(one.products.values(), count) for one, count in zip(selected, counts, strict=True)]
    slowest = {name: max(link_profile(name).cost.of(one).seconds for one in traffics) for name in LINKS}
    times = ", ".join(f"{1e6 * seconds:.0f} us {name}" for name, seconds in slowest.items())
    return f"{' '.join(map(str, counts))} runs; {times}"


def add(folder: Path, corpus: Path = CORPUS) -> list[Path]:
    """Copy a folder's manifests; each must be one, and be plannable to itself."""
    added = []
    for name, manifest in manifests(folder).items():
        for plan in (kvferry.plan(manifest, manifest, dst_rank=rank.rank) for rank in manifest.ranks):
            kvferry.prove(plan)
        added.append(corpus / f"{OF_GPUS}{name}.json")
        added[-1].write_bytes(manifest_to_json(manifest))
    return added


def write_golden(corpus: Path = CORPUS) -> int:
    """A line for each pair; return how many."""
    found = manifests(corpus)
    lines = [f"{src} -> {dst}: {outcome(found[src], found[dst])}" for src, dst in pairs(found)]
    (corpus / GOLDEN).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(f"{len(add(Path(each)))} manifests of {each} are in {CORPUS}")
    print(f"{write_golden()} pairs are in {CORPUS / GOLDEN}")
