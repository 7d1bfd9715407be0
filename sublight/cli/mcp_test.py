"""The server over its pipes with the package's own client; and what it may run."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sublight.cli import main as cli
from sublight.cli.mcp_tools import TOOLS, Tools
from sublight.errors import BadInput
from sublight.learn.exercises import find

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    for folder in ("mine", "pages", "others"):
        (tmp_path / folder).mkdir()
    (tmp_path / "others" / "train.py").write_text("")
    (tmp_path / "mine" / "train.py").write_text("")
    return Tools(allowed=(tmp_path / "mine",), pages=tmp_path / "pages", limit_s=60.0)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands, which are not run."""
    commands: list[list[str]] = []

    async def note(self: Tools, command: list[str]) -> str:
        commands.append(list(command))
        return "sublight: noted"

    monkeypatch.setattr(Tools, "_run", note)
    return commands


def test_with_the_packages_own_client(tmp_path: Path) -> None:
    mcp = pytest.importorskip("mcp")
    arguments = ["-P", "-m", "sublight", "mcp", "--pages", str(tmp_path)]
    server = mcp.StdioServerParameters(
        command=sys.executable, args=arguments, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    )

    async def talk() -> tuple[Any, ...]:
        async with mcp.Client(server) as client:
            listed = await client.list_tools()
            predicted = await client.call_tool("predict", {"model": "gpt2", "gpu": "h200", "mode": "decode"})
            refused = await client.call_tool("explain", {"target": "examples/host_sync.py"})
            return listed.tools, predicted, refused

    listed, predicted, refused = asyncio.run(talk())
    assert tuple(tool.name for tool in listed) == TOOLS
    assert all(tool.annotations.read_only_hint and tool.description for tool in listed)
    found = json.loads(predicted.content[0].text)
    assert found == predicted.structured_content and found["model"]["name"] == "gpt2"
    assert found["predictions"][0]["floor_s"] > 0 and "ops" not in found["predictions"][0]
    assert "<html" in Path(found["page"]).read_text() and Path(found["data"]).parent == tmp_path
    assert refused.is_error and "--allow-run" in refused.content[0].text


def call(words: Any) -> Any:
    return asyncio.run(words)


def test_code_runs_in_allowed_folders_alone(tools: Tools, ran: list[list[str]], tmp_path: Path) -> None:
    link = tmp_path / "mine" / "link.py"
    link.symlink_to(tmp_path / "others" / "train.py")
    no_ending = tmp_path / "others" / "train"  # which explain would run
    no_ending.write_text("print()")
    odd = tmp_path / "others" / "softmax:x.py"  # a file that begins like an op
    odd.write_text("")
    for path in (tmp_path / "others" / "train.py", tmp_path / "mine" / ".." / "others" / "train.py", link, no_ending):
        with pytest.raises(BadInput, match="--allow-run"):
            call(tools.explain(str(path)))
    for target in (f"{tmp_path}/others/train.py:kernel", str(link), str(odd)):
        with pytest.raises(BadInput, match="--allow-run"):
            call(tools.xray(target))
    assert not ran
    for run in (tools.explain, tools.xray):
        with pytest.raises(BadInput, match="noted"):  # as nothing was run
            call(run(str(tmp_path / "mine" / "train.py"), args=["--lr", "3"]))
    assert [command[-3:] for command in ran] == [["--", "--lr", "3"]] * 2


def test_what_is_compiled_is_read_without_running(tools: Tools, ran: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "others" / "k.ptx").write_text("")
    with pytest.raises(BadInput, match="noted"):
        call(tools.xray(f"{tmp_path}/others/k.ptx"))
    assert "--no-exec" in ran[0]


def test_no_option_passes_for_a_name(tools: Tools, ran: list[list[str]]) -> None:
    for words in (tools.explain("--fix"), tools.xray("--run"), tools.limits(gpu="--explain"), tools.learn_check("-x")):
        with pytest.raises(BadInput, match="dash"):
            call(words)
    for words in (tools.bench(["--tune"]), tools.why("--help"), tools.predict("--html=x")):
        with pytest.raises(BadInput, match="noted"):
            call(words)
    assert [command[-2] for command in ran] == ["--"] * 3


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~nobody-of-this-name/x.py"])
def test_what_can_be_no_name_is_not_there(tools: Tools, name: str) -> None:
    for words in (tools.explain(name), tools.learn_check(name)):
        with pytest.raises(BadInput, match="there is no"):
            call(words)


@pytest.mark.parametrize("model", ["x" * 200_000, "a\0b"])
def test_arguments_that_no_command_takes_are_refused(tmp_path: Path, model: str) -> None:
    with pytest.raises(BadInput, match="no command can be made"):
        call(Tools(allowed=(), pages=tmp_path, limit_s=60.0).predict(model))


def test_a_check_without_leave_only_reads(tools: Tools, ran: list[list[str]], tmp_path: Path) -> None:
    file = tmp_path / "others" / "copy.py"
    file.write_text("import os\ndef copy(x, out):\n    os.abort()\n")
    found = call(tools.learn_check(str(file)))
    assert not ran and not found["passed"] and "--allow-run" in found["not_run"]
    assert found["faults"][0]["line"] == 1 and "import os" in found["faults"][0]["text"]


def test_without_leave_each_kind_of_exercise_is_read_as_what_it_is(
    tools: Tools, ran: list[list[str]], tmp_path: Path
) -> None:
    for name, file in (("add.cu", "add.cu"), ("strides", "strides.py"), ("add", "add.py")):
        path = tmp_path / "others" / file
        path.write_text(find(name).solution())
        found = call(tools.learn_check(str(path)))
        assert not ran and found["exercise"] == name and found["faults"] == [] and Path(found["page"]).is_file()
    paper = tmp_path / "others" / "strides.py"
    paper.write_text("import torch\ndef strides(sizes, index):\n    pass\n")
    assert "a step on paper" in call(tools.learn_check(str(paper)))["faults"][0]["text"]


def test_no_op_is_not_every_op(tools: Tools, ran: list[list[str]]) -> None:
    with pytest.raises(BadInput, match="ops is empty"):
        call(tools.bench([]))
    assert not ran


def test_what_takes_too_long_ends_with_all_it_started(tools: Tools, tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    short = Tools(allowed=(), pages=tools.pages, limit_s=0.3)
    with pytest.raises(BadInput, match=r"more than 0\.3 s"):
        call(short._run(["sh", "-c", f"sh -c 'sleep 1; touch {mark}' & sleep 100"]))
    call(asyncio.sleep(1.2))
    assert not mark.exists()


def test_bad_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words in (["--allow-run", "nowhere"], ["--limit", "soon"], ["--pages", str(tmp_path / "file" / "x")]):
        assert cli.run(["mcp", *words]) == 2
        assert capsys.readouterr().err.startswith(f"sublight: {words[0]}")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    assert cli.run(["mcp"]) == 2
    assert "pip install 'sublight[mcp]'" in capsys.readouterr().err
