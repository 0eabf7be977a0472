"""The arguments of reference functions, which are the arguments of the ops with their names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import Parameter, Signature

import torch

from moe_fp8_ext._torch import schema_of


def of_op(function: Callable) -> Callable:
    """Gives a function the signature of the op with its name: names and defaults come from the op's schema.

    The function itself takes all arguments by position, in the order of the schema.
    """
    arguments = schema_of(getattr(torch.ops.moe_fp8, function.__name__).default).arguments
    defaults = {a.name: a.default_value if a.has_default_value() else Parameter.empty for a in arguments}
    kind = Parameter.POSITIONAL_OR_KEYWORD
    signature = Signature([Parameter(name, kind, default=default) for name, default in defaults.items()])

    @functools.wraps(function)
    def with_defaults(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return function(*given.args)

    with_defaults.__signature__ = signature
    return with_defaults
