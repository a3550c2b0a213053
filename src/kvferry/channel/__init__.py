"""The control channel: small messages between engines."""

from kvferry.channel.zmq import SILENCE_SECONDS, Channel, Contact, ContactChange, Received

__all__ = ["SILENCE_SECONDS", "Channel", "Contact", "ContactChange", "Received"]
