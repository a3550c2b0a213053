"""Write the bill of materials of kvferry and its dependencies: ``make sbom``.

    python tools/sbom.py --extra vllm > kvferry.cdx.json

CycloneDX 1.6 as JSON, for the versions in the environment that runs this, with each package's license and
dependencies. Packages that are not installed have no version, and are listed on standard error. The output
has no time and no random number: the same environment gives the same file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT_PACKAGE = "kvferry"
MAX_LICENSE = 100
"""Longer texts in the field are the license itself, not its name."""


def installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def required(found: Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    """The direct dependencies of a package with these extras, on this machine."""
    for text in found.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def licenses(found: Distribution) -> list[dict[str, Any]]:
    expressions = found.metadata.get_all("License-Expression")
    if expressions:
        return [{"expression": expressions[0]}]
    name = (found.metadata.get_all("License") or [""])[0].strip()
    names = [name] if 0 < len(name) <= MAX_LICENSE and "\n" not in name else []
    classifiers = found.metadata.get_all("Classifier") or []
    names = names or [re.sub(r".*:: ", "", each) for each in classifiers if each.startswith("License ::")]
    return [{"license": {"name": each}} for each in names]


def component(name: str, found: Distribution | None) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{found.version}" if found else f"pkg:pypi/{name}"
    described: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "purl": purl}
    if found:
        described |= {"version": found.version, "licenses": licenses(found)}
    return described


def bill(extras: Sequence[str]) -> dict[str, Any]:
    """The bill of materials, with dependencies of dependencies."""
    edges: dict[str, set[str]] = {}
    wanted: dict[str, frozenset[str]] = {}
    queue = [(ROOT_PACKAGE, frozenset(extras))]
    while queue:
        name, more = queue.pop()
        known = wanted.get(name)
        if known is not None and more <= known:
            continue
        wanted[name] = (known or frozenset()) | more
        found = installed(name)
        for requirement in required(found, wanted[name]) if found else ():
            needed = canonicalize_name(requirement.name)
            queue.append((needed, frozenset(requirement.extras)))
            if needed != name:  # an extra may be made of others of the same package
                edges.setdefault(name, set()).add(needed)
    components = {name: component(name, installed(name)) for name in sorted(wanted)}
    root = components.pop(ROOT_PACKAGE)
    refs = {name: each["bom-ref"] for name, each in {**components, ROOT_PACKAGE: root}.items()}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": list(components.values()),
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[needed] for needed in edges.get(name, ()))}
            for name in sorted(refs)
        ],
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extra", action="append", default=[], help="an extra of kvferry; repeatable")
    made = bill(parser.parse_args(argv).extra)
    json.dump(made, sys.stdout, indent=1)
    sys.stdout.write("\n")
    missing = [each["name"] for each in made["components"] if "version" not in each]
    if missing:
        print(f"not installed, and listed without a version: {', '.join(missing)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
