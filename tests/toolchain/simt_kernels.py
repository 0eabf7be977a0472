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
from simt_mx import FP8_TYPES, IN_TYPES, MxKernels
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

DIRECTIONS = ("rows", "columns", "rows and columns", "squares")  # of simt_quantize_blockwise
GROUPS = ("equal", "rows", "columns")  # enum class ScaleGroups


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


class _Scales(ctypes.Structure):
    """struct Scales of shim.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("group_stride", "row_stride", "block_stride", "blocks", "block_size")),
        *((name, ctypes.c_int64) for name in ("rows_log2", "layout")),
    )

    @classmethod
    def of(cls, q: Tensor, scale: Tensor, layout: str) -> _Scales:
        """Of an operand q [..., rows, K] by the layouts of `dequantize`."""
        rows, block = q.shape[-2], 32 if "32" in layout else 128 if "128" in layout else 0
        blocks, *strides = -(-q.shape[-1] // block) if block else 1, *scale.stride()
        if layout == "rowwise of group":  # one a row, of each group
            what = 0 if scale.ndim == 1 else strides[0], 1, 0, 1, 0, 0, 0
        elif layout == "rowwise":
            what = rows, 1, 0, 1, 0, 0, 0
        elif layout == "colwise":
            what = 0, 1, rows, scale.shape[0], 0, 0, 0
        elif layout == "128x128":
            what = *strides, blocks, block, 7, 0
        elif layout in ("1x128", "128x1"):
            what = 0, *strides, scale.shape[1], block, 0, 0
        elif layout == "1x32":
            what = rows * blocks, blocks, 1, blocks, block, 0, 1
        elif layout == "32x1_blocked":
            what = 0, 0, shapes.round_up(rows, 128), blocks, block, 0, 2
        else:
            what = scale.shape[1] if q.ndim == 3 else 0, 0, 0, blocks, block, 0, 2
        return cls(scale.data_ptr(), *what)


class SimtKernels(MxKernels):
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
        done: Tensor | bool | None = None,
        block_size: int | None = None,
    ) -> Tensor:
        memory = GuardedMemory()
        a, b, scale_a, scale_b, offs = map(memory.copy, (a, b, scale_a, scale_b, offs))
        done = None if done is None else memory.copy(done)
        e, groups_of_sum = offs.shape[0], b.ndim == 2
        out = memory.empty(shapes.scaled_grouped_mm(a.shape, b.shape, e), out_dtype)
        what_a = a, FP8_TYPES.index(a.dtype), *a.shape, a.stride(0)
        what_b = b, FP8_TYPES.index(b.dtype), b.shape[-1], b.stride(-1), 0 if groups_of_sum else b.stride(0)
        is_float32 = out_dtype == torch.float32
        if block_size == 32:
            of_a, of_b = ("32x1_blocked",) * 2 if groups_of_sum else ("1x32_blocked rows", "1x32_blocked")
        elif block_size:
            of_a, of_b = ("128x1",) * 2 if groups_of_sum else ("1x128", "128x128")
            scale_b = scale_b.mT
        else:
            of_a, of_b = "rowwise of group", "rowwise of group"
        of_a, of_b = _Scales.of(a, scale_a, of_a), _Scales.of(b.mT, scale_b, of_b)
        what = groups_of_sum, ctypes.byref(of_a), ctypes.byref(of_b), offs, e, is_float32, done
        self._call("scaled_grouped_mm", memory, *what_a, *what_b, *what, out)
        return out

    def dequantize(
        self, q: Tensor, scale: Tensor, layout: str, offs: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        memory, out_dtype = GuardedMemory(), out_dtype or torch.bfloat16
        q, scale, offs = memory.copy(q), memory.copy(scale), None if offs is None else memory.copy(offs)
        out, (*outer, rows, k) = memory.empty(tuple(q.shape), out_dtype), q.shape
        of_rows = offs is not None and layout == "1x32_blocked"
        scales = _Scales.of(q, scale, layout + " rows" * of_rows)
        groups = 0 if offs is None else 1 if of_rows else 2  # enum class Groups
        strides = q.stride()[:2] if outer else (0, q.stride(0))
        what = q, FP8_TYPES.index(q.dtype), *(outer or [1]), rows, k, *strides, ctypes.byref(scales)
        how = offs, 0 if offs is None else offs.shape[0], groups, IN_TYPES.index(out_dtype)
        self._call("dequantize", memory, *what, *how, out)
        return out

    def permute_pad(self, x: Tensor, indices: Tensor, top_k: int = 1) -> Tensor:
        memory = GuardedMemory()
        x, indices, size = memory.copy(x), memory.copy(indices), x.element_size()
        out = memory.empty(shapes.permute_pad(x.shape, indices.shape[0]), x.dtype)
        what = x, x.shape[0], x.stride(0) * size, out, out.shape[0], out.shape[1] * size
        self._call("copy_rows", memory, *what, indices, top_k)
        return out

    def _sources(
        self, pad: bool, offs: Tensor, starts: Tensor | None, m: int, p: int, align: int
    ) -> tuple[Tensor, ...]:
        memory, e = GuardedMemory(), offs.shape[0]
        offs, starts = memory.copy(offs), None if starts is None else memory.copy(starts)
        found = [memory.empty((e,), torch.int32) for _ in range(2)] if starts is None else [None, None]
        source = memory.empty((p if pad else m,), torch.int32)
        self._call("token_groups", memory, pad, offs, starts, *found, source, e, m, p, align)
        return source, *found

    def pad_token_groups(self, x: Tensor, offs: Tensor, align: int) -> tuple[Tensor, ...]:
        p = shapes.padded_extent(x.shape[0], offs.shape[0], align)
        source, starts, ends = self._sources(True, offs, None, x.shape[0], p, align)
        return self.permute_pad(x, source), starts, ends

    def pad_token_groups_to(self, x: Tensor, offs: Tensor, padded_starts: Tensor, num_padded: int) -> Tensor:
        return self.permute_pad(x, self._sources(True, offs, padded_starts, x.shape[0], num_padded, 1)[0])

    def unpad_token_groups(self, y: Tensor, offs: Tensor, padded_starts: Tensor, num_tokens: int) -> Tensor:
        return self.permute_pad(y, self._sources(False, offs, padded_starts, num_tokens, y.shape[0], 1)[0])

    def _swizzle(
        self, scale: Tensor, shape: tuple[int, ...], groups: str, offs: Tensor | None = None
    ) -> Tensor | tuple:
        """`groups`: one of GROUPS."""
        memory = GuardedMemory()
        scale, offs = memory.copy(scale), None if offs is None else memory.copy(offs)
        starts = None if offs is None else memory.empty(tuple(offs.shape), torch.int32)
        out, e = memory.empty(shape, scale.dtype), scale.shape[0] if scale.ndim == 3 else 1
        what = e if offs is None else offs.shape[0], *scale.shape[-2:], scale.stride(-2), scale.stride(0)
        self._call("swizzle_scales", memory, False, scale, out, offs, starts, *what, GROUPS.index(groups))
        return out if offs is None else (out, starts)

    def _unswizzle(self, blocked: Tensor, shape: tuple[int, ...], groups: str, offs: Tensor | None = None) -> Tensor:
        memory = GuardedMemory()
        blocked, offs = memory.copy(blocked), None if offs is None else memory.copy(offs)
        out, e = memory.empty(shape, blocked.dtype), shape[0] if len(shape) == 3 else 1
        what = e if offs is None else offs.shape[0], *shape[-2:], shape[-1], shape[-2] * shape[-1]
        self._call("swizzle_scales", memory, True, blocked, out, offs, None, *what, GROUPS.index(groups))
        return out

    def swizzle_scales_2d(self, scale: Tensor) -> Tensor:
        return self._swizzle(scale, shapes.swizzle_scales_2d(scale.shape), "equal")

    def swizzle_scales_3d(self, scale: Tensor) -> Tensor:
        return self._swizzle(scale, shapes.swizzle_scales_3d(scale.shape), "equal")

    def swizzle_scales_m_groups(self, scale: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
        return self._swizzle(scale, shapes.swizzle_scales_m_groups(scale.shape, offs.shape[0]), "rows", offs)

    def swizzle_scales_k_groups(self, scale: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
        return self._swizzle(scale, shapes.swizzle_scales_k_groups(scale.shape, offs.shape[0]), "columns", offs)

    def unswizzle_scales_2d(self, blocked: Tensor, rows: int, cols: int) -> Tensor:
        return self._unswizzle(blocked, (rows, cols), "equal")

    def unswizzle_scales_3d(self, blocked: Tensor, rows: int, cols: int) -> Tensor:
        return self._unswizzle(blocked, (blocked.shape[0], rows, cols), "equal")

    def unswizzle_scales_m_groups(self, blocked: Tensor, offs: Tensor, rows: int, cols: int) -> Tensor:
        return self._unswizzle(blocked, (rows, cols), "rows", offs)

    def unswizzle_scales_k_groups(self, blocked: Tensor, offs: Tensor, rows: int, cols: int) -> Tensor:
        return self._unswizzle(blocked, (rows, cols), "columns", offs)

    def permute_indices(
        self, counts: Tensor, num_ranks: int, num_local_experts: int, num_tokens: int, align: int, align_empty: bool
    ) -> tuple[Tensor, ...]:
        memory, e = GuardedMemory(), num_local_experts
        outputs = [memory.empty(s, torch.int32) for s in shapes.permute_indices(num_tokens, e, align)]
        what = memory.copy(counts), counts.dtype == torch.int64, *outputs, num_ranks, e, num_tokens
        self._call("permute_indices", memory, *what, outputs[0].shape[0], align, align if align_empty else 0)
        return tuple(outputs)

    def permute_pad_quantize_rowwise(
        self, x: Tensor, indices: Tensor, top_k: int, dtype: torch.dtype, pow2_scale: bool = False
    ) -> tuple[Tensor, ...]:
        memory = GuardedMemory()
        x, indices, rows = memory.copy(x), memory.copy(indices), indices.shape[0]
        outputs = _allocate(memory, shapes.permute_pad_quantize_rowwise(x.shape, rows), dtype)
        what = x, IN_TYPES.index(x.dtype), *x.shape, x.stride(0), indices, top_k, rows, None, 0, 1, 0
        nothing = None, None, None
        self._call("permute_pad_quantize", memory, *what, FP8_TYPES.index(dtype), pow2_scale, *outputs, *nothing)
        return outputs

    def permute_pad_quantize_rowcol(
        self, x: Tensor, indices: Tensor, offs: Tensor, top_k: int, align: int, dtype: torch.dtype, pow2: bool = False
    ) -> tuple[Tensor, ...]:
        memory = GuardedMemory()
        x, indices, offs, rows, e = *map(memory.copy, (x, indices, offs)), indices.shape[0], offs.shape[0]
        outputs = _allocate(memory, shapes.permute_pad_quantize_rowcol(x.shape, rows, e, align), dtype)
        what = x, IN_TYPES.index(x.dtype), *x.shape, x.stride(0), indices, top_k, rows, offs, e, align
        how = outputs[2].shape[1], FP8_TYPES.index(dtype), pow2
        self._call("permute_pad_quantize", memory, *what, *how, *outputs)
        return outputs

    def _blockwise(
        self,
        x: Tensor,
        fp8: torch.dtype,
        pow2: bool,
        directions: str,
        offs: Tensor | None = None,
        align: int = 1,
        transpose: bool = True,
        indices: Tensor | None = None,
        top_k: int = 1,
    ) -> tuple[Tensor, ...]:
        """`directions`: one of DIRECTIONS."""
        memory = GuardedMemory()
        x, indices, offs = (None if t is None else memory.copy(t) for t in (x, indices, offs))
        if directions == "squares":
            e, rows, k = x.shape
            q, q_t, scale = shapes.quantize_128x128(x.shape)
            out = {
                "q": memory.empty(q, fp8),
                "q_t": memory.empty(q_t, fp8),
                "scale": memory.empty(scale, torch.float32),
            }
            group_stride, row_stride, positions = *x.stride()[:2], rows
        else:
            rows, k = x.shape[0] if indices is None else indices.shape[0], x.shape[1]
            e, group_stride, row_stride, positions, out = 0 if offs is None else offs.shape[0], 0, x.stride(0), 0, {}
            if "rows" in directions:
                q, scale, stride = shapes.quantize_1x128((rows, k))
                out = {"q": memory.empty(q, fp8), "scale": memory.strided(scale, stride)}
            if "columns" in directions:
                q_t, scale_t, stride, ends = shapes.quantize_128x1((rows, k), e, align, transpose)
                out |= {"q_t": memory.empty(q_t, fp8), "scale_t": memory.strided(scale_t, stride)}
                out["padded_offs"] = memory.empty(ends, torch.int32)
                positions = shapes.padded_extent(rows, e, align)
        what = x, IN_TYPES.index(x.dtype), e, rows, k, group_stride, row_stride, indices, x.shape[0], top_k
        how = offs, align, positions, transpose, FP8_TYPES.index(fp8), pow2
        names = "q", "scale", "q_t", "scale_t", "padded_offs"
        self._call("quantize_blockwise", memory, DIRECTIONS.index(directions), *what, *how, *map(out.get, names))
        return tuple(out.values())

    def quantize_1x128(self, x: Tensor, fp8: torch.dtype, pow2: bool = False) -> tuple[Tensor, ...]:
        return self._blockwise(x, fp8, pow2, "rows")

    def quantize_128x1(
        self, x: Tensor, offs: Tensor, align: int, fp8: torch.dtype, pow2: bool = False, transpose: bool = True
    ) -> tuple[Tensor, ...]:
        return self._blockwise(x, fp8, pow2, "columns", offs, align, transpose)

    def quantize_1x128_128x1(
        self, x: Tensor, offs: Tensor, align: int, fp8: torch.dtype, pow2: bool = False, transpose: bool = True
    ) -> tuple[Tensor, ...]:
        return self._blockwise(x, fp8, pow2, "rows and columns", offs, align, transpose)

    def quantize_128x128(self, w: Tensor, fp8: torch.dtype, pow2: bool = False) -> tuple[Tensor, ...]:
        return self._blockwise(w, fp8, pow2, "squares")

    def permute_pad_quantize_1x128(
        self, x: Tensor, indices: Tensor, top_k: int, fp8: torch.dtype, pow2: bool = False
    ) -> tuple[Tensor, ...]:
        return self._blockwise(x, fp8, pow2, "rows", None, 1, True, indices, top_k)

    def permute_pad_quantize_1x128_128x1(
        self,
        x: Tensor,
        indices: Tensor,
        offs: Tensor,
        top_k: int,
        align: int,
        fp8: torch.dtype,
        pow2: bool = False,
        transpose: bool = True,
    ) -> tuple[Tensor, ...]:
        return self._blockwise(x, fp8, pow2, "rows and columns", offs, align, transpose, indices, top_k)

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

    def invert_indices(self, indices: Tensor, size: int) -> Tensor:
        memory = GuardedMemory()
        inverse = memory.empty((size,), torch.int32)
        self._call("invert_indices", memory, memory.copy(indices), indices.numel(), inverse, size)
        return inverse

    def sort_tokens(self, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, ...]:
        memory = GuardedMemory()
        ids, n, top_k = memory.copy(topk_ids), topk_ids.numel(), topk_ids.shape[-1]
        row_stride = top_k if ids.ndim == 1 else ids.stride(0)
        outputs = [memory.empty(s, torch.int32) for s in shapes.sort_tokens(topk_ids.shape, num_experts)]
        blocks = self._library.simt_sort_tokens_blocks(ctypes.c_int64(n))
        counts = memory.empty((blocks, num_experts), torch.int32)
        what = ids, ids.dtype == torch.int64, n, top_k, row_stride, num_experts
        self._call("sort_tokens", memory, *what, *outputs, counts)
        return tuple(outputs)

    def combine(self, y: Tensor, inverse: Tensor, topk_scores: Tensor | None = None) -> Tensor:
        memory = GuardedMemory()
        y, inverse = memory.copy(y), memory.copy(inverse)
        scores = None if topk_scores is None else memory.copy(topk_scores)
        out = memory.empty(shapes.combine(y.shape, inverse.shape), y.dtype)
        is_float32 = scores is not None and scores.dtype == torch.float32
        what = *inverse.shape, *y.shape, y.stride(0), IN_TYPES.index(y.dtype), is_float32
        self._call("combine", memory, y, inverse, scores, out, *what)
        return out

    def combine_backward(
        self, grad: Tensor, y: Tensor | None, inverse: Tensor, topk_scores: Tensor | None, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        memory = GuardedMemory()
        grad, inverse = memory.copy(grad), memory.copy(inverse)
        y, scores = (None if t is None else memory.copy(t) for t in (y, topk_scores))
        of_y, of_scores = shapes.combine_backward(grad.shape, inverse.shape, num_rows, y is not None)
        grad_y = memory.empty(of_y, grad.dtype)
        grad_scores = memory.empty(of_scores, torch.float32 if scores is None else scores.dtype)
        slot_of = memory.empty((num_rows,), torch.int32)
        tensors = grad, y, inverse, scores, slot_of, grad_y, None if y is None else grad_scores
        strides = grad.stride(0), 0 if y is None else y.stride(0)
        what = *inverse.shape, num_rows, grad.shape[1], *strides, IN_TYPES.index(grad.dtype)
        self._call("combine_backward", memory, *tensors, *what, grad_scores.dtype == torch.float32)
        return grad_y, grad_scores


def _as_c(value: Tensor | int | bool | None) -> object:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(None)
    if not isinstance(value, (bool, int, float)):  # a structure by reference
        return value
    return ctypes.c_bool(value) if isinstance(value, bool) else ctypes.c_int64(value)


def _allocate(memory: GuardedMemory, sizes: tuple[shapes.Shape, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, scale, q_t and scale_t alternate; [E] int32 padded_offs comes last when their number is odd."""
    dtypes = (dtype, torch.float32, dtype, torch.float32, torch.int32)
    if len(sizes) == 3:
        dtypes = dtypes[2:]
    return tuple(memory.empty(size, kind) for size, kind in zip(sizes, dtypes, strict=False))
