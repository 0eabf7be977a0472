"""Ways into other people's packages, a module each. None is imported with `moe_fp8_ext`."""
