"""Numbers as readable text: for the terminal, reports, figures and model cards. None and NaN are unknown."""

from __future__ import annotations

import math
from typing import Any

UNKNOWN = "–"
Number = float | int | None


def is_known(value: Number) -> bool:
    return value is not None and math.isfinite(value)


def none_if_nan(value: Any) -> Any:
    """A number for JSON, where an unknown one is null."""
    return None if value != value else value


def short(value: Number) -> str:
    """Three significant digits; whole numbers from 1,000 on."""
    is_large = value is not None and abs(value) >= 1000
    return _shown(value, ".0f" if is_large else ".3g")


def count(value: Number) -> str:
    """A whole number with thousands separators."""
    return _shown(value, ",.0f")


def fixed(value: Number, digits: int = 3, *, signed: bool = False) -> str:
    """A number with a fixed number of digits after the point."""
    return _shown(value, f"{'+' if signed else ''}.{digits}f")


def _shown(value: Number, form: str) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else format(value, form)


def with_error(value: Number, error: Number, digits: int = 3) -> str:
    """A value and its standard error. The error of equal values is unknown, not 0: others may differ."""
    return f"{fixed(value, digits)} ± {fixed(error, digits) if is_known(error) and error else 'unknown'}"


def chance(p: float) -> str:
    """A p-value."""
    if p >= 0.9995:
        return "p = 1"
    return "p < .001" if p < 0.001 else f"p = {p:.3f}".replace("0.", ".", 1)


def percent(share: float, digits: int = 0) -> str:
    return f"{share:.{digits}%}"


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def clock(seconds: float) -> str:
    """Minutes and seconds as 1:05, hours as 1:00:05."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes}:{remainder:02d}"


def duration(seconds: float) -> str:
    """A duration with units, such as 1 h 5 min."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {remainder} s" if minutes else f"{seconds:.3g} s"


def progress(done: int | None, total: int | None) -> str:
    """Progress: "3/64", "3", or nothing if it is unknown."""
    if done is None:
        return ""
    return str(done) if total is None else f"{done}/{total}"


def tick(value: float, _: object = None) -> str:
    """The label of a tick, with thousands as k."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{round(value, 10):g}"


def percent_tick(value: float, _: object = None) -> str:
    return f"{round(100 * value, 8):g}%"


def power_tick(value: float, _: object = None) -> str:
    """The label of a tick on a logarithmic axis."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:g}"
    return f"1e{math.floor(math.log10(abs(value)) + 0.5)}"
