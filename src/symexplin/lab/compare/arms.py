"""The arms that a comparison knows by name: one model and seed, different ways to train it."""

from typing import Any

__all__ = ["ARMS", "BASELINE"]

BASELINE = "AdamW"

# Learning rates of learned scales in runs of some hundred steps: the paper's 0.015 to 0.0024 are for 100,000.
_SHORT_RUN = {"pattern": "row_col_mult", "peak_lr": [0.003, 0.001]}

# What each changes in the table [sel] (symexplin.lab.config.CurveConfig). "SEL" is the best of those tried on other
# seeds than the demo's (docs/log.md).
ARMS: dict[str, dict[str, Any]] = {
    BASELINE: {"home": "none"},
    "SEL": {"preset": "carried"},
    "SEL-learned": {"preset": "carried", "map": {"e": _SHORT_RUN, "l": _SHORT_RUN}},
    "SEL-paper": {"preset": "paper", "start": "mismatched"},
    "SEL-fixed-curvature": {"preset": "fixed_curvature", "start": "mismatched"},
    "SEL-frozen": {"preset": "frozen", "start": "mismatched"},
    "SEL-congruent": {"preset": "congruent"},
    "SEL-exp-only": {"preset": "exp_only"},
    "SEL-module": {"home": "module", "preset": "paper", "start": "mismatched"},
}
