"""Imported by vLLM's worker on a GPU, as its extension: teaches its process to answer a test's questions."""

import os

from tests.e2e import inside
from tests.e2e.devices import device_named


class Taught:
    """Adds nothing to a worker: it is there to have this module imported, once in a process."""


if inside.TEACH in os.environ:
    inside.teach(device_named(os.environ[inside.TEACH]))
