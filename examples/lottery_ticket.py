"""The lottery ticket, on a CPU in under three minutes: few weights learn well, if they begin with the right values.

Train a network, take away the smallest weights, set the others back to their first values, train again, and so on
(`sublight/fix/prune.py`). After some rounds few weights are left, and they still learn the task: a winning ticket. Two
other networks show that it is no matter of size alone: one with the same places and other first weights, one with the
same weights and random places.

Two tasks, both drawn by code or shipped with a library; nothing is downloaded:
- an MLP on digits of 8x8 pixels: scikit-learn's scanned ones where it is installed, else synthetic ones: the ten shapes
  of a seven-segment display, each moved by up to a pixel, with strokes of random strength and noise on every pixel;
- a small GPT on a language of forty invented words in random order: it is scored by how many next letters it guesses,
  and the first letter of a word is a matter of luck.

Then the MLP once more, for sparse tensor cores: two of every four weights, before and after fine-tuning.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from sublight import units
from sublight.errors import BadInput
from sublight.fix import prune
from sublight.report.draw import plot, shares

WAYS = ("winning ticket", "other first weights", "random places")
SEGMENTS = (  # rows of three pixels, from the top
    *("111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001"),
    *("111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111"),
)
WORDS, LETTERS = 40, "abcdefghijklmnopqrst "


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something to learn: networks by their seed, batches, and a trained network's score on what it has not seen."""

    name: str
    make: Callable[[int], torch.nn.Module]
    loss: Callable[[torch.nn.Module, torch.Generator], torch.Tensor]
    score: Callable[[torch.nn.Module], float]
    steps: int
    lr: float
    rounds: int
    share: float  # the share of the remaining weights that each round removes

    def train(self, model: torch.nn.Module, masks: prune.Masks, seed: int, steps: int = 0) -> float:
        batches = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=self.lr, fused=True)
        with prune.held(model, masks, optimizer):
            for _ in range(steps or self.steps):
                loss = self.loss(model, batches)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            return self.score(model)


def synthetic_digits(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = torch.tensor([[int(pixel) for pixel in rows] for rows in SEGMENTS]).view(10, 5, 3)
    labels = torch.randint(10, (count,), generator=generator)
    strokes = shapes[labels] * (0.6 + 0.8 * torch.rand(count, 5, 3, generator=generator))
    down, across = (torch.randint(2, (count, 1, 1), generator=generator) for _ in range(2))
    images = 0.2 * torch.randn(count, 8, 8, generator=generator)
    row, col = down + 1 + torch.arange(5).view(5, 1), across + 2 + torch.arange(3)
    images[torch.arange(count).view(-1, 1, 1), row, col] += strokes
    return images.flatten(1), labels


def digits() -> tuple[str, tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The images' name, those to train on and those to test on, with their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return "synthetic seven-segment digits", synthetic_digits(2000, 0), synthetic_digits(2000, 1)
    data = load_digits()
    images, labels = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1200], order[1200:]
    return "scikit-learn's digits", (images[train], labels[train]), (images[test], labels[test])


def mlp_task() -> Task:
    name, (images, labels), (test_images, test_labels) = digits()

    def make(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        linear, relu = torch.nn.Linear, torch.nn.ReLU
        return torch.nn.Sequential(linear(64, 128), relu(), linear(128, 64), relu(), linear(64, 10))

    def loss(model: torch.nn.Module, batches: torch.Generator) -> torch.Tensor:
        batch = torch.randint(len(labels), (128,), generator=batches)
        return F.cross_entropy(model(images[batch]), labels[batch])

    def score(model: torch.nn.Module) -> float:
        return float((model(test_images).argmax(1) == test_labels).float().mean())

    return Task(name=f"MLP, {name}", make=make, loss=loss, score=score, steps=200, lr=3e-3, rounds=8, share=0.4)


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class SmallGpt(torch.nn.Module):
    def __init__(self, letters: int, width: int = 32, layers: int = 2, heads: int = 2, length: int = 32) -> None:
        super().__init__()
        self.letter, self.place = torch.nn.Embedding(letters, width), torch.nn.Embedding(length, width)
        self.blocks = torch.nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, letters)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.letter(ids) + self.place.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def invented_text(letters: int, seed: int) -> torch.Tensor:
    """Random words of one vocabulary, as numbers of letters."""
    vocabulary = torch.Generator().manual_seed(0)
    words = []
    for _ in range(WORDS):
        length = int(torch.randint(3, 8, (1,), generator=vocabulary))
        words.append([*torch.randint(len(LETTERS) - 1, (length,), generator=vocabulary).tolist(), len(LETTERS) - 1])
    order = torch.randint(WORDS, (letters // 4,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor([letter for word in order.tolist() for letter in words[word]][:letters])


def gpt_task() -> Task:
    text, test = invented_text(20_000, 1), invented_text(32 * 33, 2).view(32, 33)

    def make(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return SmallGpt(len(LETTERS))

    def loss(model: torch.nn.Module, batches: torch.Generator) -> torch.Tensor:
        begin = torch.randint(len(text) - 33, (32, 1), generator=batches)
        ids = text[begin + torch.arange(33)]
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def score(model: torch.nn.Module) -> float:
        return float((model(test[:, :-1]).argmax(-1) == test[:, 1:]).float().mean())

    return Task(name="GPT, invented words", make=make, loss=loss, score=score, steps=150, lr=1e-2, rounds=6, share=0.5)


def lottery(task: Task, seeds: int, rounds: int) -> dict[str, dict[float, list[float]]]:
    """The scores of all seeds, by way and by the share of weights left."""
    by_way: dict[str, dict[float, list[float]]] = {way: {} for way in WAYS}
    for seed in range(seeds):
        model = task.make(seed)
        trained = prune.rounds(
            model, lambda model, masks, seed=seed: task.train(model, masks, seed), count=rounds, share=task.share
        )
        for each in trained:
            others = (
                (task.make(1000 + seed), each.masks),
                (task.make(seed), prune.shuffled(each.masks, torch.Generator().manual_seed(seed))),
            )
            scores = each.score, *(task.train(other, masks, seed) for other, masks in others)
            for way, score in zip(WAYS, scores, strict=True):
                by_way[way].setdefault(round(each.left, 5), []).append(score)
    return by_way


def drawn(task: Task, by_way: dict[str, dict[float, list[float]]]) -> shares.Curves:
    return shares.Curves(
        title=task.name,
        x_title="weights left",
        y_title="right answers on what was not trained on; bars: range over seeds",
        curves=tuple(
            shares.Curve(
                name=way,
                points=tuple(
                    (left, statistics.mean(scores), (max(scores) - min(scores)) / 2) for left, scores in by_left.items()
                ),
            )
            for way, by_left in by_way.items()
        ),
    )


def two_of_four(task: Task, seed: int = 0) -> dict[str, float]:
    """The score of a trained network, of it with two of every four weights, and of that after fine-tuning."""
    model = task.make(seed)
    everything = prune.all_weights(model)
    scores = {"all weights": task.train(model, everything, seed)}
    masks = prune.two_of_four(model, everything)
    pruned = copy.deepcopy(model)
    prune.apply(pruned, masks)
    with torch.no_grad():
        scores["two of four"] = task.score(pruned)
    scores["two of four, fine-tuned"] = task.train(pruned, masks, seed + 1, steps=task.steps // 2)
    return scores


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=("mlp", "gpt", "both"), default="both")
    parser.add_argument("--seeds", type=int, default=2, help="networks a task (default 2)")
    parser.add_argument("--rounds", type=int, default=0, help="trainings of a network (default 8 for mlp, 6 for gpt)")
    parser.add_argument(
        "--plot", default="", metavar="FILE", help="write the curves as .html (.svg or .png of one task)"
    )
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    args = parser.parse_args()
    if args.seeds < 1 or args.rounds < 0:
        parser.error("--seeds and --rounds are at least 1")
    if args.plot and args.task == "both" and not args.plot.endswith(".html"):
        parser.error("two tasks make a page: give --plot a name that ends in .html, or one --task")
    try:
        plot.check(args.plot)
    except BadInput as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parsed()
    torch.set_num_threads(1)  # these products are too small to be shared out
    tasks = [make() for name, make in (("mlp", mlp_task), ("gpt", gpt_task)) if args.task in (name, "both")]
    charts, scores = [], {}
    for task in tasks:
        by_way = lottery(task, args.seeds, args.rounds or task.rounds)
        charts.append(drawn(task, by_way))
        scores[task.name] = by_way
        if not args.json:
            print(f"\n{task.name}: right answers, mean of {args.seeds}")
            print(f"{'weights left':>14}" + "".join(f"{way:>22}" for way in WAYS))
            for left in by_way[WAYS[0]]:
                means = (statistics.mean(by_way[way][left]) for way in WAYS)
                print(f"{100 * left:>12.3g} %" + "".join(f"{units.percent(mean):>22}" for mean in means), flush=True)
    sparse = two_of_four(tasks[0])
    if args.json:
        print(json.dumps({"scores": scores, "two_of_four": {tasks[0].name: sparse}}))
    else:
        print(
            f"\n{tasks[0].name}, for sparse tensor cores: "
            + ", ".join(f"{k} {units.percent(v)}" for k, v in sparse.items())
        )
        print(f"{time.process_time():.0f} s of one core")
    if args.plot:
        lead = "Few weights learn well, if they begin with the right values."
        shares.write(charts, Path(args.plot), title="The lottery ticket", lead=lead)


if __name__ == "__main__":
    main()
