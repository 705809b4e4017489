"""A small network that predicts each sample's temperature from its embedding (TempNet, arXiv 2404.04575).

It follows the authors' released code for image-text pairs. For an embedding e of one modality,

    v = dropout(sigmoid(A e + a)),    z_j = <v, w_j / |w_j|>,    p = softmax(z / phi)
    tau = tau_min + (tau_max - tau_min) * sigmoid( sum_j c_j (p_j - 1/m) sigmoid(z_j) + b )

with prototypes w_1, ..., w_m and one network per modality. The network minimizes iSogCLR's objective in tau_i; no
gradient flows to the embeddings. In plain PyTorch: `equations.tempnet_tau`, `equations.tempnet`.

Readings fixed here: every process updates the same network on all B gathered anchors, so no gradient is communicated;
process 0 broadcasts its network once per epoch, against drift by rounding. The step number seeds dropout, so that it is
the same on every process and after a resume. The prototypes start as the first batch's embeddings of the other
modality, as in the authors' script; if these are fewer than m, the other prototypes stay random.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import on_first
from open_clip_ext.errors import InputError
from open_clip_ext.kernels.adam import adam_step
from open_clip_ext.kernels.streaming import are_not_finite
from open_clip_ext.options import POSITIVE, option
from open_clip_ext.side_model import SideModel
from open_clip_ext.temperatures.base import RHO, TAU_MAX, TAU_MIN, Temperature

FIRST_PHI = 0.01


class NetworkTemperature(Temperature):
    """Predicts tau_i from the anchor's own embedding, with one network for images and one for texts.

    The parameters and Adam's two moments are one vector each. Adam is not torch's: a step with a non-finite
    batch changes nothing, and under `hold` only the moments change.
    """

    name = "network"
    optimizer_options = ()
    reads_logit_scale = False
    allows_reference = False
    allows_views = False
    follows_epochs = True  # its learning rate
    rho: float = RHO.with_default(7.0)
    tau_min: float = TAU_MIN.with_default(0.005)
    tau_max: float = TAU_MAX.with_default(0.05)
    tau_net_prototypes: int = option(
        256, "prototypes of the network that predicts temperatures, per modality",
        valid=lambda value: value >= 2, expected="at least 2", in_state=True,
    )
    tau_net_lr: float = option(
        3e-5, "learning rate of the temperature network in the first epoch; times 0.9 in each later one", **POSITIVE
    )
    tau_net_dropout: float = option(
        0.5, "dropout of the temperature network's hidden layer",
        valid=lambda value: 0 <= value < 1, expected="in [0, 1)",
    )
    LR_DECAY = 0.9

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.network: SideModel  # known with the first batch, as are its shapes
        self.shapes: dict[str, torch.Size] = {}
        self.steps = 0
        self.epoch = 0
        self._dropout_mask: Tensor | None = None  # dropout's mask of the latest step

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, explicit: Collection[str]) -> None:
        if settings["tau_max"] < settings["tau_min"]:
            raise InputError(f"{settings['tau_max']:g} is below tau_min, {settings['tau_min']:g}", "tau_max")

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._send = True

    # The network

    def materialize(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        d, m = dimension, self.tau_net_prototypes
        bound = d**-0.5  # as torch.nn.Linear initializes
        with torch.device("cpu"):  # where the generator is
            draw = torch.Generator().manual_seed(0)
            start = {
                "inner": torch.rand(2, d, d, generator=draw).mul(2).sub(1).mul(bound),
                "inner_bias": torch.rand(2, d, generator=draw).mul(2).sub(1).mul(bound),
                "prototypes": torch.randn(2, m, d, generator=draw),
                "log_phi": torch.tensor([FIRST_PHI, FIRST_PHI]).log(),
                "out": torch.ones(2, m),
                "out_bias": torch.zeros(2),
            }
        self.shapes = {name: part.shape for name, part in start.items()}
        weights = torch.cat([part.flatten() for part in start.values()]).to(device, dtype)
        self.network = SideModel({"weights": weights, "moments": weights.new_zeros(2, len(weights))})

    @property
    def weights(self) -> Tensor:
        """All parameters, one vector."""
        return self.network.named["weights"]

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """Views of the parameter vector, by name; their first axis is the modality, images first."""
        parts = weights.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def predict(self, image: Tensor, text: Tensor, weights: Tensor, mask: Tensor | None = None) -> Tensor:
        """Temperatures, (2, b), of image and text embeddings, (b, d) each; `mask` is dropout's mask, (2, b, d)."""
        p = self.named(weights)
        inner = (torch.stack([image, text]) @ p["inner"].mT + p["inner_bias"][:, None]).sigmoid()
        if mask is not None:
            inner = inner * mask / (1 - self.tau_net_dropout)
        products = inner @ normalize(p["prototypes"], dim=2).mT
        probs = (products / p["log_phi"].exp()[:, None, None]).softmax(dim=2)
        terms = (probs - 1 / self.tau_net_prototypes) * products.sigmoid() * p["out"][:, None]
        between = (terms.sum(dim=2) + p["out_bias"][:, None]).sigmoid()
        return self.tau_min + (self.tau_max - self.tau_min) * between

    # The steps

    @property
    def current_lr(self) -> float:
        """The learning rate of this epoch."""
        return self.tau_net_lr * self.LR_DECAY**self.epoch

    def observe(self, batch: Batch) -> None:
        if self.steps == 0:
            prototypes = self.named(self.weights)["prototypes"]
            embeddings = torch.stack([batch.all_text, batch.all_image])[:, : prototypes.shape[1]]
            initial = prototypes[:, : embeddings.shape[1]]
            initial.copy_(torch.where(are_not_finite(embeddings), initial, embeddings))
        if self._send:
            self.network.broadcast()
        self._send = False

    def lookup(self, batch: Batch) -> Tensor:
        """The predicted temperatures, (B, 2); in training with the step's dropout, which `update` uses again."""
        self._dropout_mask = None
        if self.training and self.tau_net_dropout > 0:
            device = batch.all_image.device
            # On a GPU drawn there: a copy from host memory would wait for it. Other devices may have no generator.
            draw_device = device if device.type == "cuda" else torch.device("cpu")
            draw = torch.Generator(draw_device).manual_seed(self.steps)
            mask = torch.empty(2, *batch.all_image.shape, dtype=torch.bool, device=draw_device)
            self._dropout_mask = mask.bernoulli_(1 - self.tau_net_dropout, generator=draw).to(device)
        return self.predict(batch.all_image, batch.all_text, self.weights, self._dropout_mask).T

    def taus(self, tau: Tensor, rows: Tensor | None) -> Tensor:
        assert rows is not None
        return rows.T

    def update(self, batch: Batch, rows: Tensor, gradients: Tensor) -> None:
        """A step of Adam on mean_i tau_i * (value_i + rho), summed over both directions.

        Args:
            gradients: derivatives in tau_i, (2, B).
        """
        with torch.enable_grad():
            weights = self.weights.detach().requires_grad_()
            taus = self.predict(batch.all_image, batch.all_text, weights, self._dropout_mask)
            (gradient,) = torch.autograd.grad(taus, weights, gradients / batch.size)
        self.steps += 1
        moments = self.network.named["moments"]
        step, new = adam_step(gradient, moments.unbind(), self.steps)
        moved = self.weights if self.hold else self.weights - self.current_lr * step
        self.network.named["weights"] = torch.where(batch.finite, moved, self.weights)
        self.network.named["moments"] = torch.where(batch.finite, torch.stack(new), moments)

    # State

    def full_state(self) -> dict[str, Tensor]:
        if not hasattr(self, "network"):
            return {}
        return on_first({**self.network.state(), "steps": torch.tensor(self.steps)})

    def check_state(self, state: dict[str, Tensor], dimension: int) -> None:
        if not dimension:
            return
        if "weights" not in state:
            raise ValueError("temperature: 'network', but the state has no such network")
        d, m = dimension, self.tau_net_prototypes
        if len(state["weights"]) != 2 * (d * d + d + m * d + 1 + m + 1):
            raise ValueError(f"tau_net_prototypes: {self.tau_net_prototypes} where the state has another number")

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        if state:
            self.network.load(state)
            self.steps = int(state["steps"])
