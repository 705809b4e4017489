"""Global contrastive losses for OpenCLIP: each sample's normalizer estimated over the whole data set."""

from pathlib import Path

from open_clip_ext.keyboard import end_imports_in_one_line

end_imports_in_one_line()

# ruff: noqa: E402
from open_clip_ext.errors import InputError
from open_clip_ext.factory import create_loss, list_losses
from open_clip_ext.losses import GlobalContrastiveLoss, NonFiniteError
from open_clip_ext.recovery import recover_statistics
from open_clip_ext.row_files import rows_in_files

__version__ = "0.1.0"
MODEL_CONFIGS = Path(__file__).with_name("model_configs")  # of the tiny models, for open_clip.add_model_config
__all__ = [
    "MODEL_CONFIGS", "GlobalContrastiveLoss", "InputError", "NonFiniteError", "create_loss", "list_losses",
    "recover_statistics", "rows_in_files",
]
