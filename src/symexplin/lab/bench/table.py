"""From timings to rows: medians, spreads, ratios to the baseline of the same round, bytes and FLOP/s; CSV and text."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from symexplin.lab.bench.config import BenchConfig, Case
from symexplin.lab.bench.floors import floor, map_floor, matmul_flops, moved
from symexplin.lab.bench.measure import Round, Timing
from symexplin.lab.bench.variants import BASELINES
from symexplin.lab.bench.work import PHASES

__all__ = ["Row", "Size", "format_rows", "rows_of", "to_csv"]

_MIB = 2**20
_LOW, _HIGH = 10, 90  # percentiles of the spread


class Size(NamedTuple):
    """Parameters of a case: all of the plain model, those that are curved, those that a token is multiplied with."""

    parameters: int
    curved: int
    multiplied: int
    shape: str | None = None


@dataclass(frozen=True)
class Row:
    """One line of results.csv: one variant of one case. What does not apply is empty.

    `ratio` is the median over the rounds of this variant's time by that of `baseline` in the same round; those of the
    phases of a whole step are medians, too, so that they need not add up to `ms`.
    """

    part: str
    variant: str
    baseline: str
    dtype: str
    width: int
    depth: int | None
    shape: str | None
    tokens: int | None
    microbatches: int | None
    heads: int | None
    loss_chunk: int | None
    parameters: int
    curved: int
    rounds: int
    ms: float
    ms_p10: float
    ms_p90: float
    host_ms: float
    ratio: float
    ratio_p10: float
    ratio_p90: float
    overhead_percent: float | None
    floor_bytes: int
    moved_bytes: int | None
    gb_per_s: float | None
    gb_per_s_share: float | None
    peak_mib: float | None
    peak_ratio: float | None
    tokens_per_s: float | None
    mfu: float | None
    peak_flops: float | None
    peak_flops_source: str | None
    forward_ms: float | None
    backward_ms: float | None
    optimizer_ms: float | None


def rows_of(
    config: BenchConfig,
    case: Case,
    size: Size,
    rounds: Sequence[Round],
    peaks: Mapping[str, int | None],
    flops: tuple[float, str] | None = None,
) -> list[Row]:
    """Return the rows of a case, one a variant.

    Args:
        config: of the measurement.
        case: what was measured.
        size: of its model, or of its matrix.
        rounds: its timings.
        peaks: bytes of memory by variant, None where unknown.
        flops: FLOP/s of the device in the case's dtype and where they are from, for the MFU of whole steps.
    """
    baselines, run = BASELINES[case.part, case.dtype], config.run(case)
    found: dict[str, Row] = {}
    for name, baseline in baselines.items():
        ms = [timing[name].ms for timing in rounds]
        ratios = [timing[name].ms / timing[baseline].ms for timing in rounds]
        low, middle, high = np.percentile(ms, (_LOW, 50, _HIGH)).tolist()
        ratio_low, ratio, ratio_high = np.percentile(ratios, (_LOW, 50, _HIGH)).tolist()
        below, bytes_moved = _bytes(name, case, size)
        speed = None if bytes_moved is None else bytes_moved / middle / 1e6
        base = found.get(baseline)
        peak, base_peak = peaks.get(name), peaks.get(baseline)
        per_second = None if case.tokens is None else 1e3 * case.tokens / middle
        found[name] = Row(
            part=case.part,
            variant=name,
            baseline=baseline,
            dtype=case.dtype,
            width=case.width,
            depth=case.depth,
            shape=size.shape,
            tokens=case.tokens,
            microbatches=case.microbatches,
            heads=None if case.depth is None else run.model.heads,
            loss_chunk=None if case.tokens is None else run.compute.loss_chunk,
            parameters=size.parameters,
            curved=size.curved,
            rounds=len(rounds),
            ms=middle,
            ms_p10=low,
            ms_p90=high,
            host_ms=float(np.median([timing[name].host_ms for timing in rounds])),
            ratio=ratio,
            ratio_p10=ratio_low,
            ratio_p90=ratio_high,
            overhead_percent=None if case.part == "map" else 100.0 * (ratio - 1.0),
            floor_bytes=below,
            moved_bytes=bytes_moved,
            gb_per_s=speed,
            gb_per_s_share=_share(speed, speed if base is None else base.gb_per_s),
            peak_mib=None if peak is None else peak / _MIB,
            peak_ratio=_share(peak, base_peak),
            tokens_per_s=per_second,
            mfu=_mfu(config, case, size, per_second, flops),
            peak_flops=flops[0] if flops and per_second else None,
            peak_flops_source=flops[1] if flops and per_second else None,
            **_phases([timing[name] for timing in rounds]),
        )
    return list(found.values())


def _bytes(name: str, case: Case, size: Size) -> tuple[int, int | None]:
    """Return the floor and, but for a whole step, what the variant moves in its passes."""
    if case.part == "map":
        total = map_floor(name, case.dtype) * size.curved
        return total, total
    plain = size.parameters - size.curved
    below = floor(case.part, name, case.dtype, case.microbatches or 1).total(size.curved, plain)
    return below, moved(name, case.dtype).total(size.curved, plain) if case.part == "optimizer" else None


def _phases(timings: Sequence[Timing]) -> dict[str, float | None]:
    """Return the columns of a whole step's phases."""
    found = [timing.phases for timing in timings if timing.phases]
    medians = {phase: float(np.median([ms[phase] for ms in found])) if found else None for phase in PHASES}
    return {f"{phase}_ms": ms for phase, ms in medians.items()}


def _share(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value / base


def _mfu(
    config: BenchConfig, case: Case, size: Size, per_second: float | None, flops: tuple[float, str] | None
) -> float | None:
    if per_second is None or flops is None or case.depth is None:
        return None
    return per_second * matmul_flops(size.multiplied, case.depth, case.width, config.context) / flops[0]


def to_csv(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """Return the rows as CSV, each with the facts of the measurement: machine, versions, commit, ..."""
    names = [field.name for field in fields(Row)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *facts])
    for row in rows:
        writer.writerow([*(_cell(getattr(row, name)) for name in names), *(_cell(fact) for fact in facts.values())])
    return text.getvalue()


def _cell(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


def format_rows(rows: Sequence[Row]) -> str:
    """Return the rows of a case as a table in plain text; the ratio is to the first variant of its kind, see there."""
    head = ("variant", "ms", "p10-p90", "x baseline", "p10-p90", "of", "GB/s", "MiB", "tokens/s", "MFU")
    lines = [head, *(_cells(row) for row in rows)]
    columns = [column for column in zip(*lines, strict=True) if any(cell != "-" for cell in column[1:])]
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in zip(*columns, strict=True)
    )


def _cells(row: Row) -> tuple[str, ...]:
    alone = row.variant == row.baseline
    return (
        row.variant,
        f"{row.ms:.3f}",
        f"{row.ms_p10:.3f}-{row.ms_p90:.3f}",
        "-" if alone else f"{row.ratio:.4f}",
        "-" if alone else f"{row.ratio_p10:.4f}-{row.ratio_p90:.4f}",
        "-" if alone else row.baseline,
        "-" if row.gb_per_s is None else f"{row.gb_per_s:,.1f}",
        "-" if row.peak_mib is None else f"{row.peak_mib:,.0f}",
        "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        "-" if row.mfu is None else f"{100 * row.mfu:.1f} %",
    )
