"""Print and parse quantities; values are SI everywhere else, and nobody else formats them."""

from __future__ import annotations

import math
import re

_PREFIXES = {-9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def text(value: float | None, unit: str) -> str:
    """Three significant digits with an SI prefix; a dash for what is not known.

    >>> text(4.273e12, "B/s"), text(989.4e12, "FLOP/s"), text(1.04e-6, "s"), text(0, "B"), text(None, "s")
    ('4.27 TB/s', '989 TFLOP/s', '1.04 µs', '0 B', '–')
    >>> text(999.6e9, "B/s")
    '1.00 TB/s'
    """
    if value is None:
        return "–"
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f} {unit}"
    rounded = float(f"{value:.2e}")  # round first: 999.6 GB/s is 1.00 TB/s, not 1000 GB/s
    exponent = 3 * math.floor(math.log10(abs(rounded)) / 3)
    exponent = min(max(exponent, min(_PREFIXES)), max(_PREFIXES))
    if unit == "s":
        exponent = min(exponent, 0)  # nobody reads kiloseconds
    scaled = rounded / 10.0**exponent
    digits = max(0, 2 - math.floor(math.log10(abs(scaled)))) if abs(scaled) < 1000 else 0
    return f"{scaled:.{digits}f} {_PREFIXES[exponent]}{unit}"


def part_of(part: float, whole: float, unit: str) -> str:
    """A part and its whole with one prefix, the whole's.

    >>> part_of(2.891e-3, 9.598e-3, "s"), part_of(0.02e-3, 9.598e-3, "s"), part_of(39.84e-3, 151.6e-3, "s")
    ('2.89 of 9.60 ms', '0.02 of 9.60 ms', '39.8 of 152 ms')
    """
    figures, _, prefixed = text(whole, unit).partition(" ")
    name = prefixed.removesuffix(unit)
    scaled = part / 10.0 ** next((power for power, prefix in _PREFIXES.items() if prefix == name), 0)
    decimals = 2 - min(max(math.floor(math.log10(scaled)), 0), 2) if scaled > 0 and math.isfinite(scaled) else 0
    return f"{scaled:.{decimals}f} of {figures} {prefixed}"


def count(number: float) -> str:
    """How many of something there are a step: it need not be whole.

    >>> count(12.0), count(0.3333), count(10.04), count(1.5), count(0)
    ('12', '0.33', '10', '1.5', '0')
    """
    near = abs(number - round(number)) < 0.05 and (number == 0 or round(number) != 0)
    return f"{number:.0f}" if near or number >= 9.95 else f"{number:.2g}"


def ago(seconds: float) -> str:
    """How long ago, as people say it.

    >>> ago(0.4), ago(59), ago(600), ago(7300), ago(200_000)
    ('just now', '59 s ago', '10 min ago', '2 h ago', '2 days ago')
    """
    for size, name in ((172_800, "days"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{seconds / (86_400 if name == 'days' else size):.0f} {name} ago"
    return "just now"


def percent(fraction: float | None) -> str:
    """A share of a whole.

    >>> percent(0.953), percent(1.0), percent(0.0042), percent(None)
    ('95 %', '100 %', '0.4 %', '–')
    """
    if fraction is None:
        return "–"
    return f"{100 * fraction:.0f} %" if abs(fraction) >= 0.0995 or fraction == 0 else f"{100 * fraction:.1f} %"


def parse_quantity(words: str) -> int:
    """A count or a number of bytes as people write it: decimal k, M, G; binary Ki, Mi, Gi; and 2^18.

    >>> parse_quantity("64MB"), parse_quantity("1.5 GiB"), parse_quantity("2^18"), parse_quantity("4096")
    (64000000, 1610612736, 262144, 4096)
    >>> parse_quantity("9007199254740993")  # a float has 53 bits
    9007199254740993
    """
    power = re.fullmatch(r"(\d+)(?:\^|\*\*)(\d+)", words.strip())
    if power and int(power[2]) < 64:
        return int(int(power[1]) ** int(power[2]))
    match = _QUANTITY.fullmatch(words.strip())
    if not match:
        raise ValueError(f"{words!r} is not a quantity: write 4096, 2^18, 64MB or 1.5GiB")
    number = int(match[1]) if match[1].isdigit() else float(match[1])
    amount = number * _SUFFIXES[(match[2] or "").lower()]
    if amount == math.inf or amount != int(amount):
        raise ValueError(f"{words!r} is not a whole number")
    return int(amount)


def parse_seconds(words: str) -> float:
    """A time as people write it.

    >>> parse_seconds("90s"), parse_seconds("10 min"), parse_seconds("1.5h"), parse_seconds("30")
    (90.0, 600.0, 5400.0, 30.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?(s|sec|m|min|h)?", words.strip())
    if not match or not (seconds := float(match[1]) * {"m": 60, "h": 3600}.get((match[2] or "s")[0], 1)) > 0:
        raise ValueError(f"{words!r} is no time: write 90s, 10min or 1h")
    return seconds
