"""What surrounds a training step: reuse of quantized weights, activation checkpointing."""
