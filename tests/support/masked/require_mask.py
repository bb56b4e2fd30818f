"""Fail unless this process is masked. Tests pass it to pytest, `-p require_mask`, so that no mask is left out unseen."""

import os
import sys

from eformer._engine.stores import directory, durable, new_files

if hasattr(os, "O_PATH") or directory._syscall or durable._sync_file_range or new_files._sync_all:
    raise RuntimeError("calls of Linux are not masked: is another sitecustomize on the path?")
if (directory.sys.platform == "darwin") != (os.environ["EFORMER_MASK"] == "macos"):
    raise RuntimeError(f"eformer sees the platform {directory.sys.platform}")
if sys.platform == "linux" and directory.own_path(directory.Directory(".", 0)) != directory.Path():
    raise RuntimeError("eformer finds its descriptors in /proc")
