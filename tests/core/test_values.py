"""The core is made of values: nobody changes them under somebody who holds them."""

import importlib
import inspect
import pkgutil
from dataclasses import is_dataclass

import pytest

from kvferry import core

MODULES = [
    importlib.import_module(f"kvferry.core.{module.name}") for module in pkgutil.iter_modules(core.__path__)
]
VALUES = [
    cls
    for module in MODULES
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if cls.__module__ == module.__name__ and is_dataclass(cls)
]


@pytest.mark.parametrize("cls", VALUES, ids=lambda cls: cls.__name__)
def test_a_dataclass_of_the_core_is_frozen(cls):
    assert cls.__dataclass_params__.frozen
