"""Global contrastive losses for OpenCLIP: each sample's normalizer estimated over the whole data set."""

from open_clip_ext.errors import InputError
from open_clip_ext.factory import create_loss, list_losses
from open_clip_ext.losses import GlobalContrastiveLoss, NonFiniteError
from open_clip_ext.recovery import recover_statistics

__version__ = "0.1.0"
__all__ = [
    "GlobalContrastiveLoss", "InputError", "NonFiniteError", "create_loss", "list_losses", "recover_statistics",
]
