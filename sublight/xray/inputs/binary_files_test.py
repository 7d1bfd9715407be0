"""PTX and cubins: every kernel of a file, for the GPUs that run it; spills are told from arrays."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

from sublight.errors import BadInput
from sublight.gpus import find
from sublight.xray import binary
from sublight.xray.inputs.binary_files import demangled, plain_name
from sublight.xray.inputs.load import load

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
TWO = """
.visible .entry _Z5scaleIfEvPT_S0_(.param .u64 p)
.reqntid 96
{
  .reg .b64 %a<3>;
  .reg .b32 %r<3>;
  ld.param.u64 %a1, [p];
  bar.sync 2, 96;
  ld.global.v2.u32 {%r1, %r2}, [%a1];  // a brace in a comment: }
  st.global.u32 [%a1], %r2;
  ret;
}
.visible .entry tight(.param .u64 p)
.maxntid 1024
.minnctapersm 2
{
  .reg .b64 %a<3>;
  .reg .b32 %r<80>;
  .shared .b32 tile[64];
  ld.param.u64 %a1, [p];
BODY
  ret;
}
.entry indexed(.param .u64 p)
{
  .local .align 4 .b8 array[64];
  .reg .b64 %a<4>;
  .reg .b32 %r<3>;
  ld.param.u64 %a1, [p];
  ld.global.u32 %r1, [%a1];
  mov.u64 %a2, array;
  mul.wide.u32 %a3, %r1, 4;
  add.u64 %a2, %a2, %a3;
  st.local.u32 [%a2], %r1;
  ld.local.u32 %r2, [%a2+4];
  st.global.u32 [%a1], %r2;
  ret;
}
"""
LOADS = "\n".join(f"  ld.volatile.global.u32 %r{i}, [%a1+{4 * i}];" for i in range(60))
STORES = "\n".join(f"  st.volatile.global.u32 [%a1+{4 * i}], %r{i};" for i in range(60))
PTX = HEAD + TWO.replace("BODY", f"{LOADS}\n  st.shared.u32 [tile], %r1;\n  bar.sync 0;\n{STORES}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("binaries")
    (made / "k.ptx").write_text(PTX)
    (made / "k.cubin").write_bytes(binary.assemble(PTX, 80))
    return made


def test_every_kernel_of_ptx_is_assembled(folder: Path) -> None:
    found = load(str(folder / "k.ptx"), [find("a100"), find("rtx4090")])
    assert [code.name.split("<")[0] for code in found] == ["scale", "tight", "indexed"] * 2
    assert [code.gpu.key for code in found] == ["a100"] * 3 + ["rtx4090"] * 3
    codes = {code.symbol: code for code in found}
    scale, tight, indexed = codes["_Z5scaleIfEvPT_S0_"], codes["tight"], codes["indexed"]
    assert scale.gpu.key == "rtx4090" and scale.capability == 89
    assert (scale.resources.threads, scale.resources.barriers) == (96, 3), "named barrier 2 takes 0 to 2"
    assert (tight.resources.threads, tight.resources.static_shared_bytes) == (1024, 256)
    assert found[1].resources.registers == 32, "two blocks of 1024 threads on an A100; an RTX 4090 has no room for two"
    assert indexed.resources.threads is None
    assert "indexed" not in scale.ptx and "tight" not in scale.ptx and "bar.sync 2" in scale.ptx and HEAD in scale.ptx


def test_threads_and_shared_memory_are_the_launchs_where_the_code_does_not_say(folder: Path) -> None:
    (code,) = load(str(folder / "k.ptx:indexed"), [find("a100")], threads=128, shared_bytes=4096)
    assert (code.resources.threads, code.resources.shared_bytes) == (128, 4096)


@pytest.mark.parametrize("suffix", ["ptx", "cubin"])
def test_a_spill_is_no_array(folder: Path, suffix: str) -> None:
    codes = {code.symbol: code for code in load(str(folder / f"k.{suffix}"), [find("a100")])}
    tight, indexed = codes["tight"].resources, codes["indexed"].resources
    assert tight.spill_bytes == tight.stack_bytes > 100, "60 values in 32 registers, and the driver's local memory"
    assert (indexed.spill_bytes, indexed.stack_bytes) == (0, 64)


def test_spills_beside_an_array_are_what_the_assembler_stored() -> None:
    sass = "STL [R1+0x84], R2 ; LDL.LU R2, [R1+0x84] ; STL.128 [R1], R4 ; LDL.128 R4, [R1] ; LDL R4, [R5+0x8] ;"
    used = {"REG": 32, "STACK": 160}

    def spill(**known: int) -> int:
        read = binary.resources(used, sass, dynamic_shared_bytes=0, threads=None, capability=80, **known)
        return read.spill_bytes

    assert spill(array_bytes=128, spilled=20) == 20
    assert spill(array_bytes=128, spilled=0) == 0
    assert spill(spilled=0) == 0, "a frame that a call needs"
    assert spill() == 4, "only what is loaded for the last time"
    assert spill(array_bytes=128, spilled=500) == 32, "a place may be stored to more than once"


def test_a_cubin_is_for_its_own_generation(folder: Path) -> None:
    said: list[str] = []
    codes = load(str(folder / "k.cubin:tight"), [find("h100"), find("a100")], tell=said.append)
    assert [(code.gpu.key, code.name, code.ptx) for code in codes] == [("a100", "tight", "")]
    assert said == [f"{folder / 'k.cubin'} is for sm_80, which h100 cannot run"]
    (later,) = load(str(folder / "k.cubin:tight"), [find("l40s")], tell=said.append)
    assert later.gpu.key == "l40s" and len(said) == 1
    (alone,) = load(str(folder / "k.cubin:tight"), [find("h100")], tell=said.append)
    assert alone.gpu.compute_capability == (8, 0)
    (unasked,) = load(str(folder / "k.cubin:scale"), [], may_run=False)
    assert unasked.gpu.compute_capability == (8, 0) and unasked.symbol == "_Z5scaleIfEvPT_S0_"


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="needs c++filt")
def test_names_are_as_they_were_written() -> None:
    symbols = ["_Z5scaleIfEvPT_S0_", "_ZN2ns1vEPNS_1VE", "saxpy"]
    assert list(demangled(symbols).values()) == ["scale<float>", "ns::v", "saxpy"]


def test_names_without_a_demangler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert demangled(["_Z5scaleIfEvPT_S0_", "_ZN2ns5inner1vEPNS_1VE"]) == {
        "_Z5scaleIfEvPT_S0_": "scale",
        "_ZN2ns5inner1vEPNS_1VE": "ns::inner::v",
    }
    assert plain_name("_ZTV3abc") == "_ZTV3abc", "no function"


ELF = b"\x7fELF\x02\x01\x01" + bytes(11)
BAD = {
    "empty.ptx": (b"", "has no kernel in PTX: it needs .version"),
    "none.ptx": (HEAD.encode(), "has no kernel in PTX"),
    "new.ptx": (PTX.replace("sm_80", "sm_90a").encode(), "is for sm_90a, which b200 (sm_100) does not run"),
    "old.ptx": (PTX.replace("sm_80", "sm_120").encode(), "is for sm_120, which b200 (sm_100) does not run"),
    "wrong.ptx": (PTX.replace("bar.sync 2, 96", "bar.sunk 2, 96").encode(), "ptxas: line 11: "),
    "empty.cubin": (b"", "this is no cubin: it does not begin as an ELF file does"),
    "amd.cubin": (ELF + (224).to_bytes(2, "little") + bytes(44), "no NVIDIA cubin, it is AMD's"),
    "cpu.so": (ELF + (62).to_bytes(2, "little") + bytes(44), "no NVIDIA cubin, it is a program of x86-64"),
    "cut.cubin": (ELF + (190).to_bytes(2, "little") + bytes(28) + b"\x50\x05\x50\x00" + bytes(12), "cut.cubin: "),
    "future.cubin": (
        ELF + (190).to_bytes(2, "little") + bytes(28) + b"\x63\x05\x63\x00" + bytes(12),
        "is for sm_99: no GPU",
    ),
    "header.cubin": (ELF + (190).to_bytes(2, "little"), "this cubin holds no code: it is cut off"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_binary_is_told_in_one_line(tmp_path: Path, name: str) -> None:
    content, words = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput) as caught:
        load(str(tmp_path / name), [find("b200")], tell=lambda said: None)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_kernel_that_is_not_there_is_told(folder: Path) -> None:
    for suffix in ("ptx", "cubin"):
        with pytest.raises(BadInput, match=rf"k\.{suffix} has no kernel 'thight': it has tight"):
            load(str(folder / f"k.{suffix}:thight"), [find("a100")])


def test_a_folder_of_amd_kernels_is_told(tmp_path: Path) -> None:
    (tmp_path / "k.json").write_text("{}")
    (tmp_path / "k.hsaco").write_bytes(b"")
    with pytest.raises(BadInput, match="holds AMD kernels"):
        load(str(tmp_path), [find("h100")])


def test_a_cache_with_broken_metadata_is_told(tmp_path: Path) -> None:
    (tmp_path / "k.json").write_text("{")
    (tmp_path / "k.cubin").write_bytes(b"")
    with pytest.raises(BadInput, match=r"k\.json is no JSON"):
        load(str(tmp_path), [find("h100")])
