"""Recipes: which formats, scales and group alignment a quantized grouped matmul uses."""

from dataclasses import dataclass

import torch

# Tokens to a multiple of which a group must be padded for the grouped GEMM of a recipe to take it as it is: 16 bytes of
# the summed dimension of wgrad for the tensor memory accelerator, whole scaling blocks where those run along tokens.
GROUP_ALIGNMENT = {"bf16": 8, "rowwise": 16, "blockwise": 128, "mxfp8": 32}


SCALINGS = ("rowwise", "blockwise", "mxfp8")
MX_SCALINGS = ("rceil", "floor")


@dataclass(frozen=True)
class Recipe:
    """How `grouped_mm` computes.

    Attributes:
        name: what `get_recipe` knows it by.
        quantized: False multiplies in bfloat16.
        scaling: "rowwise", one scale for each row and column of an operand; "blockwise", one for each 128 elements of a
            row or a column of activations and for each 128 x 128 of a weight; or "mxfp8", a power of two for each 32
            elements of a row or a column of either.
        dtype: fp8 format of every operand; None is the device's own (`default_fp8_dtype`).
        grad_dtype: fp8 format of gradients, such as float8_e5m2; None is `dtype`. torch's fp8 GEMM takes no other than
            float8_e4m3fn: rowwise operands of another format are multiplied by a slower kernel.
        pow2_scale: round multipliers down to powers of two; those of "mxfp8" are such.
        mx_scaling: how "mxfp8" rounds its scales: "rceil", up, so that nothing saturates, or "floor", down, as the OCP
            specification has it.
        wgrad_high_precision: compute the gradient of weights in bfloat16 from the activation as it was, which is kept
            for backward in bfloat16 instead of a quantized copy.
        align: tokens to a multiple of which groups are padded inside transposed operands; None is what the scaling
            asks for (`group_alignment`).
        use_fast_accum: let the GEMM accumulate in the tensor cores' own precision.
    """

    name: str
    quantized: bool = True
    scaling: str = "rowwise"
    dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    pow2_scale: bool = False
    mx_scaling: str = "rceil"
    wgrad_high_precision: bool = False
    align: int | None = None
    use_fast_accum: bool = True

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling must be one of {sorted(SCALINGS)}, got {self.scaling!r}")
        if self.mx_scaling not in MX_SCALINGS:
            raise ValueError(f"mx_scaling must be one of {sorted(MX_SCALINGS)}, got {self.mx_scaling!r}")
        if self.align is None:
            object.__setattr__(self, "align", GROUP_ALIGNMENT[self.scaling])  # the way of a frozen dataclass
        least, most = (32, 128) if self.scaling == "mxfp8" else (1, 256)
        if not least <= self.align <= most or self.align & (self.align - 1):
            text = f"align must be a power of two from {least} to {most} with scaling {self.scaling!r}"
            raise ValueError(f"{text}, got {self.align}")

    def rule(self, dtype: torch.dtype | None) -> tuple[torch.dtype | None, bool | str]:
        """The format and what the scales' rule leaves open, as the classes of `operands` take them."""
        return dtype, self.mx_scaling if self.scaling == "mxfp8" else self.pow2_scale


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("bf16", quantized=False, align=GROUP_ALIGNMENT["bf16"]),
        # Powers of two, as torchao rounds them: a value has the same fp8 bytes up to its exponent in both directions.
        Recipe("rowwise", pow2_scale=True),
        # Scales of any value, as DeepSeek-V3 trained with.
        Recipe("blockwise", scaling="blockwise"),
        Recipe("mxfp8", scaling="mxfp8"),
    )
}


def get_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of that name; a `Recipe` is returned as it is.

    Raises:
        ValueError: no recipe of that name exists.
        TypeError: neither a name nor a `Recipe`.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe must be a str or a Recipe, got {type(recipe).__name__}")
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {sorted(RECIPES)}, got {recipe!r}")
    return RECIPES[recipe]


def group_alignment(recipe: str | Recipe) -> int:
    """Tokens to a multiple of which to pad groups, for whoever lays them out before a grouped GEMM of the recipe.

    `grouped_mm` itself takes groups of any size with every recipe: it pads inside quantized operands only. What to do
    with the alignment depends on how tokens reach the experts:

        format  tokens reach the experts by              align for permute_indices    offs of grouped_mm
        BF16    any way                                  1: nothing is padded         its padded_offs, or sort_tokens'
        FP8     no expert parallelism: sort_tokens       none: nothing is padded      offs of sort_tokens
        FP8     all-to-all, then permute_indices         group_alignment, 16 (*)      its padded_offs
        FP8     a dispatcher that pads to 16 already     none: tokens lie as wanted   ends of its padded groups
        MXFP8   no expert parallelism: sort_tokens       none: nothing is padded      offs of sort_tokens
        MXFP8   all-to-all, then permute_indices         group_alignment, 32 (*)      its padded_offs
        MXFP8   a dispatcher that pads to 32 already     none: tokens lie as wanted   ends of its padded groups

    (*) 1 works too. The alignment is for consumers that need padded groups themselves, such as torch's grouped GEMMs
    called directly, for which BF16 needs its 8. "blockwise" is an FP8 recipe whose alignment is 128.

    Args:
        recipe: "bf16", "rowwise", "blockwise", "mxfp8", or a `Recipe`.

    Returns:
        a power of two.

    Raises:
        ValueError: no recipe of that name exists.
        TypeError: neither a name nor a `Recipe`.

    Source: 16-byte strides of the tensor memory accelerator; the scaling blocks of DESIGN.md sections 3 and 6.
    """
    if isinstance(recipe, Recipe):
        return recipe.align
    if not isinstance(recipe, str):
        raise TypeError(f"recipe must be a str or a Recipe, got {type(recipe).__name__}")
    if recipe not in GROUP_ALIGNMENT:
        raise ValueError(f"recipe must be one of {sorted(GROUP_ALIGNMENT)}, got {recipe!r}")
    return GROUP_ALIGNMENT[recipe]


def default_fp8_dtype(device: torch.device | str) -> torch.dtype:
    """float8_e4m3fnuz where the device's fp8 instructions are FNUZ (gfx942), else float8_e4m3fn."""
    device = torch.device(device)
    if device.type == "cuda" and torch.version.hip:
        if torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx94"):
            return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn
