"""A sentence classifier over texts of all lengths: a loader without workers tokenises, pads and copies each batch."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

WORDS = [f"word{number}" for number in range(5000)]


class Texts(Dataset):
    """Sentences as text: each is tokenised when it is asked for."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(20, 400, (count,), generator=generator).tolist()
        self.known = {word: number + 1 for number, word in enumerate(WORDS)}
        self.texts = [
            " ".join(WORDS[at] for at in torch.randint(len(WORDS), (n,), generator=generator)) for n in lengths
        ]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, at):
        words = self.texts[at].split()
        return torch.tensor([self.known.get(word, 0) for word in words]), len(words) % 2


def padded(rows):
    return nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True), torch.tensor([y for _, y in rows])


class Classifier(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embed = nn.Embedding(len(WORDS) + 1, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, 2)

    def forward(self, ids):
        padding = ids == 0
        x = self.body(self.embed(ids), src_key_padding_mask=padding).masked_fill(padding[..., None], 0.0)
        return self.head(x.sum(1) / (~padding).sum(1, keepdim=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    width, layers, batch = (512, 4, 256) if on_gpu else (64, 1, 8)
    loader = DataLoader(Texts(40 * batch), batch_size=batch, shuffle=True, collate_fn=padded)
    model = Classifier(width, layers).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = 0
    while step < args.steps:
        for ids, labels in loader:
            loss = F.cross_entropy(model(ids.to(args.device)), labels.to(args.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step >= args.steps:
                break
    print(f"loss: {loss.item():.4f}")


if __name__ == "__main__":
    main()
