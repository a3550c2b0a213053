"""CUDA's driver. Only this file imports NVIDIA's bindings; torch is not needed.

A thread that touches device memory must have the device's *primary* context current, which torch and the CUDA
runtime use, too. Calls of the driver release the interpreter's lock while they wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransportError

INSTALL = (
    'install NVIDIA\'s bindings with: pip install ".[cuda]" in a clone (torch 2.10 and later bring them)'
)
NAME_BYTES = 128


def has_cuda() -> bool:
    try:
        return int(call(_driver().cuDeviceGetCount)) > 0
    except TransportError:
        return False


def device_names() -> list[str]:
    """The names of this process's devices, by index; raises TransportError without a driver."""
    driver = _driver()
    names = (call(driver.cuDeviceGetName, NAME_BYTES, device) for device in _devices(driver))
    return [bytes(name).partition(b"\0")[0].decode() for name in names]


def visible_devices() -> frozenset[str]:
    driver = _driver()
    return frozenset(_uuid(driver, device) for device in _devices(driver))


def _devices(driver: Any) -> list[Any]:
    return [call(driver.cuDeviceGet, i) for i in range(int(call(driver.cuDeviceGetCount)))]


Event = Any
"""The driver's own, or its address as a number, as torch gives it."""


class Allocation(NamedTuple):
    address: int
    num_bytes: int


class Arguments:
    """Arguments of a kernel, numbers of 64 bits; reusable."""

    def __init__(self, number: int) -> None:
        self._values = (ctypes.c_uint64 * number)()
        at = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * number)(*(at + 8 * i for i in range(number)))
        self.address = ctypes.addressof(self._pointers)

    def set(self, *values: int) -> None:
        """For the next launch, which copies them."""
        self._values[:] = list(values)


class Cuda:
    def __init__(self, device_index: int) -> None:
        self._cu = _driver()
        self._device = call(self._cu.cuDeviceGet, device_index)
        self._context = call(self._cu.cuDevicePrimaryCtxRetain, self._device)
        with self.current():
            self._stream = self.make_stream()

    @property
    def uuid(self) -> str:
        """The same in every process, unlike the index."""
        return _uuid(self._cu, self._device)

    @property
    def num_multiprocessors(self) -> int:
        attribute = self._cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return int(call(self._cu.cuDeviceGetAttribute, attribute, self._device))

    @property
    def architecture(self) -> str:
        names = self._cu.CUdevice_attribute
        parts = (
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
        major, minor = (call(self._cu.cuDeviceGetAttribute, part, self._device) for part in parts)
        return f"sm_{major}{minor}"

    def bind_thread(self) -> None:
        """Make the device current in the calling thread; graph captures of others are not disturbed."""
        call(self._cu.cuCtxSetCurrent, self._context)
        relaxed = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        call(self._cu.cuThreadExchangeStreamCaptureMode, relaxed)

    @contextmanager
    def current_for_launches(self) -> Iterator[None]:
        """Make the device current for work in a stream, which disturbs no graph capture anyway."""
        call(self._cu.cuCtxPushCurrent, self._context)
        try:
            yield
        finally:
            call(self._cu.cuCtxPopCurrent)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device current in any thread; graph captures of other threads are not disturbed."""
        relaxed = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        call(self._cu.cuCtxPushCurrent, self._context)
        before = call(self._cu.cuThreadExchangeStreamCaptureMode, relaxed)
        try:
            yield
        finally:
            call(self._cu.cuThreadExchangeStreamCaptureMode, before)
            call(self._cu.cuCtxPopCurrent)

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> int:
        """Returns the address."""
        with self.current():
            return int(call(self._cu.cuMemAlloc, num_bytes))

    def free(self, address: int) -> None:
        with self.current():
            call(self._cu.cuMemFree, address)

    def upload(self, address: int, data: bytes) -> None:
        """Copy host bytes to the device; done on return."""
        with self.current():
            call(self._cu.cuMemcpyHtoD, address, data, len(data))

    def download(self, address: int, num_bytes: int) -> bytes:
        """Copy device bytes to the host; done on return."""
        data = np.empty(num_bytes, np.uint8)
        with self.current():
            call(self._cu.cuMemcpyDtoH, data.ctypes.data, address, num_bytes)
        return data.tobytes()

    def copy(self, src: int, dst: int, num_bytes: int) -> None:
        """Copy within the device; done on return, from any thread."""
        with self.current():
            try:
                call(self._cu.cuMemcpyDtoDAsync, dst, src, num_bytes, self._stream)
            finally:
                self.wait_stream(self._stream)

    def clear(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fill (address, bytes) spans of the device with zeros; done on return, from any thread."""
        with self.current():
            try:
                for address, num_bytes in spans:
                    call(self._cu.cuMemsetD8Async, address, 0, num_bytes, self._stream)
            finally:  # also after an error
                self.wait_stream(self._stream)

    def allocate_pinned(self, num_bytes: int) -> int:
        """Host memory that the device reads and writes; returns the address."""
        with self.current():
            return int(call(self._cu.cuMemHostAlloc, num_bytes, 0))

    def pinned_array(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
        return np.frombuffer(memoryview(buffer), np.uint8)

    def free_pinned(self, address: int) -> None:
        with self.current():
            call(self._cu.cuMemFreeHost, address)

    def allocation_of(self, address: int) -> Allocation:
        with self.current():
            base, num_bytes = call(self._cu.cuMemGetAddressRange, address)
        return Allocation(int(base), int(num_bytes))

    # -- memory of other processes -----------------------------------------------------------------

    def export(self, allocation: Allocation) -> bytes:
        """A handle of an allocation, for other processes of this host."""
        with self.current():
            return bytes(call(self._cu.cuIpcGetMemHandle, allocation.address).reserved)

    def open(self, handle: bytes) -> Allocation:
        """Map the allocation of a handle into this process, until ``close_opened``."""
        ours = self._cu.CUipcMemHandle()
        try:
            ours.reserved = handle
        except ValueError as error:
            raise TransportError("cuda", f"not a CUDA handle: {len(handle)} bytes") from error
        lazy = self._cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with self.current():
            address = int(call(self._cu.cuIpcOpenMemHandle, ours, lazy))
            try:
                return self.allocation_of(address)
            except TransportError:
                call(self._cu.cuIpcCloseMemHandle, address)
                raise

    def close_opened(self, allocation: Allocation) -> None:
        """Nothing may be reading it."""
        with self.current():
            call(self._cu.cuIpcCloseMemHandle, allocation.address)

    def export_virtual(self, allocation: Allocation) -> int:
        """A file descriptor of a piece of virtual memory, for other processes of this host."""
        kind = self._cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        with self.current():
            handle = call(self._cu.cuMemRetainAllocationHandle, allocation.address)
            try:
                return int(call(self._cu.cuMemExportToShareableHandle, handle, kind, 0))
            finally:
                call(self._cu.cuMemRelease, handle)

    def open_virtual(self, descriptors: Sequence[int], sizes: Sequence[int]) -> Allocation:
        """Map pieces of virtual memory side by side, until ``close_virtual``."""
        kind = self._cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        with self.current(), ExitStack() as undo:
            room = Allocation(int(call(self._cu.cuMemAddressReserve, sum(sizes), 0, 0, 0)), sum(sizes))
            undo.callback(self._cu.cuMemAddressFree, *room)
            at = room.address
            for descriptor, num_bytes in zip(descriptors, sizes, strict=True):
                handle = call(self._cu.cuMemImportFromShareableHandle, descriptor, kind)
                try:
                    call(self._cu.cuMemMap, at, num_bytes, 0, handle, 0)
                finally:
                    call(self._cu.cuMemRelease, handle)  # the mapping keeps it
                undo.callback(self._cu.cuMemUnmap, at, num_bytes)
                at += num_bytes
            access = self._cu.CUmemAccessDesc()
            access.location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = int(self._device)
            access.flags = self._cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            call(self._cu.cuMemSetAccess, *room, [access], 1)
            undo.pop_all()
        return room

    def close_virtual(self, allocation: Allocation) -> None:
        """Nothing may be reading it."""
        with self.current():
            call(self._cu.cuMemUnmap, *allocation)
            call(self._cu.cuMemAddressFree, *allocation)

    # -- work in order -----------------------------------------------------------------------------

    def make_stream(self) -> Any:
        """Independent of the default stream."""
        return call(self._cu.cuStreamCreate, self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def free_stream(self, stream: Any) -> None:
        with self.current():
            call(self._cu.cuStreamDestroy, stream)

    def wait_stream(self, stream: Any) -> None:
        call(self._cu.cuStreamSynchronize, stream)

    def make_event(self) -> Event:
        """Waiting for it spins, without the interpreter's lock: sleeping would cost 50 µs."""
        return call(self._cu.cuEventCreate, self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def free_event(self, event: Event) -> None:
        call(self._cu.cuEventDestroy, event)

    def record(self, event: Event, stream: Any) -> None:
        call(self._cu.cuEventRecord, event, stream)

    def wait_event(self, event: Event) -> None:
        call(self._cu.cuEventSynchronize, event)

    def has_come_to(self, event: Event) -> bool:
        (status,) = self._cu.cuEventQuery(event)
        if status == self._cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        _check("cuEventQuery", status)
        return True

    def wait_in_stream(self, stream: Any, event: Event) -> None:
        """Let a stream wait, on the device, for an event of another."""
        call(self._cu.cuStreamWaitEvent, stream, event, 0)

    def upload_later(self, address: int, pinned: int, num_bytes: int, stream: Any) -> None:
        call(self._cu.cuMemcpyHtoDAsync, address, pinned, num_bytes, stream)

    def download_later(self, pinned: int, address: int, num_bytes: int, stream: Any) -> None:
        call(self._cu.cuMemcpyDtoHAsync, pinned, address, num_bytes, stream)

    # -- kernels -----------------------------------------------------------------------------------

    def load(self, binary: bytes, name: str) -> Any:
        """A kernel of a compiled module, which is never unloaded."""
        with self.current():
            module = call(self._cu.cuModuleLoadData, binary)
            return call(self._cu.cuModuleGetFunction, module, name.encode())

    def launch(
        self, kernel: Any, num_blocks: int, num_threads: int, stream: Any, arguments: Arguments
    ) -> None:
        grid = (num_blocks, 1, 1, num_threads, 1, 1, 0)
        call(self._cu.cuLaunchKernel, kernel, *grid, stream, arguments.address, 0)

    def close(self) -> None:
        """Keeps the context: UCX's mappings of other memory last as long as this process."""
        self.free_stream(self._stream)


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise TransportError("no-cuda", f"CUDA's bindings cannot be imported ({error}); {INSTALL}") from error
    try:
        call(driver.cuInit, 0)
    except RuntimeError as error:
        raise TransportError("no-cuda", f"the CUDA driver cannot be loaded: {error}") from error
    return driver


def _uuid(driver: Any, device: Any) -> str:
    return bytes(call(driver.cuDeviceGetUuid, device).bytes).hex()


def call(function: Any, *args: Any) -> Any:
    """The results of a function of the driver or the compiler; raises TransportError."""
    status, *results = function(*args)
    _check(function.__name__, status)
    return results[0] if len(results) == 1 else tuple(results)


def _check(name: str, status: Any) -> None:
    if int(status) != 0:
        raise TransportError("cuda", f"{name}: {getattr(status, 'name', status)}")


def compile_kernel(source: str, architecture: str) -> bytes:
    nvrtc = _nvrtc()
    program = call(nvrtc.nvrtcCreateProgram, source.encode(), b"kvferry.cu", 0, [], [])
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    try:
        call(nvrtc.nvrtcCompileProgram, program, len(options), options)
    except TransportError as error:
        text = bytearray(call(nvrtc.nvrtcGetProgramLogSize, program))
        call(nvrtc.nvrtcGetProgramLog, program, text)
        raise TransportError("cuda", f"{error.detail}: {text.decode(errors='replace')}") from error
    binary = bytearray(call(nvrtc.nvrtcGetCUBINSize, program))
    call(nvrtc.nvrtcGetCUBIN, program, binary)
    call(nvrtc.nvrtcDestroyProgram, program)
    return bytes(binary)


def compiler_version() -> str:
    return ".".join(str(part) for part in call(_nvrtc().nvrtcVersion))


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        detail = f"CUDA's run-time compiler cannot be loaded ({error}); {INSTALL}"
        raise TransportError("no-cuda", detail) from error
    return nvrtc
