"""The control channel: small messages between engines."""

from kvferry.channel.budget import Budget
from kvferry.channel.zmq import Channel, Received

__all__ = ["Budget", "Channel", "Received"]
