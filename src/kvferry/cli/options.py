"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Model = Annotated[str, typer.Option("--model", metavar="NAME", help="A model of `kvferry models`.")]
Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="A model's config.json.")]
