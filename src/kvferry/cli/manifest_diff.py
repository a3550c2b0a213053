"""The differences between two manifests, and their effects on a transfer between the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvferry.cli.asked import WINDOW, Asked, Billed, fitting_tokens, window_words, without_requirement
from kvferry.cli.bill import SLOW, Bill, LinkBill
from kvferry.cli.link_profile import RDMA_400
from kvferry.cli.output import cell_words, kind_of, milliseconds
from kvferry.core.box import TOKEN, Box
from kvferry.core.identity import compare_identity
from kvferry.core.manifest import Manifest, compare
from kvferry.core.span import Span
from kvferry.core.state import Group, State
from kvferry.core.view import BLOCK, View
from kvferry.errors import Code, Finding, Refused, SpecError, counted


class Effect(StrEnum):
    REFUSED = "refused"
    """Incompatible, in one direction at least: the bytes do not fit, or the models differ."""
    SLOWER = "slower"
    """Transfers need short runs."""
    UNTRIED = "not tried"
    """Not planned in one direction at least: ranks or views are missing, or the request does not fit."""
    HARMLESS = "harmless"


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference, for all states that have it."""

    what: str
    a: str
    b: str
    effect: Effect
    states: tuple[str, ...] = ()


@dataclass(frozen=True)
class Direction:
    """A request from one engine to the other."""

    name: str
    """``a -> b`` or ``b -> a``."""
    billed: Billed
    problem: str = ""
    """Why the request cannot be planned, although the engines may be compatible."""

    @property
    def is_refused(self) -> bool:
        return bool(self.billed.bill.findings) and not self.lacks_ranks

    @property
    def lacks_ranks(self) -> bool:
        """Whether the only reason of a refusal is a manifest without all of its ranks and views."""
        found = self.billed.bill.findings
        return bool(found) and {finding.code for finding in found} == {Code.NOT_HELD}

    @property
    def is_untried(self) -> bool:
        return self.lacks_ranks or bool(self.problem)

    @property
    def reasons(self) -> str:
        """The findings of its plan; empty if they are listed as differences."""
        source, destination, bill = self.billed.source, self.billed.destination, self.billed.bill
        if not bill.findings or compare(source, destination):
            return ""
        return "; ".join(str(Refused(*bill.findings, num_more=bill.num_more)).splitlines())

    @property
    def over_network(self) -> LinkBill | None:
        """Its bill; None if it is refused, or transfers nothing."""
        bill = self.billed.bill
        return bill.over(RDMA_400) if bill.total_bytes and not bill.findings else None


@dataclass(frozen=True)
class ManifestDiff:
    """All differences, and a request in both directions."""

    differences: tuple[Difference, ...]
    directions: tuple[Direction, ...]

    @property
    def bytes_fit(self) -> bool:
        """Whether a transfer is possible but for the models."""
        return not any(each.billed.bill.findings or each.problem for each in self.directions)

    @property
    def is_slow(self) -> bool:
        return any(bill.is_slow for each in self.directions if (bill := each.over_network))

    @property
    def effect(self) -> Effect | None:
        """The worst of all effects; None if nothing differs."""
        found = {difference.effect for difference in self.differences}
        found |= {Effect.UNTRIED for each in self.directions if each.is_untried}
        found |= {Effect.REFUSED for each in self.directions if each.is_refused}
        return next((effect for effect in Effect if effect in found), None)


def manifest_diff(a: Manifest, b: Manifest, asked: Asked, of_models: Sequence[Finding] = ()) -> ManifestDiff:
    """Compare two manifests, and plan a request in both directions.

    ``of_models``: differences of the models that the manifests do not have.
    """
    a, b = without_requirement(a, b)
    directions = _direction("a -> b", a, b, asked), _direction("b -> a", b, a, asked)
    places = Effect.UNTRIED if any(each.is_untried for each in directions) else Effect.HARMLESS
    if _is_slower(a, b, directions, asked):
        places = Effect.SLOWER
    windows = Effect.REFUSED if of_models else Effect.HARMLESS
    told = (
        Difference(f"model: {each.field}", each.src, each.dst, Effect.REFUSED)
        for each in of_models
        if each.field != WINDOW  # listed with its states
    )
    found = (*_meaning(a, b), *told, *_places(a, b, places, windows), *_engines(a, b))
    order = list(Effect)
    return ManifestDiff(tuple(sorted(found, key=lambda each: order.index(each.effect))), directions)


def _is_slower(a: Manifest, b: Manifest, directions: Iterable[Direction], asked: Asked) -> bool:
    """Whether a request takes much longer than between two engines like ``a``, or two like ``b``."""
    slow = [bill.seconds for each in directions if (bill := each.over_network) and bill.is_slow]
    if not slow:
        return False
    equal = (_direction("", each, each, asked).over_network for each in (a, b))
    return max(slow) >= SLOW * min((bill.seconds for bill in equal if bill), default=0.0)


def _direction(name: str, source: Manifest, destination: Manifest, asked: Asked) -> Direction:
    try:
        return Direction(name, asked.billed_between(source, destination))
    except SpecError as error:
        tokens = asked.tokens or fitting_tokens(source, destination)
        return Direction(name, Billed(source, destination, tokens, (), Bill(())), str(error))


# -- differences that prevent a transfer -------------------------------------------------------------


def _meaning(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """The findings of ``compare``, once for both directions."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    other_dtype = {found.state for found in compare(a, b) if found.field == "dtype"}
    for found in compare(a, b):
        if found.code is Code.MISSING_STATE:
            key = ("states", "not there", "there")
        elif found.code is Code.IDENTITY_UNKNOWN or (
            found.field == "item_bytes" and found.state in other_dtype
        ):
            continue
        else:
            kind = "model: " if found.code is Code.IDENTITY_DIFFERS else ""
            key = (f"{kind}{found.field}", found.src, found.dst)
        alike.setdefault(key, []).append(found.state)
    for found in compare(b, a):
        if found.code is Code.MISSING_STATE:
            alike.setdefault(("states", "there", "not there"), []).append(found.state)
    for (what, in_a, in_b), states in alike.items():
        yield Difference(what, in_a, in_b, Effect.REFUSED, tuple(state for state in states if state))
    for found in compare_identity(a.identity, b.identity).unknown:
        if found.src != found.dst:
            yield Difference(f"model: {found.field}", found.src, found.dst, _unknown_effect(a, b))


def _unknown_effect(a: Manifest, b: Manifest) -> Effect:
    is_required = a.identity.is_required or b.identity.is_required
    return Effect.REFUSED if is_required else Effect.HARMLESS


# -- the places of cells -----------------------------------------------------------------------------


def _places(a: Manifest, b: Manifest, effect: Effect, windows: Effect) -> Iterator[Difference]:
    """Block sizes, orders inside a block, and the split of states over ranks."""
    looks: tuple[tuple[str, Callable[[Manifest, State], str], Effect], ...] = (
        ("tokens per block", _block_tokens, effect),
        (WINDOW, _window, windows),
        ("held by", _holding, effect),
        ("aliases", lambda _, state: ", ".join(state.aliases) or "none", Effect.HARMLESS),
    )
    shared = [(other, state) for state in b.states if (other := a.find(state)) is not None]
    for what, look, its_effect in looks:
        pairs = ((look(a, other), look(b, state), state.name) for other, state in shared)
        yield from _together(what, pairs, its_effect)
    yield from _together("order in memory", _orders(a, b, shared), effect)


def _together(what: str, pairs: Iterable[tuple[str, str, str]], effect: Effect) -> Iterator[Difference]:
    """One difference for all states with the same two values."""
    alike: dict[tuple[str, str], list[str]] = {}
    for in_a, in_b, state in pairs:
        if in_a != in_b:
            alike.setdefault((in_a, in_b), []).append(state)
    for (in_a, in_b), states in alike.items():
        yield Difference(what, in_a, in_b, effect, tuple(states))


def _view(manifest: Manifest, state: State) -> View | None:
    return next((rank.by_state[state.name] for rank in manifest.ranks if state.name in rank.by_state), None)


def _block_tokens(manifest: Manifest, state: State) -> str:
    view = _view(manifest, state)
    return str(manifest.group_by_name[view.group].tokens_per_block) if view else "no rank has it"


def _window(manifest: Manifest, state: State) -> str:
    view = _view(manifest, state)
    return window_words(manifest.group_by_name[view.group]) if view else "none"


def _holding(manifest: Manifest, state: State) -> str:
    if _view(manifest, state) is None:
        return "no rank has it"
    boxes = [box for _, box in manifest.holders[state.name].boxes]
    parts = list(dict.fromkeys(str(_split_axes(box, state)) for box in boxes))
    shown = ", ".join([*parts[:2], *["…"] * (len(parts) > 2)])
    how = "all of it on each" if shown == "everything" else f"{counted(len(parts), 'part')}: {shown}"
    return f"{counted(len(boxes), 'rank')}, {how}"


def _split_axes(box: Box, state: State) -> Box:
    """A box without the axes that it covers."""
    sizes = {axis.name: axis.size for axis in state.axes} | {TOKEN: box.period}
    return Box(tuple(each for each in box.axes if each[1] != (Span(0, sizes[each[0]]),)), box.period)


def _orders(
    a: Manifest, b: Manifest, shared: Iterable[tuple[State, State]]
) -> Iterator[tuple[str, str, str]]:
    """Different orders in memory. An axis of size one has no place in an order."""
    for other, state in shared:
        ours, theirs = _view(a, other), _view(b, state)
        if ours is not None and theirs is not None:
            orders = memory_order(ours, other.item_bytes), memory_order(theirs, state.item_bytes)
            words = [{word.strip("+"): word for word in order.split(", ")} for order in orders]
            both = [[word for name, word in each.items() if all(name in w for w in words)] for each in words]
            if both[0] != both[1]:
                yield orders[0], orders[1], state.name


def memory_order(view: View, item_bytes: int) -> str:
    """The axes of a view from the outermost to the innermost; ``+``: with gaps.

    >>> import numpy as np
    >>> pool = np.zeros((9, 4, 16, 2, 8), np.int16)  # block, head, token, K or V, channel
    >>> k = pool[:, :, :, 0]
    >>> memory_order(View.of_strides("k", "g", "r", "block head token channel", k.shape, k.strides), 2)
    'block, head, token+, channel'
    """
    steps = [
        (digit.stride, digit.num_held, name)
        for name, axis in view.axes
        for digit in axis.digits
        if digit.num_held > 1
    ]
    words: list[str] = []
    extent = item_bytes
    for stride, count, name in sorted(steps):
        words.append(name if stride == extent else f"{name}+")
        extent = stride * count
    words.append(BLOCK if view.block_stride == extent else f"{BLOCK}+")
    return ", ".join(reversed(words))


StateFacts = tuple[tuple[str, str, str], ...]
"""A property of a state and its values on both sides; empty on a side without the state."""


def state_facts(a: Manifest, b: Manifest) -> list[tuple[list[str], StateFacts]]:
    """The facts of each group of similar states."""
    names = dict.fromkeys(state.name for manifest in (a, b) for state in manifest.states)
    found: dict[tuple[str, StateFacts], list[str]] = {}
    for name in names:
        sides = [(each, each.state_by_name.get(name)) for each in (a, b)]
        said = [_state_words(manifest, state) if state else {} for manifest, state in sides]
        facts = tuple((what, said[0].get(what, ""), said[1].get(what, "")) for what in said[0] | said[1])
        found.setdefault((kind_of(name), facts), []).append(name)
    return [(some, facts) for (_, facts), some in found.items()]


def _state_words(manifest: Manifest, state: State) -> dict[str, str]:
    view = _view(manifest, state)
    return {
        "cell": cell_words(state),
        "encoding": state.encoding,
        "tokens per block": _block_tokens(manifest, state),
        "window": _window(manifest, state),
        "held by": _holding(manifest, state),
        "order in memory": memory_order(view, state.item_bytes) if view else "no rank has it",
    }


# -- differences without effect ----------------------------------------------------------------------


def _engines(a: Manifest, b: Manifest) -> Iterator[Difference]:
    looks: tuple[tuple[str, Callable[[Manifest], str]], ...] = (
        ("model's name", lambda each: each.model or "none"),
        ("ranks", lambda each: str(len(each.ranks))),
        ("groups", lambda each: ", ".join(sorted(map(_group_words, each.groups)))),
        ("blocks in the pool", lambda each: _joined({str(group.num_blocks) for group in each.groups})),
        ("memory", lambda each: _joined({r.device.partition(":")[0] for k in each.ranks for r in k.regions})),
    )
    for what, look in looks:
        if look(a) != look(b):
            yield Difference(what, look(a), look(b), Effect.HARMLESS)


def _group_words(group: Group) -> str:
    return group.name if group.pool == group.name else f"{group.name} in pool {group.pool}"


def _joined(words: set[str]) -> str:
    return ", ".join(sorted(words, key=lambda word: (len(word), word)))


VERDICTS = {
    None: ("SAME", "nothing differs"),
    "harmless": ("SAME", "no relevant difference"),
    "not tried": ("NOTE", "the differences may cost time; not planned in one direction at least"),
    "slower": ("SLOW", "compatible, but slow; see `kvferry plan`"),
    "refused": ("REFUSED", "incompatible"),
}
OTHER_MODEL = "not the same model: running engines reject each other, although the bytes fit"


def verdict(found: ManifestDiff) -> tuple[str, str]:
    """A word, and a sentence."""
    word, words = VERDICTS[found.effect]
    if found.effect is Effect.UNTRIED and not found.differences:
        words = "nothing differs; not planned in one direction at least"
    if word == "SAME" and found.is_slow:
        words += ", but transfers are slow; see `kvferry plan`"
    return word, OTHER_MODEL if found.effect is Effect.REFUSED and found.bytes_fit else words


def direction_time(direction: Direction) -> str:
    """The time of a request, or why it is refused; empty if it transfers nothing."""
    if direction.problem:
        return f"cannot be planned: {direction.problem}"
    if direction.billed.bill.findings:
        word = "not tried" if direction.lacks_ranks else "refused"
        return f"{word}: {direction.reasons}".removesuffix(": ")
    bill = direction.over_network
    if bill is None:
        return ""
    time, long = (milliseconds(1e3 * each) for each in (bill.seconds, bill.long_run_seconds))
    return f"{time} over {bill.profile.name}; {long} in long runs"
