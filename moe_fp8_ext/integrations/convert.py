"""Makes the experts of an existing model compute by a recipe. It replaces one attribute of each module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from types import MethodType
from typing import NamedTuple

from torch import nn

from moe_fp8_ext.integrations import fp8_checkpoint, peft
from moe_fp8_ext.layer.frozen import FrozenWeight
from moe_fp8_ext.layer.modules import Experts, check_fits
from moe_fp8_ext.ops.checks import check_filter, check_module, require
from moe_fp8_ext.quantization.recipe import Recipe, get_recipe

_SWAP = "_moe_fp8_ext_swap"
_WAY_OUT = "let convert_ run first, or use experts_implementation of Transformers, which runs in any order"


class _Swap(NamedTuple):
    """The replaced attribute of a module. The module stores it, so copies of the module can be reverted too."""

    attribute: str
    value: object
    before: tuple[object, ...]  # the module's previous value, or empty if only its class had the attribute


class _Kind(NamedTuple):
    """A kind of experts that `convert_` knows."""

    name: str
    has: Callable[[nn.Module], bool]  # whether a module is of this kind
    replacement: Callable[[nn.Module, Recipe], tuple[str, object]]  # the attribute, and its new value
    runs: Callable[[nn.Module], tuple[Recipe | None, str]]  # the recipe and a note, or None and why


def _is_of_transformers(module: nn.Module) -> bool:
    """Whether `use_experts_implementation` wrote the forward of the module's class. The class may be of any package."""
    return _wrote_transformers(getattr(type(module), "forward", None))


def _wrote_transformers(forward: object) -> bool:
    return getattr(forward, "__globals__", {}).get("__name__") == "transformers.integrations.moe"


def _is_of_fp8_checkpoint(module: nn.Module) -> bool:
    return _is_of_transformers(module) and fp8_checkpoint.is_quantized(module)


def _is_of_torchtitan(module: nn.Module) -> bool:
    is_derived = any(base.__module__.partition(".")[0] == "torchtitan" for base in type(module).__mro__)
    return is_derived and hasattr(module, "_grouped_mm")


def _by_integration(module: str, function: str) -> Callable[..., tuple]:
    """Imports an integration, and with it the other package, only when a module needs it."""
    return lambda *args: getattr(import_module(f"moe_fp8_ext.integrations.{module}"), function)(*args)


def _is_of_this_package(module: nn.Module) -> bool:
    return isinstance(module, Experts) and type(module).forward is Experts.forward


def _replacement(experts: Experts, recipe: Recipe) -> tuple[str, object]:
    check_fits(experts.ep, experts.num_experts, recipe)
    for frozen in (w for w in experts.children() if isinstance(w, FrozenWeight)):
        text = f"the recipe must have the format of weights that freeze_ has quantized, {frozen.format!r}"
        require(frozen.format == recipe.format, f"Experts: {text}, got recipe {recipe.name!r}")
    return "options", {**experts.options, "recipe": recipe}


_KINDS = (
    _Kind("moe_fp8_ext", _is_of_this_package, _replacement, lambda experts: (experts.options["recipe"], "")),
    *(
        _Kind(name, has, _by_integration(module, "replacement"), _by_integration(module, "runs"))
        for name, has, module in (
            ("FP8 checkpoint", _is_of_fp8_checkpoint, "transformers"),
            ("transformers", _is_of_transformers, "transformers"),
            ("torchtitan", _is_of_torchtitan, "torchtitan"),
        )
    ),
)


class Converted(NamedTuple):
    """A module that computes by the recipe."""

    name: str
    kind: str
    recipe: Recipe


class Left(NamedTuple):
    """A module that may be experts, and that `convert_` left as it was."""

    name: str
    why: str


class Report(NamedTuple):
    """The result of `convert_`. Prints as a table.

    Attributes:
        converted: the modules that now compute by the recipe: qualified name, kind, recipe. The kind is the package of
            the experts, or "FP8 checkpoint".
        left: other modules that may be experts: qualified name, and why `convert_` left the module as it was.
    """

    converted: tuple[Converted, ...]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        rows = [(name, kind, repr(recipe)) for name, kind, recipe in self.converted]
        return _table([*rows, *((name, "", f"not converted: {why}") for name, why in self.left)])


class Running(NamedTuple):
    """A module that computes by a recipe."""

    name: str
    kind: str
    recipe: Recipe
    note: str


class Fp8Report(NamedTuple):
    """Which experts of a model compute by a recipe. Prints as a table.

    Attributes:
        running: the modules that compute by a recipe: qualified name, package of the experts, recipe, and a note, which
            may be empty.
        others: other modules that may be experts: qualified name, and why the module has no recipe.
    """

    running: tuple[Running, ...]
    others: tuple[Left, ...]

    def __str__(self) -> str:
        if not self.running and not self.others:
            return "no experts were found: nothing of this model computes by a recipe"
        rows = [
            (name, kind, f"{recipe}, {note}" if note else repr(recipe)) for name, kind, recipe, note in self.running
        ]
        return _table([*rows, *((name, "", f"no recipe: {why}") for name, why in self.others)])


def _table(rows: list[tuple[str, str, str]]) -> str:
    rows = [("module", "kind", "recipe"), *((name or "(model)", *rest) for name, *rest in rows)]
    names, kinds = (max(len(row[i]) for row in rows) for i in range(2))
    return "\n".join(f"{name:{names}}  {kind:{kinds}}  {text}" for name, kind, text in rows)


def convert_(
    model: nn.Module, recipe: str | Recipe = "rowwise", filter: Callable[[str, nn.Module], bool] | None = None
) -> Report:
    """Makes the experts of a model compute by a recipe, in place.

    `convert_` knows these experts:

    - experts that Transformers marks with `use_experts_implementation`, with any experts_implementation. Experts of an
      FP8 checkpoint only take recipe "blockwise",
    - torchtitan's GroupedExperts and GroupedLinear,
    - `Experts`. An `Experts` with an ep only takes the ep's recipe.

    `convert_` replaces one attribute of such a module: its forward, or an attribute that its forward reads. Classes,
    parameters, their names and hooks do not change. So `fully_shard` and accelerate's `dispatch_model` and
    `cpu_offload` may come before or after `convert_`. Checkpoints, copies and torch.compile work as before. Other code
    that replaces a forward, such as plans of tensor and expert parallelism, must run after `convert_`. If you call
    `convert_` again, the last recipe counts.

    If PEFT has put adapters on parameters of the experts (`target_parameters`), converted experts multiply by their
    factors, and never compute W + B A. For this, `convert_` also replaces the forward of PEFT's wrappers. It makes PEFT
    refuse to merge adapters into FP8. So call `convert_` after `get_peft_model`.

    Args:
        model: the model, or the experts themselves.
        recipe: as in `grouped_mm`.
        filter: a function of a qualified name and a module. It returns whether to convert the module. None converts
            all modules.

    Returns:
        a `Report`, which prints as a table.

    Raises:
        ValueError, TypeError: the model has nothing to convert, no recipe of that name exists, or an argument is not as
            above. The model is then unchanged.

    Source: DESIGN.md section 6.
    """
    recipe = get_recipe(recipe, "convert_")
    check_module("convert_", "model", model)
    check_filter("convert_", filter)
    swaps, converted, left = [], [], []
    for name, module, kind in _experts_in(model, left):
        if filter is not None and not filter(name, module):
            left.append(Left(name, "filter said no"))
        else:
            try:
                swaps.append((module, _new_swap(module, *kind.replacement(module, recipe))))
                converted.append(Converted(name, kind.name, recipe))
            except (ImportError, RuntimeError, TypeError) as refusal:
                left.append(Left(name, str(refusal)))
    swaps += _swaps_of_adapters(model, [experts for experts, swap in swaps if swap.attribute == "forward"])
    report = Report(tuple(converted), tuple(left))
    if not converted:
        text = "convert_: model must have experts that can be converted, got none"
        raise ValueError(f"{text}\n{report}" if left else text)
    for module, swap in swaps:
        setattr(module, _place(module, swap.attribute), swap.value)
        setattr(module, _SWAP, swap)
    return report


def revert_(model: nn.Module) -> None:
    """Undoes `convert_`: restores the attribute that every module had before its first `convert_`.

    A model without converted modules stays as it is.

    Raises:
        RuntimeError: other code has replaced an attribute that `convert_` had set. The model is then unchanged.
        TypeError: model is no module.

    Source: DESIGN.md section 6.
    """
    check_module("revert_", "model", model)
    swaps = [(module, swap) for module in model.modules() if (swap := _swap_of(module))]
    for module, (attribute, _, before) in swaps:
        place = _place(module, attribute)
        delattr(module, place)
        if place != attribute and not before:
            before = (MethodType(getattr(type(module), attribute), module),)  # accelerate's hook calls it
        for value in before:
            setattr(module, place, value)
        delattr(module, _SWAP)


def fp8_report(model: nn.Module) -> Fp8Report:
    """Reports which experts of a model compute by a recipe of this package, and why other experts do not.

    The model does not change. `fp8_report` knows the same experts as `convert_`. Their recipe may come from `convert_`,
    `experts_implementation`, a plan of expert parallelism or an override of torchtitan. The report leaves out all other
    modules, such as attention and dense layers.

    Returns:
        an `Fp8Report`, which prints as a table.

    Raises:
        TypeError: model is no module.

    Source: DESIGN.md section 6.
    """
    check_module("fp8_report", "model", model)
    running, others = [], []
    for name, module, kind in _experts_in(model, others):
        try:
            recipe, note = kind.runs(module)
        except (ImportError, RuntimeError) as error:
            recipe, note = None, str(error)
        if recipe is None:
            others.append(Left(name, note))
        else:
            running.append(Running(name, kind.name, recipe, note))
    return Fp8Report(tuple(running), tuple(others))


def _experts_in(model: nn.Module, others: list[Left]) -> Iterator[tuple[str, nn.Module, _Kind]]:
    """Yields the experts of known kinds. Adds other modules that may be experts to `others`."""
    for name, module in model.named_modules():
        kind = next((kind for kind in _KINDS if kind.has(module)), None)
        is_of_torch = type(module).__module__.startswith("torch.nn.")  # such as convolutions
        if kind is not None:
            yield name, module, kind
        elif not is_of_torch and any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
            others.append(Left(name, f"the forward of {type(module).__name__} is not known"))


def _new_swap(module: nn.Module, attribute: str, value: object) -> _Swap:
    swap = _swap_of(module)
    if swap is not None:
        return swap._replace(value=value)
    place, attributes = _place(module, attribute), vars(module)
    if place not in attributes:
        return _Swap(attribute, value, ())
    found, of_class = attributes[place], getattr(type(module), attribute, None)
    is_of_class = of_class is None or found == MethodType(of_class, module)
    if not is_of_class:  # each loading of an FP8 checkpoint gives its class another forward
        is_of_class = getattr(found, "__self__", None) is module and _wrote_transformers(found)
    require(is_of_class, f"{attribute} must be its class's own, got another that the module itself has; {_WAY_OUT}")
    return _Swap(attribute, value, (found,))


def _swaps_of_adapters(model: nn.Module, converted: list[nn.Module]) -> list[tuple[nn.Module, _Swap]]:
    """Returns the swaps of PEFT's wrappers, which then pass their adapters to converted experts as factors.

    And of PEFT's models around them, which then refuse to merge adapters into FP8.
    """
    experts = {id(module) for module in converted}
    wrappers = [module for module in model.modules() if id(peft.wrapped(module)) in experts]
    swaps = [(wrapper, _new_swap(wrapper, *peft.replacement(wrapper))) for wrapper in wrappers]
    tuners = filter(peft.can_merge, model.modules() if wrappers else ())
    return swaps + [(tuner, _new_swap(tuner, *peft.merge_check(tuner))) for tuner in tuners]


def _swap_of(module: nn.Module) -> _Swap | None:
    """Returns the swap of the last `convert_` on a module, or None. Raises if the attribute has changed since."""
    attributes = vars(module)
    swap = attributes.get(_SWAP)
    if swap is not None:
        text = f"{swap.attribute} of {type(module).__name__} must be what convert_ put there, got another"
        require(attributes.get(_place(module, swap.attribute)) is swap.value, text)
    return swap


def _place(module: nn.Module, attribute: str) -> str:
    """Returns the name under which a module has an attribute.

    A hook of accelerate replaces the forward of a module. The hook stores the earlier forward as _old_forward.
    """
    is_hooked = attribute == "forward" and {"_hf_hook", "_old_forward"} <= vars(module).keys()
    return "_old_forward" if is_hooked else attribute
