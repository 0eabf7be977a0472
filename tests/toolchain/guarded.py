"""Tensors in guarded memory: filled with 0xFF, with an inaccessible page behind them and checked bytes around them."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_LIBC = ctypes.CDLL(None, use_errno=True)
_PROT_NONE = 0


class GuardedMemory:
    """Allocates CPU tensors and checks, at the end, that nothing was written around them."""

    def __init__(self) -> None:
        self._around: list[Tensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a contiguous tensor of 0xFF bytes at a 16-byte boundary."""
        return self._bytes(torch.Size(shape).numel() * dtype.itemsize, 0).view(dtype).view(shape)

    def like(self, t: Tensor) -> Tensor:
        """Returns a tensor of the shape, strides and dtype of t. If columns have gaps, so does the last one."""
        if t.stride() == torch.empty(t.shape).stride():
            return self.empty(t.shape, t.dtype)
        if t.ndim == 3:  # dense, in any order of dimensions
            return self.empty((t.numel(),), t.dtype).as_strided(t.shape, t.stride())
        return self.empty((t.shape[1] * t.stride(1),), t.dtype).as_strided(t.shape, t.stride())

    def copy(self, t: Tensor) -> Tensor:
        """Returns a tensor of the values, strides and misalignment of t. Gaps between its strides hold 0xFF."""
        elements = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        flat = self._bytes(elements * t.element_size(), t.data_ptr() % 16).view(t.dtype)
        view = flat.as_strided(t.shape, t.stride())
        if 0 not in t.stride():
            return view.copy_(t)
        flat.copy_(t.as_strided(flat.shape, [1]))  # an expanded tensor cannot be written element by element
        return view

    def _bytes(self, size: int, misalignment: int) -> Tensor:
        taken = size + (-misalignment - size) % 16
        mapped = -(-taken // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = mmap.mmap(-1, mapped + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        end = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + mapped
        if _LIBC.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
        if mapped == 0:
            return torch.empty(0, dtype=torch.uint8)
        whole = torch.frombuffer(pages, dtype=torch.uint8, count=mapped).fill_(0xFF)
        self._around += [whole[: mapped - taken], whole[mapped - taken + size :]]
        return whole[mapped - taken : mapped - taken + size]

    def assert_untouched_around(self) -> None:
        assert all(bool((t == 0xFF).all()) for t in self._around), "bytes beside a tensor were overwritten"
