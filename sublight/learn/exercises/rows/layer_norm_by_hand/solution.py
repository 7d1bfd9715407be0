"""LayerNorm's gradient: what goes along the row's two constraints, mean and length, is taken out."""

EPSILON = 1e-5


def layer_norm_by_hand(x: list[float], weight: list[float], grad: list[float]) -> list[float]:
    n = len(x)
    mean = sum(x) / n
    scale = (sum((v - mean) ** 2 for v in x) / n + EPSILON) ** -0.5
    normal = [(v - mean) * scale for v in x]
    inner = [g * w for g, w in zip(grad, weight)]
    along_ones = sum(inner) / n
    along_x = sum(i * v for i, v in zip(inner, normal)) / n
    return [(i - along_ones - v * along_x) * scale for i, v in zip(inner, normal)]
