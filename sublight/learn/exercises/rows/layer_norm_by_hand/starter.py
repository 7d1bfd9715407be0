"""LayerNorm's gradient on paper. Page: `sublight learn show layer_norm_by_hand`. Check: `sublight learn check`."""

EPSILON = 1e-5


def layer_norm_by_hand(x: list[float], weight: list[float], grad: list[float]) -> list[float]:
    n = len(x)
    mean = sum(x) / n
    scale = (sum((v - mean) ** 2 for v in x) / n + EPSILON) ** -0.5
    normal = [(v - mean) * scale for v in x]
    inner = [g * w for g, w in zip(grad, weight)]  # the gradient of each entry of normal
    # TODO: mean and scale depend on every x, too
    return [i * scale for i in inner]
