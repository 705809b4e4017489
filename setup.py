from pathlib import Path

from setuptools import find_packages, setup

version = next(
    line.split('"')[1]
    for line in Path(__file__).with_name("open_clip_ext").joinpath("__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)
plots = ["matplotlib"]
data = ["scikit-learn"]

setup(
    name="open-clip-ext",
    version=version,
    description="NeuCLIP, FastCLIP and other global contrastive losses for an unmodified OpenCLIP",
    long_description=Path(__file__).with_name("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["open_clip_ext*", "training_ext*"]),
    package_data={"open_clip_ext": ["model_configs/*.json"]},
    install_requires=[
        "open_clip_torch[training]>=3.3,<4",
        "torch>=2.6",
        "timm",
        "transformers",
        "webdataset",
        "braceexpand",
        "pandas",
        "safetensors",
        "pillow",
        "tqdm",
        # From 2.4 on, float() refuses the one-element arrays of OpenCLIP 3.3's zero-shot accuracy.
        "numpy<2.4",
    ],
    extras_require={
        "data": data,
        "plots": plots,
        "test": ["pytest", "pytest-xdist", "hypothesis", "ruff", "setuptools>=64", "tensorboard", *data, *plots],
    },
)
