"""Writes a model of Hugging Face Transformers as an FP8 checkpoint, with the bytes that training multiplied.

The files have the format of published FP8 checkpoints: E4M3 values, with one `weight_scale_inv` per 128 x 128 values.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from moe_fp8_ext import ops
from moe_fp8_ext.integrations.fp8_checkpoint import dequantized, is_marked, names_of, scale_shape
from moe_fp8_ext.ops.checks import FP8_DTYPES, INPUT_DTYPES, check_module, check_not_meta, dtype_name, fail, is_int
from moe_fp8_ext.quantization.recipe import Recipe, get_recipe

_BLOCK = 128
_FP8 = torch.float8_e4m3fn
_SCALE = "_scale_inv"  # of a weight's name: the name of its scales
_CHUNK = 1 << 26  # weights that are quantized at once
_WRAPPED = "_orig_mod", "_checkpoint_wrapped_module"  # the inner module of torch.compile and of checkpoint_wrapper
# Of the flags of `use_experts_implementation`: what FP8 experts of Transformers have, and in words.
_LAYOUT = (
    ("has_bias", False, "no biases"),
    ("is_transposed", False, "weights [experts, out, in]"),
    ("is_concatenated", True, "gate and up as halves of a weight"),
    ("has_post_expert_norm", False, "no norm behind every expert"),
)


def export_fp8(
    model: nn.Module,
    folder: str | Path,
    *,
    recipe: str | Recipe | None = None,
    linears: bool = False,
    merge_adapters: bool = False,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a model of Transformers into a folder as an FP8 checkpoint.

        moe_fp8_ext.export_fp8(model, folder)
        tokenizer.save_pretrained(folder)

    The folder gets safetensors files with an index, config.json with a `quantization_config`, and
    generation_config.json. Tensors have the names and shapes of published checkpoints, such as
    `experts.0.gate_proj.weight` and `experts.0.gate_proj.weight_scale_inv`. Transformers, vLLM and SGLang read this
    layout.

    Weights of experts get the bytes that recipe "blockwise" multiplies. Weights that are already in FP8 keep their
    bytes and scales. All other tensors are written without a change: routers, embeddings, norms, heads and, unless
    `linears` is set, linear layers.

    The model's device needs extra memory for one weight in FP8. With `merge_adapters` it also needs memory for a copy
    of one module with adapters. The host needs memory for one file. Files are first written into a temporary folder
    next to `folder`. At the end the temporary folder replaces `folder`.

    Args:
        model: a model of Transformers, or a PeftModel around one. Weights may be on any device except meta.
        folder: a folder that does not exist yet or is empty.
        recipe: "blockwise" or a `Recipe` of this format. Only its rounding has an effect. With rounding "pow2", the
            config says `scale_fmt="ue8m0"`. None: the rounding of the model's own FP8 weights, or "exact" if the model
            has none.
        linears: also quantize the linear layers of attention, dense MLPs and shared experts, as published checkpoints
            do. If one linear layer of a parent module cannot be quantized, no layer of that parent is quantized. Linear
            layers next to experts, such as routers, and layers of the model itself, such as heads, are not quantized.
        merge_adapters: write the weights with the active adapters of PEFT merged, as `merge_and_unload` merges them.
            The model keeps its adapters. An FP8 weight with an adapter is merged in float32 and quantized again.
        max_shard_bytes: maximum size of a file. A larger tensor gets a separate file.

    Raises:
        RuntimeError: the model cannot be written in this format, or the folder is not empty; the text says why. No file
            has been written then.
        ValueError, TypeError: an argument is not as above.
        ImportError: Transformers or safetensors is missing.

    Source: DESIGN.md section 6.
    """
    op = "export_fp8"
    if not is_int(max_shard_bytes) or max_shard_bytes < 1:
        raise ValueError(f"{op}: max_shard_bytes must be a positive int, got {max_shard_bytes!r}")
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"{op}: folder must be a path, got {type(folder).__name__}; the model is the first argument")
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fail(op, f"folder must be new or empty, got {folder}, which has files")
    plan = _Plan(op, model, recipe, linears, merge_adapters)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        written = Path(temporary) / folder.name
        written.mkdir()
        _write_config(plan, written)
        _write_tensors(plan.tensors(), written, max_shard_bytes)
        written.replace(folder)


def fp8_state(
    model: nn.Module,
    *,
    recipe: str | Recipe | None = None,
    linears: bool = False,
    merge_adapters: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that `export_fp8` writes, with their names, for a running inference engine.

        engine.load_weights(moe_fp8_ext.fp8_state(model))

    Tensors are made one weight at a time, on the device of the model's weights. Tensors that are not quantized share
    the model's memory: copy a tensor that must outlive the next optimizer step.

    Args:
        model, recipe, linears, merge_adapters: as in `export_fp8`.

    Returns:
        an iterator over names and tensors. The call itself checks the model, before the first tensor.

    Raises:
        RuntimeError, ValueError, TypeError, ImportError: as in `export_fp8`.

    Source: DESIGN.md section 6.
    """
    return _Plan("fp8_state", model, recipe, linears, merge_adapters).tensors()


class _Plan:
    """The checkpoint's format for every tensor of a model. The constructor checks all tensors and computes none.

    Attributes:
        model: the model of Transformers, inside of a PeftModel.
        quantized: the weights that a checkpoint has in FP8, by their full names.
        skipped: the names of modules with a matrix that stays as it is, as a checkpoint names them.
        rounding: of weights that are not FP8 yet.
    """

    def __init__(
        self, op: str, model: nn.Module, recipe: str | Recipe | None, linears: bool, merge_adapters: bool
    ) -> None:
        for name, value in (("linears", linears), ("merge_adapters", merge_adapters)):
            if not isinstance(value, bool):
                raise TypeError(f"{op}: {name} must be a bool, got {type(value).__name__}")
        check_module(op, "model", model)
        model = _inside(model)
        self.op, self.merge_adapters = op, merge_adapters
        self.model = _base_model(op, model)
        self.pieces = _pieces_by_class(op, self.model)
        self.rounding, self.scale_dtype = self._scales(recipe)
        self.modules = {name: module for name, module, _ in _walk(self.model, _without_adapter)}
        self.adapted = {name for name, _, is_adapted in _walk(self.model, _without_adapter) if is_adapted}
        self._check_adapters(model)
        self.left_out = self._tied() | set(getattr(self.model, "_keys_to_ignore_on_save", None) or ())
        weights = [f"{name}.{w}" for name, m in self.modules.items() if is_marked(m) for w in self._experts(name, m)]
        weights += [f"{name}.weight" for name, m in self.modules.items() if _is_fp8(getattr(m, "weight", None))]
        weights += [f"{name}.weight" for name in self._linears()] if linears else []
        self.quantized = frozenset(weights)
        if not weights:
            text = "model must have experts that Transformers marks, FP8 weights, or linear layers with linears=True"
            fail(op, f"{text}, got {_class(self.model)} without")
        self.skipped = self._check_tensors()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of the checkpoint with their names, made one weight at a time."""
        for module_name, module, _ in _walk(self.model, _with_adapter if self.merge_adapters else _without_adapter):
            for name, tensor, scale in self._tensors_of(module_name, module):
                if name not in self.quantized:
                    yield from self.pieces(name, tensor)
                    continue
                values, scales = (self.pieces(name, t) for t in self._fp8(name, tensor, scale))
                for (piece, q), (_, scale_of_piece) in zip(values, scales, strict=True):
                    yield piece, q
                    yield piece + _SCALE, scale_of_piece.reshape(scale_shape(q))  # 5.17.0 drops dimensions of 1

    def config(self) -> dict[str, object]:
        """The `quantization_config` of the checkpoint."""
        return dict(
            quant_method="fp8",
            fmt="e4m3",
            activation_scheme="dynamic",
            weight_block_size=[_BLOCK, _BLOCK],
            modules_to_not_convert=self.skipped,
            **(dict(scale_fmt="ue8m0") if self.rounding == "pow2" else {}),
        )

    def _scales(self, recipe: str | Recipe | None) -> tuple[str, torch.dtype]:
        """Returns the rounding of weights that are not FP8 yet, and the dtype of their scales.

        A checkpoint has one format of scales. If the model has FP8 weights already, their scales decide it.
        """
        rounding, dtype = None, torch.float32
        if any(_is_fp8(p) for p in self.model.parameters()):
            rounding = "pow2" if self._config_of_fp8().get("scale_fmt") == "ue8m0" else "exact"
            dtype = next((p.dtype for name, p in self.model.named_parameters() if name.endswith(_SCALE)), dtype)
        if recipe is None:
            return rounding or "exact", dtype
        recipe = get_recipe(recipe, self.op)
        if recipe.format != "blockwise" or recipe.dtype not in (None, _FP8):
            fail(self.op, f"recipe must be 'blockwise', with dtype None or float8_e4m3fn, got {recipe!r}")
        if rounding not in (None, recipe.rounding):
            text = f"recipe must have the rounding of the model's own FP8 weights, {rounding!r}"
            fail(self.op, f"{text}, got {recipe.rounding!r}: leave the recipe out")
        return recipe.rounding, dtype

    def _config_of_fp8(self) -> dict[str, object]:
        """Returns the model's own `quantization_config`, checked to be of the format that is written."""
        given = getattr(self.model.config, "quantization_config", None) or {}
        given = given if isinstance(given, dict) else given.to_dict()
        wanted = dict(quant_method="fp8", activation_scheme="dynamic", expert_dtype="fp8")
        for field, value in wanted.items():
            if (got := given.get(field, value)) != value:
                fail(self.op, f"quantization_config of the model must have {field}={value!r}, got {got!r}")
        if list(got := given.get("weight_block_size") or ()) != [_BLOCK, _BLOCK]:
            fail(self.op, f"quantization_config of the model must have weight_block_size=[128, 128], got {got!r}")
        return given

    def _check_adapters(self, given: nn.Module) -> None:
        if given is not self.model and given.active_peft_config.is_prompt_learning:
            fail(self.op, "adapters of model must change its weights, got prompts, which no checkpoint holds")
        if self.adapted and not self.merge_adapters:
            text = "model must have no adapters with merge_adapters=False"
            fail(self.op, f"{text}, got some on {len(self.adapted)} modules: pass merge_adapters=True, or unload them")

    def _tied(self) -> set[str]:
        """Returns names of parameters that are others under a second name. Checkpoints have the first name only."""
        owners, tied = {}, set()
        for owner, module in self.modules.items():
            for name, parameter in module.named_parameters(owner, recurse=False):
                first = owners.setdefault(parameter, owner)
                if first == owner:
                    continue
                tied.add(name)
                if self.adapted & {first, owner}:
                    text = "adapters must not be on weights that other modules share"
                    fail(self.op, f"{text}, got {first} and {owner}: untie them first")
        return tied

    def _experts(self, module_name: str, module: nn.Module) -> tuple[str, ...]:
        """Returns the names of an experts module's weights, checked to have a layout that FP8 checkpoints know."""
        text = f"{module_name} ({_class(module)}) must have"
        if module_name.rpartition(".")[2] != "experts":
            fail(self.op, f"{text} the name 'experts', by which Transformers finds FP8 experts, got another")
        for flag, wanted, words in _LAYOUT:
            if bool(getattr(module, flag, wanted)) != wanted:
                fail(self.op, f"{text} {words}, as Transformers' FP8 experts have, got {flag}={not wanted}")
        try:
            loaded = self._fp8_experts(module)
        except (AttributeError, KeyError) as error:
            fail(self.op, f"{text} a config that Transformers' FP8Experts can read, got an error: {error}")
        for name in names_of(module):
            w = getattr(module, name, None)
            if not isinstance(w, Tensor) or w.dim() != 3:
                fail(self.op, f"{text} a tensor {name} of 3 dimensions, got {type(w).__name__}")
            rows, columns = w.shape[1] // 2 if name == "gate_up_proj" else w.shape[1], w.shape[2]
            if rows % _BLOCK or columns % _BLOCK:
                fail(self.op, f"{text} sizes that are multiples of 128, got {rows} and {columns}")
            if w.shape != (wanted := getattr(loaded, name).shape):
                fail(self.op, f"{text} {name} of shape {tuple(wanted)}, by its config, got {tuple(w.shape)}")
        return names_of(module)

    def _fp8_experts(self, module: nn.Module) -> nn.Module:
        """Returns the module that Transformers puts in place of experts when it loads them in FP8."""
        from transformers.integrations.finegrained_fp8 import FP8Experts

        config = getattr(module, "config", None) or self.model.config.get_text_config()
        with torch.device("meta"):
            return FP8Experts(config, block_size=(_BLOCK, _BLOCK), has_bias=False, has_gate=module.has_gate)

    def _linears(self) -> list[str]:
        """Returns the names of linear layers that are to be quantized."""
        of_parent = {}
        for name, module in self.modules.items():
            if type(module) is nn.Linear and not _is_fp8(module.weight):
                of_parent.setdefault(name.rpartition(".")[0], []).append(name)
        kept = {"", *(name.rpartition(".")[0] for name, module in self.modules.items() if is_marked(module))}
        head = self.model.get_output_embeddings()
        chosen = []
        for parent, names in of_parent.items():
            layers = [self.modules[name] for name in names]
            fits = not any(size % _BLOCK for layer in layers for size in layer.weight.shape)
            chosen += names if fits and parent not in kept and head not in layers else []
        return chosen

    def _tensors_of(self, module_name: str, module: nn.Module) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yields the tensors of a module itself that a checkpoint has: full name, tensor, and the scales of FP8."""
        state = module.state_dict().items()
        tensors = {name: t.detach() for name, t in state if "." not in name and isinstance(t, Tensor)}
        for name, tensor in tensors.items():
            full = f"{module_name}.{name}".lstrip(".")
            is_scale = name.endswith(_SCALE) and name.removesuffix(_SCALE) in tensors
            if not is_scale and full not in self.left_out:
                yield full, tensor, tensors.get(name + _SCALE)

    def _check_tensors(self) -> list[str]:
        """Checks every tensor, and that no two come under one name. Returns the names of `skipped`."""
        seen, names, skipped = set(), set(), []
        for module_name, module in self.modules.items():
            for name, tensor, scale in self._tensors_of(module_name, module):
                names.add(name)
                self._check_tensor(name, tensor, scale)
                for piece, _ in self.pieces(name, tensor.to("meta")):
                    if piece in seen:
                        fail(self.op, f"{name} must have a name of its own in checkpoints, got {piece} twice")
                    seen.add(piece)
            if _stays_a_matrix(module) and f"{module_name}.weight" not in self.quantized:
                pieces = self.pieces(f"{module_name}.weight", module.weight.to("meta"))
                skipped += [name.removesuffix(".weight") for name, _ in pieces]
            elif module_name.endswith(".experts") and not is_marked(module) and list(module.parameters(recurse=False)):
                skipped.append(module_name)  # which Transformers takes for FP8 experts by the name alone
        if missing := sorted(self._names_by_class() - names - self.left_out):
            cause = "which a loader would draw at random; undo what took their place, such as a parametrization"
            fail(self.op, f"model must have every tensor of its class, got none for {', '.join(missing[:3])}, {cause}")
        return skipped

    def _names_by_class(self) -> set[str]:
        """Returns the names of the tensors that the model's class makes for its config."""
        with torch.device("meta"):
            return set(type(self.model)(copy.copy(self.model.config)).state_dict())

    def _check_tensor(self, name: str, tensor: Tensor, scale: Tensor | None) -> None:
        text = f"{name} must be"
        check_not_meta(self.op, name, tensor)
        if type(tensor) is not Tensor:
            fail(self.op, f"{text} a whole tensor, got a {type(tensor).__name__}: gather it first")
        is_quantized = name in self.quantized
        if is_quantized and tensor.dtype not in (*INPUT_DTYPES, _FP8):
            fail(self.op, f"{text} bfloat16, float16, float32 or float8_e4m3fn, got {dtype_name(tensor.dtype)}")
        if not _is_fp8(tensor):
            if scale is not None:
                cause = "a cast such as model.bfloat16() loses the scales: load the model again"
                fail(self.op, f"{text} float8_e4m3fn beside {name}{_SCALE}, got {dtype_name(tensor.dtype)}; {cause}")
            return
        if not is_quantized:
            fail(self.op, f"{text} the weight of a linear layer or of experts to be FP8, got another")
        wanted = scale_shape(tensor)
        got = "none" if scale is None else tuple(scale.shape)
        if got != wanted:
            fail(self.op, f"{name}{_SCALE} must have shape {wanted}, got {got}")

    def _fp8(self, name: str, w: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns a weight's values and scales in FP8: its own, or as the recipe quantizes it."""
        if _is_fp8(w):
            return w, scale
        q, scale = _quantize(w.reshape(-1, *w.shape[-2:]), self.rounding)
        if not scale.isfinite().all():
            fail(self.op, f"{name} must be finite, got Inf or NaN")
        return q.view(w.shape), scale.view(*w.shape[:-2], *scale.shape[1:]).to(self.scale_dtype)


def _pieces_by_class(op: str, model: nn.Module) -> Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]:
    """Returns a function of a name and a tensor: what a checkpoint has in their place, by Transformers' conversions.

    A checkpoint has one tensor or, for experts, one or two for each expert. The conversions belong to the model's
    class, because the conversions that the model was loaded with may quantize or dequantize.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise ImportError(f"{op}: needs transformers 5.17.0 or newer, and its weight conversions") from error
    every = get_model_conversion_mapping(model, add_legacy=False)
    kept = [c for c in every if type(c).__name__ != "PrefixChange"]  # a prefix that a checkpoint was loaded with
    by_class = SimpleNamespace(config=model.config, get_parameter=model.get_parameter, _weight_conversions=kept)
    return lambda name, tensor: revert_weight_conversion(by_class, {name: tensor}).items()


def _quantize(w: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """Quantizes weights [E, N, K], a few experts at a time, because experts share no blocks."""
    q = torch.empty_like(w, dtype=_FP8, memory_format=torch.contiguous_format)
    scale = torch.empty(scale_shape(w), device=w.device)
    step, how = max(1, _CHUNK // max(1, w[0].numel())), dict(dtype=_FP8, rounding=rounding, directions="rows")
    for i in range(0, w.shape[0], step):
        part = slice(i, i + step)
        q[part], scale[part], _, _ = ops.quantize_weight(w[part], "blockwise", **how)
    return q, scale


def _write_config(plan: _Plan, folder: Path) -> None:
    model = plan.model
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = next(p.dtype for p in model.parameters() if p.dtype in INPUT_DTYPES)
    config.quantization_config = plan.config()
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _write_tensors(tensors: Iterator[tuple[str, Tensor]], folder: Path, max_bytes: int) -> None:
    """Writes safetensors files as they fill up. Their names contain the number of files, so they come at the end."""
    from safetensors.torch import save_file

    files, tensors_of_file = [[]], {}  # the names of each file, and the tensors of the last file
    size, total = 0, 0

    def flush() -> None:
        save_file(tensors_of_file, folder / str(len(files)), metadata={"format": "pt"})
        tensors_of_file.clear()

    for name, tensor in tensors:
        if tensors_of_file and size + tensor.nbytes > max_bytes:
            flush()
            files.append([])
            size = 0
        # A copy on the host, contiguous and of its own memory, as safetensors needs it.
        tensors_of_file[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        files[-1].append(name)
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    weight_map = {}
    for number, names in enumerate(files, 1):
        suffix = f"-{number:05}-of-{len(files):05}" if len(files) > 1 else ""
        (folder / str(number)).rename(folder / f"model{suffix}.safetensors")
        weight_map |= dict.fromkeys(names, f"model{suffix}.safetensors")
    if len(files) > 1:
        index = dict(metadata=dict(total_size=total), weight_map=weight_map)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


# ---- Modules, and PEFT's wrappers around them ------------------------------------------------------------------------


def _base_model(op: str, model: nn.Module) -> nn.Module:
    """Returns the model of Transformers, inside of a PeftModel."""
    peft, transformers = sys.modules.get("peft"), sys.modules.get("transformers")
    base = model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model
    if transformers is None or not isinstance(base, transformers.PreTrainedModel):
        fail(op, f"model must be a model of Transformers, or a PeftModel around one, got {_class(base)}")
    return base


def _inside(module: nn.Module) -> nn.Module:
    """Returns the module inside of wrappers that compute the same."""
    while inner := [child for name, child in module.named_children() if name in _WRAPPED]:
        (module,) = inner
    return module


def _walk(model: nn.Module, unwrap: Callable[[nn.Module], nn.Module]) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yields all modules under the names that they have without wrappers, and whether PEFT has wrapped them.

    `unwrap` makes a module of PEFT's wrapper when the walk comes there.
    """

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
        module = _inside(module)
        is_wrapped = _is_wrapper(module)
        module = unwrap(module) if is_wrapped else module
        yield name, module, is_wrapped
        for child, inner in module.named_children():
            yield from visit(f"{name}.{child}".lstrip("."), inner)

    return visit("", model)


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is PEFT's layer around another, to whose weights it adds."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def _is_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's layer, or trains a whole module in place of another, as `modules_to_save` does."""
    return _is_layer(module) or hasattr(module, "unload_and_optionally_merge_module")


def _without_adapter(wrapper: nn.Module) -> nn.Module:
    return wrapper.get_base_layer() if _is_layer(wrapper) else wrapper.original_module


@torch.no_grad()
def _with_adapter(wrapper: nn.Module) -> nn.Module:
    """Returns a copy of the module inside of a wrapper, with the active adapters merged by PEFT."""
    wrapper = copy.deepcopy(wrapper)
    if not _is_layer(wrapper):
        return wrapper.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    base = wrapper.get_base_layer()
    while wrapper is not base:  # PEFT has one layer for each parameter of experts
        name = getattr(wrapper, "parameter_name", "weight")
        weight = getattr(base, name)
        if _is_fp8(weight):  # PEFT would add to the values without regard to their scales
            wide = dequantized(weight, getattr(base, name + _SCALE), torch.float32)
            setattr(base, name, nn.Parameter(wide, requires_grad=False))
        wrapper.merge()
        if not wrapper.merged:  # no active adapter
            setattr(base, name, weight)
        wrapper = wrapper.base_layer
    return base


def _stays_a_matrix(module: nn.Module) -> bool:
    """Whether a module has a matrix that loaders would take for FP8 unless the config names the module."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() > 1 and not isinstance(module, nn.Embedding)


def _is_fp8(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype in FP8_DTYPES


def _class(module: nn.Module) -> str:
    return type(module).__name__
