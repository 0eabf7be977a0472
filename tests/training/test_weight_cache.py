"""reuse_weights: copies that are cached, dropped, and never out of date."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from grouped_problem import Calls, quantizations
from helpers import assert_same
from torch import Tensor
from torch.nn import Parameter
from weight_problem import OFFS, A, W, call, check_fresh, parameter

from moe_fp8_ext import Recipe, grouped_mm, reuse_weights

QUANTIZED = ("rowwise", "blockwise", "mxfp8")


def loaded(w: Parameter, values: Tensor) -> None:
    module = torch.nn.Module()
    module.w = w
    module.load_state_dict({"w": values})


def freed_and_assigned(w: Parameter, values: Tensor) -> None:
    """The allocator may give the assigned values the address of the old ones."""
    w.data = torch.empty(0, dtype=w.dtype, device=w.device)
    w.data = values.clone()


def moved(w: Parameter, values: Tensor) -> None:
    """Writes as a sharded module gathers: into the same storage object with other memory, without the counter."""
    storage = w.untyped_storage()
    storage.resize_(2 * storage.nbytes())
    with torch.autograd._unsafe_preserve_version_counter(w):
        w.copy_(values)


WRITES = {
    "copy_": lambda w, values: w.copy_(values),
    "a row": lambda w, values: w[1, 2].copy_(values[1, 2]),
    "a detached view": lambda w, values: w.detach().mT.copy_(values.mT),
    "foreach": lambda w, values: torch._foreach_copy_([w], [values]),
    "load_state_dict": loaded,
    "data": lambda w, values: setattr(w, "data", values.clone()),
    "data of other strides": lambda w, values: setattr(w, "data", values.mT.contiguous().mT),
    "freed and assigned data": freed_and_assigned,
    "set_": lambda w, values: w.set_(values.clone()),
    "moved": moved,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_are_seen(write, device):
    w, values = parameter(device), parameter(device, scale=-3).detach()
    with reuse_weights():
        call(w)
        with torch.no_grad():
            write(w, values)
        assert quantizations(lambda: check_fresh(w)) == 2
        assert quantizations(lambda: call(w)) == 0


def test_another_storage_at_the_same_address():
    memory = bytearray(W.numel() * W.itemsize)
    w = Parameter(torch.frombuffer(memory, dtype=W.dtype).view(W.shape))
    w.data.copy_(W)
    with reuse_weights():
        call(w)
        w.data = torch.frombuffer(memory, dtype=W.dtype).view(W.shape)
        w.data.mul_(-3)
        check_fresh(w)


def test_a_view_of_before_the_write(device):
    w = parameter(device)
    b_t = w.transpose(-2, -1)
    with reuse_weights():
        call(w)
        w.data = parameter(device, scale=2).detach()
        old = grouped_mm(A.detach().to(device), b_t, OFFS.to(device))
        check_fresh(w)
    assert_same(old, call(parameter(device))[0])


def test_what_is_not_seen_ends_with_the_context(device):
    w = parameter(device)
    with reuse_weights():
        call(w)
    w.data.mul_(-3)
    with reuse_weights():
        check_fresh(w)


def test_two_parameters_of_one_storage(device):
    """They have separate version counters."""
    first, second = (Parameter(t) for t in [parameter(device).data] * 2)
    with reuse_weights():
        for w, factor in ((first, 2), (second, -3)):
            with torch.no_grad():
                w.mul_(factor)
            check_fresh(w)


class ThroughData(torch.optim.Optimizer):
    """Writes without moving the version counter, calls the model, writes again and raises."""

    def __init__(self, w: Parameter) -> None:
        super().__init__([w], {})

    def step(self, closure: Callable[[], object] | None = None) -> None:
        (w,) = self.param_groups[0]["params"]
        w.data.mul_(-3)
        if closure is None:
            raise ArithmeticError
        closure()
        w.data.mul_(2)


def test_steps_of_optimizers_are_seen(device):
    w = parameter(device)
    with reuse_weights():
        call(w)
        with pytest.raises(ArithmeticError):
            ThroughData(w).step()
        check_fresh(w)
        ThroughData(w).step(lambda: check_fresh(w))
        check_fresh(w)


def test_steps_write_to_frozen_weights_that_share_memory(device):
    """A frozen copy of a trained weight has the step's values. Any other frozen weight stays in the cache."""
    w, other = parameter(device), parameter(device).requires_grad_(False)
    shared = Parameter(w.data, requires_grad=False)  # with its own version counter
    with reuse_weights():
        call(shared), call(other)
        ThroughData(w).step(lambda: check_fresh(shared))
        check_fresh(shared)
        assert quantizations(lambda: call(other)) == 0


def test_steps_of_optimizers_without_plain_parameters(device):
    sparse = torch.eye(3, device=device).to_sparse().requires_grad_()
    with reuse_weights():
        call(parameter(device))
        torch.optim.SGD([sparse]).step()


# Cached copies


def test_rules_have_copies_of_their_own(device):
    w = parameter(device)
    recipes = [
        *map(Recipe, (*QUANTIZED, "mxfp8_rowmajor")),
        *(Recipe("rowwise", rounding="exact"), Recipe("rowwise", dtype=torch.float8_e5m2)),
        *(Recipe("blockwise", rounding="pow2"), Recipe("mxfp8", rounding="floor")),
    ]
    with reuse_weights():
        for again in range(2):
            for recipe in recipes:
                assert quantizations(lambda r=recipe: call(w, r)) == 1 - again, recipe
                check_fresh(w, recipe=recipe)


def test_fields_that_do_not_touch_weights_share(device):
    w = parameter(device)
    recipes = Recipe("rowwise", grad_dtype=torch.float8_e5m2), Recipe("rowwise", align=64, wgrad_high_precision=True)
    with reuse_weights():
        call(w)
        for recipe in recipes:
            assert quantizations(lambda r=recipe: call(w, r)) == 0
            check_fresh(w, recipe=recipe)


def test_gradients_that_are_asked_for_later(device):
    """Both copies are kept, whichever the first call needs."""
    w = parameter(device)
    with reuse_weights():
        with torch.no_grad():
            assert quantizations(lambda: call(w, a_grad=False)) == 1
        for a_grad in (True, False, True):
            assert quantizations(lambda needs=a_grad: call(w, a_grad=needs)) == 0
            check_fresh(w, a_grad=a_grad)
        w.requires_grad_(False)
        assert quantizations(lambda: call(w)) == 0


def test_views_of_one_parameter(device):
    """Views are halves of the parameter, both layouts and another order of experts."""
    w = parameter(device)
    square = Parameter(w.detach()[:, :48, :48].contiguous())
    a, offs = A.detach()[:, :48].to(device), OFFS.to(device)
    views = {
        w: (lambda w: w[:, :32].mT, lambda w: w[:, 32:].mT, lambda w: w[:, :, :48].mT, lambda w: w[:, :, 48:].mT),
        square: (lambda w: w, lambda w: w.mT, lambda w: w.movedim(0, 1)[:3].mT),
    }
    for leaf, makes in views.items():
        with reuse_weights():
            for again in range(2):
                for make in makes:
                    x = a if make(leaf).shape[1] == 48 else A.detach().to(device)
                    with Calls() as calls:
                        got = grouped_mm(x, make(leaf), offs)
                    assert calls.names.count("quantize_weight") == 1 - again
                    assert_same(got, grouped_mm(x, make(leaf.detach().clone()), offs))


def test_a_leaf_that_is_no_parameter(device):
    w = parameter(device).detach().requires_grad_()
    with reuse_weights():
        assert quantizations(lambda: (call(w), call(w))) == 1


def test_autocast_casts_a_weight_once(device):
    w, casts = parameter(device, dtype=torch.float32), []

    class Casts(Calls):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._opname in ("to", "_to_copy") and args[0].data_ptr() == w.data_ptr():
                casts.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with reuse_weights(), torch.autocast(device, dtype=torch.bfloat16), Casts():
        call(w), call(w)
    assert len(casts) == 1


# Weights that are never reused


class Wrapped(Tensor):
    pass


@pytest.mark.parametrize(
    "make",
    [lambda w: w * 1, lambda w: (w * 1).mT.contiguous().mT, lambda w: w.detach(), lambda w: w.as_subclass(Wrapped)],
    ids=["computed", "laid out", "detached", "subclass"],
)
def test_what_is_no_parameter(make, device):
    x = make(parameter(device))
    a, offs = A.detach().to(device).requires_grad_(), OFFS.to(device)

    def step() -> None:
        grouped_mm(a, x.mT, offs).sum().backward(retain_graph=True)

    times = 1 if x.requires_grad else 2  # a frozen weight is quantized in one direction at a time
    with reuse_weights():
        assert quantizations(lambda: (step(), step())) == 2 * times


def test_a_view_with_its_sign_turned(device):
    """Its values differ, although address and strides are the same."""
    w, a, offs = parameter(device), A.to(device), OFFS.to(device)
    with reuse_weights():
        call(w)
        assert_same(grouped_mm(a, torch._neg_view(w).mT, offs), grouped_mm(a, (-w).mT, offs))


def test_without_the_context(device):
    w = parameter(device)
    with reuse_weights():
        call(w)
    assert quantizations(lambda: (call(w), call(w))) == 2


def test_inference_mode(device):
    w = parameter(device)
    with reuse_weights():
        with torch.inference_mode():
            assert quantizations(lambda: (call(w, a_grad=False), call(w, a_grad=False))) == 2
            b_t = Parameter(w.mT.contiguous(), requires_grad=False)
        check_fresh(w)
        assert quantizations(lambda: [grouped_mm(A.to(device), b_t, OFFS.to(device)) for _ in range(2)]) == 2


# Contexts and threads


def copies_of(w: Tensor) -> weakref.ref:
    """Returns a reference to the transposed copy of w that a call saves for backward."""
    found = []

    def pack(t: Tensor) -> Tensor:
        if t.dtype.itemsize == 1 and t.dim() == 3:
            found.append(weakref.ref(t.untyped_storage()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(w)
    (copy,) = found
    return copy


def test_memory_is_freed_with_the_parameter(device):
    w = parameter(device)
    with reuse_weights():
        copy = copies_of(w)
        assert copy() is not None
        assert copies_of(w)() is copy(), "backward saves the cached copy itself"
        del w
        assert copy() is None


def test_memory_is_freed_with_the_state(device):
    w = parameter(device)
    with reuse_weights():
        copy = copies_of(w)
        with torch.no_grad():
            w.mul_(2)
        changed = copies_of(w)
        assert copy() is None and changed() is not None
        w.grad = torch.ones_like(w)
        torch.optim.SGD([w], lr=0.1).step()
        assert changed() is None


def test_nested_contexts_and_exceptions(device):
    w = parameter(device)
    with pytest.raises(ArithmeticError), reuse_weights():
        copy = copies_of(w)
        with pytest.raises(RuntimeError, match="must have 3 entries"), reuse_weights():
            grouped_mm(A.detach().to(device), w.mT, OFFS[:1].to(device))
        assert copies_of(w)() is copy() is not None
        raise ArithmeticError
    assert copy() is None
    assert quantizations(lambda: (call(w), call(w))) == 2


def test_contexts_of_two_threads(device):
    """Threads share the copies. Leaving the last context drops them."""
    w = parameter(device)
    opened, leave = threading.Event(), threading.Event()
    counts = []

    def other() -> None:
        with reuse_weights():
            call(w)
            opened.set()
            assert leave.wait(60)
            counts.append(quantizations(lambda: call(w)))

    thread = threading.Thread(target=other)
    with reuse_weights():
        thread.start()
        assert opened.wait(60)
        counts.append(quantizations(lambda: call(w)))
    leave.set()
    thread.join()
    assert counts == [0, 0]
    assert quantizations(lambda: call(w)) == 1


def test_many_threads(device):
    w, others = parameter(device), [parameter(device, scale) for scale in (2, -3)]
    want = {id(x): call(x) for x in (w, *others)}
    failed = []

    def work(own: Parameter) -> None:
        for _ in range(20):
            with reuse_weights():
                for x in (w, own):
                    a = A.detach().to(device)
                    if not torch.equal(grouped_mm(a, x.mT, OFFS.to(device)), want[id(x)][0]):
                        failed.append(x)

    threads = [threading.Thread(target=work, args=(own,)) for own in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
