"""The model against Hugging Face's, and its two modes against each other."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import torch

from sublight import correct
from sublight.engines.train import huggingface
from sublight.engines.train.gpt2 import Gpt2, parameter_groups
from sublight.engines.train.layers import ATTENTIONS, Attention, Mode
from sublight.engines.train.shape import Shape
from sublight.errors import BadInput

SHAPE = Shape(layers=2, dim=32, heads=2, context=12, vocab=50)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random model of theirs, and the folder that it is saved in."""
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, n_positions=12, vocab_size=50, bos_token_id=None, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():  # norms and biases would be ones and zeros, which hide a swap
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize(("mode", "attention"), [("eager", "naive"), ("eager", "flash"), ("ours", "ours")])
def test_logits_are_hugging_faces(theirs: tuple[Any, Path], mode: Mode, attention: Attention) -> None:
    """No further from their float64 model than twice what their own float32 is."""
    model, folder = theirs
    ours = Gpt2(huggingface.read_shape(folder), mode=mode, attention=attention).eval()
    huggingface.load(ours, folder)
    exact = copy.deepcopy(model).double()

    @torch.no_grad()
    def draw(seed: int) -> list[correct.Error]:
        ids = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(seed))
        return [correct.error("logits", ours.logits(ids), model(ids).logits, exact(ids).logits)]

    assert correct.settled(draw).ok


def test_what_is_saved_is_what_they_load(theirs: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = theirs
    ours = Gpt2(SHAPE)
    huggingface.load(ours, folder)
    huggingface.save(ours, tmp_path / "out")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(0, 50, (2, 7))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "takes gpt2"),
        ({"activation_function": "relu"}, "activation_function"),
        ({"n_inner": 17}, "n_inner"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"n_layer": "2"}, "n_layer = '2', which is no size"),
        ({"n_embd": [32]}, "which is no size"),
        ({"n_positions": 10**30}, "n_positions"),
        ({"n_layer": 3}, "lacks transformer.h.2."),
        ({"n_positions": 9}, "wpe.weight"),
    ],
)
def test_what_does_not_fit_is_refused(
    theirs: tuple[Any, Path], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    _, folder = theirs
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(BadInput, match=words):
        huggingface.load(Gpt2(huggingface.read_shape(tmp_path)), tmp_path)


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(BadInput, match="no JSON object"):
        huggingface.read_shape(tmp_path)


def test_half_a_file_is_refused(theirs: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = theirs
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(BadInput, match="save the model again"):
        huggingface.load(Gpt2(SHAPE), tmp_path)


def results(seed: int, mode: Mode, attention: Attention, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and every gradient in one row."""
    model = Gpt2(SHAPE, mode=mode, attention=attention, compute=dtype).initialize(seed).to(dtype)
    ids = torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(seed))
    loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    grads = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    assert len(grads) == len(list(model.parameters()))
    return loss.detach(), torch.cat(grads)


def test_ours_learns_what_pytorchs_does() -> None:
    def draw(seed: int) -> list[correct.Error]:
        truth = results(seed, "eager", "naive", torch.float64)
        theirs, ours = (results(seed, *how, torch.float32) for how in (("eager", "naive"), ("ours", "ours")))
        return [correct.error(*each) for each in zip(("loss", "gradients"), ours, theirs, truth, strict=True)]

    assert correct.settled(draw).ok


def test_a_seed_gives_the_same_weights() -> None:
    one, same, other = (Gpt2(SHAPE).initialize(seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, one.parameters(), same.parameters()))
    assert not torch.equal(one.tokens, other.tokens)


def test_matrices_decay_and_vectors_do_not() -> None:
    decayed, plain = parameter_groups(Gpt2(SHAPE), 0.1)
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in plain["params"]} == {1}
    assert sum(p.numel() for group in (decayed, plain) for p in group["params"]) == SHAPE.parameters


def test_cudnn_needs_a_gpu() -> None:
    assert "cudnn" in ATTENTIONS
    with pytest.raises(BadInput, match="needs an NVIDIA GPU"):
        Gpt2(SHAPE, attention="cudnn")
