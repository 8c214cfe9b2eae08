"""Copies of the state in CPU memory, made while training continues.

On a GPU, copies wait for the step that was just taken, and the next change of the parameters waits for the copies;
forward and backward passes run concurrently. The host waits for neither:

    training stream   step n | event A | forward, backward of step n + 1 | wait for B | step n + 1
    copy stream                 wait for A | copies into pinned memory | event B
"""

import threading
from collections.abc import Iterable, Mapping, Set
from typing import Any, Protocol

import torch
from torch import Tensor

from trainers.optimizer import local


class Streams(Protocol):
    """The training stream of a device and one for copies; implemented by `CudaStreams`."""

    def mark_training(self) -> Any:
        """Return an event after all work that is queued on the training stream."""
        ...

    def begin_copies(self, event: Any) -> None:
        """Make later copies wait for the event."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy on the copy stream, without waiting for it."""
        ...

    def mark_copies(self) -> Any:
        """Return an event after all copies so far."""
        ...

    def hold_training(self, event: Any) -> None:
        """Make later work on the training stream wait for the event, without blocking."""
        ...

    def finish_copies(self) -> None:
        """Wait for all copies."""
        ...


class CudaStreams:
    """Streams of a GPU. Two threads call it, each with its own current stream, so it keeps the training stream."""

    def __init__(self, device: torch.device) -> None:
        """Use the current stream of the calling thread as the training stream."""
        self._device = device
        self._training = torch.cuda.current_stream(device)
        self._copies = torch.cuda.Stream(device)

    def mark_training(self) -> Any:
        """Record an event on the training stream."""
        return self._training.record_event()

    def begin_copies(self, event: Any) -> None:
        """Make the copy stream wait for the event."""
        # A new thread's device is 0: leaving a stream's context would create a context there, of some 500 MB per rank.
        torch.cuda.set_device(self._device)
        self._copies.wait_event(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy to `target`, which must be pinned for the copy to be asynchronous."""
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)

    def mark_copies(self) -> Any:
        """Record an event on the copy stream."""
        return self._copies.record_event()

    def hold_training(self, event: Any) -> None:
        """Make the training stream wait for the event."""
        self._training.wait_event(event)

    def finish_copies(self) -> None:
        """Block the host until all copies are done."""
        self._copies.synchronize()


class HostStreams:
    """Streams of a CPU, on which everything is done at once."""

    def mark_training(self) -> None:
        """Do nothing: training is never behind the host."""

    def begin_copies(self, event: None) -> None:
        """Do nothing."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def mark_copies(self) -> None:
        """Do nothing: no copy is pending."""

    def hold_training(self, event: None) -> None:
        """Do nothing."""

    def finish_copies(self) -> None:
        """Do nothing."""


class Snapshot:
    """Takes one copy at a time. The training thread calls `begin` and `wait_for_copy`, another thread calls `take`."""

    def __init__(
        self,
        streams: Streams | None = None,
        *,
        is_pinned: bool = True,
        buffers: Mapping[tuple[str, ...], Tensor] | None = None,
    ) -> None:
        """Copy on `streams` into `buffers`, by path; without streams, synchronously into new memory.

        Missing buffers are allocated once and reused; `is_pinned` allocates them in pinned memory.
        """
        self._streams, self._is_pinned = streams, is_pinned
        self._buffers: dict[tuple[str, ...], Tensor] = dict(buffers or {})
        self._ready: Any = None
        self._copied: Any = None
        self._is_issued = threading.Event()
        self._is_issued.set()

    def begin(self) -> None:
        """Mark the state of the step just taken for copying."""
        self._is_issued.clear()
        self._copied = None
        self._ready = self._streams.mark_training() if self._streams else None

    def take(self, live: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the marked state, valid until the next `begin`."""
        streams = self._streams
        try:
            if streams is None:
                copied: dict[str, Any] = copy_state(live)
                return copied
            streams.begin_copies(self._ready)
            state: dict[str, Any] = self._copy(live, streams, ())
            self._copied = streams.mark_copies()
        finally:
            self._is_issued.set()
        streams.finish_copies()
        return state

    @property
    def is_copied(self) -> bool:
        """Return whether `wait_for_copy` would return at once."""
        return self._is_issued.is_set() and self._copied is None

    def wait_for_copy(self) -> None:
        """Order every later change of the state after the copy. The host waits until all copies are issued."""
        self._is_issued.wait()
        if self._streams is not None and self._copied is not None:
            self._streams.hold_training(self._copied)
            self._copied = None

    def _copy(self, value: Any, streams: Streams, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(part, streams, (*path, str(key))) for key, part in value.items()}
        if not isinstance(value, Tensor):
            return value
        source = value.detach()
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = self._buffers[path] = allocate(source, is_pinned=self._is_pinned)
        streams.copy(local(buffer), local(source))
        return buffer


def allocate(value: Tensor, *, is_pinned: bool) -> Tensor:
    """Return an empty tensor like `value` in CPU memory; for a DTensor, one on the same mesh."""
    if not hasattr(value, "device_mesh"):
        return torch.empty_like(value, device="cpu", pin_memory=is_pinned)
    buffer: Any = torch.empty_like(value, device="cpu")
    if is_pinned:  # as torch.distributed.checkpoint's own stager does it, but without a copy of nothing
        buffer._local_tensor = torch.empty_like(buffer._local_tensor, pin_memory=True)
    return buffer  # type: ignore[no-any-return]


def hold_still(state: Any, addresses: Set[int]) -> Any:
    """Return the state with copies of the tensors at these addresses, which forward passes change while it is copied.

    On a GPU the copies are queued on the training stream, before the next pass.
    """
    if isinstance(state, dict):
        return {key: hold_still(part, addresses) for key, part in state.items()}
    is_moving = isinstance(state, Tensor) and not hasattr(state, "device_mesh") and state.data_ptr() in addresses
    return state.detach().clone() if is_moving else state


def find_addresses(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Return the addresses of plain tensors, for `hold_still`."""
    return frozenset(tensor.data_ptr() for tensor in tensors if not hasattr(tensor, "device_mesh") and tensor.numel())


def copy_state(value: Any) -> Any:
    """Return the state with its tensors copied to CPU memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_state(part) for key, part in value.items()}
    return value
