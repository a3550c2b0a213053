"""From arguments to manifests: a file, or a model and a topology, for each side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

from kvferry.cli import serve_command
from kvferry.cli.bad_input import at
from kvferry.cli.serve_command import ServeCommand
from kvferry.core.manifest import Manifest
from kvferry.core.state import Addressing
from kvferry.core.words import counted
from kvferry.errors import SpecError
from kvferry.models import Model, Topology, catalogue, describe, model_from_config, model_named


@dataclass(frozen=True)
class Side:
    """One side as it was asked for: a file, or a topology of a model."""

    engine: str
    """``src`` or ``dst``."""
    file: Path | None = None
    text: str = ""
    """The topology, or the command that starts the engine, as it was given."""
    model: str = ""
    config: Path | None = None
    is_named: bool = False
    """Whether the model was named for this side, and not for both."""

    def manifest(self, num_tokens: int = 0) -> Manifest:
        """Read or describe it; a pool whose size was left open has room for ``num_tokens``."""
        if self.file is not None:
            return manifest_file(self.file)
        model = self.chosen_model
        with at(f"--{self.engine} {self.text}"):
            return described_with_room(model, self.topology, self.engine, num_tokens)

    @cached_property
    def topology(self) -> str:
        """How the engine is set up, in the words of a topology."""
        return self._command.topology if self._command else self.text

    @cached_property
    def chosen_model(self) -> Model:
        """The model that is served: named for this side, or by its command if that is known, or for both."""
        is_given = bool(self.model) or self.config is not None
        if self._command and not self.is_named:
            if (model := served_model(self._command.model)) is not None:
                return model
            if not is_given:
                raise SpecError(f"--{self.engine}: {_unknown_model(self._command.model)}")
        return chosen_model(self.model, self.config)

    def with_setting(self, key: str, value: str) -> Side:
        """The side with one setting changed."""
        if self._command:
            return replace(self, text=serve_command.with_setting(self.text, key, value))
        kept = [item for item in self.text.split(",") if item and item.partition("=")[0].strip() != key]
        return replace(self, text=",".join([*kept, f"{key}={value}"]))

    @cached_property
    def _command(self) -> ServeCommand | None:
        if not ServeCommand.is_one(self.text):
            return None
        with at(f"--{self.engine} {self.text}"):
            return ServeCommand.read(self.text)


@dataclass(frozen=True)
class GivenModels:
    """The models that were named: for both sides, or for one."""

    model: str = ""
    config: Path | None = None
    models: tuple[str, str] = ("", "")
    """The source's own and the destination's own."""


def src_and_dst(
    files: Sequence[Path],
    topologies: tuple[str | None, str | None],
    given: GivenModels,
) -> tuple[Side, Side]:
    """Both sides; files stand for the sides that have no topology, the source first."""
    open_sides = topologies.count(None)
    if len(files) != open_sides:
        raise SpecError(
            f"{counted(len(files), 'file')} for {counted(open_sides, 'side')} without a topology:"
            " each side needs a manifest file or a topology (--src tp=4, --dst tp=8)"
        )
    if given.model and given.config:
        raise SpecError("--model or --config, not both; --src-model and --dst-model name one side's")
    if open_sides == 2 and (given.model or given.config or any(given.models)):
        raise SpecError("--model and --config describe a side given by --src or --dst; files need neither")
    left = iter(files)
    src, dst = (
        Side(engine, next(left))
        if text is None
        else Side(engine, Path(text))
        if text.endswith(".json")
        else Side(engine, None, text, own or given.model, None if own else given.config, bool(own))
        for engine, text, own in zip(("src", "dst"), topologies, given.models, strict=True)
    )
    return src, dst


def manifest_file(path: Path) -> Manifest:
    """A manifest from a JSON file."""
    from kvferry.wire.manifest import manifest_from_json

    with at(str(path)):
        return manifest_from_json(path.read_bytes())


def listed_ranks(manifest: Manifest) -> str:
    """The ranks of an engine as people read them: ``rank 0 only``, ``ranks 0, 1``, ``ranks 0 to 63``."""
    ranks = [rank.rank for rank in manifest.ranks]
    if len(ranks) == 1:
        return f"rank {ranks[0]} only"
    if len(ranks) > 8 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def chosen_model(name: str, config: Path | None) -> Model:
    """A model of the catalogue, or of a config.json."""
    if bool(name) == (config is not None):
        raise SpecError("a topology needs a model: give --model NAME (see `kvferry models`) or --config FILE")
    if config is None:
        with at("--model"):
            return model_named(name)
    with at(str(config)):
        return model_from_config(_json_object(config), _name_of(config))


def served_model(name: str) -> Model | None:
    """The model that an engine was started with: a folder, a model of the hub, or one of the catalogue."""
    config = Path(name) / "config.json"
    if config.is_file():
        return chosen_model("", config)
    for known, entry in catalogue().items():
        if name.lower() in (known, str(entry["source"]).partition(" ")[0].lower()):
            return model_named(known)
    return None


def _unknown_model(name: str) -> str:
    alike = get_close_matches(name.rpartition("/")[2].lower(), catalogue(), n=1, cutoff=0.5)
    mend = f"--model {alike[0]}, if its cache is the same, or " if alike else ""
    return (
        f"the model {name!r} is neither a folder with a config.json nor known by that name: give"
        f" {mend}--config FILE with its config.json"
    )


def _name_of(config: Path) -> str:
    """A config.json is called after its folder, any other file after itself."""
    return config.resolve().parent.name if config.stem == "config" else config.stem


def _json_object(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SpecError(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise SpecError("a JSON object is expected, as in a model's config.json")
    return values


def described_with_room(model: Model, text: str, engine: str, num_tokens: int) -> Manifest:
    """Describe an engine; unless ``blocks`` is given, its pool has room for a request of ``num_tokens``."""
    topology = Topology.parse(text)
    manifest = describe(model, topology, engine)
    needed = blocks_needed(manifest, num_tokens)
    if needed <= topology.blocks or "blocks" in _keys(text):
        return manifest
    return describe(model, replace(topology, blocks=needed), engine)


def described_to_fit(
    model: Model, text: str, engine: str, num_tokens: int, num_requests: int = 2
) -> Manifest:
    """Describe an engine with room for so many requests of ``num_tokens``: two, to scatter one of them."""
    topology = Topology.parse(text)
    if "blocks" in _keys(text):
        return describe(model, topology, engine)
    needed = blocks_needed(describe(model, replace(topology, blocks=1), engine), num_tokens)
    return describe(model, replace(topology, blocks=num_requests * needed), engine)


def blocks_needed(manifest: Manifest, num_tokens: int) -> int:
    """Blocks that a request takes at most, if all groups draw from one pool."""
    return sum(
        -(-num_tokens // group.tokens_per_block) + 1 if group.addressing is Addressing.TABLE else 1
        for group in manifest.groups
    )


def _keys(text: str) -> set[str]:
    return {item.partition("=")[0].strip() for item in text.split(",")}
