"""Frames under a stream's own key: AES-128-GCM. The only file that imports cryptography."""

from __future__ import annotations

from kvferry.errors import MissingPackage, TransportError

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ModuleNotFoundError as error:
    raise MissingPackage.named(error) from None

KEY_BYTES = 16
SEAL_BYTES = 16
"""What a sealed frame is longer by."""
NONCE_BYTES = 12


class FrameSeal:
    """One end of a stream: frames are counted, and each is sealed, or opened, in its turn.

    A key is drawn for one stream and used in one direction, so no count ever comes twice under it.

    >>> sender, receiver = FrameSeal(bytes(16)), FrameSeal(bytes(16))
    >>> sealed, plain = bytearray(5 + SEAL_BYTES), bytearray(5)
    >>> sender.seal(b"head", memoryview(b"bytes"), memoryview(sealed))
    >>> receiver.open(b"head", memoryview(sealed), memoryview(plain))
    >>> bytes(plain)
    b'bytes'
    >>> receiver.open(b"head", memoryview(sealed), memoryview(plain))  # once more
    Traceback (most recent call last):
    kvferry.errors.TransportError: bad-frame: it was changed on its way
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:  # a peer's word
            raise TransportError("bad-key", f"a stream's key has {KEY_BYTES} bytes, got {len(key)}")
        self._cipher, self._count = AESGCM(key), 0

    def seal(self, head: bytes, plain: memoryview, sealed: memoryview) -> None:
        """Encrypt bytes into ``sealed``, which is longer by ``SEAL_BYTES``; the head is proved with them."""
        self._cipher.encrypt_into(self._next(), plain, head, sealed)

    def open(self, head: bytes, sealed: memoryview, plain: memoryview) -> None:
        """Decrypt into ``plain``; raises TransportError if head or bytes are not those that were sealed."""
        try:
            self._cipher.decrypt_into(self._next(), sealed, head, plain)
        except InvalidTag:
            raise TransportError("bad-frame", "it was changed on its way") from None

    def skip(self) -> None:
        """A frame passed that nobody wants."""
        self._next()

    def _next(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(NONCE_BYTES, "big")
