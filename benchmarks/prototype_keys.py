"""Prototypes that keep the key of their sample: the error of NeuCLIP's log-normalizers where captions repeat.

    python benchmarks/prototype_keys.py

Embeddings drift from random ones to clusters of a caption's pictures; a caption's text embedding is one. The network
follows Algorithm 1 by autograd in float64. Against the log-normalizers over all samples whose caption is not the
anchor's: mean squared error and, in brackets, bias of alpha over the last two thirds of 150 steps.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

EPS = 1e-14
N, DIMENSION, BATCH, PROTOTYPES, STEPS = 512, 32, 64, 128, 150
VARIANTS = ("prototypes keep keys", "keys in the minibatch alone", "no keys")
SETTINGS = (
    {}, dict(lr=0.1), dict(captions=16), dict(captions=256), dict(updates=0, restart_every=5), dict(tau=0.03),
)


def log_mean(exponents: Tensor, counts: Tensor) -> Tensor:
    """log(eps + mean of exp(exponents) over those that count); (2, b, k) and (b, k) to (2, b)."""
    exponents = exponents.masked_fill(~counts, -math.inf)
    return torch.logaddexp(
        exponents.logsumexp(2) - counts.sum(1).clamp(min=1).log(), torch.tensor(EPS).log()
    )


class Data:
    """Embeddings of N pairs at any step."""

    def __init__(self, captions: int, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.key = torch.arange(N) % captions
        center, image_center, noise = self._draw(captions), self._draw(captions), self._draw(N)
        self.from_image, self.from_text = self._draw(N), self._draw(captions)
        center = normalize(center + 0.5 * self._draw(1), dim=1) * math.sqrt(DIMENSION)
        self.to_image, self.to_text = center[self.key] + 0.7 * noise + 0.3 * image_center[self.key], center

    def _draw(self, rows: int) -> Tensor:
        return torch.randn(rows, DIMENSION, generator=self.generator)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        part = step / STEPS
        image = normalize((1 - part) * self.from_image + part * self.to_image, dim=1)
        return image, normalize((1 - part) * self.from_text + part * self.to_text, dim=1)[self.key]


def gaps(image: Tensor, text: Tensor, texts: Tensor, images: Tensor) -> Tensor:
    """Similarities of image and text anchors to others, less the positives', (2, b, k)."""
    positives = (image * text).sum(1)[:, None]
    return torch.stack([image @ texts.T - positives, text @ images.T - positives])


def error(
    variant: str, seed: int, captions: int = 64, tau: float = 0.07, lr: float = 1.0, updates: int = 10,
    restart_every: int = 25,
) -> tuple[float, float]:
    """Mean squared error and bias of alpha."""
    data, latest, found = Data(captions, seed), [], []
    key = data.key
    everyone = torch.arange(N)
    for step in range(STEPS):
        if step % (N // BATCH) == 0:
            order = everyone[torch.randperm(N, generator=data.generator)]
        chosen = order[step % (N // BATCH) * BATCH :][:BATCH]
        all_image, all_text = data.at(step)
        image, text, own = all_image[chosen], all_text[chosen], key[chosen]
        latest = [*latest, (text, image, own)][-(PROTOTYPES // BATCH) :]
        if step < PROTOTYPES // BATCH or step % restart_every == 0:
            texts, images, drawn_from = (torch.cat(parts) for parts in zip(*latest, strict=True))
            restarted = torch.stack([texts, images])
            if step < PROTOTYPES // BATCH:
                w = restarted.requires_grad_()
                optimizer = torch.optim.Adagrad([w], lr=lr)
            else:
                w.data.copy_(restarted)

        def alpha(image: Tensor, text: Tensor, anchors: Tensor) -> Tensor:
            counts = anchors[:, None] != drawn_from  # noqa: B023  # called in the same step
            if variant != VARIANTS[0]:
                counts = torch.ones_like(counts)
            return log_mean(gaps(image, text, *normalize(w, dim=2)) / tau, counts)  # noqa: B023

        negatives = chosen[:, None] != chosen if variant == VARIANTS[2] else own[:, None] != own
        log_batch = log_mean(gaps(image, text, text, image) / tau, negatives)
        for _ in range(updates):
            optimizer.zero_grad()
            predicted = alpha(image, text, own)
            (tau * ((log_batch - predicted).exp() + predicted).mean(1).sum()).backward()
            optimizer.step()
        if step >= STEPS // 3 and step % 7 == 0:
            with torch.no_grad():
                exact = log_mean(gaps(all_image, all_text, all_text, all_image) / tau, key[:, None] != key)
                found.append(alpha(all_image, all_text, key) - exact)
    errors = torch.stack(found)
    return errors.square().mean().item(), errors.mean().item()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    for settings in SETTINGS:
        print(settings or "as it is")
        for variant in VARIANTS:
            each = [error(variant, seed, **settings) for seed in (0, 1)]
            print(f"    {variant:28}", *(f"{mse:.3f} ({bias:+.2f})" for mse, bias in each), flush=True)


if __name__ == "__main__":
    main()
