"""Kernels made by hand, for tests and for looking at the page without compiling anything."""

from __future__ import annotations

import dataclasses

from sublight import gpus
from sublight.report.xray.view import KernelView, MixRow, OccupancyRow, RoofRow
from sublight.xray.examine import Page
from sublight.xray.occupancy.blocks import occupancy, table, what_if
from sublight.xray.occupancy.in_flight import bytes_in_flight
from sublight.xray.occupancy.waves import waves
from sublight.xray.record import Access, Code, Finding, Place, Resources
from sublight.xray.roof import Bound, Roof
from sublight.xray.sass.mix import mix

FILE = "/home/me/double.py"
HELPER = "/home/me/lib/standard.py"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
SOURCE = """import triton.language as tl

def twice(x):
    return x + x

@triton.jit
def _double(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)  # <b>all</b> of them // 2
    x = tl.load(x_ptr + i)
    y = twice(tl.sum(x))
    tl.store(y_ptr + i, y + twice(x))
"""
TTGIR = f"""#blocked = #ttg.blocked<{{sizePerThread = [4]}}>
#loc = loc("{FILE}":7:1)
#loc1 = loc(unknown)
module attributes {{"ttg.num-warps" = 4 : i32}} {{
  tt.func public @_double(%x_ptr: !tt.ptr<f32> loc("x_ptr"(#loc))) attributes {{noinline = false}} {{
    %cst = arith.constant 0.0 : f32 loc(#loc1)
    %i = tt.make_range {{end = 512 : i32}} : tensor<512xi32, #blocked> loc(#loc2)
    %x = tt.load %i : tensor<512x!tt.ptr<f32>, #blocked> loc(#loc3)
    %s = "tt.reduce"(%x) <{{axis = 0 : i32}}> ({{
    ^bb0(%a: f32 loc(callsite(#loc1 at #loc4)), %b: f32 loc(callsite(#loc1 at #loc4))):
      %c = arith.addf %a, %b : f32 loc(callsite(#loc5 at #loc6))
      tt.reduce.return %c : f32 loc(#loc6)
    }}) : (tensor<512xf32, #blocked>) -> f32 loc(#loc6)
    %y = arith.addf %s, %s : f32 loc(#loc8)
    %z = arith.addf %x, %x : tensor<512xf32, #blocked> loc(fused<"cse">[#loc9, #loc8])
    tt.store %i, %z : tensor<512x!tt.ptr<f32>, #blocked> loc("{FILE}":11:5 to :40)
    tt.return loc(#loc)
  }} loc(#loc)
}} loc(#loc)
#loc2 = loc("i"("{FILE}":8:9))
#loc3 = loc("x"(#loc7))
#loc4 = loc("{FILE}":10:15)
#loc5 = loc("{HELPER}":287:12)
#loc6 = loc(callsite("{HELPER}":314:12 at #loc4))
#loc7 = loc("{FILE}":9:9)
#loc8 = loc(callsite("{FILE}":4:12 at "y"("{FILE}":10:9)))
#loc9 = loc(callsite("{FILE}":4:12 at "{FILE}":11:25))
"""
PTX = f""".version 8.7
.target sm_90a
.visible .entry _double(
	.param .u64 _double_param_0
)
.reqntid 128
{{
	.reg .b32 	%r<9>;
	.loc	1 7 0                           // double.py:7:0
$L__func_begin0:
	ld.param.b64 	%rd1, [_double_param_0];
$L__tmp0:
	.loc	1 8 9                           // double.py:8:9
	mov.u32 	%r1, %tid.x;
	.loc	1 9 9                           // double.py:9:9
	// begin inline asm
	@%p1 ld.global.v4.b32 {{ %r2, %r3, %r4, %r5 }}, [ %rd1 + 0 ];
	// end inline asm
	.loc	1 10 15
	.loc	2 314 12, function_name $L__info_string0, inlined_at 1 10 15 // standard.py:314:12
	.loc	2 287 12, function_name $L__info_string0, inlined_at 2 314 12 // standard.py:287:12
	add.f32 	%r6, %r2, %r3;
	bar.sync 	0;
	.loc	1 10 9
	.loc	1 4 12, function_name $L__info_string1, inlined_at 1 10 9
	add.f32 	%r7, %r6, %r6;
	.loc	1 0 12, function_name $L__info_string1, inlined_at 1 11 25
	add.f32 	%r8, %r2, %r2;
$L__BB0_1:
	.loc	1 11 5
	st.global.b32 	[%rd1], %r8;
	ret;
}}
.visible .entry another(
)
{{
	.loc	1 99 0
	ret;
}}
.func helper(
)
{{
	ret;
}}
	.file	1 "{FILE}"
	.file	2 "{HELPER}"
	.section	.debug_abbrev
	{{
.b8 1
	}}
"""
SASS = f"""	.section	.text._double,"ax",@progbits
        .global         _double
_double:
.text._double:
	//## File "{FILE}", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
	//## File "{FILE}", line 8
        /*0010*/                   S2R R0, SR_TID.X ;
	//## File "{FILE}", line 9
        /*0020*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
	//## File "{HELPER}", line 287 inlined at "{HELPER}", line 314
	//## File "{HELPER}", line 314 inlined at "{FILE}", line 10
	//## File "{FILE}", line 10
        /*0030*/                   FADD R4, R4, R5 ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
	//## File "{FILE}", line 4 inlined at "{FILE}", line 10
	//## File "{FILE}", line 10
        /*0050*/                   FADD R4, R4, R4 ;
	//## File "{FILE}", line 4 inlined at "{FILE}", line 11
	//## File "{FILE}", line 11
        /*0060*/                   HFMA2.MMA R5, -RZ, RZ, 0, 0 ;
        /*0070*/                   STL [R1], R4 ;
	//## File "{FILE}", line 11
        /*0080*/                   STG.E desc[UR4][R2.64], R5 ;
.L_x_0:
        /*0090*/                   BRA `(.L_x_0);
        /*00a0*/                   NOP;
.L_x_1:
"""


def place(line: int) -> Place:
    return Place(file=FILE, line=line)


def code(gpu: str = "h200", **changed: object) -> Code:
    used = Resources(
        registers=40, spill_bytes=8, stack_bytes=8, static_shared_bytes=0, dynamic_shared_bytes=1536, barriers=1,
        threads=128,
    )  # fmt: skip
    made = Code(
        name="_double", symbol="_double", gpu=gpus.find(gpu), resources=used, sass=SASS, ptx=PTX, ttgir=TTGIR,
        file=FILE, signature={"x_ptr": "*fp32", "y_ptr": "*fp32"}, constants={"N": 512}, options={"num_warps": 4},
        grid=(256, 2),
    )  # fmt: skip
    return dataclasses.replace(made, **changed)  # type: ignore[arg-type]


def accesses() -> tuple[Access, ...]:
    """A good one, a poor one, a conflict, one of which nothing is known."""
    load = {"space": "global", "kind": "load", "bytes_per_thread": 16, "requests": 4}
    rows = (
        {**load, "place": place(9), "sectors": 64, "ideal_sectors": 64, "instruction": "ld.global.v4.b32"},
        {**load, "place": place(11), "kind": "store", "bytes_per_thread": 4, "sectors": 128, "ideal_sectors": 16},
        {**load, "place": place(10), "space": "shared", "wavefronts": 32, "ideal_wavefronts": 4},
        {**load, "place": None, "requests": 0, "unknown": "its address depends on data"},
    )
    return tuple(Access(**row) for row in rows)  # type: ignore[arg-type]


def view(gpu: str = "h200", **changed: object) -> KernelView:
    """Every part of the page."""
    made = KernelView(
        code=code(gpu),
        source=SOURCE,
        blocks_per_sm=12,
        occupancy=0.75,
        limited_by="registers",
        tensor_core="",
        accesses=accesses(),
        findings=(
            Finding(id="enough", kernel="_double", place=None, detail="Enough bytes in flight.", is_information=True),
            Finding(id="spill", kernel="_double", place=place(4), detail="8 bytes do not fit into registers."),
        ),
        occupancy_rows=(
            OccupancyRow(warps=4, blocks_per_sm=12, occupancy=0.75, limited_by="registers", is_now=True),
            OccupancyRow(warps=8, blocks_per_sm=8, occupancy=1.0, limited_by="threads", is_best=True),
        ),
        mix=(
            MixRow(name="outside loops", counts={"fp32": 3, "global load": 1, "local store": 1, "barrier": 1}),
            MixRow(name="loop", counts={"HGMMA": 2, "tensor core": 6}, place=place(10), depth=1, issue_cycles=8.0),
        ),
        roof=(
            RoofRow(name="floor", seconds=1e-5, kind="floor", detail="48 MB at 4.8 TB/s"),
            RoofRow(name="issue", seconds=2e-6),
            RoofRow(name="occupancy", seconds=None),
            RoofRow(name="measured", seconds=1.5e-5, kind="measured"),
        ),
        notes=("One note.",),
    )
    return dataclasses.replace(made, **changed)  # type: ignore[arg-type]


def page(gpu: str = "h200", **changed: object) -> Page:
    """The terminal's: occupancy, waves and instructions as they are reckoned, the rest made up."""
    made = code(gpu)
    made = changed.pop("code", made)  # type: ignore[assignment]
    reckoned = occupancy(made.resources, made.gpu)
    whole = Page(
        code=made,
        mix=mix(made),
        accesses=accesses(),
        findings=view(gpu).findings,
        roof=Roof(
            bounds=(
                Bound(name="floor", seconds=1e-5, detail="48 MB at 4.8 TB/s"),
                Bound(name="transactions", seconds=1.25e-5, detail="60 MB in sectors"),
                Bound(name="issue", seconds=None, detail="how often the loop at line 10 turns is not known"),
            )
        ),
        heat={},
        occupancy=reckoned,
        what_if=what_if(made.resources, made.gpu),
        table=table(made.resources, made.gpu),
        waves=waves(512, reckoned, made.gpu),
        in_flight=bytes_in_flight(reckoned, made.gpu, bytes_per_thread=16),
        notes=("One note.",),
    )
    return dataclasses.replace(whole, **changed)  # type: ignore[arg-type]


def hostile() -> KernelView:
    """Names, source and listings that are markup."""
    ptx, sass = (text.replace("R4, R4", HOSTILE) for text in (PTX, SASS))
    bad = code(
        name=HOSTILE, file=f"/tmp/{HOSTILE}.py", ptx=ptx, sass=sass, ttgir=TTGIR.replace("%cst", HOSTILE),
        signature={HOSTILE: HOSTILE}, constants={HOSTILE: HOSTILE},
    )  # fmt: skip
    at = Place(file=bad.file, line=4)
    return view(
        code=bad,
        source=f"{HOSTILE}\n" * 12,
        limited_by=HOSTILE,
        tensor_core=HOSTILE,
        findings=(Finding(id=HOSTILE, kernel=HOSTILE, place=at, detail=HOSTILE),),
        accesses=(Access(place=at, space="global", kind="load", bytes_per_thread=4, requests=1, unknown=HOSTILE),),
        mix=(MixRow(name=HOSTILE, counts={HOSTILE: 3}, note=HOSTILE),),
        roof=(RoofRow(name=HOSTILE, seconds=1.0, detail=HOSTILE),),
        occupancy_rows=(OccupancyRow(warps=1, blocks_per_sm=1, occupancy=1.0, limited_by=HOSTILE),),
        notes=(HOSTILE,),
    )
