"""All benchmark cases by label, with the targets for one H200.

Cases do not define how they are timed. Bytes need no formula: every argument is read once and every output is written
once. So a memory-bound op moves the sizes of its tensors, padding and scales included.
"""

from __future__ import annotations

from case import Case
from cases_activations import ACTIVATION_CASES
from cases_experts import EXPERTS_CASES
from cases_gemm import GEMM_CASES
from cases_low_rank import LOW_RANK_CASES
from cases_models import MODEL_CASES
from cases_quantize import QUANTIZE_CASES
from cases_router import ROUTER_CASES
from cases_scales import SCALE_CASES
from cases_tokens import TOKEN_CASES

_OF_TOKENS = (*ROUTER_CASES, *TOKEN_CASES, *LOW_RANK_CASES)
_OF_OPS = (*QUANTIZE_CASES, *ACTIVATION_CASES, *_OF_TOKENS, *SCALE_CASES, *GEMM_CASES)
_ALL = (*_OF_OPS, *EXPERTS_CASES, *MODEL_CASES)
CASES: dict[str, Case] = {case.label: case for case in _ALL}
