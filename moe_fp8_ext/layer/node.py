"""The one autograd Function of a layer: source -> up projection -> activation -> down projection -> source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, reduce
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext import _torch
from moe_fp8_ext.layer.adapter import UNADAPTED, Adapted
from moe_fp8_ext.layer.bias import gradient_of_weighted, part_of_dscores
from moe_fp8_ext.layer.linear import ExpertLinear
from moe_fp8_ext.layer.source import Chunk, Source
from moe_fp8_ext.layer.weight_gradients import DOWN, UP, DelayedWgrads, WeightGradients
from moe_fp8_ext.matmul.engine import Activated, Engine, Groups, Wanted, engine_of
from moe_fp8_ext.matmul.low_rank import Rows, Slots, Tokens
from moe_fp8_ext.ops.dispatch import below_autograd, differentiable_once
from moe_fp8_ext.quantization.casting import cast, rounded, without_autocast
from moe_fp8_ext.quantization.prepare import NOTHING, Operand
from moe_fp8_ext.quantization.recipe import Recipe
from moe_fp8_ext.training.watch import LayerWatch, watched

_combine = torch.ops.moe_fp8.combine.default
_unread: ContextVar[Callable[[Tensor], Tensor | None]] = ContextVar("_unread", default=lambda x: None)


class Call(NamedTuple):
    """The arguments of a layer that autograd does not see."""

    recipe: Recipe
    rounding: str | None  # of the scales of all operands, None if it is not known
    activation: str
    interleaved: bool
    keep_fp8: bool
    dtype: torch.dtype | None  # torch.autocast's if it is on, else None
    experts: int
    features: int  # F, the width of an activation
    x_is_quantized: bool  # whether x came quantized, so that its values before are not known
    needs_x: bool
    needs_scores: bool
    up: ExpertLinear
    down: ExpertLinear
    delayed: DelayedWgrads | None  # if it computes the gradients of weights, after backward

    @property
    def needs(self) -> tuple[bool, ...]:
        """Whether each input needs a gradient, in the order of `Inputs`."""
        up, down = self.up, self.down
        needs = self.needs_x, self.needs_scores, up.needs_weight, down.needs_weight, up.needs_bias, down.needs_bias
        return *needs, up.needs_A, up.needs_B, down.needs_A, down.needs_B

    @property
    def needs_dh(self) -> bool:
        up = self.up
        return self.needs_x or up.needs_weight or up.needs_bias or up.needs_A or up.needs_B

    @property
    def is_adapted(self) -> bool:
        return self.up.adapter is not None or self.down.adapter is not None

    @property
    def needs_da(self) -> bool:
        return self.needs_dh or self.needs_scores

    @property
    def needs_h(self) -> bool:
        return self.needs_da or self.down.needs_weight or self.down.needs_A

    def static(self) -> Call:
        """Returns the call without the tensors that autograd saves, for backward."""
        up, down = self.up.static(), self.down.static()
        return self if up is self.up and down is self.down else self._replace(up=up, down=down)


class Inputs(NamedTuple):
    """The tensors of a layer that autograd sees, or their gradients."""

    x: Tensor | None = None
    scores: Tensor | None = None
    w_gate_up: Tensor | None = None
    w_down: Tensor | None = None
    b_gate_up: Tensor | None = None
    b_down: Tensor | None = None
    A_gate_up: Tensor | None = None
    B_gate_up: Tensor | None = None
    A_down: Tensor | None = None
    B_down: Tensor | None = None


class SavedLayer(NamedTuple):
    """The tensors of the parameters that backward reads."""

    up_t: Tensor | None  # w_gate_up, for a product over N: see `quantization/prepare.py`
    up_t_scale: Tensor | None
    down_t: Tensor | None
    down_t_scale: Tensor | None
    b_down: Tensor | None
    A_gate_up: Tensor | None
    B_gate_up: Tensor | None
    A_down: Tensor | None
    B_down: Tensor | None


class SavedChunk(NamedTuple):
    """The tensors of a chunk of tokens that backward reads."""

    scores: Tensor | None
    offs: Tensor
    indices: Tensor | None
    inverse: Tensor | None
    x: Tensor | None
    x_scale: Tensor | None
    h: Tensor | None
    h_scale: Tensor | None
    u_up: Tensor | None  # of adapters
    mask_up: Tensor | None
    u_down: Tensor | None
    mask_down: Tensor | None

    def groups(self) -> Groups:
        top_k = None if self.indices is None else self.inverse.shape[1]
        return Groups(self.offs, self.indices, top_k, self.inverse)


class LayerFunction(torch.autograd.Function):
    """The node of a layer. With a list `postponed`, forward appends its last step to it, for `Finish`, and returns a
    stand-in for the output. An integration may set `failed` of a node: backward calls it with an error that it is about
    to raise."""

    @staticmethod
    def forward(ctx, call, source, postponed, *inputs):
        inputs, engine = Inputs(*inputs), engine_of(call.recipe, call.rounding)
        with below_autograd(), without_autocast(inputs.x):
            up = call.up.of_forward(inputs.w_gate_up, inputs.b_gate_up, inputs.A_gate_up, inputs.B_gate_up)
            down = call.down.of_forward(inputs.w_down, inputs.b_down, inputs.A_down, inputs.B_down)
            w_up, up_t = up.operands(engine, call.dtype, transposed=call.needs_x)  # tokens may still travel
            w_down, down_t = down.operands(engine, call.dtype, transposed=call.needs_da)
            watches = watched(engine, up.weight, down.weight)
            sent = None if call.x_is_quantized else inputs.x
            watch = ctx.watch = None if watches is None else LayerWatch(*watches, call, sent)
            given_back, kept = [], []
            for chunk in source.chunks(inputs.x, inputs.scores):
                finish, saved = _forward(engine, call, chunk, up, w_up, down, w_down, watch)
                watch = None  # the first chunk alone is measured
                if postponed is None:
                    given_back.append(source.give_back(finish()))
                else:
                    postponed.append(finish)
                del finish  # it holds activations
                kept.append(saved)
            x = inputs.x
            out = source.collect(given_back) if postponed is None else x.new_empty(()).expand(x.shape)
        layer = SavedLayer(up_t.values, up_t.scale, down_t.values, down_t.scale, inputs.b_down, *inputs[6:])
        source_tensors = source.tensors()
        ctx.save_for_backward(*layer, *source_tensors, *chain.from_iterable(kept))
        ctx.call = call.static()
        ctx.source, ctx.num_of_source = source.static(), len(source_tensors)
        ctx.dtypes, ctx.failed = [None if t is None else t.dtype for t in inputs], None
        return cast(out, inputs.x.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx, dout):
        if ctx.failed is None:
            return None, None, None, *_gradients(ctx, dout)
        try:
            return None, None, None, *_gradients(ctx, dout)
        except Exception as error:
            ctx.failed(error)
            raise


class Finish(torch.autograd.Function):
    """The last step of a layer's forward, as a node that saves nothing."""

    @staticmethod
    def forward(ctx, stand_in, finish):
        unread = _unread.get()(stand_in)
        if unread is not None:
            return unread
        with below_autograd(), without_autocast(stand_in):
            return cast(finish(), stand_in.dtype)

    @staticmethod
    def backward(ctx, dout):
        return dout, None


@contextmanager
def unread_outputs(unread: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """A context in which `Finish` asks for its output: a tensor if nothing will read the values, None to compute it.

    `unread` gets a tensor of the output's shape and dtype."""
    token = _unread.set(unread)
    try:
        yield
    finally:
        _unread.reset(token)


def computed(call: Call, source: Source, *inputs: Tensor | None) -> Tensor:
    """Computes a layer whose tokens are all here.

    A checkpoint computes forward again until it has all saved tensors. So under a checkpoint the last product, which
    saves none, is a node of its own. Where nothing behind the layer saves tensors, it is not computed again.
    """
    if torch.compiler.is_compiling() or not _torch.hooks_saved_tensors():
        return LayerFunction.apply(call, source, None, *inputs)
    postponed: list[Callable[[], Tensor]] = []
    stand_in = LayerFunction.apply(call, source, postponed, *inputs)
    return Finish.apply(stand_in, *postponed)


def node_of(out: Tensor) -> torch.autograd.graph.Node | None:
    """Returns the node of the layer that `computed` out, or None without gradients."""
    node = out.grad_fn
    return node.next_functions[0][0] if node is not None and node.name() == "FinishBackward" else node


def _gradients(ctx: torch.autograd.function.FunctionCtx, dout: Tensor) -> Inputs:
    saved = ctx.saved_tensors  # not below autograd: here `checkpoint` recomputes forward, with gradients
    layer_size, chunk_size = len(SavedLayer._fields), len(SavedChunk._fields)
    first = layer_size + ctx.num_of_source
    layer, source = SavedLayer(*saved[:layer_size]), ctx.source.restored(saved[layer_size:first])
    kept = [SavedChunk(*saved[at : at + chunk_size]) for at in range(first, len(saved), chunk_size)]
    with source.completed(), below_autograd(), without_autocast(dout):
        if ctx.watch is not None:
            ctx.watch.sent = dout
        grads = _backward(source, kept, layer, source.gradient_chunks(dout), ctx.call, ctx.watch)
    pairs = zip(grads, ctx.dtypes, strict=True)
    return Inputs(*[t if t is None or t.dtype == dtype else t.to(dtype) for t, dtype in pairs])


def _forward(
    engine: Engine,
    call: Call,
    chunk: Chunk,
    up: ExpertLinear,
    w_up: Operand,
    down: ExpertLinear,
    w_down: Operand,
    watch: LayerWatch | None,
) -> tuple[Callable[[], Tensor], SavedChunk]:
    """Computes a chunk up to its activations. Returns the rest, which computes out [T, D] in bfloat16, and the tensors
    that backward reads."""
    (x, scores, groups), needs_h = chunk, call.needs_h
    slots = Slots(groups) if call.is_adapted else None
    rows, _ = engine.tokens(x, groups, rows=True)
    # The activation adds the bias, unless an adapter or statistics read h with it.
    in_product = up.bias is None or up.adapter is not None or watch is not None
    bias, up = (None, up) if in_product else (up.bias, up._replace(bias=None))
    adapted_up, term = UNADAPTED, None
    if up.adapter is not None:
        adapted_up = up.adapter.narrow(Tokens, engine, x, groups.of_tokens, slots)
        term = up.adapter.term(engine, adapted_up)
    h = up.product(engine, rows, w_up, groups, by_index=True, low_rank=term)
    if up.adapter is not None:
        h = h if term is not None else up.adapter.add_to_h(h, adapted_up, slots)
        adapted_up = up.adapter.kept(adapted_up)
    if watch is not None:
        watch.forward(x, h, groups, up.weight, down.weight)
    bias = None if bias is None else rounded(bias, h.dtype).contiguous()
    rows, h = engine.activated(h, groups, call.activation, call.interleaved, call.keep_fp8 and needs_h, bias)
    adapted_down = UNADAPTED
    if down.adapter is not None:
        adapted_down = down.adapter.narrow(Rows, engine, rows, groups.offs, slots)

    def finish() -> Tensor:
        term = None if down.adapter is None else down.adapter.term(engine, adapted_down)
        y = down.product(engine, rows, w_down, groups, low_rank=term)
        out = y if groups.inverse is None else _combine(y, groups.inverse, scores)
        if down.adapter is None or term is not None:
            return out
        return down.adapter.add_to_out(out, adapted_down, slots, scores)

    x, h = x if up.needs_weight or up.needs_A else NOTHING, h if needs_h else NOTHING
    kept_down = adapted_down if down.adapter is None else down.adapter.kept(adapted_down)
    kept = x.values, x.scale, h.values, h.scale, *adapted_up, *kept_down
    return finish, SavedChunk(scores, groups.offs, groups.indices, groups.inverse, *kept)


def _backward(
    source: Source,
    kept: Sequence[SavedChunk],
    layer: SavedLayer,
    gradients: Sequence[Operand],
    call: Call,
    watch: LayerWatch | None,
) -> Inputs:
    """Returns the gradients of all inputs that need one. Gradients of x and of weights are bfloat16."""
    engine, found = engine_of(call.recipe, call.rounding), []
    if call.is_adapted:
        up = call.up.of_backward(layer.A_gate_up, layer.B_gate_up)
        call = call._replace(up=up, down=call.down.of_backward(layer.A_down, layer.B_down))
    up_t = partial(call.up.second, engine, Operand(layer.up_t, layer.up_t_scale), call.dtype)
    down_t = partial(call.down.second, engine, Operand(layer.down_t, layer.down_t_scale), call.dtype)
    if len(kept) > 1:  # chunks share the operands. A single chunk frees each one after its product
        up_t, down_t = _once(up_t), _once(down_t)
        up, down = (linear._replace(transposed=False) for linear in (call.up, call.down))  # totals are contiguous
        call = call._replace(up=up, down=down)
    weights = (WeightGradients if call.delayed is None else call.delayed.of_backward)(engine, call.up, call.down)
    for saved, dout in zip(kept, gradients, strict=True):
        arguments = engine, call, layer.b_down, up_t, down_t, saved, dout, weights, source.give_back, watch
        found.append(_backward_of_chunk(*arguments))
        watch = None
    if len(found) == 1:
        ((dx, dscores, _, _, *rest),) = found
        handles = (None if rows is None else source.collect([rows]) for rows in (dx, dscores))
        return Inputs(*handles, *weights.for_autograd(), *rest)
    *handles, _, _, b_up, b_down, A_up, B_up, A_down, B_down = zip(*found, strict=True)
    dx, dscores = (None if rows[0] is None else source.collect(rows) for rows in handles)
    factors = map(_sum_float32, (A_up, B_up, A_down, B_down))
    return Inputs(dx, dscores, *weights.for_autograd(), _sum(b_up), _sum(b_down), *factors)


def _backward_of_chunk(
    engine: Engine,
    call: Call,
    b_down: Tensor | None,
    up_t: Callable[[Tensor], Operand],
    down_t: Callable[[Tensor], Operand],
    saved: SavedChunk,
    dout: Operand,
    weights: WeightGradients,
    give_back: Callable[[Tensor], object],
    watch: LayerWatch | None,
) -> Inputs:
    """Returns the gradients of a chunk. Gradients of x and scores go to `give_back` as soon as they are computed; in
    their place stand the handles that it returns. Gradients of weights go to `weights`."""
    scores, groups, up, down = saved.scores, saved.groups(), call.up, call.down
    needs_x, needs_scores, needs_da = call.needs_x, call.needs_scores, call.needs_da
    slots = None
    if call.is_adapted:
        slots, adapted_up = Slots(groups), Adapted(saved.u_up, saved.mask_up)
        adapted_down = Adapted(saved.u_down, saved.mask_down)
    p = (dout.values if groups.indices is None else groups.indices).shape[0]
    dx = dscores = db_up = db_down = dA_up = dB_up = dA_down = dB_down = None
    dy, dy_t = engine.tokens(dout, groups, rows=needs_da, tokens=down.needs_weight, gradient=True)
    if watch is not None:
        watch.gradients(dout, dy_t)
    if down.adapter is not None:
        tokens = Tokens(engine.values(dout), slots, rows=_in_bf16(dy, dy_t))
        v_down, dB_down = down.adapter.gradients(tokens, adapted_down, needs_da, scores)
        del tokens
    if call.needs_h:
        if needs_da:
            term = None if down.adapter is None else down.adapter.gradient_term(engine, v_down, adapted_down)
            da = engine.product(dy, down_t(dout.values), groups, by_index=True, low_rank=term)
        else:  # only dW_down is wanted: of the results of `gradients` it reads a alone, which needs no da
            da = dout.values.new_zeros(p, call.features, dtype=torch.bfloat16)
        if needs_da and down.adapter is not None and term is None:
            da = down.adapter.add_to_da(da, v_down, adapted_down, slots)
        row_scores = None if scores is None else scores.view(-1)
        if slots is not None and groups.indices is None and scores is not None:
            # Makes dh zero in rows without a group, because adapters read all rows.
            row_scores = slots.row_scores(scores)
        activated = Activated(Operand(saved.h, saved.h_scale), row_scores, call.activation, call.interleaved)
        wanted = Wanted(
            rows=needs_x,
            tokens=up.needs_weight,
            a=down.needs_weight,
            dh=up.adapter is not None,
            a_values=down.needs_A,
            db=up.needs_bias,
        )
        dh, dh_t, a_t, dh_values, dscores, a, db_up = engine.gradients(da, activated, groups, wanted)
        if down.needs_A:
            dA_down = down.adapter.gradient_of_A(Rows, engine, Operand(a), None, slots, v_down, adapted_down)
        if watch is not None:
            watch.between(da, activated, dh_t, a_t)
    if down.needs_weight:
        weights.add(DOWN, dy_t, a_t, groups)
    if b_down is not None and (needs_scores or down.needs_bias):
        values = engine.values(dout)
        if down.needs_bias:
            db_down = gradient_of_weighted(values, scores, groups)
        if needs_scores:
            bias_part = part_of_dscores(values, b_down, scores, groups)
            dscores = dscores.view(bias_part.shape) + bias_part
    if needs_scores:
        dscores = give_back(dscores.view(groups.inverse.shape))
    if up.adapter is not None and call.needs_dh:
        v_up, dB_up = up.adapter.gradients(Rows(dh_values, slots), adapted_up, needs_x)
    if needs_x:
        term = None if up.adapter is None else up.adapter.gradient_term(engine, v_up, adapted_up)
        rows = engine.product(dh, up_t(dout.values), groups, low_rank=term)
        dx = rows if groups.indices is None else _combine(rows, groups.inverse, None)
        if up.adapter is not None and term is None:
            dx = up.adapter.add_to_dx(dx, v_up, adapted_up, slots)
        dx = give_back(dx)
    x = Operand(saved.x, saved.x_scale)
    if up.needs_A:
        dA_up = up.adapter.gradient_of_A(Tokens, engine, x, groups.of_tokens, slots, v_up, adapted_up)
    if up.needs_weight:
        _, x_t = engine.tokens(x, groups, tokens=True)
        weights.add(UP, dh_t, x_t, groups)
        if watch is not None:
            watch.tokens(x, x_t)
    factors = dA_up, dB_up, dA_down, dB_down
    return Inputs(dx, dscores if needs_scores else None, None, None, db_up, db_down, *factors)


def _in_bf16(*operands: Operand) -> Tensor | None:
    """Returns the first operand that holds rows in bfloat16, if any does."""
    return next((x.values for x in operands if x.values is not None and x.scale is None), None)


def _once(make: Callable[[Tensor], Operand]) -> Callable[[Tensor], Operand]:
    """Returns a function that makes the operand in its first call, and returns it in every call."""
    made = []

    def get(gradient: Tensor) -> Operand:
        if not made:
            made.append(make(gradient))
        return made[0]

    return get


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    return reduce(torch.add, [part for part in parts if part is not None] or [None])


def _sum_float32(parts: Sequence[Tensor | None]) -> Tensor | None:
    return None if parts[0] is None else _sum([part.float() for part in parts])
