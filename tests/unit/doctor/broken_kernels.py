"""Kernels that fail in every way, run as mcore_rl.doctor.kernels is."""

from __future__ import annotations

import os
import sys
import time

from mcore_rl.doctor.kernels import KERNELS, call_each


def _raise(device: str) -> None:
    raise OSError("libcudnn.so.9: cannot open\nmore of it")


def _die(device: str) -> None:
    os.abort()


def _hang(device: str) -> None:
    time.sleep(600)


BROKEN = {"raises": ("", _raise), "dies": ("", _die), "hangs": ("", _hang)}

if __name__ == "__main__":
    call_each({**BROKEN, **KERNELS}, sys.argv[1], sys.argv[2:])
