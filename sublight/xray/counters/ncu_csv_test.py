"""Both forms of `ncu --csv`, as public tools and the CLI's manual show them; the kernels and numbers are made up."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sublight.errors import BadInput
from sublight.xray.counters import ncu_csv
from sublight.xray.counters import record as counters

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC"'
)

# synthetic; a coalesced 4-byte load is 4 sectors a request, the store 32, LDS.128 of 4 passes twofold in conflict
WIDE = f"""rows done: 12, in 3 s
==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "transpose" - 0: 0%....50%....100% - 9 passes
{HEAD},"dram__bytes_read.sum","gpu__time_duration.sum","l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",\
"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",\
"l1tex__t_requests_pipe_lsu_mem_global_op_st.sum","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",\
"l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum","launch__func_cache_config","launch__registers_per_thread",\
"launch__shared_mem_per_block_dynamic","sm__warps_active.avg.pct_of_peak_sustained_active",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
"","","","","","","","","","","","Mbyte","usecond","","","","","sector","sector","","register/thread","Kbyte/block","%",\
"inst","inst","inst"
"0","4711","python3.12","127.0.0.1","void mine::transpose<float, 32>(const float *, float *)","1","7","(32, 8, 1)",\
"(64, 128, 1)","0","9.0","16.78","1,234.50","1,048,576","2,097,152","262,144","262,144","1,048,576","8,388,608",\
"CachePreferNone","32","4.22","87.5","6.00","1.00","3.00"
"1","4711","python3.12","127.0.0.1","_add_kernel","1","7","(128, 1, 1)","(1024, 1, 1)","0","9.0","0","12","n/a","n/a",\
"8","4","32","16","CachePreferNone","16","0","50","","",""
==PROF== Disconnected from process 4711
"""

LONG = f"""==WARNING== Note: Running with unmodified GPU clocks.
{HEAD},"Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type","Rule Description"
"0","1","app","h","gemm(float *, int)","1","7","(128, 1, 1)","(96, 2, 1)","0","8.0","GPU Speed Of Light Throughput",\
"Memory Throughput","%","87.54","","",""
"0","1","app","h","gemm(float *, int)","1","7","(128, 1, 1)","(96, 2, 1)","0","8.0","GPU Speed Of Light Throughput",\
"Duration","nsecond","853,984","","",""
"0","1","app","h","gemm(float *, int)","1","7","(128, 1, 1)","(96, 2, 1)","0","8.0","Memory Workload Analysis",\
"Memory Throughput","Gbyte/second","1,200.00","","",""
"0","1","app","h","gemm(float *, int)","1","7","(128, 1, 1)","(96, 2, 1)","0","8.0","Occupancy","Achieved Occupancy",\
"%","16.33","","",""
"0","1","app","h","gemm(float *, int)","1","7","(128, 1, 1)","(96, 2, 1)","0","8.0","Launch Statistics","Block Size",\
"","128","","",""
"0","1","app","h","gemm(float *, int)","1","7","(128, 1, 1)","(96, 2, 1)","0","8.0","Launch Statistics",\
"Static Shared Memory Per Block","Kbyte/block","49.15","","",""
"0","1","app","h","gemm(float *, int)","1","7","(128, 1, 1)","(96, 2, 1)","0","8.0","SpeedOfLight","","","",\
"SOLBottleneck","OPT","Memory is more heavily utilized, than Compute"
"1","1","app","h","gemm(float *, int)","1","7","(128, 1, 1)","(96, 2, 1)","0","8.0","Occupancy","Achieved Occupancy",\
"%","20","","",""
"""


def test_the_wide_form() -> None:
    transpose, add = ncu_csv.parse(WIDE)
    assert transpose.name == "transpose" and transpose.kernel.startswith("void mine::")
    assert transpose.grid == (64, 128, 1) and transpose.block == (32, 8, 1) and transpose.capability == 90
    assert transpose.duration_s == pytest.approx(1.2345e-3)
    assert transpose.dram_read_bytes == pytest.approx(16.78e6)
    assert transpose.dynamic_shared_bytes == pytest.approx(4220)
    assert transpose.registers == 32 and transpose.occupancy == 0.875
    assert transpose.sectors_per_load == 4 and transpose.sectors_per_store == 32
    assert transpose.shared_load_conflict == 2 and transpose.shared_conflict == 2
    assert transpose.stalls == {"long_scoreboard": 0.6, "wait": 0.3, "selected": 0.1}
    assert add.name == "_add_kernel" and add.duration_s == pytest.approx(12e-6)
    assert add.shared_load_conflict is None and add.shared_load_wavefronts is None and add.stalls == {}
    assert add.dram_read_bytes == 0  # counted, and none


def test_the_long_form() -> None:
    first, second = ncu_csv.parse(LONG)
    assert first.name == "gemm" and first.capability == 80
    assert first.memory_throughput == pytest.approx(0.8754)  # not the one in bytes a second
    assert first.duration_s == pytest.approx(853.984e-6)
    assert first.occupancy == pytest.approx(0.1633) and second.occupancy == pytest.approx(0.20)
    assert first.static_shared_bytes == pytest.approx(49150)
    assert first.grid == (96, 2, 1) and first.block == (128, 1, 1)
    assert second.duration_s is None


def test_metrics_without_a_page_are_long_with_their_own_names() -> None:
    text = LONG.replace("Achieved Occupancy", "sm__warps_active.avg.pct_of_peak_sustained_active")
    assert ncu_csv.parse(text)[0].occupancy == pytest.approx(0.1633)


def test_a_summary_has_averages_and_no_launch() -> None:
    text = (
        '"Kernel Name","Block Size","Grid Size","Invocations","Metric Name","Metric Unit","Minimum",'
        '"Maximum","Average"\n'
        '"k","(128, 1, 1)","(96, 1, 1)","3","gpu__time_duration.sum","ns","10","20","15"\n'
        '"k","(128, 1, 1)","(48, 1, 1)","3","gpu__time_duration.sum","ns","10","20","18"\n'
    )
    assert [(row.grid[0], row.duration_s) for row in ncu_csv.parse(text)] == [(96, 15e-9), (48, 18e-9)]


def test_older_versions_have_no_sizes_and_no_capability() -> None:
    text = (
        '"ID","Process ID","Process Name","Host Name","Kernel Name","Kernel Time","Context","Stream","Metric Name",'
        '"Metric Unit","Metric Value"\n"0","1","a","h","k","2020","1","7","launch__grid_size","","512"\n'
    )
    (row,) = ncu_csv.parse(text)
    assert row.grid == (512,) and row.block == () and row.capability is None


def test_what_the_program_prints_between_the_rows_is_left_out() -> None:
    longer = ",".join(map(str, range(60)))
    noise = f"step 2, loss 0.5\nKernel Name, or so\nlosses,1,2,3,4,5,6,7\n{longer}\n"
    noisy = WIDE.replace('"1","4711"', f'{noise}"1","4711"')
    assert ncu_csv.parse(noisy) == ncu_csv.parse(WIDE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line has a column 'Kernel Name'"),
        ("a,b\n1,2\n", "no line has a column 'Kernel Name'"),
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "run it as root"),
        (HEAD + "\n", "no kernel"),
        (WIDE.replace("1,234.50", "1.234,50"), "LC_ALL=C"),
        (WIDE.replace("usecond", "fortnight"), "--print-units base"),
    ],
)
def test_bad_input_is_one_line(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        ncu_csv.parse(text)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_and_one_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read"):
        ncu_csv.read(tmp_path / "none.csv")
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(BadInput, match="neither a report nor a CSV"):
        ncu_csv.read(tmp_path / "x.csv")


# ------------------------------------------------------------------------------------------------ the record


def test_every_figure_of_the_table_is_a_field_and_every_name_is_listed_once() -> None:
    fields = {field.name for field in dataclasses.fields(counters.Counters)}
    assert {metric.field for metric in counters.METRICS} <= fields
    assert len(set(counters.wanted())) == len(counters.wanted())
    labels = [metric.label for metric in counters.METRICS if metric.label]
    assert len(set(labels)) == len(labels)


def test_passes_and_conflicts_come_from_one_source() -> None:
    pipe = {
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": (120.0, ""),
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": (90.0, ""),
    }
    by_address = {"smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": (64.0, "")}
    assert counters.counters("k", pipe).shared_load_conflict == 4
    assert counters.counters("k", {**pipe, **by_address}).shared_load_conflict == 4  # no conflicts by address
    by_address["smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"] = (32.0, "")
    assert counters.counters("k", {**pipe, **by_address}).shared_load_conflict == 2


def test_all_shared_accesses_by_address_where_the_report_has_them() -> None:
    values = {
        "memory_l1_wavefronts_shared": (96.0, ""),
        "memory_l1_wavefronts_shared_ideal": (32.0, ""),
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": (32.0, ""),
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": (0.0, ""),
    }
    assert counters.counters("k", values).shared_conflict == 3


def test_loads_proper_are_what_the_loads_are_without_the_copies_among_them() -> None:
    values = {
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": (30.0, ""),
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": (360.0, ""),
    }
    assert counters.counters("k", values).sectors_per_load == 12
    stem = "sm__sass_l1tex_t_{}_pipe_lsu_mem_global_op_ldgsts_cache_bypass.sum"
    values |= {stem.format("requests"): (20.0, ""), stem.format("sectors"): (320.0, "")}
    assert counters.counters("k", values).sectors_per_load == 4
    values |= {stem.format("requests"): (30.0, ""), stem.format("sectors"): (360.0, "")}
    assert counters.counters("k", values).sectors_per_load is None


def test_passes_a_load_are_by_address_and_conflicts_by_the_pipe() -> None:
    values = {
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": (1152.0, ""),
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": (768.0, ""),
        "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": (1088.0, ""),
        "sass__inst_executed_shared_loads": (320.0, ""),
        "smsp__inst_executed_op_shared_ld.sum": (999.0, ""),  # with those that no lane executes
    }
    result = counters.counters("k", values)
    assert result.passes_per_shared_load == 3.4 and result.shared_load_conflict == 3 and result.has_matrix_loads
    assert not counters.counters("k", {}).has_matrix_loads


def test_samples_where_there_are_no_averages() -> None:
    values = {
        "smsp__pcsamp_warps_issue_stalled_wait": (30.0, ""),
        "smsp__pcsamp_warps_issue_stalled_wait_not_issued": (500.0, ""),
        "smsp__pcsamp_warps_issue_stalled_not_selected": (10.0, ""),
    }
    assert counters.counters("k", values).stalls == {"wait": 0.75, "not_selected": 0.25}


def test_json_leaves_out_what_is_not_known() -> None:
    row = ncu_csv.parse(WIDE)[1].to_json()
    assert row["name"] == "_add_kernel" and row["sectors_per_load"] == 4 and row["grid"] == (1024, 1, 1)
    assert "shared_load_conflict" not in row and "stalls" not in row and row["dram_read_bytes"] == 0
