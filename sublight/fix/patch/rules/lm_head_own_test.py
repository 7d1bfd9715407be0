"""Language models whose loss is almost that of each next token: they are left alone."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from sublight.fix.patch.model import patch
from sublight.fix.patch.record import Left, Swap
from sublight.fix.patch.rules import lm_head

VOCAB = 53


class MaskedLoss(transformers.LlamaForCausalLM):
    """Leaves out what the attention mask marks."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if labels is not None and attention_mask is not None:
            labels = labels.masked_fill(attention_mask == 0, -100)
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)


class PaddedLoss(transformers.LlamaForCausalLM):
    """Leaves out padding tokens."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if labels is not None:
            labels = torch.where(labels == 0, -100, labels)
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def weighing(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
    weight = torch.ones(vocab_size, dtype=logits.dtype)
    weight[7] = 3.0
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight)


class WeighedLoss(transformers.LlamaForCausalLM):
    """One class counts three times."""

    @property
    def loss_function(self) -> Any:
        return weighing


class DetachedHead(transformers.LlamaForCausalLM):
    """Its logits' gradient does not reach the body."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state.detach()
        logits = self.lm_head(hidden)
        loss = None if labels is None else self.loss_function(logits, labels, VOCAB)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


class ClampedHead(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state).clamp(-1e5, 1e5)
        loss = None if labels is None else self.loss_function(logits, labels, VOCAB)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


class OwnHead(transformers.LlamaForCausalLM):
    """A right one, whose loss may be made another below."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state)
        loss = None if labels is None else self.of(self.loss_function(logits, labels, VOCAB), logits)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    def of(self, loss: Any, logits: Any) -> Any:
        return loss


class LongerCountsMore(OwnHead):
    def of(self, loss: Any, logits: Any) -> Any:
        return loss * (logits.shape[1] // 6 + 1)


class LongerIsSharper(OwnHead):
    def of(self, loss: Any, logits: Any) -> Any:
        return loss * torch.tensor(logits.shape[1] // 6 + 1)


class HalvedInBfloat16(OwnHead):
    def of(self, loss: Any, logits: Any) -> Any:
        return loss * 0.5 if logits.dtype == torch.bfloat16 else loss


class DividedByLength(transformers.LlamaForCausalLM):
    """Of a trial's tokens two are left out."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state)
        loss = None
        if labels is not None:
            flat, following = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(flat, following, reduction="sum")
            loss = loss / (labels.shape[0] * (labels.shape[1] - 1) - 2)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


def answer_for(kind: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = kind(config)
    return lm_head.find(model, model)


@pytest.mark.parametrize("kind", (MaskedLoss, PaddedLoss, WeighedLoss, DetachedHead, ClampedHead))
def test_a_loss_of_its_own_is_left(kind: Any) -> None:
    answer = answer_for(kind)
    assert isinstance(answer, Left) and "not proven" in answer.reason, answer


class Configured(OwnHead):
    def of(self, loss: Any, logits: Any) -> Any:
        return loss / self.config.logit_divisor


def test_what_it_reads_of_its_config_is_compared() -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, eos_token_id=None, logit_divisor=1.0,
    )  # fmt: skip
    model = Configured(config)
    assert patch(model, rules=(lm_head.LM_HEAD,)).swapped == 1
    ids = torch.randint(VOCAB, (2, 5))
    before = model(input_ids=ids, labels=ids).loss
    config.logit_divisor = 2.0
    with pytest.warns(UserWarning, match="has changed since sublight.patch"):
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, before / 2)


@pytest.mark.parametrize("kind", (LongerCountsMore, LongerIsSharper, HalvedInBfloat16, DividedByLength))
def test_a_loss_that_is_another_elsewhere_is_left(kind: Any) -> None:
    """At a trial's length, in float64, each is that of each next token."""
    answer = answer_for(kind)
    assert isinstance(answer, Left) and "does otherwise" in answer.reason, answer
    assert isinstance(answer_for(OwnHead), Swap)
