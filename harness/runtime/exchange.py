"""Exchange two folders atomically: at every moment each path has either folder, even if the process is killed.

Linux has renameat2 for this, and macOS renamex_np. File systems without support, such as NFS, raise OSError.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

_HERE = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE, and RENAME_SWAP of macOS
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EPERM)


def exchange(left: Path, right: Path) -> None:
    """Exchange the folders at two paths.

    Raises OSError, whose `errno` is one of `UNSUPPORTED` if the system cannot exchange folders.
    """
    # Python's `os` has no such call.
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(left), os.fsencode(right)
    try:
        if sys.platform == "darwin":
            failed = libc.renamex_np(*paths, _EXCHANGE)
        else:
            failed = libc.renameat2(_HERE, paths[0], _HERE, paths[1], _EXCHANGE)
    except AttributeError as error:  # another C library
        raise OSError(errno.ENOSYS, "this system cannot exchange two folders") from error
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(left), None, str(right))
