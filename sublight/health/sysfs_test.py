"""AMD's and Intel's GPUs from a tree as the kernel shows it; units come out as SI. The trees are made by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sublight.health import check, sysfs
from sublight.health.record import Unavailable

AMD = {
    "vendor": "0x1002", "device": "0x74a1", "unique_id": "abc123", "gpu_busy_percent": "87", "mem_busy_percent": "30",
    "mem_info_vram_total": "205905723392", "mem_info_vram_used": "1000000", "current_link_speed": "16.0 GT/s PCIe",
    "max_link_speed": "32.0 GT/s PCIe", "current_link_width": "8", "max_link_width": "16", "pcie_replay_count": "0",
    "hwmon/hwmon3/power1_average": "412000000", "hwmon/hwmon3/power1_cap": "750000000",
    "hwmon/hwmon3/power1_cap_default": "750000000", "hwmon/hwmon3/temp1_input": "55000",
    "hwmon/hwmon3/temp1_crit": "100000", "hwmon/hwmon3/freq1_input": "2100000000",
}  # fmt: skip
INTEL = {
    "vendor": "0x8086", "device": "0xe20b", "tile0/gt0/freq0/act_freq": "2400", "tile0/gt0/freq0/max_freq": "2850",
    "hwmon/hwmon1/energy1_input": "7500000", "hwmon/hwmon1/power1_max": "190000000",
}  # fmt: skip


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for at, files in enumerate((AMD, INTEL)):
        for name, words in files.items():
            path = tmp_path / f"card{at}/device/{name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(words + "\n")
    (tmp_path / "card0-DP-1").mkdir()  # a plug of the card, no card
    monkeypatch.setattr(sysfs, "CARDS", tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "amdsmi", None)
    return tmp_path


def test_amd_in_si(cards: Path) -> None:
    found = sysfs.read("AMD", 3)
    assert isinstance(found, tuple)
    (gpu,) = found
    assert (gpu.index, gpu.vendor, gpu.name, gpu.uuid) == (3, "AMD", "AMD GPU 0x74a1", "abc123")
    assert gpu.activity.gpu_share == pytest.approx(0.87)
    assert gpu.power.power_w == pytest.approx(412.0) and gpu.power.temperature_c == pytest.approx(55.0)
    assert gpu.clocks.sm_clock_hz == 2.1e9 and gpu.memory.memory_total_bytes == 205905723392
    assert (gpu.link.pcie_generation, gpu.link.pcie_generation_max, gpu.link.pcie_width) == (4, 5, 8)
    assert gpu.power.fan_share == Unavailable("the kernel shows no pwm1 of it")
    assert gpu.activity.sm_share == Unavailable("this back end does not read it")
    assert [problem.kind for problem in check.of_gpu(gpu)] == ["link"]


def test_nobody_is_sent_to_another_vendors_tool(cards: Path) -> None:
    (cards / "card0/device/hwmon/hwmon3/power1_cap").write_text("400000000")
    found = sysfs.read("AMD")
    assert isinstance(found, tuple)
    lines = [problem.line for problem in check.of_gpu(found[0])]
    assert any("power limit is 400 W, not 750 W" in line for line in lines)
    assert not any("nvidia" in line for line in lines)


def test_intel_in_si(cards: Path) -> None:
    found = sysfs.read("Intel")
    assert isinstance(found, tuple)
    (gpu,) = found
    assert (gpu.clocks.sm_clock_hz, gpu.clocks.sm_clock_max_hz) == (2.4e9, 2.85e9)
    assert gpu.power.energy_j == 7.5 and gpu.power.power_limit_w == pytest.approx(190.0)
    assert check.of_gpu(gpu) == ()


def test_without_one_the_reason_is_said(cards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cards / "card0/device/vendor").write_text("0x10de")
    assert sysfs.read("AMD") == Unavailable(f"no GPU of AMD is in {cards}")
    monkeypatch.setattr(sysfs, "CARDS", cards / "none")
    assert isinstance(sysfs.read("Intel"), Unavailable)


def test_amdsmi_names_the_card(cards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bus_id = (cards / "card0/device").resolve().name
    library = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: ["h"],
        amdsmi_get_gpu_asic_info=lambda handle: {"market_name": "AMD Instinct MI300X"},
        amdsmi_get_gpu_device_bdf=lambda handle: bus_id.upper(),
    )
    monkeypatch.setitem(__import__("sys").modules, "amdsmi", library)  # type: ignore[arg-type]
    found = sysfs.read("AMD")
    assert isinstance(found, tuple) and found[0].name == "AMD Instinct MI300X"
