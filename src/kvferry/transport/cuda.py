"""The few calls of the CUDA driver that a transport needs, by ctypes: no torch, no toolkit.

A thread that touches device memory must have the device's *primary* context current, the one that torch and
the CUDA runtime use too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from kvferry.errors import TransportError

LIBRARY = "libcuda.so.1"
NON_BLOCKING = 1


def has_cuda() -> bool:
    """Whether this machine has a CUDA driver and a device."""
    try:
        return _count(_load()) > 0
    except TransportError:
        return False


class Cuda:
    """One device, by its index in this process."""

    def __init__(self, device_index: int) -> None:
        self._driver = _load()
        self._device, self._context, self._stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(self._device), device_index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        with self._current():
            self._call("cuStreamCreate", ctypes.byref(self._stream), NON_BLOCKING)

    def bind_thread(self) -> None:
        """Make the device current in the calling thread, for good."""
        self._call("cuCtxSetCurrent", self._context)

    def clear(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fill (address, bytes) spans of the device with zeros; done on return, from any thread."""
        with self._current():
            for address, num_bytes in spans:
                args = (ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes), self._stream)
                self._call("cuMemsetD8Async", *args)
            self._call("cuStreamSynchronize", self._stream)

    def allocate(self, num_bytes: int) -> int:
        """Device memory; its address."""
        address = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def free(self, address: int) -> None:
        """Give device memory back."""
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def upload(self, address: int, data: bytes) -> None:
        """Copy host bytes to the device."""
        with self._current():
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def download(self, address: int, num_bytes: int) -> bytes:
        """Copy device bytes to the host."""
        data = ctypes.create_string_buffer(num_bytes)
        with self._current():
            self._call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))
        return data.raw

    def close(self) -> None:
        """Give the stream back.

        The context is kept: UCX remembers its mappings of other processes' memory for the life of this one,
        and if the last holder of the context let go, they would dangle.
        """
        with self._current():
            self._call("cuStreamDestroy_v2", self._stream)

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *args: object) -> None:
        _check(self._driver, name, *args)


def _load() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise TransportError("no-cuda", f"the CUDA driver cannot be loaded: {error}") from error
    _check(driver, "cuInit", 0)
    return driver


def _count(driver: ctypes.CDLL) -> int:
    number = ctypes.c_int()
    _check(driver, "cuDeviceGetCount", ctypes.byref(number))
    return number.value


def _check(driver: ctypes.CDLL, name: str, *args: object) -> None:
    status = getattr(driver, name)(*args)
    if status != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else f"error {status}"
        raise TransportError("cuda", f"{name}: {reason}")
