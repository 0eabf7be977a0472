"""The parts of `python -m moe_fp8_ext`: the machine, a check of every kernel, and speeds of layers."""
