"""Recipes: the format and the options by which `grouped_mm` and `experts` multiply."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from moe_fp8_ext.ops.checks import FP8_DTYPES, dtype_name, either, is_int
from moe_fp8_ext.quantization.cost import COSTS, Work, fastest, grouped_mm_work, layer_work
from moe_fp8_ext.quantization.format import FORMATS, MAX_EXPERTS, Format

_BF16_ALIGN = 8  # BF16 tokens in 16 bytes, the alignment of TMA loads
_NATIVE_MULTIPLE = 16  # of K and N, as Hopper's FP8 GEMMs need them
_AUTO_FORMATS = "rowwise", "blockwise"
_OPTIONS_OF_ANY_FORMAT = "dtype", "grad_dtype", "wgrad_high_precision", "align", "use_fast_accum"


class Rule(NamedTuple):
    """How values are quantized."""

    format: str
    dtype: torch.dtype | None
    rounding: str


@dataclass(frozen=True)
class Recipe:
    """How `grouped_mm` and `experts` compute: the format of operands, and options.

        grouped_mm(A, B_t, offs, recipe="mxfp8")                                the recipe of this name
        grouped_mm(A, B_t, offs, recipe=Recipe("mxfp8", rounding="floor"))      with another option
        grouped_mm(A, B_t, offs, recipe=Recipe("mine", "mxfp8"))                with a name of your own, and a format

    The constructor replaces None by the default of the field. Afterwards only `dtype` and `grad_dtype` may be None; for
    "bf16" also `format`, `rounding` and `amax`. A recipe prints as its constructor call, without fields that have their
    defaults. `to_json` writes the same fields.

    Attributes:
        name: "bf16", "auto", the name of a format, or any other name if a format is given.
        format: format of every operand: "rowwise", "blockwise", "mxfp8" or "mxfp8_rowmajor" (see `quantize_rows`).
            None: the format of the recipe's name; for "auto", "rowwise". Only "bf16" has no format: it multiplies in
            bfloat16.
        dtype: fp8 dtype of every operand. None is the default of the device: float8_e4m3fnuz on gfx942, else
            float8_e4m3fn.
        grad_dtype: fp8 dtype of gradients, such as float8_e5m2. None is `dtype`. Native GEMMs take float8_e4m3fn;
            Hopper's also take gradients of float8_e5m2. A slower kernel multiplies rowwise operands of other dtypes.
        rounding: rounding of scales: "exact" or "pow2"; for MX formats "rceil" or "floor". Defaults: "rowwise" has
            "pow2", as in torchao. A value then has the same fp8 bytes in both directions, except for the exponent.
            "blockwise" has "exact", as in DeepSeek-V3. The MX formats have "rceil".
        wgrad_high_precision: compute the gradient of weights in bfloat16. Backward then keeps the activation in
            bfloat16 instead of a quantized copy.
        align: quantizers pad each group to a multiple of this number of tokens inside operands along tokens. None is
            the format's default, 32; "bf16" has 8. `grouped_mm` takes groups of any size with every recipe, so callers
            need not pad. If a consumer needs padded groups, such as a direct call of torch's grouped GEMMs, use
            `permute_indices(..., align=recipe.align)`.
        use_fast_accum: let the GEMM of "rowwise" accumulate whole sums in the tensor cores' own precision.
        amax: the granularity of scales along tokens, see `quantize_tokens`. "group" is one scale for each group or
            scaling block. "batch" is for "rowwise" and only affects `experts` with several experts per token. Its
            tokens and the gradients of its output then have scales of the whole batch, so each token is cast once for
            all of its experts. In other calls, and over ranks, "batch" means "group" (DESIGN.md section 6). "square" is
            for "blockwise": one scale for 128 x 128 values of activations, while gradients have "group". A tile of
            Hopper's wgrad then has one scale for all columns, which is faster. None is "batch" for "rowwise" and
            "square" for "blockwise". DeepSeek-V3 trained with "blockwise" and "group".
        bf16_where_faster: multiply in bfloat16 if that is faster by a model of sizes (`for_layer`, `for_grouped_mm`).
            None is True for "auto" and False otherwise. "auto" with the default format, rounding and amax chooses among
            "bf16", "rowwise" and "blockwise". Every other recipe chooses between its own format and "bf16".

    Raises:
        ValueError: a field has none of these values; the text names the field.
        TypeError: a field has another type.
    """

    name: str = "rowwise"
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
            names = _quoted(["bf16", "auto", *FORMATS])
            _require(self.format is not None, "name", f"{names}, or come with a format", self.name)
            known = [self.name] if self.name in FORMATS else list(FORMATS)
            _require(self.format in known, "format", f"{_quoted(known)} with name {self.name!r}", self.format)
        for field in ("dtype", "grad_dtype"):
            value = getattr(self, field)
            if self.format is None:
                _require(value is None, field, "None without a format", value)
            _require(value is None or value in FP8_DTYPES, field, either(map(dtype_name, FP8_DTYPES)), value)
        self._check_choice("rounding", "roundings", _default_rounding)
        self._check_align()
        self._check_choice("amax", "amaxes", _default_amax)
        self._set("_variants", self._make_variants())
        self._set("_rule_of_tokens", Rule(self.format, self.dtype, self.rounding))
        self._set("_rule_of_gradients", Rule(self.format, self.grad_dtype or self.dtype, self.rounding))

    def __repr__(self) -> str:
        given = "".join(f", {field}={value!r}" for field, value in self._given().items())
        return f"Recipe({self.name!r}{given})"

    def to_json(self) -> str:
        """Writes the recipe as a JSON object for `from_json`, with dtypes by name."""
        given = {field: dtype_name(v) if isinstance(v, torch.dtype) else v for field, v in self._given().items()}
        return json.dumps({"name": self.name, **given})

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Reads a recipe that `to_json` wrote.

        Raises:
            ValueError: text is not a JSON object, has no name, or has an unknown field.
            ValueError, TypeError: text is no str, or the constructor refuses the value of a field.
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
        """Returns the arguments of the constructor after the name, without defaults."""
        usual = Recipe(self.name, self.format)
        given = {} if self.format == _format_of(self.name) else {"format": self.format}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != getattr(usual, field.name):
                given[field.name] = value
        return given

    def for_layer(
        self, slots: int, hidden: int, intermediate: int, experts: int, gated: bool, backward: bool = True
    ) -> Recipe:
        """Returns the recipe that `experts` computes with at these sizes.

        Without `bf16_where_faster`, that is this recipe. Otherwise a model of times, fitted on an H200, chooses the
        fastest recipe (`quantization/cost.py`). The model knows only sizes. It is wrong on GPUs that emulate FP8, and
        it counts the casts of weights even if `reuse_weights` avoids them. If a size is no multiple of 16, the result
        is "bf16", because native FP8 GEMMs do not take such sizes.

        Args:
            slots: tokens * top_k, or the rows of all experts.
            hidden, intermediate: D and F.
            experts: E, the experts of this rank.
            gated: whether w_gate_up has 2 F rows.
            backward: False for a call without a backward, such as a model's in eval mode under `torch.no_grad()`.
        """
        if not self.bf16_where_faster:
            return self
        work = layer_work(slots, hidden, intermediate, experts, gated, backward)
        return self._fastest("layer" if backward else "layer forward", work, experts, hidden, intermediate)

    def for_grouped_mm(self, rows: int, k: int, n: int, experts: int) -> Recipe:
        """Returns the recipe that `grouped_mm` computes with for A [rows, k] and B_t [experts, k, n].

        The choice is as in `for_layer`, with other constants.
        """
        if not self.bf16_where_faster:
            return self
        return self._fastest("grouped_mm", grouped_mm_work(rows, k, n, experts), experts, k, n)

    def _fastest(self, op: str, work: Work, experts: int, *features: int) -> Recipe:
        candidates = [*self._variants] or [self.format]
        if experts < MAX_EXPERTS:  # torch's BF16 product takes fewer
            if any(size % _NATIVE_MULTIPLE for size in features):
                return RECIPES["bf16"]
            candidates = ["bf16", *candidates]
        chosen = fastest(COSTS[op], work, candidates)
        return RECIPES["bf16"] if chosen == "bf16" else self._variants.get(chosen, self)

    def _make_variants(self) -> dict[str, Recipe]:
        """Returns the fp8 recipes that "auto" chooses from, by format, with the options that fit any format."""
        if self.name != "auto":
            return {}
        usual = FORMATS["rowwise"]
        if (self.format, self.rounding, self.amax) != (usual.name, _default_rounding(usual), _default_amax(usual)):
            return {}
        options = {field: getattr(self, field) for field in _OPTIONS_OF_ANY_FORMAT}
        return {format: Recipe(format, **options) for format in _AUTO_FORMATS}

    @property
    def amax_of_groups(self) -> str | None:
        """`amax` for calls without scales of the batch: a token has one group, or ranks have different tokens."""
        return "group" if self.amax == "batch" else self.amax

    def rule(self, gradient: bool) -> Rule:
        """Returns the rule for weights and tokens, or for gradients of tokens."""
        return self._rule_of_gradients if gradient else self._rule_of_tokens

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)  # the dataclass is frozen

    def _check_type(self, field: str, wanted: type) -> None:
        value = getattr(self, field)
        if type(value) is not wanted:
            raise TypeError(f"Recipe: {field} must be of type {wanted.__name__}, got {value!r}")

    def _check_choice(self, field: str, choices: str, usual: Callable[[Format], str]) -> None:
        """Checks a field that is one of the format's `choices`, and None without a format."""
        value = getattr(self, field)
        if self.format is None:
            return _require(value is None, field, "None without a format", value)
        format = FORMATS[self.format]
        value, known = usual(format) if value is None else value, getattr(format, choices)
        _require(value in known, field, f"{_quoted(known)} with format {self.format!r}", value)
        self._set(field, value)

    def _check_align(self) -> None:
        format = FORMATS.get(self.format)
        if self.align is None:
            self._set("align", format.align if format else _BF16_ALIGN)
        if is_int(self.align):
            self._set("align", int(self.align))
        self._check_type("align", int)
        smallest, largest = (format.min_align, format.max_align) if format else (1, 256)
        ok = smallest <= self.align <= largest and self.align & (self.align - 1) == 0
        _require(ok, "align", f"a power of two from {smallest} to {largest} with format {self.format!r}", self.align)


def _format_of(name: str) -> str | None:
    """The default format of a recipe of this name."""
    if name == "auto":
        return "rowwise"
    return name if name in FORMATS else None


def _default_rounding(format: Format) -> str:
    return "pow2" if format.name == "rowwise" else format.roundings[0]


def _default_amax(format: Format) -> str:
    return format.amaxes[-1]


def _quoted(names) -> str:
    return either([repr(name) for name in names])


def _require(ok: bool, field: str, wanted: str, got: object) -> None:
    if not ok:
        raise ValueError(f"Recipe: {field} must be {wanted}, got {got!r}")


RECIPES = {name: Recipe(name) for name in ("bf16", "rowwise", "blockwise", "mxfp8", "auto")}


def get_recipe(recipe: str | Recipe, op: str = "") -> Recipe:
    """Returns the recipe of that name, or the `Recipe` itself.

    Args:
        op: the name of the op that takes the recipe, for error messages.

    Raises:
        ValueError: no recipe of that name exists.
        TypeError: recipe is neither a name nor a `Recipe`.
    """
    if isinstance(recipe, Recipe):
        return recipe
    where = f"{op}: " if op else ""
    if not isinstance(recipe, str):
        raise TypeError(f"{where}recipe must be a str or a Recipe, got {type(recipe).__name__}")
    if recipe not in RECIPES:
        known = either([*map(repr, RECIPES), "a Recipe"])
        raise ValueError(f"{where}recipe must be {known}, got {recipe!r}")
    return RECIPES[recipe]
