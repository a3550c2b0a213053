"""An agent with the memory of a rank: made whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from kvferry.transport.agent import FabricAgent
from kvferry.transport.cuda import Cuda
from kvferry.transport.descriptors import RegionTable
from kvferry.transport.quietly import quietly
from kvferry.transport.scratch import Scratch
from kvferry.transport.ucx import prepare_for_cuda


class RegisteredAgent:
    """For one thread, the one that makes it."""

    def __init__(self, memory: RegionTable, cuda: Cuda | None, make_agent: Callable[[], FabricAgent]) -> None:
        if cuda:
            prepare_for_cuda(os.environ)
            cuda.bind_thread()
        self.scratch = Scratch(cuda, [region.device for region in memory.places.regions])
        self._registered: list[Any] = []
        try:
            self.agent = make_agent()
            for table in (memory, self.scratch.memory):
                for kind in dict.fromkeys(table.names.tolist()):
                    self._registered.append(self.agent.register(kind, table.whole()[table.names == kind]))
            self.metadata = self.agent.metadata()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give memory and agent up; nothing may be under way."""
        for registered in self._registered:
            quietly(self.agent.deregister, registered)
        self.__dict__.pop("agent", None)  # NIXL ends its own threads when nobody knows it any more
        quietly(self.scratch.free)
