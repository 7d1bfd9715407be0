"""AMD's and Intel's GPUs from what the Linux kernel shows of them (sysfs and hwmon), which needs no library.

The units are the kernel's: busy in percent, memory in bytes, power in µW, energy in µJ, temperature in thousandths of a
degree, clocks of hwmon in Hz and of Intel's drivers in MHz. amdsmi, where it is installed, adds the card's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sublight.health.record import (
    Activity,
    Clocks,
    Errors,
    GpuState,
    Link,
    Memory,
    Number,
    Power,
    Unavailable,
    Vendor,
    known,
)

CARDS = Path("/sys/class/drm")
VENDORS: dict[str, Vendor] = {"0x1002": "AMD", "0x8086": "Intel"}
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # GT/s a lane -> PCIe generation
_CARD = re.compile(r"card\d+")


def read(vendor: Vendor, first_index: int = 0) -> tuple[GpuState, ...] | Unavailable:
    """This vendor's GPUs, or why none is seen."""
    if not CARDS.exists():
        return Unavailable(f"no {CARDS}: this system does not show GPUs there")
    cards = [card for card in sorted(CARDS.iterdir()) if _CARD.fullmatch(card.name)]
    mine = [card / "device" for card in cards if VENDORS.get(_text(card / "device/vendor") or "") == vendor]
    if not mine:
        return Unavailable(f"no GPU of {vendor} is in {CARDS}")
    names = dict(_names_of_amdsmi()) if vendor == "AMD" else {}
    return tuple(_gpu(vendor, first_index + at, device, names) for at, device in enumerate(mine))


def _gpu(vendor: Vendor, index: int, device: Path, names: dict[str, str]) -> GpuState:
    sensors = next(iter(sorted(device.glob("hwmon/hwmon*"))), device / "hwmon")
    bus_id = device.resolve().name
    number = f"{vendor} GPU {_text(device / 'device') or ''}".strip()
    return GpuState(
        index=index,
        name=names.get(bus_id) or _text(device / "product_name") or number,
        uuid=_text(device / "unique_id") or bus_id,
        vendor=vendor,
        bus_id=bus_id,
        activity=Activity(
            gpu_share=_number(device / "gpu_busy_percent", 0.01),
            memory_controller_share=_number(device / "mem_busy_percent", 0.01),
        ),
        clocks=_clocks_of_amd(sensors) if vendor == "AMD" else _clocks_of_intel(device),
        power=_power(sensors),
        memory=Memory(
            memory_total_bytes=_count(device / "mem_info_vram_total"),
            memory_used_bytes=_count(device / "mem_info_vram_used"),
        ),
        errors=Errors(),
        link=Link(
            pcie_generation=_generation(device / "current_link_speed"),
            pcie_width=_count(device / "current_link_width"),
            pcie_generation_max=_generation(device / "max_link_speed"),
            pcie_width_max=_count(device / "max_link_width"),
            pcie_replays=_count(device / "pcie_replay_count"),
        ),
    )


def _clocks_of_amd(sensors: Path) -> Clocks:
    return Clocks(sm_clock_hz=_number(sensors / "freq1_input"), memory_clock_hz=_number(sensors / "freq2_input"))


def _clocks_of_intel(device: Path) -> Clocks:
    """The xe driver's folder first, then the older i915's."""
    card = next(iter(sorted(device.glob("drm/card*"))), device)
    now = _first(device / "tile0/gt0/freq0/act_freq", card / "gt_act_freq_mhz", scale=1e6)
    most = _first(device / "tile0/gt0/freq0/max_freq", card / "gt_max_freq_mhz", scale=1e6)
    return Clocks(sm_clock_hz=now, sm_clock_max_hz=most)


def _power(sensors: Path) -> Power:
    return Power(
        power_w=_first(sensors / "power1_average", sensors / "power1_input", scale=1e-6),
        power_limit_w=_first(sensors / "power1_cap", sensors / "power1_max", scale=1e-6),
        power_default_w=_first(sensors / "power1_cap_default", sensors / "power1_rated_max", scale=1e-6),
        energy_j=_number(sensors / "energy1_input", 1e-6),
        temperature_c=_number(sensors / "temp1_input", 1e-3),
        memory_temperature_c=_number(sensors / "temp3_input", 1e-3),
        slowdown_c=_number(sensors / "temp1_crit", 1e-3),
        shutdown_c=_number(sensors / "temp1_emergency", 1e-3),
        fan_share=_number(sensors / "pwm1", 1 / 255),
    )


def _names_of_amdsmi() -> Iterator[tuple[str, str]]:
    """Bus id and the name that AMD sells the card under."""
    try:
        import amdsmi

        amdsmi.amdsmi_init()
    except Exception:  # not installed, or its library finds no driver: names are then the kernel's
        return
    try:
        for handle in amdsmi.amdsmi_get_processor_handles():
            info: Any = amdsmi.amdsmi_get_gpu_asic_info(handle)
            yield str(amdsmi.amdsmi_get_gpu_device_bdf(handle)).lower(), str(info["market_name"])
    except Exception:
        return
    finally:
        amdsmi.amdsmi_shut_down()


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _number(path: Path, scale: float = 1.0) -> Number:
    try:
        return int(path.read_text()) * scale
    except PermissionError:
        return Unavailable("needs root")
    except (OSError, ValueError):
        return Unavailable(f"the kernel shows no {path.name} of it")


def _count(path: Path) -> Any:
    value = _number(path)
    return value if isinstance(value, Unavailable) else int(value)


def _first(*paths: Path, scale: float) -> Number:
    values = [_number(path, scale) for path in paths]
    return next((value for value in values if known(value) is not None), values[0])


def _generation(path: Path) -> Any:
    """The PCIe generation, from a text such as "16.0 GT/s PCIe"."""
    words = _text(path)
    if words is None:
        return Unavailable(f"the kernel shows no {path.name} of it")
    return _GENERATIONS.get(words.split()[0], Unavailable(f"unknown link speed {words}"))
