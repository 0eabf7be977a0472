"""Adapters to other packages, a module each. `import moe_fp8_ext` imports none of them."""
