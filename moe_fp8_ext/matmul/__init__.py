"""Grouped matmuls: the differentiable `grouped_mm`, and the engine that it shares with the layer."""
