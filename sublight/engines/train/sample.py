"""Text out of a model: one token after another, from a window of what came before. No cache: samples are short."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sublight.engines.train.gpt2 import Gpt2

TOP_K = 50
TEMPERATURE = 0.7


@torch.no_grad()
def sample(
    model: Gpt2,
    prompt: Sequence[int],
    count: int,
    *,
    vocab: int,
    seed: int,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
) -> list[int]:
    """New tokens below `vocab`, by a generator of its own: sampling leaves the run's random numbers as they are."""
    generator = torch.Generator().manual_seed(seed)
    device = model.tokens.device
    ids = [int(each) for each in prompt] or [0]
    was_training = model.training
    model.eval()
    for _ in range(count):
        window = torch.tensor([ids[-model.shape.context :]], device=device)
        scores = model.logits(window)[0, -1, :vocab].float().cpu()  # past `vocab` lies only the table's padding
        if temperature == 0:
            ids.append(int(scores.argmax()))
            continue
        best, places = (scores / temperature).topk(min(top_k, vocab))
        ids.append(int(places[torch.multinomial(torch.softmax(best, -1), 1, generator=generator)]))
    model.train(was_training)
    return ids[len(prompt) or 1 :]
