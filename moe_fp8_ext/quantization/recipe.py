"""Recipes: how `grouped_mm` and `experts` compute."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import torch

from moe_fp8_ext.ops.checks import FP8_DTYPES, dtype_name, either, is_int
from moe_fp8_ext.quantization.format import FORMATS, MAX_EXPERTS

# Below so many fp8 is slower than bfloat16, of formats whose products an H200 has. Others are taken for "rowwise".
LEAST_PRODUCTS_A_CAST = {"rowwise": 350, "blockwise": 240}
_BF16_ALIGN = 8  # tokens in 16 bytes, as the tensor memory accelerator loads them


@dataclass(frozen=True)
class Recipe:
    """How `grouped_mm` and `experts` compute.

    `Recipe("rowwise")` is what they take "rowwise" for, and so for every name; `Recipe("mxfp8", ...)` is one
    of your own, under a name that says its format or under any other, with one. None stands for what is usual; after
    construction only `dtype`, `grad_dtype` and what "bf16" has none of are None. It prints as the call that makes it,
    with what is not usual, and so is it in JSON.

    Attributes:
        name: "bf16", "auto", that of a format, or any other if a format is given.
        format: of every operand: "rowwise", "blockwise", "mxfp8" or "mxfp8_rowmajor" (see `quantize_rows`). None is the
            one that the recipe is named after. Recipe "bf16" alone has none and multiplies in bfloat16.
        dtype: fp8 dtype of every operand; None is the device's own, float8_e4m3fnuz on gfx942, else float8_e4m3fn.
        grad_dtype: fp8 dtype of gradients, such as float8_e5m2; None is `dtype`. Native GEMMs take float8_e4m3fn, those
            for Hopper gradients of float8_e5m2 too; rowwise operands of others are multiplied by a slower kernel.
        rounding: of multipliers or scales, one of those that the format knows: "exact" or "pow2", "rceil" or "floor".
            None is "pow2" for "rowwise", as torchao rounds them: a value has the same fp8 bytes up to its exponent in
            both directions; "exact" for "blockwise", as DeepSeek-V3 trained; "rceil" for the MX formats.
        wgrad_high_precision: compute the gradient of weights in bfloat16 from the activation as it was, which is kept
            for backward in bfloat16 instead of a quantized copy.
        align: tokens to a multiple of which groups are padded inside operands along tokens; None is the format's usual,
            32. `grouped_mm` takes groups of any size with every recipe: whoever lays tokens out for it need not pad.
            `permute_indices(..., align=recipe.align)` is for consumers that need padded groups themselves, such as
            torch's grouped GEMMs called directly, for which "bf16" has 8.
        use_fast_accum: let the GEMM of "rowwise" accumulate whole sums in the tensor cores' own precision.
        amax: of what operands along tokens have their scales, see `quantize_tokens`. "batch", of "rowwise", is of
            `experts` alone, of tokens and of gradients of its output, where a token goes to several experts: it casts
            them once for all of them. Elsewhere and over ranks that is "group", see DESIGN.md section 6. "square", of
            "blockwise", is of activations; gradients have "group". Hopper's wgrad is faster by it, for it has one scale
            for all columns of a tile. None is "batch" for "rowwise" and "square" for "blockwise", which with "group" is
            what DeepSeek-V3 trained with.
        bf16_where_faster: multiply as "bf16" does where fp8 would take longer, see `at`. None is True for "auto", which
            is "rowwise" with it; of small experts "blockwise" with it is the faster one.

    Raises:
        ValueError: a field has none of these values; the text names it.
        TypeError: a field is not of its type.
    """

    name: str
    format: str | None = None
    dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    rounding: str | None = None
    wgrad_high_precision: bool = False
    align: int | None = None
    use_fast_accum: bool = True
    amax: str | None = None
    bf16_where_faster: bool | None = None

    def __post_init__(self) -> None:
        self._check_type("name", str)
        for field in ("wgrad_high_precision", "use_fast_accum"):
            self._check_type(field, bool)
        if self.bf16_where_faster is None:
            self._set("bf16_where_faster", self.name == "auto")
        self._check_type("bf16_where_faster", bool)
        if self.name == "auto":
            _require(self.bf16_where_faster, "bf16_where_faster", 'True with name "auto"', self.bf16_where_faster)
        if self.format is None:
            self._set("format", _format_of(self.name))
        if self.name == "bf16":
            _require(self.format is None, "format", 'None with name "bf16"', self.format)
        else:
            known = [self.name] if self.name in FORMATS else list(FORMATS)
            _require(self.format in known, "format", f"{_quoted(known)} with name {self.name!r}", self.format)
        for field in ("dtype", "grad_dtype"):
            value = getattr(self, field)
            if self.format is None:
                _require(value is None, field, "None without a format", value)
            _require(value is None or value in FP8_DTYPES, field, either(map(dtype_name, FP8_DTYPES)), value)
        self._check_rounding()
        self._check_align()
        self._check_amax()

    def __repr__(self) -> str:
        given = "".join(f", {field}={value!r}" for field, value in self._given().items())
        return f"Recipe({self.name!r}{given})"

    def to_json(self) -> str:
        """An object in JSON that `from_json` takes, dtypes by name."""
        given = {field: dtype_name(v) if isinstance(v, torch.dtype) else v for field, v in self._given().items()}
        return json.dumps({"name": self.name, **given})

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The recipe of which `to_json` made the text.

        Raises:
            ValueError: text is no object in JSON, has no name, or has a field that no recipe has.
            ValueError, TypeError: text is no str, or a field has no value of its own, as in the constructor.
        """
        if not isinstance(text, str):
            raise TypeError(f"Recipe: text must be a str, got {type(text).__name__}")
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"Recipe: text must be JSON, got {text!r}: {error}") from error
        known = [field.name for field in fields(cls)]
        _require(isinstance(given, dict) and "name" in given, "text", "an object in JSON with a name", text)
        for field in given:
            _require(field in known, "every field", f"one of {_quoted(known)}", field)
        for field in ("dtype", "grad_dtype"):
            value = given.get(field)
            given[field] = next((dtype for dtype in FP8_DTYPES if dtype_name(dtype) == value), value)
        return cls(**given)

    def _given(self) -> dict[str, object]:
        """What a constructor needs beside the name."""
        usual = Recipe(self.name, self.format)
        given = {} if self.format == _format_of(self.name) else {"format": self.format}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != getattr(usual, field.name):
                given[field.name] = value
        return given

    def at(self, products: int, casts: int, experts: int) -> Recipe:
        """This recipe, or "bf16", if that is `bf16_where_faster`: a rule of sizes alone, measured on an H200.

        FP8 saves a time in proportion to the multiplications of a product, `products`, rows * K * N, and costs one in
        proportion to the elements that are cast for it, `casts`, so it pays where they are few (DESIGN.md section 6).
        """
        pays = products > LEAST_PRODUCTS_A_CAST.get(self.format, LEAST_PRODUCTS_A_CAST["rowwise"]) * casts
        # Products in bfloat16 take fewer experts: MAX_EXPERTS of them have no choice.
        return self if not self.bf16_where_faster or pays or experts >= MAX_EXPERTS else RECIPES["bf16"]

    @property
    def amax_of_groups(self) -> str | None:
        """`amax` where no scale is of the batch: a token has one group, or ranks have other tokens each."""
        return "group" if self.amax == "batch" else self.amax

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)  # the way of a frozen dataclass

    def _check_type(self, field: str, wanted: type) -> None:
        value = getattr(self, field)
        if type(value) is not wanted:
            raise TypeError(f"Recipe: {field} must be of type {wanted.__name__}, got {value!r}")

    def _check_rounding(self) -> None:
        if self.format is None:
            return _require(self.rounding is None, "rounding", "None without a format", self.rounding)
        known = FORMATS[self.format].roundings
        if self.rounding is None:
            self._set("rounding", "pow2" if self.format == "rowwise" else known[0])
        _require(self.rounding in known, "rounding", f"{_quoted(known)} with format {self.format!r}", self.rounding)

    def _check_align(self) -> None:
        format = FORMATS.get(self.format)
        if self.align is None:
            self._set("align", format.align if format else _BF16_ALIGN)
        if is_int(self.align):
            self._set("align", int(self.align))
        self._check_type("align", int)
        least, most = (format.least_align, format.most_align) if format else (1, 256)
        ok = least <= self.align <= most and self.align & (self.align - 1) == 0
        _require(ok, "align", f"a power of two from {least} to {most} with format {self.format!r}", self.align)

    def _check_amax(self) -> None:
        if self.format is None:
            return _require(self.amax is None, "amax", "None without a format", self.amax)
        known = FORMATS[self.format].amaxes
        if self.amax is None:
            self._set("amax", known[-1])
        _require(self.amax in known, "amax", f"{_quoted(known)} with format {self.format!r}", self.amax)


def _format_of(name: str) -> str | None:
    """The format that a name says."""
    if name == "auto":
        return "rowwise"
    return name if name in FORMATS else None


def _quoted(names) -> str:
    return either([repr(name) for name in names])


def _require(ok: bool, field: str, wanted: str, got: object) -> None:
    if not ok:
        raise ValueError(f"Recipe: {field} must be {wanted}, got {got!r}")


RECIPES = {name: Recipe(name) for name in ("bf16", "rowwise", "blockwise", "mxfp8", "auto")}


def get_recipe(recipe: str | Recipe, op: str = "") -> Recipe:
    """The recipe of that name; a `Recipe` is returned as it is. op: whose argument it is, for the error.

    Raises:
        ValueError: no recipe of that name exists.
        TypeError: neither a name nor a `Recipe`.
    """
    if isinstance(recipe, Recipe):
        return recipe
    where = f"{op}: " if op else ""
    if not isinstance(recipe, str):
        raise TypeError(f"{where}recipe must be a str or a Recipe, got {type(recipe).__name__}")
    if recipe not in RECIPES:
        raise ValueError(f"{where}recipe must be one of {sorted(RECIPES)}, got {recipe!r}")
    return RECIPES[recipe]
