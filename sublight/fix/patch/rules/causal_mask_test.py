"""A compiled model skips the mask that eager skips, and no other."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from transformers.masking_utils import create_causal_mask

from sublight.fix.patch import model as patching
from sublight.fix.patch.conftest import error_of_all
from sublight.fix.patch.model import is_patched, patch, unpatch
from sublight.fix.patch.record import Rule, Swap
from sublight.fix.patch.rules import RULES, causal_mask, residual_norm
from sublight.ops.norm import add_norm

ONLY = (causal_mask.CAUSAL_MASK,)
VOCAB, BATCH, TOKENS = 53, 2, 7
SDPA = {"attn_implementation": "sdpa"}
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "eos_token_id": None}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MIXED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
NEWER = pytest.mark.skipif(
    "cache_position" in inspect.signature(create_causal_mask).parameters, reason="calls it as transformers 5 has it"
)
BARE, MASKED = (True, False), (False, True)  # is_causal, a mask
FAMILIES: dict[str, tuple[str, str, dict[str, Any], list[Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", SIZES, [BARE, BARE]),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SIZES, [BARE, BARE]),
    "Mistral": ("MistralForCausalLM", "MistralConfig", SIZES | {"sliding_window": None}, [BARE, BARE]),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", SIZES | MIXED, [BARE, MASKED]),
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", GPT2 | DROPOUT, [BARE, BARE]),
}


def built(family: str, **more: Any) -> Any:
    name, config, sizes, _ = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**{**sizes, **SDPA, **more}))


def ids() -> Any:
    return torch.randint(2, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def compiled(model: Any, seen: list[Any], **options: Any) -> Any:
    """The model in one graph, and in `seen` what SDPA is called with there."""

    def backend(graph: Any, _: Any) -> Any:
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        for node in (node for part in parts for node in part.graph.nodes):
            if "scaled_dot_product" in str(node.target):
                seen.append((node.kwargs["is_causal"], node.kwargs["attn_mask"] is not None))
        return graph

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True, **options)


def step(call: Any, model: Any, **batch: Any) -> tuple[Any, ...]:
    """Logits, and the gradients of their loss."""
    model.zero_grad()
    logits = call(**batch).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids().flatten()).backward()
    return logits.detach(), *[parameter.grad.clone() for parameter in model.parameters()]


def in_double(model: Any) -> Any:
    return copy.deepcopy(model).double()


def check(*results: Any) -> None:
    """Ours, PyTorch's and the truth, each a tensor or several: by the rule."""
    error = error_of_all(*([each] if isinstance(each, torch.Tensor) else each for each in results))
    assert error.ok, error


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("use_cache", (False, True))  # which the forward then makes
def test_a_compiled_model_skips_what_eager_skips(family: str, use_cache: bool) -> None:
    model, seen, batch = built(family), [], {"input_ids": ids(), "use_cache": use_cache}
    expected, exact = step(model, model, **batch), in_double(model)
    truth = step(exact, exact, **batch)
    changes = patch(model, rules=ONLY)
    assert changes.swapped == 1 and changes.rows[0].reason == "under torch.compile, the mask that eager skips"
    assert all(map(torch.equal, step(model, model, **batch), expected))  # eager: nothing has changed
    check(step(compiled(model, seen), model, **batch), expected, truth)
    assert seen == FAMILIES[family][3]
    assert unpatch(model) == 1 and "forward" not in vars(model.base_model)


def positions(kind: str) -> Any:
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])
    return packed if kind == "packed" else torch.arange(TOKENS)[None].expand(BATCH, -1)


def given(kind: str, model: Any) -> dict[str, Any]:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    if kind == "padded":
        mask[0, :3] = 0
    if kind in ("packed", "counted"):
        return {"position_ids": positions(kind), "use_cache": False}
    if kind in ("padded", "full"):
        return {"attention_mask": mask, "use_cache": False}
    if kind == "embedded":
        return {"inputs_embeds": model.get_input_embeddings()(ids()).detach(), "use_cache": False}
    with torch.no_grad():
        cache = model(ids(), use_cache=True).past_key_values
    return {"past_key_values": cache, "use_cache": True}


@pytest.mark.parametrize(
    ("family", "kind"),
    [("Llama", kind) for kind in ("packed", "counted", "padded", "full", "cache", "embedded")]
    + [(family, kind) for family in ("Gemma3", "GPT2") for kind in ("packed", "padded", "cache")],
)
def test_what_is_passed_keeps_the_mask(family: str, kind: str) -> None:
    model, seen = built(family).eval(), []
    batch = {"input_ids": ids()} if kind != "embedded" else {}
    expected = model(**batch, **given(kind, model)).logits
    exact = in_double(model)
    truth = exact(**batch, **given(kind, exact)).logits
    if kind == "packed":
        assert (expected - model(**batch).logits).abs().max() > 1e-3
    patch(model, rules=ONLY)
    ours = compiled(model, seen)(**batch, **given(kind, model)).logits
    check(ours, expected, truth)
    assert seen == (FAMILIES[family][3] if kind == "embedded" else [MASKED, MASKED])


@pytest.mark.parametrize("use_cache", (False, True))
def test_shapes_may_change(use_cache: bool) -> None:
    model, seen = built("Llama").eval(), []
    whole = ids().repeat(1, 3)

    def logits(call: Any) -> list[Any]:
        return [call(input_ids=whole[:, :n], use_cache=use_cache).logits for n in (7, 1, 9, 13)]

    expected, truth = logits(model), logits(in_double(model))
    patch(model, rules=ONLY)
    check(logits(compiled(model, seen, dynamic=True)), expected, truth)
    assert not any(masked for _, masked in seen)


@pytest.mark.parametrize("strict", (False, True))
def test_an_export_is_as_before(strict: bool) -> None:
    model, batch = built("Llama").eval(), {"input_ids": ids(), "use_cache": False}

    def exported() -> str:
        torch._dynamo.reset()
        return str(torch.export.export(model, (), batch, strict=strict).graph)

    plain, truth = exported(), in_double(model)(**batch).logits
    patch(model, rules=ONLY)
    assert exported() == plain and "expand" in plain
    seen: list[Any] = []
    check(compiled(model, seen)(**batch).logits, model(**batch).logits, truth)
    assert seen == [BARE, BARE]


def test_copies_pickles_and_checkpoints() -> None:
    model, batch = built("Llama"), {"input_ids": ids(), "use_cache": False}
    expected, seen, exact = step(model, model, **batch), [], in_double(model)
    truth = step(exact, exact, **batch)
    patch(model, rules=ONLY)
    copied = copy.deepcopy(model)
    assert is_patched(copied.model) and copied.model.forward.__self__ is copied.model
    check(step(compiled(copied, seen), copied, **batch), expected, truth)
    assert seen == [BARE, BARE]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not is_patched(loaded.model)
    assert torch.equal(step(loaded, loaded, **batch)[0], expected[0])
    model.gradient_checkpointing_enable()
    seen.clear()
    check(step(compiled(model.train(), seen), model, **batch), expected, truth)
    assert set(seen) == {BARE}


def test_other_attentions_and_windows_are_left() -> None:
    for model, reason in (
        (built("Llama", attn_implementation="eager"), "its attention is eager"),
        (built("Mistral", sliding_window=4), "a sliding window"),
    ):
        (row,) = patch(model, rules=ONLY).rows
        assert not row.is_swapped and reason in row.reason
    assert not patch(torch.nn.Linear(2, 2), rules=ONLY).rows


def test_an_attention_that_is_set_later_is_obeyed() -> None:
    model, batch, seen = built("Llama").eval(), {"input_ids": ids(), "use_cache": False}, []
    truth = in_double(model)(**batch).logits
    patch(model, rules=ONLY)
    model.set_attn_implementation("eager")
    expected = model(**batch).logits
    check(compiled(model, seen)(**batch).logits, expected, truth)


def test_another_function_under_its_name_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = built("Llama").eval(), []
    patch(model, rules=ONLY)

    def mine(**named: Any) -> Any:
        return torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)

    monkeypatch.setitem(inspect.unwrap(type(model.model).forward).__globals__, "create_causal_mask", mine)
    compiled(model, seen)(input_ids=ids(), use_cache=False)
    assert seen == [MASKED, MASKED]


def test_all_rules_at_once_batch_or_not() -> None:
    batch = {"input_ids": ids(), "labels": ids(), "use_cache": False}
    for more in ((), (batch,)):
        model, seen = built("Llama"), []

        def results(call: Any, model: Any) -> list[Any]:
            loss = call(**batch).loss
            return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

        exact = in_double(model)
        theirs, truth = results(model, model), results(exact, exact)
        (row,) = (row for row in patch(model, *more, rules=RULES).rows if row.rule == "causal_mask")
        assert row.is_swapped and row.kind == "LlamaModel" and row.reason == causal_mask.WHY
        check(results(compiled(model, seen), model), theirs, truth)
        assert seen == [BARE, BARE]


def test_what_a_step_costs_does_not_undo_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it timed: an eager step has nothing to tell."""
    asked: list[Any] = []

    def undoing(model: Any, batch: Any, rules: Any, apply: Any) -> Any:
        asked.extend(rules)
        apply([])
        return SimpleNamespace(undone=[(rule, 1.0) for rule in rules])

    monkeypatch.setattr(patching, "keep_what_pays", undoing)
    swap = Swap(rule="own", forward=lambda self, x: x, op="softmax", arguments=lambda module, x: (x,))
    monkeypatch.setattr(patching, "asked", lambda model, found, batch: found)
    own = Rule(name="own", find=lambda module, model: swap if isinstance(module, torch.nn.Embedding) else None)
    model = built("Llama")
    report = patch(model, measure={"input_ids": ids()}, rules=(own, *ONLY))
    assert asked == ["own"] and {row.rule: row.is_swapped for row in report.rows} == {"own": False, "causal_mask": True}
    assert is_patched(model.model) and not is_patched(model.model.embed_tokens)


class Both(torch.nn.Module):
    """A forward in which two rules find something."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.norm = config, torch.nn.RMSNorm(8, eps=1e-6)

    def forward(
        self, inputs_embeds: Any, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None
    ) -> Any:
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        mask = create_causal_mask(self.config, inputs_embeds, attention_mask, past_key_values, position_ids)
        total = inputs_embeds + inputs_embeds.square()
        x = self.norm(total)
        return total + torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=mask is None)


def looking_back(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return kv <= q - 2


OTHERWISE: dict[str, dict[str, Any]] = {
    "more is seen": {"or_mask_function": looking_back},
    "less is seen": {"and_mask_function": looking_back},
    "it is asked for": {"allow_is_causal_skip": False},
    "positions of unknown origin": {"position_ids": torch.arange(TOKENS)[None]},
    "a mask": {"attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.int64)},
}


@NEWER
@pytest.mark.parametrize("more", OTHERWISE)
def test_a_call_that_asks_for_more_gets_its_mask(more: str) -> None:
    config, x = transformers.LlamaConfig(**SIZES, **SDPA), torch.randn(BATCH, TOKENS, 32)
    maker = causal_mask.chosen_for(create_causal_mask)

    def made(bare: bool, **options: Any) -> Any:
        given = {"config": config, "inputs_embeds": x, "attention_mask": None, "past_key_values": None, **options}
        torch._dynamo.reset()
        call = torch.compile(lambda: (x + 1, maker(create_causal_mask, bare)(**given)), backend="eager")
        return call()[1]  # beside a sum, for a graph without any operation would be run in eager mode

    assert made(True) is None
    assert torch.equal(made(True, **OTHERWISE[more]), made(False, **OTHERWISE[more]))


@NEWER
def test_another_mask_registered_for_sdpa_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = built("Llama").eval(), []
    patch(model, rules=ONLY)
    masks = sys.modules["transformers.masking_utils"].ALL_MASK_ATTENTION_FUNCTIONS
    kept = masks["sdpa"]

    def mine(*args: Any, **named: Any) -> Any:
        return kept(*args, **{**named, "allow_is_causal_skip": False})

    monkeypatch.setitem(masks._global_mapping, "sdpa", mine)
    compiled(model, seen)(input_ids=ids(), use_cache=False)
    assert seen == [MASKED, MASKED]


@NEWER
def test_two_rules_share_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(add_norm, "not_ours", lambda *_: ran.append(1) or "")
    config = transformers.LlamaConfig(**SIZES, **SDPA)
    module, x = torch.nn.Sequential(Both(config)), torch.randn(BATCH, TOKENS, 8)
    expected, truth = module(x), in_double(module)(x.double())
    changes = patch(module, rules=(residual_norm.RESIDUAL_NORM, *ONLY))
    assert {row.rule: row.is_swapped for row in changes.rows} == {"residual_norm": True, "causal_mask": True}
    check(module(x), expected, truth)
    assert ran
    seen: list[Any] = []
    check(compiled(module, seen)(x), expected, truth)
    assert seen == [BARE]
    copied = copy.deepcopy(module)
    assert unpatch(copied) == unpatch(module) == 1 and not is_patched(copied[0])
    assert torch.equal(module(x), expected)


def test_a_forward_that_is_wholly_another_rules_has_no_room() -> None:
    def find(module: Any, model: Any) -> Any:
        if not hasattr(module, "embed_tokens"):
            return None
        return Swap(rule="own", forward=lambda self, *args, **named: None, why="because")

    model = built("Llama")
    rows = {row.rule: row for row in patch(model, rules=(Rule(name="own", find=find), *ONLY)).rows}
    assert rows["own"].reason == "because" and not rows["causal_mask"].is_swapped
    assert rows["causal_mask"].reason == "own gives it another forward"


COUNTED = (
    "pass",
    "position_ids = torch.arange(x.shape[1], device=x.device)",
    "n = past.get_seq_length() if past is not None else 0\n position_ids = torch.arange(x.shape[1]) + n\n"
    " position_ids = position_ids.unsqueeze(0)",
    "cache_position: int = torch.arange(n, n + x.shape[1])\n position_ids = cache_position.unsqueeze(0).expand(b, -1)",
    "position_ids = torch.arange(x.shape[1])[None, :]",
)
NOT_COUNTED = (
    "position_ids = attention_mask.long().cumsum(-1) - 1",
    "position_ids = torch.arange(0, x.shape[1], 2)",
    "position_ids = torch.arange(x.shape[1], out=y)",
    "position_ids = torch.arange(x.shape[1]) + offsets",
    "position_ids = torch.arange(x.shape[1]) * 2",
    "n = jumps(x)\n position_ids = torch.arange(x.shape[1]) + n",
    "position_ids = torch.arange(x.shape[1])\n position_ids[3:] = 0",
    "position_ids = torch.arange(x.shape[1])\n position_ids += jumps",
    "position_ids = torch.arange(x.shape[1])\n position_ids.remainder_(3)",
    "position_ids, y = self.made(x)",
    "for position_ids in y: pass",
    "position_ids = self.positions(x)",
    "position_ids = torch.arange(x.shape[1]).unsqueeze(1)",
    "position_ids = torch.arange(x.shape[1]).view(1, 1, -1).expand(3, b, -1)",
    "cache_position = self.made(x)\n position_ids = cache_position.unsqueeze(0)",
    "if (position_ids := self.made(x)): pass",
    "position_ids = y",
)


@pytest.mark.parametrize("body", (*COUNTED, *NOT_COUNTED))
def test_only_plain_counts_are_taken_for_one_sequence(body: str) -> None:
    tree: Any = ast.parse(f"def forward(self, x, position_ids=None, cache_position=None):\n {body}").body[0]
    assert causal_mask.is_counted("position_ids", tree) == (body in COUNTED)
