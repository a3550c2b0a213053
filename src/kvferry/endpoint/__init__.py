"""The library's API for engines: offer requests, fetch them, poll for what happened.

One process of a source engine runs the ``SourceEngine`` (the lease authority); each of its ranks runs a
``SourceRank``; each rank of a destination engine runs a ``Destination``. A ``Claimant`` exchanges soft offers
of earlier turns for tickets. Nothing here blocks its caller.
"""

from kvferry.endpoint.claiming import Claimant
from kvferry.endpoint.destination import Destination
from kvferry.endpoint.invitation import Invitation
from kvferry.endpoint.source import SourceEngine
from kvferry.endpoint.source_rank import SourceRank

__all__ = ["Claimant", "Destination", "Invitation", "SourceEngine", "SourceRank"]
