"""GPT-OSS from its MXFP4 checkpoint, with frozen experts in FP8 that hold the same values."""

from __future__ import annotations

from warnings import warn

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_fp8_ext.integrations import fp8_checkpoint
from moe_fp8_ext.integrations.fp8_checkpoint import scale_shape
from moe_fp8_ext.integrations.fp8_loading import dtypes_of, refuse_without_scales
from moe_fp8_ext.ops import dequantize, quantize_weight
from moe_fp8_ext.ops.checks import require
from moe_fp8_ext.quantization.tensor import Quantized

_FORMAT = "blockwise"
_MXFP4 = "moe_fp8_ext_mxfp4"
_PROJECTIONS = "gate_up_proj", "down_proj"


def from_mxfp4(blocks: Tensor, scales: Tensor) -> tuple[Quantized, Tensor]:
    """Converts MXFP4 weights to format "blockwise", one expert after the other.

    An MXFP4 value is an E2M1 number times a power of two that 32 values along K share. In "blockwise", 128 x 128 values
    share one scale: the smallest power of two that brings their largest value to at most 448. E4M3 has a wider range
    than E2M1. So a value stays exact if the scale of its MXFP4 block is at most 2^14 times smaller than the largest of
    the 128 x 128 values. Other values are rounded to the nearest E4M3 number. The transpose has the same bytes, so
    backward multiplies the same values.

    Args:
        blocks: [E, N, K / 32, 16] uint8. A byte holds two E2M1 numbers, the first of them in its low bits.
        scales: [E, N, K / 32] uint8. Byte s stands for 2^(s - 127), 255 for NaN.

    Returns:
        the weights [E, N, K], and the number of values that were rounded, a tensor of one int64.

    Raises:
        RuntimeError: dtypes or shapes are not as above.

    Source: the OCP Microscaling Formats (MX) specification, version 1.0, sections 5.3.3 and 5.4.1.
    """
    op = "from_mxfp4"
    for name, given in (("blocks", blocks), ("scales", scales)):
        require(given.dtype == torch.uint8, f"{op}: {name} must be uint8, got {given.dtype}")
    fits = blocks.dim() == 4 and blocks.shape[-1] == 16
    require(fits, f"{op}: blocks must have shape [E, N, K / 32, 16], got {list(blocks.shape)}")
    wanted = blocks.shape[:-1]
    require(scales.shape == wanted, f"{op}: scales must have shape {list(wanted)}, got {list(scales.shape)}")
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=blocks.device)
    e2m1 = torch.cat([magnitudes, -magnitudes])
    e, n, k = blocks.shape[0], blocks.shape[1], blocks.shape[2] * 32
    q = torch.empty(e, n, k, dtype=torch.float8_e4m3fn, device=blocks.device)
    scale = q.new_empty(scale_shape(q), dtype=torch.float32)
    rounded = torch.zeros((), dtype=torch.int64, device=blocks.device)
    how = dict(dtype=q.dtype, rounding="pow2", directions="rows")
    for i in range(e):
        nibbles = torch.stack([blocks[i] & 15, blocks[i] >> 4], -1).flatten(-2)
        powers = scales[i].contiguous().view(torch.float8_e8m0fnu).float()
        w = (e2m1[nibbles.int()] * powers[..., None]).view(1, n, k)
        q[i : i + 1], scale[i : i + 1], _, _ = quantize_weight(w, _FORMAT, **how)
        rounded += (dequantize(q[i : i + 1], scale[i : i + 1], _FORMAT, out_dtype=w.dtype) != w).sum()
    return Quantized(q, scale, _FORMAT), rounded


def load_mxfp4(folder: str, **options: object) -> PreTrainedModel:
    """Loads GPT-OSS from its MXFP4 checkpoint with frozen experts in FP8, by `from_mxfp4`, and everything else trained.

    Weights of experts take one byte per element. While a weight is loaded, only one of its experts is in memory in
    float32. If values had to be rounded, a warning says how many. The implementation of experts is
    "moe_fp8_blockwise", so call `register()` first. The model cannot be saved, but its adapters can.

    Args:
        folder: a folder or a name of the hub, as in `from_pretrained`.
        options: further arguments of `AutoModelForCausalLM.from_pretrained`, such as device_map.

    Raises:
        RuntimeError: the checkpoint is not of GPT-OSS in MXFP4.
    """
    config = AutoConfig.from_pretrained(folder)
    given = getattr(config, "quantization_config", None) or {}
    method = given.get("quant_method") if isinstance(given, dict) else given.quant_method
    got = f"{config.model_type} with quant_method {method}"
    require(got == "gpt_oss with quant_method mxfp4", f"load_mxfp4: folder must have GPT-OSS in MXFP4, got {got}")
    config.quantization_config = dict(quant_method=_MXFP4)
    options = dict(experts_implementation="moe_fp8_blockwise") | options
    return AutoModelForCausalLM.from_pretrained(folder, config=config, **options)


@auto.register_quantization_config(_MXFP4)
class Mxfp4Config(QuantizationConfigMixin):
    def __init__(self, **kwargs: object) -> None:
        super().__init__(_MXFP4)


@auto.register_quantizer(_MXFP4)
class Mxfp4Quantizer(HfQuantizer):
    """Loads the experts of GPT-OSS in FP8."""

    is_trainable = True

    def is_serializable(self, **kwargs: object) -> bool:
        return False

    def _process_model_before_weight_loading(self, model, **kwargs):
        for module in filter(fp8_checkpoint.is_marked, model.modules()):
            self._freeze(module)
        names = dtypes_of(kwargs.get("checkpoint_files") or ())
        blocks = [name for name in names if name.endswith("_proj_blocks")]
        refuse_without_scales([name for name in blocks if f"{name.removesuffix('blocks')}scales" not in names])

    @staticmethod
    def _freeze(experts: nn.Module) -> None:
        """Gives experts parameters as an FP8 checkpoint has them: [E, N, K] and scales. They are on the meta device."""
        for name in _PROJECTIONS:
            e, k, n = getattr(experts, name).shape
            q = torch.empty(e, n, k, dtype=torch.float8_e4m3fn, device="meta")
            scale = torch.empty(scale_shape(q), device="meta")
            setattr(experts, name, nn.Parameter(q, requires_grad=False))
            setattr(experts, f"{name}_scale_inv", nn.Parameter(scale, requires_grad=False))
        experts.is_transposed, experts.block_size, experts.num_rounded = False, (128, 128), 0

    def _process_model_after_weight_loading(self, model, **kwargs):
        rounded = 0
        for module in filter(fp8_checkpoint.is_marked, model.modules()):
            fp8_checkpoint.freeze(module, *_PROJECTIONS, *(f"{name}_scale_inv" for name in _PROJECTIONS))
            module.num_rounded = int(module.num_rounded)
            rounded += module.num_rounded
        if rounded:
            text = "which scales near each other differ too much for; experts count them in num_rounded"
            warn(f"load_mxfp4: {rounded:,} values of experts were rounded, {text}", stacklevel=2)
        return model

    def get_weight_conversions(self):
        return [
            WeightConverter([f"{name}_blocks", f"{name}_scales"], name, [_FromMxfp4(self)]) for name in _PROJECTIONS
        ]


class _FromMxfp4(ConversionOps):
    def __init__(self, hf_quantizer: Mxfp4Quantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict, model=None, full_layer_name=None, **kwargs):
        path, _, name = full_layer_name.rpartition(".")
        blocks, scales = (input_dict[f"{name}_{part}"] for part in ("blocks", "scales"))
        blocks, scales = (part[0] if isinstance(part, list) else part for part in (blocks, scales))
        weight, rounded = from_mxfp4(blocks, scales)
        experts = model.get_submodule(path)  # Transformers copies operations, so they can count nothing themselves
        experts.num_rounded = experts.num_rounded + rounded
        return {full_layer_name: weight.q, f"{full_layer_name}_scale_inv": weight.scale}
