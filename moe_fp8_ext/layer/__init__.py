"""The MoE layer: experts as one function, the router, and both as modules."""
