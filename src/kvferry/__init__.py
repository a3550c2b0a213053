"""kvferry: transfers the KV cache (and recurrent state) of a request from one engine to another.

Two descriptions in, a proved plan and byte runs out::

    plan = kvferry.plan(src, dst, dst_rank=0)       # the pieces per source rank, or Refused with the reasons
    route = kvferry.lower(kvferry.prove(plan))      # proved, then turned into byte patterns, once per peer
    selection = kvferry.select(route, request)      # block tables in, byte runs out, per request
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.core.identity import Identity
    from kvferry.core.lower import Route, lower
    from kvferry.core.manifest import Manifest, Rank, Region, compare
    from kvferry.core.plan import Piece, Plan, explain, plan
    from kvferry.core.product import Product, Term
    from kvferry.core.prove import Proof, prove
    from kvferry.core.request import HOLE, BlockTable, Request, need_of
    from kvferry.core.runs import Runs, coalesce
    from kvferry.core.select import Selection, Slack, select
    from kvferry.core.span import Span
    from kvferry.core.state import Addressing, Axis, Group, Kind, State, Tail
    from kvferry.core.view import AxisMap, Digit, View
    from kvferry.errors import Code, Finding, KVFerryError, Refused, RequestError, SpecError

__version__ = "0.1.0.dev0"

__all__ = [
    "HOLE",
    "Addressing",
    "Axis",
    "AxisMap",
    "BlockTable",
    "Code",
    "Digit",
    "Finding",
    "Group",
    "Identity",
    "KVFerryError",
    "Kind",
    "Manifest",
    "Piece",
    "Plan",
    "Product",
    "Proof",
    "Rank",
    "Refused",
    "Region",
    "Request",
    "RequestError",
    "Route",
    "Runs",
    "Selection",
    "Slack",
    "Span",
    "SpecError",
    "State",
    "Tail",
    "Term",
    "View",
    "coalesce",
    "compare",
    "explain",
    "lower",
    "need_of",
    "plan",
    "prove",
    "select",
]

_HOMES = {
    "kvferry.core.plan": "Piece Plan explain plan",
    "kvferry.core.identity": "Identity",
    "kvferry.core.lower": "Route lower",
    "kvferry.core.manifest": "Manifest Rank Region compare",
    "kvferry.core.product": "Product Term",
    "kvferry.core.prove": "Proof prove",
    "kvferry.core.request": "HOLE BlockTable Request need_of",
    "kvferry.core.runs": "Runs coalesce",
    "kvferry.core.select": "Selection Slack select",
    "kvferry.core.span": "Span",
    "kvferry.core.state": "Addressing Axis Group Kind State Tail",
    "kvferry.core.view": "AxisMap Digit View",
    "kvferry.errors": "Code Finding KVFerryError Refused RequestError SpecError",
}
"""The module of each name, imported at its first use: `kvferry --help` needs none."""


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names.split():
            found: object = getattr(_import_module(home), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module 'kvferry' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
