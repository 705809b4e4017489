"""Keep OpenCLIP's accuracy on ImageNet working, before OpenCLIP 4, with NumPy 2.4 and later."""

from training_ext.core.component import Component
from training_ext.core.hosts import release
from training_ext.core.seam import Seam

ACCURACY = Seam(
    "open_clip_train.zero_shot", "float",
    why="from NumPy 2.4 on, float refuses an array with one element in a dimension",
    contract="accuracy makes a number of each of its arrays of one element by float(array), and nothing else there "
    "uses float",
    replacement=lambda original, component: lambda array: array.item(),
    used_by="open_clip_train.zero_shot:accuracy",
)  # fmt: skip


class NumPyScalars(Component):
    name = "numpy_scalars"
    seams = (ACCURACY,) if release() < (4, 0) else ()
