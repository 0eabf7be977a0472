"""The hipified kernels, built for the CPU with the SIMT emulation and called like the functions of the reference."""

from __future__ import annotations

import ctypes
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from guarded import GuardedMemory
from hipified import ROOT, hipify
from torch import Tensor

from moe_fp8_ext import shapes

SIMT = Path(__file__).parent / "simt"
ARCH_MACROS = {64: ("__gfx942__", "__GFX9__"), 32: ("__gfx1201__", "__GFX12__")}  # fnuz and fn fp8 instructions
CXX_FLAGS = (
    "-std=c++17 -O1 -g1 -fPIC -pthread -Wall -Wno-unknown-pragmas -ffp-contract=off -fno-strict-aliasing "
    # Two libraries in one process would share static variables.
    "-fno-gnu-unique "
    # Finds the misaligned vector accesses that x86 forgives and a GPU does not, bad shifts and indices. Addresses that
    # nobody reads from may be anything.
    "-fsanitize=undefined -fno-sanitize=vptr,pointer-overflow -fsanitize-undefined-trap-on-error"
).split()
IN_TYPES = (torch.bfloat16, torch.float16, torch.float32)  # enum class InType
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)  # Fp8Type


def compile_cxx(*arguments: str | Path, wave: int) -> None:
    macros = ("MOE_SIMT", f"SIMT_WARP={wave}")
    command = [os.environ.get("CXX", "g++"), *CXX_FLAGS, *(f"-D{m}" for m in macros), f"-I{SIMT}", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    assert result.returncode == 0, "\n".join([*errors[:5], " ".join(command)])


def build(folder: Path, waves: tuple[int, ...]) -> dict[int, Path]:
    """Compiles the kernels for every wave size; returns the shared objects."""
    tree = folder / "csrc"
    sources = hipify(ROOT / "csrc", tree)
    device = [f"-I{tree}", "-DUSE_ROCM", "-D__HIP__", "-x", "c++"]
    jobs = []
    for wave in waves:
        macros = [f"-D{macro}" for macro in ARCH_MACROS[wave]]
        jobs += [(wave, folder / f"{s.stem}.{wave}.o", [*macros, *device, s]) for s in sources]
        jobs.append((wave, folder / f"shim.{wave}.o", [f"-I{ROOT / 'csrc'}", SIMT / "shim.cpp"]))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: compile_cxx(*job[2], "-c", "-o", job[1], wave=job[0]), jobs))
    libraries = {wave: folder / f"kernels.{wave}.so" for wave in waves}
    for wave, library in libraries.items():
        objects = [job[1] for job in jobs if job[0] == wave]
        compile_cxx("-shared", "-Wl,-Bsymbolic", *objects, "-ldl", "-o", library, wave=wave)
    return libraries


class SimtKernels:
    """Each method allocates its outputs in guarded memory, full of 0xFF, and raises RuntimeError if a launch fails."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def native_fnuz(self) -> bool:
        return bool(self._library.simt_native_fnuz())

    def _call(self, function: str, memory: GuardedMemory, *arguments: Tensor | int | float | bool | None) -> None:
        entry = getattr(self._library, f"simt_{function}")
        entry.restype = ctypes.c_char_p
        error = entry(*map(_as_c, arguments))
        if error is not None:
            raise RuntimeError(f"{function}: {error.decode()}")
        memory.assert_untouched_around()

    def quantize_rowwise(self, x: Tensor, dtype: torch.dtype, pow2_scale: bool = False) -> tuple[Tensor, ...]:
        memory = GuardedMemory()
        x = memory.copy(x)
        q_shape, scale_shape = shapes.quantize_rowwise(x.shape)
        q, scale = memory.empty(q_shape, dtype), memory.empty(scale_shape, torch.float32)
        *outer, rows, k = (1, *x.shape) if x.ndim == 2 else x.shape
        strides = (0, *x.stride()) if x.ndim == 2 else x.stride()
        what = IN_TYPES.index(x.dtype), *outer, rows, k, *strides[:2], FP8_TYPES.index(dtype), pow2_scale
        self._call("quantize_rowwise", memory, x, *what, q, scale)
        return q, scale

    def quantize_colwise(
        self, x: Tensor, offs: Tensor, align: int, dtype: torch.dtype, pow2_scale: bool = False
    ) -> tuple[Tensor, ...]:
        memory = GuardedMemory()
        x, offs, e = memory.copy(x), memory.copy(offs), offs.shape[0]
        outputs = _allocate(memory, shapes.quantize_colwise(x.shape, e, align), dtype)
        what = x, IN_TYPES.index(x.dtype), *x.shape, x.stride(0), offs, e, align, outputs[0].shape[1]
        self._call("quantize_colwise", memory, *what, FP8_TYPES.index(dtype), pow2_scale, *outputs)
        return outputs

    def quantize_rowcol(
        self, x: Tensor, offs: Tensor, align: int, dtype: torch.dtype, pow2_scale: bool = False
    ) -> tuple[Tensor, ...]:
        memory = GuardedMemory()
        x, offs, e = memory.copy(x), memory.copy(offs), offs.shape[0]
        outputs = _allocate(memory, shapes.quantize_rowcol(x.shape, e, align), dtype)
        what = False, x, IN_TYPES.index(x.dtype), e, *x.shape, 0, x.stride(0), offs, align, outputs[2].shape[1]
        self._call("quantize_rowcol", memory, *what, FP8_TYPES.index(dtype), pow2_scale, *outputs)
        return outputs

    def quantize_weight(self, w: Tensor, dtype: torch.dtype, pow2_scale: bool = False) -> tuple[Tensor, ...]:
        memory = GuardedMemory()
        w = memory.copy(w)
        outputs = _allocate(memory, shapes.quantize_weight(w.shape), dtype)
        what = True, w, IN_TYPES.index(w.dtype), *w.shape, *w.stride()[:2], None, 1, w.shape[1]
        self._call("quantize_rowcol", memory, *what, FP8_TYPES.index(dtype), pow2_scale, *outputs, None)
        return outputs

    def scaled_grouped_mm(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        offs: Tensor,
        out_dtype: torch.dtype,
        done: Tensor | None = None,
    ) -> Tensor:
        memory = GuardedMemory()
        a, b, scale_a, scale_b, offs = map(memory.copy, (a, b, scale_a, scale_b, offs))
        done = None if done is None else memory.copy(done)
        e, groups_of_sum = offs.shape[0], b.ndim == 2
        out = memory.empty(shapes.scaled_grouped_mm(a.shape, b.shape, e), out_dtype)
        what_a = a, FP8_TYPES.index(a.dtype), *a.shape, a.stride(0)
        what_b = b, FP8_TYPES.index(b.dtype), b.shape[-1], b.stride(-1), 0 if groups_of_sum else b.stride(0)
        is_float32 = out_dtype == torch.float32
        how = groups_of_sum, scale_a, scale_b, offs, e, is_float32, done
        self._call("scaled_grouped_mm", memory, *what_a, *what_b, *how, out)
        return out

    def pad_token_groups(self, x: Tensor, offs: Tensor, align: int) -> tuple[Tensor, ...]:
        memory, e = GuardedMemory(), offs.shape[0]
        x, offs = memory.copy(x), memory.copy(offs)
        padded, starts, ends = shapes.pad_token_groups(x.shape, e, align)
        out, starts, ends = memory.empty(padded, x.dtype), *(memory.empty(s, torch.int32) for s in (starts, ends))
        sizes = e, x.shape[0], padded[0], x.shape[1] * x.element_size(), x.stride(0) * x.element_size()
        self._call("copy_token_groups", memory, True, x, out, offs, None, starts, ends, *sizes, align)
        return out, starts, ends

    def _copy_to(self, pad: bool, x: Tensor, offs: Tensor, starts: Tensor, rows: int) -> Tensor:
        memory = GuardedMemory()
        x, offs, starts = map(memory.copy, (x, offs, starts))
        out = memory.empty((rows, x.shape[1]), x.dtype)
        m, p = (x.shape[0], rows) if pad else (rows, x.shape[0])
        sizes = offs.shape[0], m, p, x.shape[1] * x.element_size(), x.stride(0) * x.element_size()
        self._call("copy_token_groups", memory, pad, x, out, offs, starts, None, None, *sizes, 1)
        return out

    def pad_token_groups_to(self, x: Tensor, offs: Tensor, padded_starts: Tensor, num_padded: int) -> Tensor:
        return self._copy_to(True, x, offs, padded_starts, num_padded)

    def unpad_token_groups(self, y: Tensor, offs: Tensor, padded_starts: Tensor, num_tokens: int) -> Tensor:
        return self._copy_to(False, y, offs, padded_starts, num_tokens)

    def prepare_offs(self, offs: Tensor, limit: int, multiple: int) -> Tensor:
        memory = GuardedMemory()
        safe = memory.empty((offs.shape[0] + 1,), torch.int32)
        self._call("prepare_offs", memory, memory.copy(offs), safe, offs.shape[0], limit, multiple)
        return safe

    def zero_rows(self, out: Tensor, first: int) -> Tensor:
        memory = GuardedMemory()
        out, first_row = memory.copy(out), memory.copy(torch.tensor([first], dtype=torch.int32))
        self._call("zero_rows", memory, out, first_row, out.shape[0], out.shape[1] * out.element_size())
        return out


def _as_c(value: Tensor | int | bool | None) -> object:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(None)
    return ctypes.c_bool(value) if isinstance(value, bool) else ctypes.c_int64(value)


def _allocate(memory: GuardedMemory, sizes: tuple[shapes.Shape, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, scale, q_t and scale_t alternate; [E] int32 padded_offs comes last when their number is odd."""
    dtypes = (dtype, torch.float32, dtype, torch.float32, torch.int32)
    if len(sizes) == 3:
        dtypes = dtypes[2:]
    return tuple(memory.empty(size, kind) for size, kind in zip(sizes, dtypes, strict=False))
