r"""Units of measurement, as written in answers: `m/s`, `m s^{-1}`, `meters per second`, `kg\cdot m^2`."""

from __future__ import annotations

import re
import unicodedata

_PREFIXES = {
    **{"giga": "G", "mega": "M", "kilo": "k", "hecto": "h", "deci": "d", "centi": "c", "milli": "m", "tera": "T"},
    **{"micro": "\N{GREEK SMALL LETTER MU}", "nano": "n", "pico": "p", "femto": "f"},
}
_NAMES = {
    **{"meter": "m", "metre": "m", "gram": "g", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h"},
    **{"day": "d", "year": "yr", "joule": "J", "newton": "N", "watt": "W", "pascal": "Pa", "volt": "V", "ampere": "A"},
    **{"amp": "A", "kelvin": "K", "hertz": "Hz", "mole": "mol", "liter": "L", "litre": "L", "l": "L", "ohm": "Ω"},
    **{"coulomb": "C", "farad": "F", "tesla": "T", "weber": "Wb", "henry": "H", "bar": "bar", "electronvolt": "eV"},
    **{"inch": "in", "inches": "in", "foot": "ft", "feet": "ft", "mile": "mi", "pound": "lb", "lbs": "lb"},
    **{"yard": "yd"},
}
_PREFIXED = (
    *("m", "g", "s", "J", "N", "W", "Pa", "V", "A", "K"),
    *("Hz", "mol", "L", "Ω", "C", "F", "T", "Wb", "H", "bar", "eV"),
)
_SYMBOLS = frozenset(
    {f"{prefix}{unit}" for prefix in (*_PREFIXES.values(), "") for unit in _PREFIXED}
    | {"min", "h", "d", "yr", "in", "ft", "mi", "lb", "yd", "°"}
)
_FACTOR = re.compile(r"([^\W\d_]+|°)(?:\^?\{?(-?\d)\}?)?")
# A speed or an acceleration, not a power of milliseconds.
_SPEED = re.compile(r"\bms(?=\^?\{?-[12]\b)")


def measure(unit: str) -> dict[str, int] | None:
    """Return the exponents of a unit by symbol, such as {"m": 1, "s": -1}; None if a part is unknown."""
    text = _SPEED.sub("m s", re.sub(r"\bper\b", "/", unicodedata.normalize("NFKC", unit)))
    result: dict[str, int] = {}
    sign = 1
    for part in re.split(r"([\s/·*]+)", text.strip()):
        if not part.strip(" ·*"):
            continue
        if part.strip() == "/":
            sign = -1
            continue
        factor = _FACTOR.fullmatch(part)
        symbol = _symbol(factor.group(1)) if factor else ""
        if factor is None or not symbol:
            return None
        result[symbol] = result.get(symbol, 0) + sign * int(factor.group(2) or 1)
        sign = 1
    return {symbol: n for symbol, n in result.items() if n} or None


def _symbol(name: str) -> str:
    if name in _SYMBOLS:
        return name
    lower = name.lower()
    for singular in (lower, lower.removesuffix("s")):
        if symbol := _NAMES.get(singular):
            return symbol
        for prefix, letter in _PREFIXES.items():
            symbol = _NAMES.get(singular.removeprefix(prefix), "") if singular.startswith(prefix) else ""
            if symbol in _PREFIXED:
                return letter + symbol
    return ""
