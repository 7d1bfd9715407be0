"""Strides by hand. Read the page: `sublight learn show strides`. Check your work: `sublight learn check strides`."""


def strides(sizes: list[int], index: list[int]) -> tuple[list[int], int, list[int]]:
    planes, rows, cols = sizes
    # TODO 1: elements from one plane to the next, from one row to the next, from one column to the next
    own = [0, 0, 1]
    place = 0  # TODO 2: how many elements lie before the one at index
    turned = own  # TODO 3: the strides of x.transpose(1, 2), whose rows are the columns of x
    return own, place, turned
