"""Every benchmark case by its label, and with it the figures that one H200 is held to.

A case says nothing about timing. Bytes need no formula: every argument is read once and every output written once, so
a memory-bound op moves the sizes of its tensors, padding and scales included.
"""

from __future__ import annotations

from case import Case
from cases_activations import ACTIVATION_CASES
from cases_experts import EXPERTS_CASES
from cases_gemm import GEMM_CASES
from cases_models import MODEL_CASES
from cases_quantize import QUANTIZE_CASES
from cases_router import ROUTER_CASES
from cases_scales import SCALE_CASES
from cases_tokens import TOKEN_CASES

_OF_OPS = (*QUANTIZE_CASES, *ACTIVATION_CASES, *ROUTER_CASES, *TOKEN_CASES, *SCALE_CASES, *GEMM_CASES)
_ALL = (*_OF_OPS, *EXPERTS_CASES, *MODEL_CASES)
CASES: dict[str, Case] = {case.label: case for case in _ALL}
