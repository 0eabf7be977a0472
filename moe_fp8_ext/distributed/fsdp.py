"""Weights of experts that FSDP2 gathers in fp8, through its own hooks: the same results, in half the bytes of bfloat16.

Each expert is quantized on its own. So quantizing a shard of experts gives the same bytes as quantizing the whole
weight. A product over K and a product over N need different bytes. In formats with square blocks, the second are the
transpose of the first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moe_fp8_ext import _torch
from moe_fp8_ext.distributed.dtensor import of_all
from moe_fp8_ext.ops.checks import check_module, default_fp8_dtype, dtype_name, fail, require
from moe_fp8_ext.quantization.casting import cast
from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.quantization.prepare import DeferredWeight, Operand, transposed_squares
from moe_fp8_ext.quantization.recipe import Recipe, Rule, get_recipe

_OP = "gather_in_fp8_"
_HAS_HOOKS = "_moe_fp8_ext_has_hooks"  # marks modules, because FSDP2 uses later hooks only if it has found earlier ones

_quantize_weight = torch.ops.moe_fp8.quantize_weight.default


def gather_in_fp8_(module: nn.Module, recipe: str | Recipe = "rowwise") -> None:
    """Makes FSDP2 gather the weights of experts as fp8. `experts` and `grouped_mm` multiply the gathered bytes.

        fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        moe_fp8_ext.gather_in_fp8_(block.experts, "rowwise")

    Outputs and gradients stay the same, bit for bit. Every process quantizes its shard as the layer would quantize the
    whole weight. Forward gathers the operands of products over K, and backward the operands of products over N. Each
    gather moves half the bytes of bfloat16, plus scales. FSDP2 frees all gathered bytes, also if backward keeps the
    weight. Parameters, gradients, optimizers and checkpoints do not change. torch.compile does not trace calls with
    such weights.

    If backward recomputes forward, or if FSDP2 does not reshard after forward, there is one gather for both directions.
    The layer then gathers the missing direction itself, which moves as many bytes again. So all processes must make
    the same calls of the layer. "blockwise" transposes the gathered bytes instead.

    Call it after `fully_shard` and before the first forward.

    Args:
        module: a module whose parameters of 3 dimensions are gathered in fp8. `fully_shard` must have sharded these
            parameters evenly along E, on their final device. The layout is [E, N, K], or [E, K, N], which always misses
            one direction. Factors of adapters, whose names have "lora_", are gathered as they are. If `module.to` or
            load_state_dict(assign=True) replaces a shard, the new shard is gathered in full precision.
        recipe: a recipe with the format, dtype and rounding of the recipe that multiplies.

    Raises:
        RuntimeError: recipe or parameters are not as above. Forward raises if shards are not as above, or if a call has
            another recipe or another dtype, such as under torch.autocast. The text names the parameter.
        ValueError, TypeError: no recipe of that name exists, recipe is neither a name nor a `Recipe`, or module is no
            module.

    Source: DESIGN.md section 6; `fsdp_pre_all_gather` and `fsdp_post_all_gather` of torch's `fully_shard`.
    """
    missing = f"torch must have what a subclass of Tensor is made with, got {torch.__version__} without"
    require(_torch.wrapper_subclass is not None, f"{_OP}: {missing}")
    check_module(_OP, "module", module)
    recipe = get_recipe(recipe, _OP)
    is_fp8 = recipe.format is not None and not recipe.bf16_where_faster
    require(is_fp8, f"{_OP}: recipe must be one that always multiplies in fp8, got {recipe.name!r}")
    weights = [(name, w) for name, w in module.named_parameters() if w.dim() == 3 and "lora_" not in name]
    require(bool(weights), f"{_OP}: module must have parameters of 3 dimensions, got none")
    owners = _owners(module, weights)
    for owner, name in owners.items():
        if _HAS_HOOKS not in vars(owner) and _torch.has_run_under_fsdp(owner):
            text = f"{name} must get its hooks before the first forward, got a call after that forward"
            fail(_OP, f"{text}; call {_OP} right after fully_shard")
    gathers = [_Gather(name, _shard(name, w), recipe) for name, w in weights]
    for owner in owners:
        setattr(owner, _HAS_HOOKS, True)
    for gather in gathers:
        gather.shard.fsdp_pre_all_gather = gather.pre_all_gather
        gather.shard.fsdp_post_all_gather = gather.post_all_gather


def _shard(name: str, w: nn.Parameter) -> Tensor:
    """Returns the tensor whose hooks FSDP2 calls. to_local() would return a view, and a view has no hooks."""
    from torch.distributed.tensor import DTensor  # imported here, because it takes long to load

    require(isinstance(w, DTensor), f"{_OP}: {name} must be sharded by fully_shard, got a {type(w).__name__}")
    shard, device = _torch.wrapper_subclass.local_tensor(w), w.device_mesh.device_type
    require(shard.device.type == device, f"{_OP}: {name} must be on {device}, got {shard.device}")
    return shard


def _owners(module: nn.Module, weights: list[tuple[str, nn.Parameter]]) -> dict[nn.Module, str]:
    """Returns the modules that have one of the weights themselves, each with the name of its first weight."""
    names, owners = {id(w): name for name, w in weights}, {}
    for owner in module.modules():
        for w in owner.parameters(recurse=False):
            if id(w) in names:
                owners.setdefault(owner, names[id(w)])
    return owners


def _said(w_dtype: torch.dtype, format: str, dtype: torch.dtype, rounding: str) -> str:
    return f"{dtype_name(w_dtype)} in format {format!r} as {dtype_name(dtype)} with rounding {rounding!r}"


class GatheredWeight(DeferredWeight):
    """Stands for the gathered parameter [E, N, K], or its transposed view. It has fp8 copies and no values.

    Backward may keep this tensor, because FSDP2 frees the copies and gathers them again.
    """

    if _torch.wrapper_subclass:
        __torch_function__ = _torch.wrapper_subclass.no_torch_function

    @staticmethod
    def __new__(cls, gather: _Gather, is_transposed: bool = False) -> GatheredWeight:
        e, n, k = gather.shape
        shape, strides = ((e, k, n), (n * k, 1, k)) if is_transposed else ((e, n, k), (n * k, k, 1))
        device = gather.shard.device
        make = _torch.wrapper_subclass.make
        self = make(cls, shape, strides=strides, dtype=gather.dtype, device=device)
        self.gather, self.is_transposed = gather, is_transposed
        return self

    def operand(self, dtype: torch.dtype, rule: Rule) -> Operand:
        self.gather.check(dtype, *rule)
        return Operand(*self.gather.copy(self.is_transposed))

    def transposed_operand(self) -> Operand:
        return Operand(*self.gather.copy(not self.is_transposed))

    def __repr__(self) -> str:
        return f"GatheredWeight({self.gather.name!r}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        w = args[0]
        if func.is_view and isinstance(w, cls):
            wanted = func(torch.empty_strided(w.shape, w.stride(), device="meta"), *args[1:], **(kwargs or {}))
            for is_transposed in (False, True):
                view = cls(w.gather, is_transposed)
                if (view.shape, view.stride()) == (wanted.shape, wanted.stride()):
                    return view
        raise RuntimeError(
            f"{func}: no argument must be a weight that was gathered in fp8, which has copies and no values"
        )


class _Gather:
    """The FSDP2 hooks of a parameter, and the bytes that the hooks have gathered."""

    def __init__(self, name: str, shard: Tensor, recipe: Recipe) -> None:
        self.name, self.shard = name, shard
        self.rule = recipe.format, recipe.dtype or default_fp8_dtype(shard.device), recipe.rounding
        self.format = FORMATS[recipe.format]
        self.other: list[Tensor] = []  # values and scales of the missing direction; empty until a product needs them

    def pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        experts, *sizes = self.shard.shape
        is_even = (experts * mesh.size(), *sizes) == tuple(outer_size)
        text = f"{_OP}: {self.name} {tuple(outer_size)} must be sharded evenly along dimension 0 over {mesh.size()}"
        require(is_even, f"{text} processes, got a shard {tuple(self.shard.shape)}")
        self.mesh, self.shape, self.dtype = mesh, tuple(outer_size), mp_policy.param_dtype or self.shard.dtype
        self.other.clear()
        # FSDP2 does not pass the direction to its hooks. To detect recomputation, FSDP2 asks autograd in the same way.
        is_backward = _torch.in_backward()
        is_transposed = is_backward and not self.format.has_square_blocks
        values, scales = self._of_shard(is_transposed)
        return (values, scales), (is_transposed, scales)

    def post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        self.is_transposed, scales = metadata
        self.values, self.scales = (*all_gather_outputs, scales)[:2]  # for one process FSDP2 passes values only
        return None if out is not None else (GatheredWeight(self), self.other)

    def check(self, w_dtype: torch.dtype, format: str, dtype: torch.dtype | None, rounding: str) -> None:
        asked = w_dtype, format, dtype or default_fp8_dtype(self.shard.device), rounding
        gathered = self.dtype, *self.rule
        if asked != gathered:
            text = f"{self.name} must be multiplied as it was gathered, {_said(*gathered)}, got {_said(*asked)}"
            fail(_OP, f"{text}; give {_OP} the recipe that multiplies, and mp_policy of fully_shard the dtype")

    def copy(self, is_transposed: bool) -> tuple[Tensor, Tensor]:
        """Returns values and scales of the whole weight."""
        is_there = self.values.untyped_storage().size() > 0
        require(is_there, f"{_OP}: {self.name} must be gathered where it is multiplied, got what FSDP2 has freed")
        if is_transposed == self.is_transposed:
            return self._typed(self.values, self.scales)
        if self.format.has_square_blocks:
            return transposed_squares(*self._typed(self.values, self.scales))
        if not self.other:
            gathered = (of_all(x, self.mesh).full_tensor() for x in self._of_shard(is_transposed))
            self.other += gathered  # FSDP2 has this list, and frees its tensors
        return self._typed(*self.other)

    def _of_shard(self, is_transposed: bool) -> tuple[Tensor, Tensor]:
        """Returns values and scales as bytes. Scales have room for any direction, because FSDP2's buffers are fixed."""
        directions = "transposed" if is_transposed else "rows"
        copies = _quantize_weight(cast(self.shard, self.dtype), *self.rule, directions)
        q, scale = copies[2:] if is_transposed else copies[:2]
        _, n, k = self.shard.shape
        room = max(self._bytes_of_scales(n, k), self._bytes_of_scales(k, n))
        scales = scale.flatten(1).view(torch.uint8)
        return q.view(torch.uint8), nn.functional.pad(scales, (0, room - scales.shape[1]))

    def _typed(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        _, dtype, _ = self.rule
        e, rows, k = values.shape
        scales = scales[:, : self._bytes_of_scales(rows, k)].contiguous().view(self.format.scale_dtype)
        return values.view(dtype), scales.view(self.format.scale_of_weight(e, rows, k).shape)

    def _bytes_of_scales(self, rows: int, k: int) -> int:
        return math.prod(self.format.scale_of_weight(1, rows, k).shape) * self.format.scale_dtype.itemsize
