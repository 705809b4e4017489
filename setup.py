import re
from pathlib import Path

from setuptools import find_packages, setup

version = next(
    line.split('"')[1]
    for line in Path(__file__).with_name("open_clip_ext").joinpath("__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)
URL = "https://github.com/open-clip-ext/open_clip_ext"
# The index shows README elsewhere than the repository does.
readme = Path(__file__).with_name("README.md").read_text()
readme = re.sub(r"\]\((?!https?:)([^)]+)\)", rf"]({URL}/blob/main/\1)", readme)
data = ["scikit-learn", "resvg-py"]  # of examples/data
docs = ["pdoc"]

setup(
    name="open-clip-ext",
    version=version,
    description="NeuCLIP, FastCLIP and other global contrastive losses for an unmodified OpenCLIP",
    long_description=readme.replace(".png)", ".png?raw=true)"),
    long_description_content_type="text/markdown",
    license="MIT",
    author="the open_clip_ext authors",
    url=URL,
    project_urls={
        "Source": URL,
        "Issues": f"{URL}/issues",
        "Changelog": f"{URL}/blob/main/CHANGELOG.md",
    },
    keywords=["CLIP", "contrastive learning", "OpenCLIP", "partition function"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    # An import hook, the default, loses to a clone's own folder of the same name where one works beside the clone.
    options={"editable_wheel": {"mode": "compat"}},
    packages=find_packages(include=["open_clip_ext*", "training_ext*"]),
    package_data={
        "open_clip_ext": ["model_configs/*.json", "py.typed"],
        "training_ext": ["flags/published/*.yaml", "py.typed"],
    },
    install_requires=[
        "open_clip_torch[training]>=2.26,!=4.0.*,!=4.1.*,<4.3",
        "torch>=2.6",  # before it, weights_only=True could be got round (CVE-2025-32434)
        "timm",
        "transformers>=4.31",  # an older one's text towers have a buffer more, which OpenCLIP does not load
        "webdataset>=0.2.35",
        "braceexpand",
        "pandas>=1.5",
        "matplotlib>=3.6",
        "safetensors>=0.3.1",
        "pillow>=10.1",  # its EPS reader can be kept from starting ghostscript
        "fsspec",
        "pyyaml",
        "tqdm",
        "numpy",
    ],
    extras_require={
        "data": data,
        "docs": docs,
        "test": [
            "pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "setuptools>=64", "tensorboard", "pyarrow", *data,
            *docs,
        ],
    },
)
