"""Core and layout are made of values: nobody changes them under somebody who holds them."""

import importlib
import inspect
import pkgutil
from dataclasses import is_dataclass

import pytest

from kvferry import core, layout

MODULES = [
    importlib.import_module(f"{room.__name__}.{module.name}")
    for room in (core, layout)
    for module in pkgutil.iter_modules(room.__path__)
]
VALUES = [
    cls
    for module in MODULES
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if cls.__module__ == module.__name__ and is_dataclass(cls)
]


@pytest.mark.parametrize("cls", VALUES, ids=lambda cls: cls.__name__)
def test_a_dataclass_of_a_pure_room_is_frozen(cls):
    assert cls.__dataclass_params__.frozen
