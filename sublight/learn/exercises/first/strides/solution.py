"""Strides by hand: each dimension's step is the product of all sizes behind it."""


def strides(sizes: list[int], index: list[int]) -> tuple[list[int], int, list[int]]:
    _, rows, cols = sizes
    own = [rows * cols, cols, 1]
    place = index[0] * own[0] + index[1] * own[1] + index[2] * own[2]
    turned = [own[0], own[2], own[1]]
    return own, place, turned
