"""Each cure on a script's own objects: it changes what it says, keeps the numbers, tells where, and leaves again."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import sublight
from sublight import correct
from sublight.errors import BadInput
from sublight.fix.cure import CURES, diff, find, pinned, treating
from sublight.fix.cure.autocast import casting
from sublight.fix.cure.first_call import at_first_call, models, precision
from sublight.fix.cure.optimizer import fuse, line_for
from sublight.fix.cure.place import loop_around
from sublight.fix.cure.record import Changes
from sublight.fix.graph import callable as graphs
from sublight.fix.graph.fake import Fake
from sublight.fix.patch.model import is_patched

pytestmark = pytest.mark.usefixtures("own_models")


def test_names_and_findings() -> None:
    assert len({cure.name for cure in CURES}) == len(CURES)
    assert {cure.name for cure in treating(["unfused-pointwise"])} == {"patch activations", "compile"}
    assert treating(["host-sync"]) == []
    assert line_for("AdamW") == "sublight.patch(optimizer)" and "fused=True" in line_for("SGD")


@pytest.mark.parametrize("cure", CURES, ids=lambda cure: cure.name)
def test_a_cure_that_finds_nothing_says_so_and_leaves_no_trace(cure: Any) -> None:
    names = (torch.Tensor.to, torch.Tensor.cuda, torch.cuda.empty_cache, DataLoader.__init__, torch.nn.Module.__call__)
    changes = Changes()
    with cure.install(changes):
        pass
    after = (torch.Tensor.to, torch.Tensor.cuda, torch.cuda.empty_cache, DataLoader.__init__, torch.nn.Module.__call__)
    assert after == names and not changes.edits
    assert cure.name in changes.left or cure.name in changes.did


def test_models_are_roots_and_the_called_one_comes_first() -> None:
    other, model = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))
    found = models(model[0])
    assert found[0] is model and other in found and model[0] not in found
    calls: list[Any] = []
    with at_first_call(calls.append):
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert len(calls) == 1


def test_norms_and_activations_are_patched_apart() -> None:
    changes, x = Changes(), torch.randn(4, 16)
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.GELU())
    before, truth = model(x), copy.deepcopy(model).double()(x.double())
    with find("patch norms").install(changes):
        model(x)
    assert is_patched(model[0]) and not is_patched(model[2])
    with find("patch activations").install(changes):
        model(x)
    assert is_patched(model[2]) and set(changes.did) == {"patch norms", "patch activations"} and not changes.left
    assert (error := correct.error("y", *(y.detach() for y in (model(x), before, truth)))).ok, error


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_an_optimizer_is_fused_at_its_first_step(kind: str) -> None:
    changes = Changes()
    nets = [torch.nn.Linear(4, 4) for _ in range(3)]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    exact = nets[2].double()
    optimizer = getattr(torch.optim, kind)(nets[0].parameters(), lr=0.1)
    other, third = (getattr(torch.optim, kind)(net.parameters(), lr=0.1) for net in nets[1:])

    def step(net: Any, by: Any) -> None:
        net(torch.ones(2, 4, dtype=net.weight.dtype)).square().mean().backward()
        by.step()
        by.zero_grad()

    with find("fused optimizer").install(changes):
        for _ in range(3):
            step(nets[0], optimizer)
    for _ in range(3):
        step(nets[1], other)
        step(exact, third)
    assert optimizer.param_groups[0]["fused"] and changes.did == {"fused optimizer": f"{kind}: fused=True"}
    assert (error := correct.error("weight", *(net.weight.detach() for net in nets))).ok, error
    assert fuse(optimizer) == "it is fused already"
    assert ("state" in fuse(other)) == bool(other.state)
    assert fuse(torch.optim.Rprop(nets[0].parameters())) == "PyTorch has no fused one"


def test_a_model_without_gradients_is_graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "Graph", functools.partial(graphs.Graph, backend=Fake()))
    changes, model = Changes(), torch.nn.Linear(4, 4)
    xs = [torch.randn(2, 4) for _ in range(8)]
    with torch.no_grad():
        eager = [model(x) for x in xs]
        with find("graph").install(changes):
            model(xs[0])
            given = [model(x) for x in xs]
    assert all(torch.equal(one, other) for one, other in zip(given, eager, strict=True))
    assert changes.did == {"graph": "1 graph captured"} and "graph" not in changes.left


def test_a_model_that_trains_is_not_graphed() -> None:
    changes, model = Changes(), torch.nn.Linear(4, 4)
    with find("graph").install(changes):
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
    assert "step = sublight.graph(step)" in changes.left["graph"] and not changes.did


def test_a_loader_gets_workers_unless_it_has_some() -> None:
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter([1])

    changes, items = Changes(), TensorDataset(torch.arange(4))
    with find("loader workers").install(changes):
        assert DataLoader(items).num_workers > 0
        assert DataLoader(items, num_workers=1).num_workers == 1
        assert DataLoader(Stream()).num_workers == 0
    assert DataLoader(items).num_workers == 0
    assert "4 batches" in changes.did["loader workers"]
    with find("loader workers").install(changes := Changes()):
        DataLoader(TensorDataset(torch.arange(1000)))
        DataLoader(items, num_workers=0, persistent_workers=False)
    assert "an epoch has 4 batches, and starts its workers first" in changes.did["loader workers"]
    with find("loader workers").install(changes := Changes()):
        DataLoader(TensorDataset(torch.arange(1000)))
    assert changes.did["loader workers"].endswith("that had none")


class Changing(Dataset):  # type: ignore[type-arg]
    """Items that know which epoch it is."""

    epoch = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return 10 * self.epoch + index


def test_workers_give_what_the_script_had() -> None:
    def epochs() -> list[int]:
        torch.manual_seed(0)
        items = Changing()
        loader, given = DataLoader(items, shuffle=True), []
        for items.epoch in range(3):
            given += [int(item) for item in loader]
        return given

    before = epochs()
    with find("loader workers").install(changes := Changes()):
        assert epochs() == before and changes.did


def test_the_cache_is_kept() -> None:
    changes = Changes()
    with find("keep the cache").install(changes):
        torch.cuda.empty_cache()
        torch.cuda.empty_cache()
    assert changes.did and not changes.left


def test_which_copies_are_taken() -> None:
    batch, small = torch.zeros(1 << 16), torch.zeros(4)
    assert pinned.takes(small, ("cuda",), {}) is None
    assert pinned.takes(batch, ("cpu",), {}) is None
    assert pinned.takes(batch, (torch.float16,), {}) is None
    assert pinned.takes(batch, ("cuda", torch.float16), {}) is None  # the cast is the script's own
    assert pinned.takes(torch.nn.Parameter(batch), ("cuda",), {}) is None
    assert pinned.takes(batch, ("nowhere",), {}) is None


def test_a_batch_that_comes_again_is_pinned_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            asked.append((address, size))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(pinned, "MOST_BYTES", 3 << 10)
    copier = pinned.Copier(torch.Tensor.to, Changes())
    batches = torch.zeros(2, 256)
    assert not copier._pin(batches[0]) and copier._pin(batches[1]), "two views of one tensor"
    assert copier._pin(batches[0]) and asked == [(batches.data_ptr(), 2048)]
    assert not any(copier._pin(torch.zeros(64)) for _ in range(4)), "new ones each time, maybe at one address"
    large = torch.zeros(512)
    assert not copier._pin(large) and not copier._pin(large), "over the budget"


def test_autocast_around_a_forward() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.randn(8, 4)
    result = casting(lambda x: {"y": layer(x), "count": 3, "kind": layer(x).dtype}, "cpu")(x)
    assert result["count"] == 3 and result["kind"] == torch.bfloat16 and layer.weight.dtype == torch.float32
    assert torch.equal(result["y"].bfloat16().float(), result["y"]) and not torch.equal(result["y"], layer(x))
    torch.nn.functional.mse_loss(result["y"], torch.randn(8, 4)).backward()  # a loss of float32, as the script has it
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


SCRIPT = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

class Trainer:
    def __init__(self):
        self.model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.GELU())

    def run(self):
        return self.model(torch.ones(1, 4))

def train(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.cuda.empty_cache()

Trainer().run()
loader = DataLoader(TensorDataset(torch.ones(4)))
model = torch.nn.LayerNorm(4)
train(model)
"""


@pytest.mark.parametrize(
    ("name", "line", "text"),
    [
        ("patch norms", 9, 'sublight.patch(self.model, only=["norm"])'),
        ("patch activations", 9, 'sublight.patch(self.model, only=["activation"])'),
        ("fused optimizer", 12, "fused=True"),
        ("loader workers", 18, "num_workers="),
        ("keep the cache", 15, "pass"),
    ],
)
def test_where_the_line_goes(tmp_path: Path, name: str, line: int, text: str) -> None:
    file, changes = tmp_path / "train.py", Changes()
    file.write_text(SCRIPT)
    with find(name).install(changes):
        exec(compile(SCRIPT, str(file), "exec"), {"__name__": "__main__"})
    edit = changes.edits[0]
    assert (edit.file, edit.line) == (str(file), line) and edit.text.startswith(text)
    after = diff.edited(SCRIPT, changes.edits)
    assert text in after and compile(after, "after", "exec")


REPLACED = """\
import torch

def steps(model):
    for _ in range(2):
        for x in torch.randn(3, 2, 8):
            out = model(x)
    return out

net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(8, 8))
net[0] = torch.nn.LayerNorm(8)
assert not hasattr(net[0], "__sublight__")
result = steps(net)
"""


def test_a_line_goes_behind_all_that_was_done_to_the_model(tmp_path: Path) -> None:
    """Right after the model is made, its children may still be replaced: the cure ran at the first call."""
    file, changes = tmp_path / "train.py", Changes()
    file.write_text(REPLACED)
    with find("patch norms").install(changes):
        exec(compile(REPLACED, str(file), "exec"), {"__name__": "__main__"})
    (edit,) = changes.edits
    assert (edit.line, edit.text) == (12, 'sublight.patch(net, only=["norm"])')
    after = diff.edited(REPLACED, changes.edits)
    names: dict[str, Any] = {}
    exec(compile(after, "after", "exec"), names)
    assert is_patched(names["net"][0]), "the replaced child has our forward: the diff does what the cure did"


@pytest.mark.parametrize(
    ("source", "line", "place"),
    [
        ("a = f()\nfor b in c:\n    while b:\n        a(b)\n", 4, 2),
        ("def g(a):\n    for b in c:\n        a(b)\n", 3, 2),
        ("for g in h:\n    def k(a):\n        a(1)\n", 3, 3),  # another frame's loop
        ("with a:\n    b(\n        c,\n    )\n", 3, 2),
        ("if a:\n    b = 1\nelse:\n    b()\n", 4, 4),
        ("a = (", 1, 0),
    ],
)
def test_a_line_before_the_loop(source: str, line: int, place: int) -> None:
    assert loop_around(source, line, 1) == place


@pytest.mark.gpu
def test_batches_come_whole_through_pinned_memory() -> None:
    changes = Changes()
    batches = [torch.randn(1 << 18) for _ in range(2)]
    with find("pinned copies").install(changes):
        for number in range(6):
            batch = batches[number % 2]
            batch.fill_(number)
            moved = batch.to("cuda")
            batch.fill_(-1)  # at once: what was copied must be what stood there
            assert moved.mean().item() == number
            fresh = torch.full((1 << 18,), float(number)).cuda()
            assert fresh.mean().item() == number
    assert changes.did and not changes.left
    assert batches[0].to("cuda").sum().item() == -(1 << 18)


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_graphed_and_right() -> None:
    changes, model = Changes(), torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).cuda()
    xs = [torch.randn(8, 64, device="cuda") for _ in range(12)]
    with torch.no_grad():
        eager = [model(x) for x in xs]
        with find("graph").install(changes):
            model(xs[0])
            given = [model(x) for x in xs]
    assert all(torch.equal(one, other) for one, other in zip(given, eager, strict=True)) and changes.did


def test_a_cure_says_in_which_data_type_it_runs() -> None:
    model = torch.nn.Linear(4, 4)
    assert precision(model) == "float32" and precision(model.bfloat16()) == "bfloat16"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert precision(model.float()) == "float32, products in bfloat16"
    changes, norm = Changes(), torch.nn.Sequential(torch.nn.LayerNorm(4)).half()
    with find("patch norms").install(changes):
        norm(torch.ones(1, 4, dtype=torch.float16))
    assert changes.did["patch norms"].startswith("1 module swapped: LayerNorm (LayerNorm); in float16;")


LOGITS = """\
import torch
from sublight.fix.patch.rules.lm_head_test import Model
model = Model()
model.body.inner = torch.nn.LayerNorm(12)
ids = torch.randint(23, (2, 5))
for _ in range(2):
    out = model(input_ids=ids, labels=ids)
    best = out.logits.argmax(-1)
"""


def test_a_line_patches_what_the_cure_patched_and_no_more(tmp_path: Path) -> None:
    """A loop that reads its logits: the cure of norms leaves them, and sublight.patch(model) does not."""
    file, changes = tmp_path / "train.py", Changes()
    file.write_text(LOGITS)
    with find("patch norms").install(changes):
        exec(compile(LOGITS, str(file), "exec"), {})
    assert [edit.text for edit in changes.edits] == ['sublight.patch(model, only=["norm"])']
    after = diff.edited(LOGITS, changes.edits)
    names: dict[str, Any] = {}
    exec(compile(after, "after", "exec"), names)
    assert is_patched(names["model"].body.inner) and names["best"].shape == (2, 5)
    with pytest.raises(AttributeError, match="argmax"):
        exec(compile(after.replace(', only=["norm"]', ""), "all", "exec"), {})
    with pytest.raises(BadInput, match="unknown rule 'norms'"):
        sublight.patch(names["model"], only=["norms"])
