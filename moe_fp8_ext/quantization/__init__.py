"""Formats, recipes, the cost model of recipe "auto", quantized operands, and how a weight becomes an operand."""
