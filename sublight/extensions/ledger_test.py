"""Every kernel compiles for every GPU it is for; the ledger holds what nvcc made of it."""

from __future__ import annotations

import pytest

from sublight.errors import BadInput
from sublight.extensions import build, ledger
from sublight.extensions.build import Usage
from sublight.extensions.ledger import Compiled

CASES = [
    pytest.param(file, target, id=f"{file.source.removeprefix('../')}-sm_{target}")
    for file in ledger.files()
    for target in build.targets(file.source)
]


def release() -> str:
    try:
        return build.nvcc_release(build.nvcc())
    except BadInput as error:
        pytest.skip(str(error))


def test_the_ledger_holds_every_kernel_as_it_is() -> None:
    """What has changed is compiled here, if it can be: then the ledger must be written anew."""
    _, kept = ledger.read()
    every = [(file, target) for file in ledger.files() for target in build.targets(file.source)]
    stale = [(file, target) for file, target in every if ledger.key_of(file.source, target) not in kept]
    for file, target in every:
        if (file, target) not in stale:
            assert ledger.problems(file, target, kept[ledger.key_of(file.source, target)]) == []
    if stale:
        release()
        file, target = stale[0]
        assert ledger.problems(file, target, build.compiled(file.source, target)[1]) == []
        names = ", ".join(sorted({file.source for file, _ in stale}))
        pytest.fail(f"{names}: compile and write the ledger anew: python -m sublight.extensions.ledger")


@pytest.mark.parametrize(("file", "target"), CASES)
def test_nvcc_makes_what_the_ledger_holds(file: Compiled, target: int) -> None:
    """Ten seconds a case: one in twenty is drawn at each commit."""
    written_by, kept = ledger.read()
    if release() != written_by:
        pytest.skip(f"nvcc is {release()}, the ledger is of {written_by}")
    if ledger.key_of(file.source, target) not in kept:
        pytest.skip("not in the ledger, which the test above says")
    assert build.compiled(file.source, target)[1] == kept[ledger.key_of(file.source, target)]


def test_problems_are_seen() -> None:
    ladder = ledger.files()[0]
    good = Usage(registers=32, spill_bytes=0, shared_bytes=0)
    kernels = dict.fromkeys(ladder.kernels, good)
    assert ledger.problems(ladder, 90, kernels) == []
    name = ladder.kernels[0]
    spilled = Usage(registers=255, spill_bytes=8, shared_bytes=0)
    assert ledger.problems(ladder, 90, kernels | {name: spilled}) == [f"{name} sm_90: spills 8 bytes a thread"]
    assert ledger.problems(ladder, 90, {name: good})[0] == f"reduce.cu sm_90: has no {ladder.kernels[1]}"
    assert ledger.problems(ladder, 90, kernels | {"more": good}) == ["reduce.cu sm_90: more is not listed"]


def test_a_changed_source_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ledger.key_of(ledger.files()[0].source, 90)
    assert before == ledger.key_of(ledger.files()[0].source, 90) != ledger.key_of(ledger.files()[0].source, 80)
    text = build.text_of
    monkeypatch.setattr(build, "text_of", lambda source: text(source) + " ")
    assert ledger.key_of(ledger.files()[0].source, 90) != before


def test_no_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with pytest.raises(BadInput, match=r"no nvcc .*not on the PATH.*set CUDA_HOME"):
        build.nvcc()
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(BadInput, match=r"no nvcc .CUDA_HOME=/nowhere has none"):
        build.nvcc()
    with pytest.raises(BadInput, match=r"no C.. compiler"):
        build.host_compiler()


def test_nvccs_words_become_one_line() -> None:
    assert build.complaint("nvcc", "nvcc fatal   : Unsupported gpu architecture 'compute_130'").startswith(
        "nvcc does not know compute_130: its CUDA is older"
    )
    unknown = "nvcc fatal   : Value 'sm_130' is not defined for option 'gpu-architecture'"
    assert build.complaint("/usr/bin/nvcc", unknown).startswith("nvcc does not know sm_130: its CUDA is older")
    gcc = "host_config.h:164:2: error: #error -- unsupported GNU version! gcc versions later than 13 are not supported!"
    assert "install g++-13, and set NVCC_CCBIN" in build.complaint("nvcc", gcc)
    assert build.complaint("nvcc", "") == "nvcc: failed without a word"
