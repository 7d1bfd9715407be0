"""A model's loss without its logits is its loss; what is more than a product's cross-entropy is left."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from sublight import correct
from sublight.fix.patch.model import apply, undo
from sublight.fix.patch.record import Left, Swap
from sublight.fix.patch.rules import lm_head

VOCAB, WIDTH, BATCH, TOKENS = 23, 12, 3, 7


@dataclass
class Output:
    loss: Any = None
    logits: Any = None
    cache: Any = None


@dataclass
class MoeOutput(Output):
    aux_loss: Any = None


class Body(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.seen: list[Any] = []

    def forward(self, input_ids: Any, mask: Any = None, use_cache: Any = None, **kwargs: Any) -> Any:
        self.seen.append((mask, use_cache, kwargs))
        hidden = self.inner(self.embed(input_ids))
        hidden = hidden if mask is None else hidden * mask[..., None]
        return SimpleNamespace(last_hidden_state=hidden, past=("cache", use_cache))


class Model(torch.nn.Module):
    base_model_prefix = "body"
    bias = False

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.body, self.head = Body(), torch.nn.Linear(WIDTH, VOCAB, bias=self.bias)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter)

    def get_output_embeddings(self) -> Any:
        return self.head

    def logits(self, hidden: Any) -> Any:
        return self.head(hidden)

    def loss(self, logits: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        how = "mean" if num_items_in_batch is None else "sum"
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), reduction=how)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def forward(
        self, input_ids: Any = None, mask: Any = None, labels: Any = None, use_cache: Any = None, **kwargs: Any
    ) -> Any:
        found = self.body(input_ids, mask=mask, use_cache=use_cache)
        logits = self.logits(found.last_hidden_state)
        loss = None if labels is None else self.loss(logits, labels, kwargs.get("num_items_in_batch"))
        return Output(loss=loss, logits=logits, cache=found.past)


class Tied(Model):
    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.head.weight = self.body.embed.weight


class Capped(Model):
    def logits(self, hidden: Any) -> Any:
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(self.head(hidden) / cap)


class Scaled(Model):
    def logits(self, hidden: Any) -> Any:
        return self.head(hidden) / self.config.logits_scaling


class Biased(Model):
    bias = True


class Unshifted(Model):
    def loss(self, logits: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Smoothed(Model):
    def loss(self, logits: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


class Twisted(Model):
    def logits(self, hidden: Any) -> Any:
        return torch.relu(self.head(hidden))


class Moe(Model):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        found = super().forward(input_ids=input_ids, labels=labels)
        return MoeOutput(loss=found.loss, logits=found.logits, cache=found.cache)


class Meddling(Model):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        found = self.body(input_ids, mask=torch.ones(1))
        logits = self.logits(found.last_hidden_state)
        return Output(loss=None if labels is None else self.loss(logits, labels), logits=logits)


class Deep(Model):
    def get_output_embeddings(self) -> Any:
        return self.body.inner


KNOWN = (
    (Model, {}, "loss without logits"),
    (Tied, {}, "loss without logits"),
    (Capped, {"final_logit_softcapping": 3.0}, "loss without logits, capped at 3"),
    (Scaled, {"logits_scaling": 4.0}, "loss without logits, which are scaled by 0.25"),
)
STRANGE = (
    (Biased, "not a plain product"),
    (Unshifted, "not the cross-entropy of each next token"),
    (Smoothed, "not the cross-entropy of each next token"),
    (Twisted, "more than a product"),
    (Moe, "more than its logits' loss"),
    (Meddling, "a mask of its own"),
    (Deep, "no child of its own"),
)


def batch() -> tuple[Any, Any]:
    ids = torch.randint(VOCAB, (BATCH, TOKENS))
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def swapped(model: Any) -> Any:
    swap = lm_head.find(model, model)
    assert isinstance(swap, Swap), swap
    apply(model, swap)
    return swap


def gradients(model: Any, loss: Any) -> list[Any]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("forced", (False, True))
@pytest.mark.parametrize(("kind", "config", "what"), KNOWN)
def test_loss_and_gradients_are_the_models_own(
    kind: Any, config: dict[str, Any], what: str, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forced:  # the library's op, as on a GPU
        monkeypatch.setitem(lm_head.linear_cross_entropy.__globals__, "_why_torch", lambda *_: "")
    model, (ids, labels) = kind(**config), batch()
    for more in ({}, {"num_items_in_batch": torch.tensor(5)}, {"num_items_in_batch": 5}):
        plain = model(ids, labels=labels, **more)
        expected = gradients(model, plain.loss)
        assert swapped(model).what == what
        ours = model(ids, labels=labels, **more)
        torch.testing.assert_close(ours.loss, plain.loss)
        assert ours.logits is None and ours.cache == plain.cache and type(ours) is Output
        torch.testing.assert_close(gradients(model, ours.loss), expected)
        undo(model)


@pytest.mark.parametrize(("kind", "reason"), STRANGE)
def test_what_is_more_is_left_with_its_reason(kind: Any, reason: str) -> None:
    model = kind()
    left = lm_head.find(model, model)
    assert isinstance(left, Left) and reason in left.reason


def test_other_modules_are_not_looked_at() -> None:
    assert lm_head.find(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)) is None


def test_where_logits_are_wanted_they_are_there() -> None:
    model, (ids, labels) = Model(), batch()
    swapped(model)
    assert model(ids).logits is not None
    with torch.no_grad():
        assert model(ids, labels=labels).logits is not None
    assert model(ids, labels=labels, surprise=1).logits is not None
    assert model(ids, labels=labels, return_dict=False).logits is not None
    handle = model.head.register_forward_hook(lambda *_: None)
    assert model(ids, labels=labels).logits is not None
    handle.remove()
    model._loss_function = F.cross_entropy
    assert model(ids, labels=labels).logits is not None
    del model._loss_function
    with torch.autocast("cpu", torch.float16):  # a sum may be too large for it
        assert model(ids, labels=labels, num_items_in_batch=3).logits is not None
    assert model(ids, labels=labels).logits is None


def test_nothing_of_the_model_is_changed_by_looking() -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    children, state = dict(model._modules), torch.get_rng_state()
    assert isinstance(lm_head.find(model, model), Swap)
    assert dict(model._modules) == children and torch.equal(state, torch.get_rng_state()) and not model.body.seen
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_arguments_reach_the_body_as_before_and_the_signature_stays() -> None:
    model, (ids, labels) = Model(), batch()
    mask = torch.ones(BATCH, TOKENS)
    plain = model(ids, mask, labels, True)
    swapped(model)
    ours = model(ids, mask, labels, True)
    (one, _), (other, _) = ((seen[:2], seen[2]) for seen in model.body.seen)
    assert one[0] is other[0] is mask and one[1] is other[1] is True
    torch.testing.assert_close(ours.loss, plain.loss)
    assert list(inspect.signature(model.forward).parameters) == ["input_ids", "mask", "labels", "use_cache", "kwargs"]


def test_a_batch_without_labels_of_its_own_costs_nothing_when_it_is_divided() -> None:
    model, (ids, labels) = Model(), batch()
    swapped(model)
    assert model(ids, labels=torch.full_like(labels, -100), num_items_in_batch=9).loss == 0


def test_its_argument_are_of_the_ops_shapes() -> None:
    model, (ids, labels) = Model(), batch()
    hidden, weight, target = swapped(model).arguments(model, ids, labels=labels)
    assert hidden.shape == (BATCH, TOKENS, WIDTH) and weight.shape == (VOCAB, WIDTH) and target.shape == ids.shape


def outcome(model: Any, ids: Any, labels: Any) -> list[Any]:
    """The loss and the gradient of every parameter."""
    loss = model(ids, labels=labels).loss
    return [loss.detach(), *gradients(model, loss)]


def errors_in_16_bits(kind: Any, config: dict[str, Any], device: str, *, autocast: bool) -> list[correct.Error]:
    """Of the swapped model, beside those of PyTorch's, against the same weights in float64."""
    model, (ids, labels) = kind(**config).to(device), (x.to(device) for x in batch())
    if not autocast:
        model = model.bfloat16()
    truth = outcome(copy.deepcopy(model).double(), ids, labels)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        theirs = outcome(model, ids, labels)
        swapped(model)
        assert model(ids, labels=labels).logits is None
        ours = outcome(model, ids, labels)
    assert ours[0].dtype == torch.float32
    return [correct.error(f"result {i}", *three) for i, three in enumerate(zip(ours, theirs, truth, strict=True))]


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", (False, True))
@pytest.mark.parametrize(("kind", "config", "what"), KNOWN)
def test_on_a_gpu_loss_and_gradients_are_as_right_as_pytorchs(
    kind: Any, config: dict[str, Any], what: str, autocast: bool
) -> None:
    error = correct.settled(lambda seed: errors_in_16_bits(kind, config, "cuda", autocast=autocast), 4, times=16)
    assert error.ok, error
