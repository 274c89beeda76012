"""A system call filter: an allow-list, anything else fails with EPERM.

Classic BPF through prctl(2), which needs no privilege once no_new_privs is set. No processes, no
threads, no sockets, no signals to others, no mounts; with `files=False` nothing can be opened.
"""

import ctypes
import platform
import struct

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _EPERM, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NR_AT, _ARCH_AT, _ARG1_AT = 0, 4, 24  # offsets in struct seccomp_data; low half of argument 1
_UNUSED = -1

_FCNTL_LIKE_IOCTLS = (0x5401, 0x5450, 0x5451)
"""TCGETS, FIONCLEX, FIOCLEX: what Python's open() asks of a file."""

_NUMBERS = {
    # name: (x86_64, aarch64)
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "close": (3, 57), "lseek": (8, 62), "fstat": (5, 80),
    "newfstatat": (262, 79), "statx": (332, 291), "stat": (4, _UNUSED), "lstat": (6, _UNUSED),
    "faccessat": (269, 48), "faccessat2": (439, 439), "access": (21, _UNUSED),
    "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fcntl": (72, 25),
    "dup": (32, 23), "dup2": (33, _UNUSED), "dup3": (292, 24), "pipe": (22, _UNUSED),
    "pipe2": (293, 59), "poll": (7, _UNUSED), "ppoll": (271, 73), "select": (23, _UNUSED),
    "pselect6": (270, 72), "ftruncate": (77, 46), "truncate": (76, 45), "unlink": (87, _UNUSED),
    "unlinkat": (263, 35), "mkdir": (83, _UNUSED), "mkdirat": (258, 34), "rmdir": (84, _UNUSED),
    "rename": (82, _UNUSED), "renameat": (264, 38), "renameat2": (316, 276), "fsync": (74, 82),
    "umask": (95, 166), "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216),
    "mprotect": (10, 226), "madvise": (28, 233), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "futex": (202, 98), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "time": (201, _UNUSED), "times": (100, 153), "getrusage": (98, 165), "getpid": (39, 172),
    "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getrandom": (318, 278),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sysinfo": (99, 179),
    "uname": (63, 160), "exit": (60, 93), "exit_group": (231, 94), "restart_syscall": (219, 128),
}  # fmt: skip
_OPENING = {"openat": (257, 56), "open": (2, _UNUSED), "readlink": (89, _UNUSED),
            "readlinkat": (267, 78)}  # fmt: skip
_IOCTL = (16, 29)

_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def supported() -> bool:
    """Whether the filter knows this machine's system call numbers."""
    return platform.machine() in _ARCHES


def program(*, files: bool, machine: str) -> bytes:
    """The filter as BPF instructions of eight bytes each."""
    column, arch = _ARCHES[machine]
    names = {**_NUMBERS, **(_OPENING if files else {})}
    allowed = sorted({row[column] for row in names.values()} - {_UNUSED})
    code = [
        _instruction(_LOAD, k=_ARCH_AT),
        _instruction(_JUMP_IF_EQUAL, jump=(1, 0), k=arch),
        _instruction(_RETURN, k=_KILL),
        _instruction(_LOAD, k=_NR_AT),
    ]
    for number in allowed:
        code += [
            _instruction(_JUMP_IF_EQUAL, jump=(0, 1), k=number),
            _instruction(_RETURN, k=_ALLOW),
        ]
    skip = 1 + 2 * len(_FCNTL_LIKE_IOCTLS)
    code += [
        _instruction(_JUMP_IF_EQUAL, jump=(0, skip), k=_IOCTL[column]),
        _instruction(_LOAD, k=_ARG1_AT),
    ]
    for request in _FCNTL_LIKE_IOCTLS:
        code += [
            _instruction(_JUMP_IF_EQUAL, jump=(0, 1), k=request),
            _instruction(_RETURN, k=_ALLOW),
        ]
    code.append(_instruction(_RETURN, k=_EPERM))
    return b"".join(code)


def install(*, files: bool) -> None:
    """Filter this process and all it becomes. Cannot be undone. Raises OSError when refused."""
    code = program(files=files, machine=platform.machine())
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refused the system call filter")


def _instruction(code: int, *, jump: tuple[int, int] = (0, 0), k: int = 0) -> bytes:
    return struct.pack("HBBI", code, jump[0], jump[1], k)
