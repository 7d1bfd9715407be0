"""Attention's gradients for one query: through the weighted sum, through softmax, through the scores."""

import math


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b))


def attention_by_hand(
    q: list[float], k: list[list[float]], v: list[list[float]], grad: list[float]
) -> tuple[list[float], list[list[float]], list[list[float]]]:
    scores = [dot(q, key) for key in k]
    powers = [math.exp(score - max(scores)) for score in scores]
    weights = [power / sum(powers) for power in powers]
    d_weights = [dot(grad, value) for value in v]
    delta = dot(weights, d_weights)
    d_scores = [w * (d - delta) for w, d in zip(weights, d_weights)]
    dq = [sum(d * key[i] for d, key in zip(d_scores, k)) for i in range(len(q))]
    dk = [[d * x for x in q] for d in d_scores]
    dv = [[w * g for g in grad] for w in weights]
    return dq, dk, dv
