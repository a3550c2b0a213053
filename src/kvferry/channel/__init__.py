"""The control channel: small messages between engines."""

from kvferry.channel.zmq import Channel, Received

__all__ = ["Channel", "Received"]
