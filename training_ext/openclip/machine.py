"""Check what a command line needs of the machine: folders, devices, packages; runs on process 0, writes nothing."""

import importlib.util
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import fsspec
import torch
import torch.distributed as dist
from open_clip import IMAGENET_CLASSNAMES
from open_clip_train.distributed import is_using_distributed
from torchvision.datasets.folder import IMG_EXTENSIONS

from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of
from training_ext.core.rows import trains
from training_ext.openclip.hosts import host
from training_ext.openclip.launch import processes_here
from training_ext.openclip.loading import one_line

PACKAGES = {"horovod": "horovod", "use_bnb_linear": "bitsandbytes", "imagenet_v2": "imagenetv2_pytorch"}
REGISTERED_ELSEWHERE = ("hccl", "ccl")  # backends that other packages register


def check_machine(args: Namespace) -> None:
    """Raise InputError for the first flag that needs what this machine does not have."""
    for check in CHECKS:
        check(args)


def check_writable(flag: str, path: str) -> None:
    """Raise InputError unless the folder `path` exists or can be created, and files can be written to it."""
    try:
        whole = folder = Path(path).absolute()
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise NotADirectoryError(None, f"{str(folder)!r} is a file")
        most = os.pathconf(folder, "PC_NAME_MAX")
        if any(len(os.fsencode(part)) > most for part in whole.parts):
            raise OSError(None, f"a name has at most {most} bytes")
        # By trying, since permissions do not tell: root may write where they forbid it.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise InputError(f"{path!r} cannot be written to: {reason}; give a writable folder", flag) from None


def check_logs(args: Namespace) -> None:
    check_writable("--logs", args.logs)
    if args.name is not None:
        check_writable("--name", os.path.join(args.logs, args.name))
    if args.cache_dir is not None:
        check_writable("--cache-dir", args.cache_dir)


def check_device(args: Namespace) -> None:
    """Raise InputError for a missing device that was given; for the default, cuda, OpenCLIP uses the CPU."""
    kind = args.device.partition(":")[0]
    try:
        torch.empty(0, device=args.device)
        if kind == "meta":
            raise ValueError("it computes nothing")
    except Exception as error:
        if "device" not in args.given_flags:
            return
        there = f"cuda:0 to cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "cpu"
        reason = str(error).splitlines()[0][:120]
        raise InputError(f"{args.device!r} is not on this machine, which has {there}: {reason}", "--device") from None
    processes = processes_here()
    if kind == "cuda" and is_using_distributed() and not args.no_set_device_rank:
        if processes > torch.cuda.device_count():
            raise InputError(
                f"{args.device!r} for {processes} processes on this machine, which has "
                f"{torch.cuda.device_count()} GPUs; start one process per GPU",
                "--device",
            )


def check_backend(args: Namespace) -> None:
    for name in (args.dist_backend or "gloo").lower().split(","):
        name = name.rpartition(":")[2]
        known = [*dist.Backend.backend_list[1:], *REGISTERED_ELSEWHERE]
        if name not in known or (is_using_distributed() and not dist.is_backend_available(name)):
            here = ", ".join(other for other in known if dist.is_backend_available(other))
            raise InputError(f"{args.dist_backend!r} is not in this PyTorch, which has {here}", "--dist-backend")


def check_packages(args: Namespace) -> None:
    for name, package in PACKAGES.items():
        if getattr(args, name) and importlib.util.find_spec(package) is None:
            raise InputError(f"needs the package {package}; install it or leave the flag out", flag_of(name))
    given = f"--report-to: {args.report_to!r}"
    loggers = [name for name in ("wandb", "tensorboard") if name in args.report_to or "all" in args.report_to]
    for logger in loggers:
        module = getattr(host().main_module, logger)
        if module is None or (logger == "wandb" and not hasattr(module, "init")):  # a folder wandb/ can be imported
            raise InputError(f"{given} needs {logger}; pip install {logger}, or leave it out")
    if not trains(args) and "wandb" in loggers:
        raise InputError(f"{given} without training makes OpenCLIP fail; leave out wandb")


def check_imagenet(args: Namespace) -> None:
    """Raise InputError unless --imagenet-val has a folder with an image for each of ImageNet's 1000 classes.

    torchvision's ImageFolder numbers the folders in alphabetical order, and OpenCLIP compares these numbers with those
    of its class names. The data of --imagenet-v2 come from a package, which reads the numbers from the folders' names.
    """
    if args.imagenet_val is None:
        return
    given, classes = f"--imagenet-val: {args.imagenet_val!r}", len(IMAGENET_CLASSNAMES)
    _, names, _ = next(os.walk(args.imagenet_val), ("", [], []))
    if len(names) != classes:
        raise InputError(
            f"{given} has {len(names)} class folders; give a folder with ImageNet's {classes}, n01440764 to n15075141"
        )
    for name in sorted(names):
        below = os.walk(os.path.join(args.imagenet_val, name), followlinks=True)
        if not any(file.lower().endswith(IMG_EXTENSIONS) for _, _, files in below for file in files):
            raise InputError(f"{given} has no image in the class folder {name!r}; add some, or give another folder")


def check_remote(args: Namespace) -> None:
    if args.remote_sync is None:
        return
    given = f"--remote-sync: {args.remote_sync!r}"
    if args.resume == "latest" and (args.save_most_recent or args.remote_sync_protocol != "s3"):
        raise InputError(f"{given} with --resume latest needs --remote-sync-protocol s3 and no --save-most-recent")
    if args.remote_sync_protocol == "s3":
        if not args.remote_sync.startswith("s3://"):
            raise InputError(f"{given} is not s3://BUCKET/FOLDER; give one, or --remote-sync-protocol fsspec")
        if shutil.which("aws") is None:
            raise InputError(f"{given} needs the command aws; install it, or give --remote-sync-protocol fsspec")
        return
    try:
        fsspec.core.url_to_fs(args.remote_sync)
    except (ValueError, ImportError, OSError) as error:
        raise InputError(f"{given} cannot be reached: {one_line(error)}") from None


def check_remote_file(flag: str, url: str) -> None:
    """Raise InputError unless fsspec finds a file at this URL."""
    try:
        system, path = fsspec.core.url_to_fs(url)
        if not system.isfile(path):
            raise FileNotFoundError("there is no such file")
    except Exception as error:  # file systems may raise anything
        raise InputError(f"{url!r} cannot be read: {one_line(error) or repr(error)}", flag) from None


def check_code(args: Namespace) -> None:
    """Raise InputError for --copy-codebase with an installed OpenCLIP, and for --trace in a training.

    OpenCLIP copies the folder three levels above its code, which is the repository in a checkout only.
    """
    source = Path(host().main_module.__file__).resolve().parents[2]
    if args.copy_codebase and (source / "site-packages").is_dir():
        raise InputError(
            f"OpenCLIP is installed as a package, and {source} with everything in it would be copied; "
            "leave it out",
            "--copy-codebase",
        )
    if args.trace and trains(args):
        raise InputError("a traced model cannot be trained; leave it out, or leave out --train-data", "--trace")


CHECKS: tuple[Callable[[Namespace], None], ...] = (
    check_device, check_backend, check_packages, check_logs, check_imagenet, check_remote, check_code,
)
