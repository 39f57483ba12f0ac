"""Weights as files: read safely, inspected, folded, inverted, exported."""

from symexplin.lab.weights.files import load_model, save_model

__all__ = ["load_model", "save_model"]
