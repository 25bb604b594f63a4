"""What this machine's processor is, without the compiler that builds loops for it."""

import platform

X86 = ("x86_64", "AMD64", "i386", "i686")
ARM = ("aarch64", "arm64")


def is_known_processor() -> bool:
    """Whether `zinf_kernels.subnormals` can set this machine's kind of processor."""
    return platform.machine() in X86 + ARM
