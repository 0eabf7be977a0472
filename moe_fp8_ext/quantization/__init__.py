"""Formats, recipes, quantized operands, and how a weight becomes an operand."""
