"""Language models whose loss is almost that of each next token: they are left alone."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from sublight.fix.patch.record import Left
from sublight.fix.patch.rules import lm_head


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
            labels = torch.where(labels == self.config.pad_token_id, -100, labels)
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
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


class ClampedHead(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state).clamp(-1e5, 1e5)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize("kind", (MaskedLoss, PaddedLoss, WeighedLoss, DetachedHead, ClampedHead))
def test_a_loss_of_its_own_is_left(kind: Any) -> None:
    config = transformers.LlamaConfig(
        vocab_size=53, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = kind(config)
    told = lm_head.find(model, model)
    assert isinstance(told, Left), told
