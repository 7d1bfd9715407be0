"""Attention's gradients on paper. Page: `sublight learn show attention_by_hand`. Check: `sublight learn check`."""

import math


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b))


def attention_by_hand(
    q: list[float], k: list[list[float]], v: list[list[float]], grad: list[float]
) -> tuple[list[float], list[list[float]], list[list[float]]]:
    """One query: out = Σ weights[j] · v[j], weights = softmax of q · k[j]; grad is the gradient of out."""
    scores = [dot(q, key) for key in k]
    powers = [math.exp(score - max(scores)) for score in scores]
    weights = [power / sum(powers) for power in powers]
    d_weights = [dot(grad, value) for value in v]  # the gradient of each weight
    d_scores = d_weights  # TODO 1: through softmax: a score moves all weights, not only its own
    dq = [0.0 for _ in q]  # TODO 2
    dk = [[0.0 for _ in q] for _ in k]  # TODO 3
    dv = [[w * g for g in grad] for w in weights]
    return dq, dk, dv
