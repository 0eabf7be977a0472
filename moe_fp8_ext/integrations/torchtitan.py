"""Makes torchtitan's routed experts use `grouped_mm`, through torchtitan's own override mechanism.

    --override.imports moe_fp8_ext.integrations.torchtitan.moe_fp8
    --override.imports 'moe_fp8_ext.integrations.torchtitan.moe_fp8={"recipe": "blockwise"}'
    config = apply_transforms(config, [MoeFp8Transform(recipe="blockwise")])  # of torchtitan's main branch

Overrides and transforms replace configs before a module is built. The new class only replaces the method `_grouped_mm`
of torchtitan's class. Parameters, their names, initial values and shardings are torchtitan's.
"""

import functools
import inspect
from dataclasses import dataclass, fields

from torch import Tensor
from torch.nn import Module, Parameter

from moe_fp8_ext.distributed.dtensor import is_dtensor
from moe_fp8_ext.matmul.grouped_mm import GroupedMm, grouped_mm
from moe_fp8_ext.quantization.recipe import Recipe, get_recipe
from moe_fp8_ext.report.machine import installed

_HERE = "moe_fp8_ext.integrations.torchtitan"
_METHOD = "_grouped_mm"
_LEAVE_OUT = "leave out the converter or override that brought it"
# The arguments of `_grouped_mm`, which are tokens, weights and offs: in 0.3.0, then in torchtitan's main branch, where
# weights are not transposed and may be float32. Since September 2026 `GroupedLinear` has the last.
_SIGNATURES = (("A", "B_t", "offs"), ("A", "weight_EOI", "offs"), ("input_RI", "weight_EOI", "offsets_E"))


try:
    from torchtitan.config import derive, override

    try:
        from torchtitan.models.common.linear import GroupedLinear as _Target
    except ImportError:  # 0.3.0 has no GroupedLinear: its experts multiply themselves
        from torchtitan.models.common.moe import GroupedExperts as _Target
    from spmd_types import register_local_autograd_function  # a dependency of torchtitan
except ImportError as error:
    text = f"{_HERE}: torchtitan must have overrides and GroupedExperts, as 0.3.0 has, or GroupedLinear"
    raise ImportError(f"{text}, got {installed('torchtitan')}: {error}") from error

try:  # of the main branch: configs are rewritten by transforms there
    from torchtitan.config.transform import ModelConfigTransform
except ImportError:
    ModelConfigTransform = object

# torchtitan's check of shardings refuses autograd Functions that are not registered.
register_local_autograd_function(GroupedMm)


class _MoeFp8:
    """The first base class of a converted class. The second is torchtitan's class."""

    _names: tuple[str, str, str]

    def __init__(self, config) -> None:
        super().__init__(config)
        _check_weights(self)
        self.recipe = get_recipe(config.recipe)

    def _grouped_mm(self, **operands: Tensor) -> Tensor:
        return _product(self._names, self.recipe, **operands)


def replacement(module: Module, recipe: Recipe) -> tuple[str, object]:
    """Returns the attribute that `convert_` replaces on built experts, and its new value.

    Raises:
        TypeError: `_grouped_mm` or weights are not torchtitan's own.
    """
    if isinstance(module, _MoeFp8):
        return "recipe", recipe
    _check_weights(module)
    return _METHOD, functools.partial(_product, _names_of(type(module)), recipe)


def runs(module: Module) -> tuple[Recipe | None, str]:
    """Returns the recipe by which experts compute, and a note; or None, and the reason why they have no recipe."""
    if isinstance(module, _MoeFp8):
        return module.recipe, ""
    product = vars(module).get(_METHOD)
    is_ours = isinstance(product, functools.partial) and product.func is _product
    return (product.args[1], "") if is_ours else (None, "no override of this package, and not converted")


def _product(names: tuple[str, str, str], recipe: Recipe, **operands: Tensor) -> Tensor:
    tokens, weights, offs = (operands[name] for name in names)
    if "B_t" not in operands:
        weights = weights.to(tokens.dtype).transpose(-2, -1)
    return grouped_mm(tokens, weights, offs, recipe=recipe)


def _check_weights(module: Module) -> None:
    for name, weight in module.named_parameters():
        local = weight.to_local() if is_dtensor(weight) else weight
        if type(local) not in (Parameter, Tensor):  # a subclass may define its own product
            text = f"{name} must be a Parameter, got a {type(local).__name__}: {_LEAVE_OUT}"
            raise TypeError(f"{_HERE}: {text}")


def _names_of(owner: type) -> tuple[str, str, str]:
    """Returns the argument names of a class's `_grouped_mm`, and checks that the method is torchtitan's own."""
    definitions = [base for base in owner.__mro__ if _METHOD in vars(base)]
    if len(definitions) > 1:
        by, of = definitions[0].__name__, definitions[-1].__name__
        text = f"{_METHOD} must be {of}'s, got {by}'s: {_LEAVE_OUT}"
        raise TypeError(f"{_HERE}: {text}")
    names = tuple(inspect.signature(getattr(owner, _METHOD)).parameters)[1:] if definitions else None
    if names not in _SIGNATURES:
        known = " or ".join(f"({', '.join(signature)})" for signature in _SIGNATURES)
        got = "no such method" if names is None else f"({', '.join(names)})"
        text = f"{_HERE}: {_METHOD} of {owner.__name__} must take {known}, got {got}"
        raise TypeError(f"{text} with {installed('torchtitan')}; 0.3.0 is known to work")
    return names


@functools.cache
def _converted(owner: type) -> type:
    if issubclass(owner, _MoeFp8):
        return owner

    class Converted(_MoeFp8, owner):
        _names = _names_of(owner)

        @dataclass(kw_only=True, slots=True)
        class Config(owner.Config):
            recipe: str | Recipe = "rowwise"

            def __reduce__(self) -> tuple:
                # pickle finds classes by name, and this class has no importable name.
                return _config, (owner, {field.name: getattr(self, field.name) for field in fields(self)})

    Converted.__name__ = Converted.__qualname__ = f"MoeFp8{owner.__name__}"
    Converted.Config.__qualname__ = f"{Converted.__name__}.Config"  # torchtitan logs this name
    return Converted


def _config(owner: type, values: dict[str, object]) -> object:
    return _converted(owner).Config(**values)


@override(target=_Target.Config, description="Grouped matmuls of routed experts by moe_fp8_ext.")
def moe_fp8(config: _Target.Config, *, recipe: str | Recipe = "rowwise") -> _Target.Config:
    """Returns a config of the same experts, which then compute by a recipe of `moe_fp8_ext.grouped_mm`.

    Raises:
        TypeError: `_grouped_mm` has arguments that no known version of torchtitan has, or other code has replaced it.
        ValueError: no recipe of that name exists.
    """
    get_recipe(recipe)
    return derive(config, _converted(type(config)._owner).Config, recipe=recipe)


@dataclass(kw_only=True, slots=True)
class MoeFp8Transform(ModelConfigTransform):
    """The override `moe_fp8` as a transform, for `apply_transforms` of torchtitan's main branch.

    List it before transforms that wrap the experts, such as LoRA's.
    """

    recipe: str | Recipe = "rowwise"

    def transform(self, model: object, *, context: object = None) -> object:
        """Replaces the config of every grouped matmul of routed experts. Returns the root config.

        Raises:
            TypeError, ValueError: as `moe_fp8`.
        """
        for _, config, parent, name in list(model.traverse(_Target.Config)):
            new = moe_fp8(config, recipe=self.recipe)
            if parent is None:
                model = new
            elif isinstance(parent, (list, dict)):
                parent[name] = new
            else:
                setattr(parent, name, new)
        return model
