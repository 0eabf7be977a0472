"""Tools for a training step: reuse of quantized weights, and activation checkpointing."""
