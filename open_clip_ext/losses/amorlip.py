"""AmorLIP: networks learn log Z of every embedding, and the encoders divide by a slow copy of them.

amorlip.txt Eq. 1-12 and Algorithm 1; there and here tau is OpenCLIP's logit_scale, an *inverse* temperature, written s
below, and B pairs include the anchor's own:

    Z_1i = mean_j exp(s <image_i, text_j>),    Z_2i with the sides swapped                                    Eq. 2
    Stage I    log Z_comb = log(beta_t * lambda_previous + (1 - beta_t) * Z)                                  Eq. 12
               the online network lambda fits log Z_comb by an f-divergence or the squared logarithm          Eq. 8, 10
               target network <- ema * target + (1 - ema) * online                                            Eq. 11
    Stage II   -2 s mean_i <image_i, text_i> + mean_ij exp(s <image_i, text_j>) (1 / lambda_1i + 1 / lambda_2j)   Eq. 6
               divided by the constant s, plus rho / s                                                        Appendix C

with lambda of stage II the target network, a constant. Stage I sees the global batch; stage II only this process's
pairs, so that nothing is gathered on steps without stage I.

Readings fixed here, where the paper is silent or its released code differs:

- Steps of an epoch count from 0, so that stage I runs on an epoch's first step: a network that was just drawn anew is
  never divided by. The last bias of a new network starts at the batch's mean log Z (`networks`), in the target too:
  within an epoch the moving average hardly leaves where it started (0.999 every 2 steps).
- beta_t = beta / 2 * (1 - cos(pi t / T)) with t = 1 in the first epoch and T the length of the training; in the first
  epoch there is no network of an earlier one, and Z stands alone.
- rho becomes `rho_annealed` from epoch `rho_annealed_from` on, by default the last quarter of the training.
- Stage II estimates Z / lambda from b local pairs. The anchor's own pair counts there what it counts in Z, 1 / B, and
  the b - 1 negatives stand for B - 1: a plain mean over b pairs would count the positive W times, and push it away.
- KL is Eq. 9 as it stands. Its lambda is not normalised, so that its optimum with 0.1 times Eq. 10 lies 0.82 above
  log Z; those of `l2-log` and `js` lie at log Z.
- exp(s <.,.>) / lambda, averaged over an anchor's pairs, is bounded by exp(10). At the exact lambda it is at most
  n / b, exp(8.3) at the paper's largest scale; a network that is far off for an anchor must not decide the step.
- The released recipe divides by Z_comb instead of the target network (`amor_denominator combined`; this gathers on
  every step), counts the positive in Z by 1e-3 (`amor_positive_weight`) and lets beta's cosine end after half of the
  epochs (`amor_beta_epochs`). The class's defaults are the paper's, the first two of `--loss amorlip` the recipe's: on
  20,000 generated pairs with batches of 64 the recipe reaches R@1 82 / 80, the paper's form 60 / 59 and, with its
  setting for CC12M, 24 / 25, because the network's output becomes a constant; each of the two changes alone 67 and 49.
- `amor_target negatives` is Table 3's "Neg.": the network fits the negatives' share of Z and the positive's is added.
"""

import math
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import softplus

from open_clip_ext.distributed import all_gather, rank, world_size
from open_clip_ext.errors import InputError
from open_clip_ext.losses.base import Loss
from open_clip_ext.networks import WIDTH, PartitionNetwork, below
from open_clip_ext.options import Option, not_negative, positive, refuse_unused
from open_clip_ext.pairs import MAX_LOG_WEIGHT, Pairs, SimilarityBlocks, local_part
from open_clip_ext.surrogates import Identity
from open_clip_ext.temperature import LOGIT_SCALE_OPTIONS, RHO


def l2_log(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 10 per anchor in r = log Z_comb - log lambda, and its derivative in r."""
    return ratio.square() / 2, ratio


def kl(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """f(t) = t log t of Eq. 8 at t = exp(r), and its derivative in r."""
    t = ratio.clamp(max=MAX_LOG_WEIGHT).exp()
    return t * ratio, t * (ratio + 1)


def js(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """f(t) = (t log t - (t + 1) log((t + 1) / 2)) / 2 of Eq. 8 at t = exp(r), and its derivative in r."""
    t = ratio.clamp(max=MAX_LOG_WEIGHT).exp()
    slope = t * (math.log(2) - softplus(-ratio)) / 2
    return slope + (math.log(2) - softplus(ratio)) / 2, slope


DIVERGENCES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"l2-log": l2_log, "kl": kl, "js": js}

MAX_LOG_RATIO = 10.0
NETWORKS = ("online", "target", "previous")
at_least_1 = dict(valid=lambda value: value >= 1, wanted="at least 1")
share = dict(valid=lambda value: 0 <= value < 1, wanted="in [0, 1)")


class AmorLIPLoss(Loss):
    """Memory is allocated at the first batch: three networks of 2 * (2 f_d d^2 + ...) numbers and Adam's moments.

    Args: see `options`; the others as in `Loss`.

    Raises:
        InputError: an argument is out of range; the message names it.
    """

    name = "amorlip"
    options = (
        RHO,
        Option(
            "rho_annealed", float, -8.0, "amorlip: rho in the last part of the training",
            valid=math.isfinite, wanted="a number",
        ),
        Option(
            "rho_annealed_from", int, None, "amorlip: first epoch of rho_annealed, from 0 (default: the last quarter)",
            valid=not_negative, wanted="at least 0",
        ),
        WIDTH,
        Option("amor_objective", str, "l2-log", "what the network minimises", choices=tuple(DIVERGENCES)),
        Option(
            "amor_l2_weight", float, 0.1, "weight of l2-log beside another objective",
            valid=not_negative, wanted="a number >= 0",
        ),
        Option("amor_updates", int, 3, "T_lambda, updates of the network each time", **at_least_1),
        Option("amor_online_every", int, 8, "T_online, steps between updates of the network", **at_least_1),
        Option("amor_target_every", int, 2, "T_target, steps between updates of the target network", **at_least_1),
        Option("amor_ema", float, 0.999, "alpha, what the target network keeps of itself at each update", **share),
        Option("amor_beta", float, 0.8, "beta_T, final share of the last epoch's network in the target", **share),
        Option("amor_beta_epochs", int, None, "epochs of beta's cosine (default: --epochs)", **at_least_1),
        Option(
            "amor_reinit_every", int, 1, "epochs between new networks; 0: never",
            valid=not_negative, wanted="at least 0",
        ),
        Option("amor_lr", float, 1e-3, "Adam's learning rate of the network", valid=positive, wanted="a number > 0"),
        Option(
            "amor_target", str, "all", "whether the network fits all of Z or the negatives' share",
            choices=("all", "negatives"), in_state=True,
        ),
        Option(
            "amor_denominator", str, "target", "whether the encoders divide by the target network or by Z_comb",
            choices=("target", "combined"),
        ),
        Option(
            "amor_positive_weight", float, 1.0, "what the positive counts in Z", valid=not_negative,
            wanted="a number >= 0",
        ),
    )
    optimizer_options = LOGIT_SCALE_OPTIONS
    least_pairs = 2
    CHECKED = ("image_features", "text_features", "logit_scale", "similarities", "log lambda")

    def __init__(
        self,
        rho: float = 6.5,
        rho_annealed: float = -8.0,
        rho_annealed_from: int | None = None,
        mlp_width: float = 0.5,
        amor_objective: str = "l2-log",
        amor_l2_weight: float = 0.1,
        amor_updates: int = 3,
        amor_online_every: int = 8,
        amor_target_every: int = 2,
        amor_ema: float = 0.999,
        amor_beta: float = 0.8,
        amor_beta_epochs: int = 1,
        amor_reinit_every: int = 1,
        amor_lr: float = 1e-3,
        amor_target: str = "all",
        amor_denominator: str = "target",
        amor_positive_weight: float = 1.0,
        accum_freq: int = 1,
        validate: bool = False,
    ):
        given = locals()
        for option in self.options:
            option.check_given(given)
        super().__init__(accum_freq, validate)
        self.rho = rho
        self.rho_annealed = rho_annealed
        self.rho_annealed_from = math.inf if rho_annealed_from is None else rho_annealed_from
        self.width = mlp_width
        self.objective = amor_objective
        self.l2_weight = amor_l2_weight
        self.updates = amor_updates
        self.online_every = amor_online_every
        self.target_every = amor_target_every
        self.ema = amor_ema
        self.beta = amor_beta
        self.beta_epochs = amor_beta_epochs
        self.reinit_every = amor_reinit_every
        self.lr = amor_lr
        self.fits_negatives = amor_target == "negatives"
        self.divides_by_combined = amor_denominator == "combined"
        self.log_positive_weight = math.log(amor_positive_weight) if amor_positive_weight > 0 else -math.inf
        self.epoch = 0
        self.step_of_epoch = 0
        self.online: PartitionNetwork | None = None
        self.target: PartitionNetwork | None = None
        self.previous: PartitionNetwork | None = None  # the target of the epoch before
        self.optimizer: torch.optim.Adam | None = None
        self._last: dict[str, Tensor] = {}
        self._objective_before: Tensor | None = None

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, given: Collection[str]) -> None:
        if settings["amor_objective"] == "l2-log":
            refuse_unused(given, ["amor_l2_weight"], "with --amor-objective l2-log")
        if settings["amor_beta_epochs"] is None:
            if epochs is None:
                raise InputError("amor_beta_epochs: the cosine of beta needs its length, or the number of epochs")
            settings["amor_beta_epochs"] = epochs
        if settings["rho_annealed_from"] is None and epochs is not None:
            settings["rho_annealed_from"] = epochs - max(epochs // 4, min(1, epochs - 1))

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if epoch != self.epoch:  # else a state of this epoch was loaded, or nothing has happened yet
            self.epoch, self.step_of_epoch = epoch, 0

    @property
    def current_rho(self) -> float:
        return self.rho if self.epoch < self.rho_annealed_from else self.rho_annealed

    @property
    def current_beta(self) -> float:
        """beta_t; 0 while there is no network of an earlier epoch."""
        if self.previous is None:
            return 0.0
        return self.beta / 2 * (1 - math.cos(math.pi * min(self.epoch + 1, self.beta_epochs) / self.beta_epochs))

    def compute(self, image: Tensor, text: Tensor, logit_scale: Tensor, index: Tensor | None, moves: bool) -> Tensor:
        """The value, an estimate of Eq. 5 with Appendix C's scale, is that of this process's pairs."""
        with torch.no_grad():
            self._follow(image)
            scale = logit_scale.detach()
            stage_1 = moves and self.step_of_epoch % self.online_every == 0
            gathered = None
            if stage_1 or self.divides_by_combined or self.online is None:
                gathered = self._log_partitions(Pairs.gather(image, text), scale)
            if moves:
                self._stage_1(gathered if stage_1 else None)
            log_lambda = self._log_denominators(image.detach(), text.detach(), scale, gathered)
        return self._stage_2(image, text, logit_scale, log_lambda)

    def _follow(self, image: Tensor) -> None:
        """Go where the embeddings are."""
        self._dimension = image.shape[1]
        if self.online is not None:
            parameter = next(iter(self.online.named().values()))
            if parameter.device != image.device or parameter.dtype != image.dtype:
                self._restore(self._tensors(), image)

    # Stage I: amortization

    def _log_partitions(self, pairs: Pairs, scale: Tensor) -> tuple[Pairs, Tensor]:
        """The batch, and log Z of all its anchors over all its pairs, (2, B): Eq. 2, or its part that the network fits.

        Two small gathers: the embeddings and 2 b numbers.
        """
        blocks = SimilarityBlocks(pairs, Identity())
        batch = pairs.all_image.shape[0]
        # Relative to the positive, whose own term is 1.
        log_negatives = blocks.log_batch_normalizers(scale.reciprocal()) + math.log(batch - 1)
        if not self.fits_negatives:
            weight = torch.full_like(log_negatives, self.log_positive_weight)
            log_negatives = torch.logaddexp(log_negatives, weight)
        log_z = log_negatives + scale * blocks.positives - math.log(batch)
        return pairs, all_gather(log_z.T).T

    def _stage_1(self, gathered: tuple[Pairs, Tensor] | None) -> None:
        if self.step_of_epoch == 0 and gathered is not None:
            self._begin_epoch(gathered[1])
        if gathered is not None:
            self._update_online(*gathered)
        if self.step_of_epoch % self.target_every == 0:
            online = self.online.named()
            for name, parameter in self.target.named().items():
                parameter.lerp_(online[name], 1 - self.ema)
        self.step_of_epoch += 1

    def _begin_epoch(self, log_z: Tensor) -> None:
        """Algorithm 1, line 4."""
        if self.target is not None:
            self.previous = self.target
            self.target = self._copy(self.previous.named(), log_z)
        due = self.reinit_every > 0 and self.epoch % self.reinit_every == 0
        if self.online is None or due:
            levels = log_z.mean(dim=1).nan_to_num(0.0, 0.0, 0.0)
            self.online = PartitionNetwork(self._dimension, self.width, levels, seed=self.epoch)
            self._new_optimizer()
            self.target = self._copy(self.online.named(), log_z)
        if world_size() > 1:  # hardware that rounds otherwise must not drift apart
            for tensor in self._tensors().values():
                if tensor.device == log_z.device:
                    dist.broadcast(tensor, 0)

    def _copy(self, parameters: dict[str, Tensor], like: Tensor) -> PartitionNetwork:
        copy = PartitionNetwork(self._dimension, self.width, like.new_zeros(2), seed=0)
        copy.load(parameters)
        return copy

    def _new_optimizer(self) -> None:
        self.optimizer = torch.optim.Adam(self.online.named().values(), lr=self.lr)

    def _log_combined(self, image: Tensor, text: Tensor, log_z: Tensor) -> Tensor:
        """Eq. 12 for anchors (b, d) with log Z (2, b)."""
        beta = self.current_beta
        if beta == 0:
            return log_z
        return torch.logaddexp(math.log(beta) + self.previous(image, text), math.log1p(-beta) + log_z)

    def _update_online(self, pairs: Pairs, log_z: Tensor) -> None:
        image, text = pairs.all_image, pairs.all_text
        log_combined = self._log_combined(image, text, log_z)
        finite = log_z.isfinite().all()
        # The mean over the samples' exp(s <.,.>) in Eq. 8 is Z itself.
        weight = (log_z - log_combined).exp()
        for update in range(self.updates):
            ratio = log_combined - self.online(image, text)
            values, slopes = DIVERGENCES[self.objective](ratio)
            if self.objective != "l2-log":
                l2_values, l2_slopes = l2_log(ratio)
                values = weight * values + self.l2_weight * l2_values
                slopes = weight * slopes + self.l2_weight * l2_slopes
            if update == 0:
                self._objective_before = values.mean(dim=1).sum()
            gradients = self.online.gradients(image, text, -slopes / ratio.shape[1])
            for parameter, gradient in zip(self.online.named().values(), gradients, strict=True):
                parameter.grad = torch.where(finite, gradient, 0.0)
            self.optimizer.step()

    # Stage II: representation learning

    def _log_denominators(self, image: Tensor, text: Tensor, scale: Tensor, gathered) -> Tensor:
        """log lambda of this process's anchors, (2, b)."""
        if self.divides_by_combined or self.online is None:
            pairs, log_z = gathered
            log_lambda = self._log_combined(image, text, local_part(log_z, pairs))
        else:
            log_lambda = self.target(image, text)
        if self.fits_negatives:
            batch = image.shape[0] * world_size()
            positives = (image * text).sum(dim=1)
            weight = self.log_positive_weight - math.log(batch)
            log_lambda = torch.logaddexp(log_lambda, (scale * positives + weight).expand_as(log_lambda))
        return log_lambda

    def _stage_2(self, image: Tensor, text: Tensor, scale: Tensor, log_lambda: Tensor) -> Tensor:
        """Eq. 6 over this process's pairs with Appendix C's scale."""
        exponents = scale * (image @ text.T)
        aligned = exponents.diagonal().mean()
        exponents = exponents + self._log_shares(len(image)).to(exponents)
        log_means = torch.stack([exponents.logsumexp(dim=1), exponents.logsumexp(dim=0)])
        log_lambda = log_lambda.maximum(log_means.detach() - MAX_LOG_RATIO)
        cross = (log_means - log_lambda).exp().mean(dim=1).sum()
        surrogate = (cross - 2 * aligned) / scale.detach() + self.current_rho / scale
        with torch.no_grad():
            value = (log_lambda.mean(dim=1).sum() - 2 * aligned + self.current_rho) / scale
            self._watch(image, text, scale, exponents, log_lambda)
        return surrogate + (value - surrogate).detach()

    def _log_shares(self, pairs: int) -> Tensor:
        """What each local pair counts in an estimate of Z over the global batch, (b, b), logarithms: the positive what
        it counts there, the negatives together for all B - 1."""
        batch = pairs * world_size()
        shares = torch.full((pairs, pairs), math.log((batch - 1) / batch / (pairs - 1)))
        return shares.fill_diagonal_(self.log_positive_weight - math.log(batch))

    def _watch(self, image: Tensor, text: Tensor, scale: Tensor, exponents: Tensor, log_lambda: Tensor) -> None:
        finite = [tensor.isfinite().all() for tensor in (image, text, scale)]
        similar = exponents.new_zeros(()) if self.log_positive_weight == -math.inf else exponents
        self.note(~torch.stack([*finite, similar.isfinite().all(), log_lambda.isfinite().all()]))
        deviation, mean = torch.std_mean(log_lambda, dim=1)
        self._last = {
            "tau": scale.reciprocal().detach(),
            "rho": torch.tensor(float(self.current_rho)),
            "amor_beta": torch.tensor(self.current_beta),
            "log_lambda_image_mean": mean[0],
            "log_lambda_image_std": deviation[0],
            "log_lambda_text_mean": mean[1],
            "log_lambda_text_std": deviation[1],
        }

    def diagnostics(self) -> dict[str, Tensor]:
        shown = {} if self._objective_before is None else {"amor_objective": self._objective_before}
        return {**self._last, **shown}

    # State

    @property
    def _networks(self) -> dict[str, PartitionNetwork]:
        networks = {"online": self.online, "target": self.target, "previous": self.previous}
        return {name: network for name, network in networks.items() if network is not None}

    def full_state(self) -> dict[str, Tensor | int | str]:
        state = {**super().full_state(), "epoch": self.epoch, "step_of_epoch": self.step_of_epoch}
        tensors = self._tensors() if rank() == 0 else {}
        return {**state, **{key: value.detach().cpu().clone() for key, value in tensors.items()}}

    def load_full_state(self, state: dict[str, Tensor | int | str]) -> None:
        super().load_full_state(state)
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        if tensors:
            hidden, dimension = tensors["online:0.up.weight"].shape
            if hidden != PartitionNetwork.hidden(dimension, self.width):
                raise ValueError(f"mlp_width: {self.width} where the state's networks are {hidden} wide")
            self._restore(tensors, tensors["online:0.up.weight"])
        self.epoch, self.step_of_epoch = int(state["epoch"]), int(state["step_of_epoch"])

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for name in NETWORKS:
            if (network := getattr(self, name)) is not None:
                tensors |= {f"{name}:{key}": value for key, value in network.named().items()}
        if self.online is not None:
            for key, parameter in self.online.named().items():
                tensors |= {f"adam:{key}:{name}": value for name, value in self.optimizer.state[parameter].items()}
        return tensors

    def _restore(self, tensors: dict[str, Tensor], like: Tensor) -> None:
        """Take over what `_tensors` gave, with the device and type of `like`."""
        self._dimension = tensors["online:0.up.weight"].shape[1]
        for name in NETWORKS:
            parameters = below(tensors, f"{name}:")
            setattr(self, name, self._copy(parameters, like) if parameters else None)
        self._new_optimizer()
        moments = [below(tensors, f"adam:{key}:") for key in self.online.named()]
        if moments[0]:
            state = {i: {name: value.clone() for name, value in own.items()} for i, own in enumerate(moments)}
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
