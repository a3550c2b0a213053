"""What peers say to each other, as JSON schemas: a file for each version of it, in tests/wire/schemas.

A structure that changes without its version would be read wrongly, or not at all, by a peer of yesterday.
tests/wire/test_schemas.py fails then. Raise the version (``PROTOCOL`` in wire/messages.py, ``VERSION`` in
core/manifest.py, ``MAGIC`` in transport/cards.py) and run

    python tools/wire_schemas.py

which writes the files of versions that have none, and records a message of each kind beside them. It never
changes one: peers out there speak it. A version that was never released may be written anew: delete its
files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect

from kvferry.core.manifest import VERSION
from kvferry.transport import cards
from kvferry.wire.manifest import ManifestDoc
from kvferry.wire.messages import PROTOCOL, FromAuthority, ToAuthority, encode
from kvferry.wire.rank_asks import FromRank, ToRank
from kvferry.wire.reading import laid_out
from kvferry.wire.request import SelectionDoc
from kvferry.wire.ticket import Permit, Ticket

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "wire" / "schemas"
RECORDED = FOLDER.with_name("recorded")
"""A message of each kind, as a peer of each version wrote it: the next version must read it."""


def schema_of(types: Iterable[Any]) -> list[Any]:
    """What is written for each type; names of classes and docstrings are not."""
    schemas, parts = msgspec.json.schema_components(types, ref_template="{name}")

    def plain(schema: Any) -> Any:
        if isinstance(schema, list | tuple):
            return [plain(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            return plain(parts[schema["$ref"]])
        return {
            key: {name: plain(each) for name, each in value.items()} if key == "properties" else plain(value)
            for key, value in schema.items()
            if key not in ("title", "description", "discriminator")
        }

    return [plain(schema) for schema in schemas]


def current() -> dict[str, Any]:
    """File name -> what is said today, under the version of today."""
    layout = {"seal": cards.SEAL.format, "head": cards.LENGTHS.format}
    return {
        f"messages-{PROTOCOL}": schema_of([ToAuthority, FromAuthority, Ticket, ToRank, FromRank, Permit]),
        f"documents-{VERSION}": schema_of([ManifestDoc, SelectionDoc]),
        f"card-{cards.MAGIC.decode()}": layout,
    }


def sample(kind: inspect.Type) -> Any:
    """Some value of a type that messages are made of."""
    match kind:
        case inspect.IntType():
            return 1
        case inspect.BoolType():
            return True
        case inspect.StrType():
            return "x"
        case inspect.BytesType():
            return b"x"
        case inspect.EnumType():
            return next(iter(kind.cls))
        case inspect.StructType():
            return kind.cls(**{field.name: sample(field.type) for field in kind.fields})
        case inspect.VarTupleType():
            return (sample(kind.item_type),)
        case inspect.TupleType():
            return tuple(map(sample, kind.item_types))
        case inspect.UnionType():
            return sample(kind.types[0])
        case inspect.DictType():
            return {sample(kind.key_type): sample(kind.value_type)}
        case _:
            raise TypeError(f"no sample of {kind}: say how one is made")


def recorded() -> dict[str, str]:
    """A message of each kind as it is said today, in hexadecimal."""
    kinds = [kind for some in (ToAuthority, FromAuthority, ToRank, FromRank) for kind in get_args(some)]
    return {kind.__name__: encode(sample(inspect.type_info(kind))).hex() for kind in kinds}


def main() -> int:
    status = 0
    FOLDER.mkdir(exist_ok=True)
    RECORDED.mkdir(exist_ok=True)
    path = RECORDED / f"messages-{PROTOCOL}.json"
    if not path.exists():
        path.write_text(laid_out(recorded()) + "\n", encoding="utf-8")
        print(f"written: recorded/{path.name}")
    for name, schema in current().items():
        path = FOLDER / f"{name}.json"
        if not path.exists():
            path.write_text(laid_out(schema) + "\n", encoding="utf-8")
            print(f"written: {path.name}")
        elif json.loads(path.read_text(encoding="utf-8")) != schema:
            print(f"{path.name} says something else: raise the version first (see {Path(__file__).name})")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
