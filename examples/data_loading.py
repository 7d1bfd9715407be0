"""A convolutional network is trained on images that are decompressed whenever they are asked for.

Cause: the DataLoader has no workers, so every image of the batch is decoded in the training loop, while the device
waits. `sublight explain`: data-loading.
Fix: decode each image once and keep it; where they do not fit in memory, `num_workers=8`.
"""

import argparse
import itertools
import statistics
import time
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE, CLASSES = 128, 10


class Images(Dataset):
    """Images of compressed differences between neighbours; `keep` decodes them once."""

    def __init__(self, keep):
        random = np.random.default_rng(0)
        self.files = [zlib.compress(random.integers(0, 16, 3 * SIDE * SIDE, np.uint8).tobytes()) for _ in range(256)]
        self.images = [self.decode(file) for file in self.files] if keep else None

    def decode(self, file):
        differences = np.frombuffer(zlib.decompress(file), np.uint8)
        return torch.from_numpy(differences.cumsum(dtype=np.uint8)).view(3, SIDE, SIDE)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return self.images[index] if self.images else self.decode(self.files[index]), index % CLASSES


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="decode each image once, and keep it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    width, dtype = (256, torch.bfloat16) if on_gpu else (4, torch.float32)
    loader = DataLoader(Images(keep=args.fixed), batch_size=64, shuffle=True, pin_memory=on_gpu)
    shapes = [(3, width, 2), (width, width, 2)] + (6 if on_gpu else 1) * [(width, width, 1)]  # in, out, stride
    blocks = [m for a, b, stride in shapes for m in (nn.Conv2d(a, b, 3, stride, padding=1), nn.ReLU(inplace=True))]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))
    model.to(args.device, dtype, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    chunk, marks = max(1, args.steps // 12), [time.perf_counter()]
    for step, (image, label) in enumerate(itertools.islice(epochs, args.steps), start=1):
        image = image.to(args.device, non_blocking=True).to(dtype, memory_format=torch.channels_last)
        loss = F.cross_entropy(model(image / 255), label.to(args.device, non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % chunk == 0:  # wait once in a chunk of steps, never in each
            torch.get_device_module(args.device).synchronize()
            marks.append(time.perf_counter())
    times = [after - before for before, after in itertools.pairwise(marks)]
    print(f"loss: {loss.item():.6f}")
    print(f"step: {1e3 * statistics.median(times[len(times) // 2 :]) / chunk:.2f} ms")


if __name__ == "__main__":
    main()
