"""Image-only self-supervision in a custom loop: SogCLR or iSogCLR on two views of handwritten digits.

    python examples/two_views.py --loss isogclr

The negatives are both views of all other images (iSogCLR, Eq. 2-4, 11). Training uses no labels. A linear probe on 3
labelled scans of each digit then compares the encoder with the same encoder before training. The scans are
scikit-learn's.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import trange

import open_clip_ext

TRAIN, BATCH, LABELS, DRAWS, TAU = 1200, 32, 3, 10, 0.2

SETTINGS = {
    "sogclr": {},
    # Images alone take larger temperatures than image-text pairs (iSogCLR, Figure 8); 0.05 and 0.5 are its code's.
    "isogclr": {"tau_start": TAU, "tau_min": 0.05, "tau_beta": 0.5, "rho": 1.0},
}


class Encoder(nn.Module):
    """Maps scans (b, 1, 8, 8) to unit vectors (b, 32) for the loss; `features` gives (b, 128) for the probe."""

    def __init__(self):
        super().__init__()
        layers = []
        for inputs, outputs, stride in ((1, 32, 1), (32, 64, 2), (64, 64, 1)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32))

    def forward(self, scans: Tensor) -> Tensor:
        return F.normalize(self.head(self.features(scans)), dim=1)


def augment(scans: Tensor) -> Tensor:
    """Rotate, zoom, shift and rescale the brightness of each scan at random, and add noise."""
    number = len(scans)
    angle, zoom = 0.35 * signed(number), 1 + 0.2 * signed(number)
    cosine, sine, shift = zoom * angle.cos(), zoom * angle.sin(), 0.25 * signed(2, number)
    rows = torch.stack([cosine, -sine, shift[0]], dim=1), torch.stack([sine, cosine, shift[1]], dim=1)
    grid = F.affine_grid(torch.stack(rows, dim=1), list(scans.shape), align_corners=False)
    moved = F.grid_sample(scans, grid, align_corners=False)
    return moved * (1 + 0.3 * signed(number, 1, 1, 1)) + 0.1 * torch.randn_like(scans)


def signed(*shape: int) -> Tensor:
    return 2 * torch.rand(shape) - 1


@torch.no_grad()
def probe(encoder: Encoder, scans: Tensor, digits: Tensor) -> float:
    """Held-out accuracy of a linear classifier on LABELS scans of each digit, mean over DRAWS choices of them."""
    features = encoder.eval().features(scans)
    features = (features - features[:TRAIN].mean(dim=0)) / (features[:TRAIN].std(dim=0) + 1e-3)
    accuracies = []
    for draw in range(DRAWS):
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(draw))
        labelled = torch.cat([order[digits[order] == digit][:LABELS] for digit in range(10)])
        classifier = LogisticRegression(C=0.1, max_iter=300).fit(features[labelled], digits[labelled])
        accuracies.append(classifier.score(features[TRAIN:], digits[TRAIN:]))
    return sum(accuracies) / DRAWS


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Train; return the accuracy before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", choices=SETTINGS, default="sogclr")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)

    data = load_digits()
    scans, digits = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    encoder = Encoder()
    before = probe(encoder, scans, digits)
    loss = open_clip_ext.create_loss(args.loss, num_samples=TRAIN, negatives="views", **SETTINGS[args.loss])
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    for epoch in trange(args.epochs, unit="epoch"):
        encoder.train()
        loss.set_epoch(epoch)
        for rows in torch.randperm(TRAIN).split(BATCH):
            views = [encoder(augment(scans[rows])) for _ in range(2)]
            optimizer.zero_grad()
            loss(*views, torch.tensor(1 / TAU), index=rows).backward()
            optimizer.step()
        schedule.step()
    after = probe(encoder, scans, digits)
    print(f"accuracy from {LABELS} labels per digit: {before:.1%} untrained, {after:.1%} after {args.loss}")
    return before, after


if __name__ == "__main__":
    main()
