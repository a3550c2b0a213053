"""Core, layout and wire are made of values: nobody changes them under somebody who holds them."""

import importlib
import inspect
import pkgutil
from dataclasses import is_dataclass

import msgspec
import pytest

from kvferry import core, layout, wire

MODULES = [
    importlib.import_module(f"{room.__name__}.{module.name}")
    for room in (core, layout, wire)
    for module in pkgutil.iter_modules(room.__path__)
]
VALUES = [
    cls
    for module in MODULES
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if cls.__module__ == module.__name__ and (is_dataclass(cls) or issubclass(cls, msgspec.Struct))
]


@pytest.mark.parametrize("cls", VALUES, ids=lambda cls: cls.__name__)
def test_what_a_pure_room_is_made_of_is_frozen(cls):
    name = "__dataclass_params__" if is_dataclass(cls) else "__struct_config__"
    assert getattr(cls, name).frozen
