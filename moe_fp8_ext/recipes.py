"""Recipes: which formats, scales and group alignment a quantized grouped matmul uses."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Recipe:
    """How `grouped_mm` computes.

    Attributes:
        name: what `get_recipe` knows it by.
        quantized: False multiplies in bfloat16.
        dtype: fp8 format of every operand; None is the device's own (`default_fp8_dtype`).
        pow2_scale: round multipliers down to powers of two.
        align: tokens to a multiple of which groups are padded inside transposed operands.
        use_fast_accum: let the GEMM accumulate in the tensor cores' own precision.
    """

    name: str
    quantized: bool = True
    dtype: torch.dtype | None = None
    pow2_scale: bool = False
    align: int = 16
    use_fast_accum: bool = True


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("bf16", quantized=False),
        # Powers of two, as torchao rounds them: a value has the same fp8 bytes up to its exponent in both directions.
        Recipe("rowwise", pow2_scale=True),
    )
}


def get_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of that name; a `Recipe` is returned as it is.

    Raises:
        ValueError: no recipe of that name exists.
        NotImplementedError: the recipe is planned.
        TypeError: neither a name nor a `Recipe`.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe must be a str or a Recipe, got {type(recipe).__name__}")
    if recipe in ("blockwise", "mxfp8"):
        raise NotImplementedError(f"recipe {recipe!r} is not implemented yet, expected one of {sorted(RECIPES)}")
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {sorted(RECIPES)}, got {recipe!r}")
    return RECIPES[recipe]


def default_fp8_dtype(device: torch.device | str) -> torch.dtype:
    """float8_e4m3fnuz where the device's fp8 instructions are FNUZ (gfx942), else float8_e4m3fn."""
    device = torch.device(device)
    if device.type == "cuda" and torch.version.hip:
        if torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx94"):
            return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn
