"""Image-caption data without a download: generated scenes and scanned digits.

`python -m open_clip_ext.data.make_shards` writes either kind as webdataset shards.
"""

from .digits import NUM_DIGITS, digit_pairs
from .scenes import (
    Scene,
    SceneObject,
    Scenes,
    describe_scene,
    render_scene,
    scene_caption,
    shifted_caption,
)

__all__ = [
    "NUM_DIGITS",
    "Scene",
    "SceneObject",
    "Scenes",
    "describe_scene",
    "digit_pairs",
    "render_scene",
    "scene_caption",
    "shifted_caption",
]
