"""One report of all results: text for people, a plot if matplotlib is there. The JSON is the file itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.cases import Case, Kind
from tests.gpu.results import Outcome, Result, Results

GOAL_MS = 10.0
"""For a load of 4,096 tokens of the 8B-like model, without what a two-token request takes."""
GOAL_LATENCY = 1.10
"""p99 between two tokens while loads arrive, in parts of the same without loads."""
OURS, OWN = "kvferry", "vllm"
ON_CPU = "Times of this machine say only that the cases run: small models and few tokens, on a CPU."


def text(results: Results, cases: Iterable[Case]) -> str:
    """The whole report."""
    names = [case.name for case in cases]
    lines = ["kvferry between real vLLM engines", ""]
    lines += [f"  {key:8} {value}" for key, value in results.machine.items()]
    commits = sorted({result.commit for result in results.by_case.values() if result.commit})
    lines += [f"  commits  {', '.join(commits)}"] if commits else []
    if results.machine.get("device") == "cpu":
        lines += ["", ON_CPU]
    lines += ["", *_counts(names, results), "", *_pairs(results), *_conversations(results)]
    lines += [*_offloads(results), *_turns(results), *_overlaps(results), *_faults(results)]
    lines += [*_describes(results), *_times(results), *_first_tokens(results), *_latency(results)]
    lines += [*_serves(results)]
    lines += [*_not_passed(results)]
    return "\n".join(lines).rstrip() + "\n"


def _kind(name: str) -> str:
    return name.split("/", 1)[0]


def _of(results: Results, kind: Kind, *outcomes: Outcome) -> list[Result]:
    found = [results.by_case[name] for name in sorted(results.by_case) if _kind(name) == kind]
    return [result for result in found if result.outcome in (outcomes or (Outcome.PASSED,))]


def _counts(names: Sequence[str], results: Results) -> Iterator[str]:
    yield f"  {'':12} {'cases':>6} {'passed':>7} {'failed':>7} {'not here':>9} {'not yet':>8}"
    for kind in Kind:
        mine = [name for name in names if _kind(name) == kind]
        got = Counter(results.by_case[name].outcome for name in mine if name in results.by_case)
        yield (
            f"  {kind:12} {len(mine):6} {got[Outcome.PASSED]:7} {got[Outcome.FAILED]:7}"
            f" {got[Outcome.NOT_HERE]:9} {len(mine) - got.total():8}"
        )


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    yield title
    for row in (head, *rows):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""


def _pairs(results: Results) -> Iterator[str]:
    rows = []
    for result in _of(results, Kind.PAIR):
        prompts = result.found["prompts"]
        equal, tokens = sum(p["num_equal"] for p in prompts), sum(p["num_tokens"] for p in prompts)
        said = "equal" if all(p["is_equal"] for p in prompts) else f"{equal} of {tokens}"
        without = sum(p["num_equal_without_connector"] for p in prompts)
        repeated = sum(p.get("num_repeated", p["num_tokens"]) for p in prompts)
        rows.append(
            (
                result.case.removeprefix(f"{Kind.PAIR}/"),
                said,
                ("equal" if without == tokens else f"{without} of {tokens}")
                + ("" if repeated == tokens else f" (one asked twice: {repeated})"),
                f"{prompts[-1]['states']} states, {sum(p['cells'] for p in prompts):,} cells",
                f"{result.found['control']['states_seen']} states",
                f"{_numbers(result.found['src_blocks'])} -> {_numbers(result.found['dst_blocks'])}"
                f" {result.found.get('dtype', '')}",
            )
        )
    title = (
        "Pairs that passed. Tokens after a load, beside those of engines without a connector; what was\n"
        "moved, all equal by digest; states in which the control (a zeroed cache) was seen; real blocks."
    )
    head = ("pair", "tokens", "without connector", "equal by digest", "control", "blocks")
    yield from _table(title, head, rows)


def _numbers(values: Iterable[int]) -> str:
    return "+".join(map(str, values))


def _conversations(results: Results) -> Iterator[str]:
    rows = [
        (
            result.case,
            str(result.found["steps"]),
            str(result.found["close"]),
            f"{result.found['largest_difference']:.3f}",
            f"{result.found['dst_tokens_loaded']:,}",
            f"{result.found['dst_tokens_cached']:,}, {result.found['src_tokens_cached']:,}",
            str(result.found["dst_blocks_kept_out"]),
        )
        for kind in (Kind.REUSE, Kind.CONVERSATION)
        for result in _of(results, kind)
    ]
    title = (
        "Prompts with shared heads, prefix caching on: no answer is wrong. Answers that part from the\n"
        "reference's by rounding; the largest difference of log probabilities; prompt tokens that were\n"
        "loaded, and that the decode and the prefill engine had cached; blocks filled in part, not cached."
    )
    head = ("engines", "steps", "close", "difference", "loaded", "cached", "kept out")
    yield from _table(title, head, rows)


def _offloads(results: Results) -> Iterator[str]:
    rows = [
        (
            result.case.removeprefix(f"{Kind.OFFLOAD}/"),
            f"{result.found['answers']}, {result.found['close']}",
            f"{result.found['largest_difference']:.3f}",
            f"{result.found['tokens_by_source']['p2p']:,}, {result.found['tokens_by_source']['host']:,}",
            f"{result.found['stored_bytes'] / 1e6:.1f}, {result.found['loaded_bytes'] / 1e6:.1f}",
            f"{result.found['preemptions_loaded']}, {result.found['preemptions_offloaded']}",
            str(result.found["digests"]["equal"]),
        )
        for result in _of(results, Kind.OFFLOAD)
    ]
    title = (
        "Beside vLLM's OffloadingConnector: no answer is wrong. Answers, and those that part by rounding;\n"
        "prompt tokens from the prefill engine and from the host's memory; MB offloaded and read back;\n"
        "preempted requests that were loaded and that were read back; loads with equal digests."
    )
    head = ("engines", "answers", "difference", "p2p, host", "MB", "preempted", "digests")
    yield from _table(title, head, rows)


def _turns(results: Results) -> Iterator[str]:
    rows, full = [], []
    for result in _of(results, Kind.TURNS):
        name = result.case.removeprefix(f"{Kind.TURNS}/")
        for mode, row in result.found.get("turns", {}).items():
            turns = row["by_turn"]
            rows.append(
                (
                    name,
                    mode,
                    str(row["wrong"]),
                    *(f"{sum(turn[key] for turn in turns):,}" for key in TURN_COLUMNS.values()),
                )
            )
        for mode, runs in result.found.get("full_pool", {}).items():
            columns = (
                ", ".join(str(run[key]) for run in runs) for key in ("preemptions", "read_back", "wrong")
            )
            full.append((name, mode, *columns, ", ".join(f"{run['seconds']:.1f}" for run in runs)))
    title = "Conversations; the prefill engine's prefix cache is emptied after each turn. Prompt tokens."
    yield from _table(title, ("engines", "connector", "wrong", *TURN_COLUMNS), rows)
    title = "The same with a decode engine whose blocks are all in use, in turns."
    yield from _table(title, ("engines", "connector", "preemptions", "read back", "wrong", "seconds"), full)


TURN_COLUMNS = {
    "prompts": "prompt_tokens",
    "prefill: computed": "prefill_computed",
    "read back": "prefill_read_back",
    "decode: loaded": "decode_loaded",
    "cached": "decode_cached",
}


def _overlaps(results: Results) -> Iterator[str]:
    rows = [
        (
            result.case.removeprefix(f"{Kind.OVERLAP}/"),
            f"{max(result.found['differences']):.3f}",
            f"{result.found['loaded_tokens']:,}",
            f"{result.found['early_bytes']:,} of {result.found['bytes']:,}",
        )
        for result in _of(results, Kind.OVERLAP)
    ]
    title = "Both legs at once: no answer is wrong; bytes that were read before the prefills had ended."
    yield from _table(title, ("engines", "difference", "loaded tokens", "early bytes"), rows)


def _first_tokens(results: Results) -> Iterator[str]:
    rows = []
    for result in _of(results, Kind.TIME):
        name = result.case.removeprefix(f"{Kind.TIME}/")
        turns = {"": result.found.get("turn_seconds", {})}
        for length, modes in {**turns, **result.found.get("overlap_ms", {})}.items():
            rows += [
                (name, length, mode, f"{row['median_ms']:.0f} ms", ", ".join(map(str, row["all_ms"])))
                for mode, row in modes.items()
            ]
    title = "From the prefill request to the first decoded token, in turns: median, and all in ms."
    yield from _table(title, ("engines", "tokens", "connector", "median", "all"), rows)


def _faults(results: Results) -> Iterator[str]:
    rows = [
        (result.case.removeprefix(f"{Kind.FAULT}/"), _words(result.found))
        for result in _of(results, Kind.FAULT)
    ]
    yield from _table(
        "Faults that ended as they must: no wrong token, blocks and memory back.", ("fault", "seen"), rows
    )


def _describes(results: Results) -> Iterator[str]:
    rows = [
        (
            result.case.removeprefix(f"{Kind.DESCRIBE}/"),
            ", ".join(result.found["kernels"]),
            str(result.found["states"]),
        )
        for result in _of(results, Kind.DESCRIBE)
    ]
    yield from _table("Engines that described themselves.", ("engine", "kernels", "states"), rows)


def load_times(results: Results) -> Iterator[tuple[str, int, float, float | None, str]]:
    """Case, tokens, our milliseconds, vLLM's own (None where it refuses, and why): less two tokens'."""
    for result in _of(results, Kind.TIME):
        times: Mapping[str, Any] = result.found.get("load_ms", {})
        for length, ours in times.get(OURS, {}).items():
            own = times.get(OWN, {}).get(length)
            why = result.found["refused"].get(OWN, "")
            name = result.case.removeprefix(f"{Kind.TIME}/").rsplit("/", 1)[0]
            least = own and own["less_two_tokens_ms"]
            yield name, int(length), ours["less_two_tokens_ms"], least, why


def _times(results: Results) -> Iterator[str]:
    rows = [
        (
            name,
            f"{tokens:,}",
            f"{ours:.1f} ms",
            f"{own:.1f} ms" if own is not None else f"refused: {why[:60]}",
        )
        for name, tokens, ours, own, why in load_times(results)
    ]
    title = (
        "Load times, without what a two-token request takes (medians; the two connectors in turns).\n"
        f"Goal for 4,096 tokens of the 8B-like model: {GOAL_MS:g} ms, and half of vLLM's own."
    )
    yield from _table(title, ("engines", "tokens", "kvferry", "vLLM's own"), rows)


def _latency(results: Results) -> Iterator[str]:
    rows = []
    for result in _of(results, Kind.TIME):
        for name, windows in result.found.get("latency", {}).items():
            alone = windows["alone"]["p99_ms"]
            rows += [
                (
                    result.case.removeprefix(f"{Kind.TIME}/"),
                    name,
                    window,
                    f"{got['p50_ms']:.2f} ms",
                    f"{got['p99_ms']:.2f} ms",
                    f"{got['p99_ms'] / alone:.2f}",
                )
                for window, got in windows.items()
            ]
    title = f"Between two tokens of running decodes. Goal for p99 with loads: {GOAL_LATENCY:.2f} of alone."
    yield from _table(title, ("case", "connector", "meanwhile", "p50", "p99", "p99 of alone"), rows)


def _serves(results: Results) -> Iterator[str]:
    rows = []
    for result in _of(results, Kind.SERVE):
        name = result.case.removeprefix(f"{Kind.SERVE}/")
        rows += [
            (
                name,
                connector,
                f"{row['requests']}, {row['failed']}",
                f"{row['equal']} of {row['sample']} ({row['equal_tokens']} of {row['sample_tokens']})",
                f"{row.get('as_others_tokens', '?')} of {row['sample_tokens']}",
                f"{row['equal_under_load']} of {row['sample']}",
                _two(row, "first_token"),
                _two(row, "per_token"),
                f"{row['requests_per_second']:.1f}",
            )
            for connector, row in result.found["serve"].items()
        ]
        rows += [
            (name, connector, f"refused: {why[:60]}", *[""] * 6)
            for connector, why in result.found["refused"].items()
        ]
    title = (
        "vllm serve twice behind the proxy, streaming clients; the two connectors in turns. Equal: answers\n"
        "(tokens) of a sample, one request at a time, that are the decode server's own; tokens that are the\n"
        "other connector's; and the decode server's own under load."
    )
    head = ("servers", "connector", "requests, failed", "equal", "as the other", "under load")
    yield from _table(title, (*head, "first token p50, p99", "per token p50, p99", "per second"), rows)


def _two(row: Mapping[str, Any], name: str) -> str:
    return f"{row[f'{name}_p50_ms']:.1f}, {row[f'{name}_p99_ms']:.1f} ms"


def _not_passed(results: Results) -> Iterator[str]:
    for outcome, title in ((Outcome.FAILED, "Failed."), (Outcome.NOT_HERE, "Not on this machine, and why.")):
        found = [result for result in results.by_case.values() if result.outcome is outcome]
        if found:
            yield title
            for result in sorted(found, key=lambda one: one.case):
                yield f"  {result.case}"
                yield from (f"      {line}" for line in result.why.splitlines()[:8])
            yield ""


def _words(found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key.replace('_', ' ')}: {value:.2f}"
        if isinstance(value, float)
        else f"{key.replace('_', ' ')}: {value}"
        for key, value in found.items()
    )


def plot(results: Results, path: Path) -> bool:
    """Load times by length, a line per pair of engines; False if there is nothing to draw, or nobody to."""
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for name, tokens, ours, own, _ in load_times(results):
        points.setdefault((name, "kvferry"), []).append((tokens, ours))
        if own is not None:
            points.setdefault((name, "vLLM's own"), []).append((tokens, own))
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    if not points:
        return False
    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6))
    colours = {name: f"C{at}" for at, name in enumerate(dict.fromkeys(name for name, _ in points))}
    for (name, connector), line in points.items():
        style = "-o" if connector == "kvferry" else "--x"
        axes.plot(*zip(*line, strict=True), style, color=colours[name], label=f"{connector}, {name}")
    axes.set(xscale="log", yscale="symlog", xlabel="tokens", ylabel="ms, less a two-token request")
    axes.set_title(f"Loads between two vLLM engines, {results.machine.get('device', '')}")
    axes.legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    return True
