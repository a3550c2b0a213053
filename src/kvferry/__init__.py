"""kvferry: moves what a language model remembers of a request from one engine to another.

Two descriptions in, a proved plan and byte runs out::

    plan = kvferry.plan(src, dst, dst_rank=0)       # who sends what; refused by name if it cannot be
    route = kvferry.lower(kvferry.prove(plan))      # proved, then turned into byte patterns, once per peer
    selection = kvferry.select(route, request)      # block tables in, byte runs out, per request
"""

from kvferry.core.explain import explain
from kvferry.core.identity import Identity
from kvferry.core.lower import Route, lower
from kvferry.core.manifest import Manifest, Rank, Region, compare
from kvferry.core.plan import Piece, Plan, plan
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
