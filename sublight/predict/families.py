"""What each model_type means: its config's fields, and what its class does that no field says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sublight.errors import BadInput
from sublight.predict.fields import Fields
from sublight.predict.model import Block, Experts, Latent, Model, Stage

MOST_LAYERS = 10_000  # more is a slip
WINDOWED = (  # others read no window
    *("mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe"),
    *("gemma2", "gemma3_text", "gpt_oss"),
)
EXPANSION = 4  # channels that a bottleneck puts out for one of its 3x3 convolution
PATTERNS = {
    "gemma2": 2,
    "gemma3_text": 6,
    "gpt_oss": 2,
}  # one layer in so many sees all keys, whatever the config leaves out
HEAD_DIMS = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128, "gpt_oss": 64}  # where a config gives none
CUT_EVENLY = ("llama", "phi3", "deepseek_v2", "deepseek_v3", "kimi_k2")  # as many heads of keys, where none are given


def _blocks(fields: Fields, experts: Experts | None, dense_first: int = 0) -> tuple[Block, ...]:
    """Layers that are alike, together: they differ in their window and in whether they have experts."""
    layers = fields.number("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise BadInput(f"the config of {fields.name} has {layers} layers: at most {MOST_LAYERS} are counted")
    inner = fields.number("intermediate_size")
    groups: dict[Block, int] = {}
    only_dense = set(fields.numbers("mlp_only_layers"))
    types = fields.layer_types()
    if types is not None and len(types) != layers:
        raise BadInput(f"the config of {fields.name} has {len(types)} layer_types for {layers} layers")
    if types and "sliding_attention" in types and not fields.maybe("sliding_window"):
        raise BadInput(f"the config of {fields.name} has layers of 'sliding_attention', and lacks sliding_window")
    step = fields.number("decoder_sparse_step", default=1)
    for index in range(layers):
        has_experts = experts is not None and index >= dense_first and index not in only_dense
        has_experts = has_experts and (index + 1) % step == 0
        kept = experts if has_experts else None
        block = Block(count=0, inner=0 if kept else inner, experts=kept, window=_window(fields, index))
        groups[block] = groups.get(block, 0) + 1
    return tuple(
        Block(count=count, inner=block.inner, experts=block.experts, window=block.window)
        for block, count in groups.items()
    )


def _window(fields: Fields, index: int) -> int | None:
    window, kind = fields.maybe("sliding_window"), str(fields.config.get("model_type"))
    is_qwen = kind.startswith("qwen")  # which uses it only if the config says so
    if not window or not fields.flag("use_sliding_window", not is_qwen):
        return None
    if types := fields.layer_types():
        return window if types[index] == "sliding_attention" else None
    if kind not in WINDOWED:
        return None
    if kind in ("qwen2", "qwen3"):  # in their last layers
        return window if index >= (fields.maybe("max_window_layers") or 0) else None
    pattern = fields.maybe("sliding_window_pattern") or PATTERNS.get(kind)
    return window if not pattern or (index + 1) % pattern else None


def _decoder(
    fields: Fields,
    source: str,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    norms: int = 2,
    experts: Experts | None = None,
    tied: bool = False,
    **more: Any,
) -> Model:
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    kind, given = str(fields.config["model_type"]), "num_key_value_heads"
    if kind not in CUT_EVENLY and given not in fields.config:  # the class has a number of its own, which few mean
        fields.number(given)
    return Model(
        name=fields.name,
        source=source,
        family="decoder",
        hidden=hidden,
        heads=heads,
        kv_heads=fields.number(given, default=heads),
        head_dim=fields.maybe("head_dim") or HEAD_DIMS.get(kind) or (hidden // heads if heads else 0),
        vocab=fields.number("vocab_size"),
        blocks=_blocks(fields, experts, fields.maybe("first_k_dense_replace") or 0),
        tied=fields.flag("tie_word_embeddings", tied),
        norms=norms,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        mlp_bias=fields.flag("mlp_bias"),
        longest=fields.maybe("max_position_embeddings"),
        **more,
    )


def _llama(fields: Fields, source: str) -> Model:
    bias = fields.flag("attention_bias")
    return _decoder(fields, source, qkv_bias=bias, out_bias=bias)


def _phi3(fields: Fields, source: str) -> Model:
    return replace(_llama(fields, source), joined=True)


def _qwen2(fields: Fields, source: str) -> Model:
    return _decoder(fields, source, qkv_bias=True)


def _mistral(fields: Fields, source: str) -> Model:
    return _decoder(fields, source)


def _qwen3(fields: Fields, source: str, experts: Experts | None = None) -> Model:
    bias = fields.flag("attention_bias")
    return _decoder(fields, source, qk_norm=True, experts=experts, qkv_bias=bias, out_bias=bias)


def _qwen3_moe(fields: Fields, source: str) -> Model:
    experts = Experts(
        count=fields.number("num_experts", "num_local_experts"),  # the second since transformers 5
        chosen=fields.number("num_experts_per_tok"),
        inner=fields.number("moe_intermediate_size"),
    )
    return _qwen3(fields, source, experts)


def _mixtral(fields: Fields, source: str) -> Model:
    experts = Experts(
        count=fields.number("num_local_experts"),
        chosen=fields.number("num_experts_per_tok"),
        inner=fields.number("intermediate_size"),
    )
    return _decoder(fields, source, experts=experts)


def _gpt_oss(fields: Fields, source: str) -> Model:
    experts = Experts(
        count=fields.number("num_local_experts"),
        chosen=fields.number("num_experts_per_tok", "experts_per_token"),
        inner=fields.number("intermediate_size"),
        bias=True,
    )
    bias = fields.flag("attention_bias", True)
    whole = _decoder(fields, source, experts=experts, qkv_bias=bias, out_bias=bias, sinks=True)
    return replace(whole, float_norms=True, score_bytes=2)  # the shares, in 16 bits


def _gemma(fields: Fields, source: str, norms: int = 2) -> Model:
    bias = fields.flag("attention_bias")
    return _decoder(fields, source, tied=True, norms=norms, qkv_bias=bias, out_bias=bias, float_norms=True)


def _gemma2(fields: Fields, source: str) -> Model:
    """Its scores are capped: what the tangent gives in 16 bits, the shares in 32, and in 16 again."""
    return replace(_gemma(fields, source, norms=4), score_bytes=8)


def _gemma3(fields: Fields, source: str) -> Model:
    return replace(_gemma(fields, source, norms=4), qk_norm=True)


def _deepseek(fields: Fields, source: str) -> Model:
    inner = fields.number("moe_intermediate_size")
    if (fields.maybe("moe_layer_freq") or 1) > 1:  # the classes do not agree on which layers that means
        raise BadInput(f"the config of {fields.name} has a moe_layer_freq above 1, which is not counted yet")
    experts = Experts(
        count=fields.number("n_routed_experts", "num_local_experts"),
        chosen=fields.number("num_experts_per_tok"),
        inner=inner,
        shared_inner=inner * (fields.maybe("n_shared_experts") or 0),
        score_bias=fields.config.get("topk_method") == "noaux_tc" or fields.config["model_type"] != "deepseek_v2",
    )
    latent = Latent(
        q_rank=fields.maybe("q_lora_rank"),
        kv_rank=fields.number("kv_lora_rank"),
        nope_dim=fields.number("qk_nope_head_dim"),
        rope_dim=fields.number("qk_rope_head_dim"),
        value_dim=fields.number("v_head_dim"),
    )
    return _decoder(fields, source, experts=experts, latent=latent)


def _gpt2(fields: Fields, source: str) -> Model:
    hidden, heads = fields.number("n_embd", "hidden_size"), fields.number("n_head", "num_attention_heads")
    inner = fields.number("n_inner", default=4 * hidden)
    positions = fields.number("n_positions", "max_position_embeddings")
    return Model(
        name=fields.name,
        source=source,
        family="decoder",
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads if heads else 0,
        vocab=fields.number("vocab_size"),
        blocks=(Block(count=fields.number("n_layer", "num_hidden_layers"), inner=inner),),
        tied=fields.flag("tie_word_embeddings", True),
        gated=False,
        rms=False,
        rotary=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        positions=positions,
        longest=positions,
        joined=True,
    )


def _encoder(fields: Fields, source: str, **more: Any) -> Model:
    """BERT and ViT: LayerNorm, biases everywhere, every token sees every other."""
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    block = Block(count=fields.number("num_hidden_layers"), inner=fields.number("intermediate_size"))
    return Model(
        name=fields.name,
        source=source,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads if heads else 0,
        blocks=(block,),
        gated=False,
        rms=False,
        rotary=False,
        qkv_bias=fields.flag("qkv_bias", True),
        out_bias=True,
        mlp_bias=True,
        **more,
    )


def _bert(fields: Fields, source: str) -> Model:
    if fields.flag("is_decoder"):
        raise BadInput(f"the config of {fields.name} has is_decoder = True: a BERT that generates is not counted yet")
    positions = fields.number("max_position_embeddings")
    return _encoder(
        fields,
        source,
        family="encoder",
        vocab=fields.number("vocab_size"),
        positions=positions,
        segments=fields.number("type_vocab_size"),
        pooler=True,
        longest=positions,
    )


def _patches(fields: Fields) -> int:
    """Of a square image; what no whole patch covers is cut off."""
    image, patch = fields.number("image_size"), fields.number("patch_size")
    if patch > image:
        raise BadInput(f"the config of {fields.name} has patches of {patch} in an image of {image}: none fits")
    return (image // patch) ** 2


def _vit(fields: Fields, source: str) -> Model:
    patches = _patches(fields)
    return _encoder(
        fields,
        source,
        family="vision",
        patch=fields.number("patch_size"),
        channels=fields.number("num_channels", default=3),
        tokens=patches + 1,  # the class token
        positions=patches + 1,
        labels=fields.labels(),
    )


def _dit(fields: Fields, source: str) -> Model:
    """Norms without parameters; six vectors a layer made of the time step and the class modulate them."""
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    return Model(
        name=fields.name,
        source=source,
        family="diffusion",
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads if heads else 0,
        blocks=(Block(count=fields.number("num_hidden_layers"), inner=4 * hidden),),
        gated=False,
        rms=False,
        norms=0,
        rotary=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        patch=fields.number("patch_size"),
        channels=fields.number("in_channels"),
        tokens=_patches(fields),
        labels=fields.number("num_labels", default=1000),
        modulation=True,
        joined=True,
    )


def _resnet(fields: Fields, source: str) -> Model:
    """Hugging Face gives what a block puts out (`hidden_sizes`), the known one what its 3x3 convolutions do."""
    for field, usual in (("layer_type", "bottleneck"), ("downsample_in_first_stage", False)):
        if (given := fields.config.get(field, usual)) != usual:
            raise BadInput(f"the config of {fields.name} has {field} = {given!r}, which is not counted yet")
    depths, outputs = fields.numbers("depths"), fields.numbers("hidden_sizes")
    if uneven := next((size for size in outputs if size % EXPANSION), 0):
        raise BadInput(f"the config of {fields.name} has hidden_sizes {outputs}: {EXPANSION} does not divide {uneven}")
    widths = fields.numbers("widths") or [size // EXPANSION for size in outputs]
    if not depths or len(depths) != len(widths):
        raise BadInput(f"the config of {fields.name} lacks depths and hidden_sizes, lists of one length")
    if min(*depths, *widths) < 1 or sum(depths) > MOST_LAYERS:
        raise BadInput(f"the config of {fields.name} has depths {depths} and widths {widths}: no layer can be empty")
    image = fields.number("image_size", default=224)  # no field of Hugging Face's: it is the data's
    if image >> (1 + len(depths)) < 1:
        raise BadInput(f"the config of {fields.name} has images of {image}: too small for {len(depths)} stages")
    stages, channels, size = [], fields.number("embedding_size", default=widths[0] if widths else 1), -(-image // 4)
    for index, (count, width) in enumerate(zip(depths, widths, strict=True)):
        stride, out = 1 if index == 0 else 2, EXPANSION * width
        stages.append(
            Stage(count=count, width=width, in_channels=channels, out_channels=out, in_size=size, stride=stride)
        )
        channels, size = out, -(-size // stride)
    return Model(
        name=fields.name,
        source=source,
        family="convolution",
        stages=tuple(stages),
        image=image,
        channels=fields.number("num_channels", default=3),
        labels=fields.labels(),
    )


READERS: dict[str, Callable[[Fields, str], Model]] = {
    "llama": _llama,
    "mistral": _mistral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
    "dit": _dit,
    "resnet": _resnet,
}
