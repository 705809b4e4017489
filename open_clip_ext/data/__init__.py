"""Image-caption data for everyone: generated scenes, scanned digits, icons.

`python -m open_clip_ext.data.make_shards` writes each kind as webdataset shards. Icons need a package that npm
downloads.
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
