"""Take away what a program could reach: a world of its own, then everything in it.

`enter_world` runs once, in the server, where the kernel allows it: own user, mount, process,
network and IPC namespaces, and a root folder that holds Python's library, read-only, and nothing
else. `confine` runs in each child. Without namespaces a child can open no file at all.
"""

import ctypes
import os
import resource
import sys
from pathlib import Path

from deltawire_environment.sandbox import seccomp

_NEWNS, _NEWUTS, _NEWIPC = 0x00020000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PR_CAPBSET_DROP, _PR_SET_DUMPABLE = 24, 4
_CAPABILITY_VERSION = 0x20080522
_NOBODY = 65534

SCRATCH = "/tmp"
"""Where a program may write, when it may write at all."""
_SCRATCH_BYTES = 16 * 1024 * 1024
_FILE_BYTES = 8 * 1024 * 1024
_OPEN_FILES = 32


def enter_world(root: Path) -> bool:
    """Move this process into namespaces of its own with `root` (an empty folder) as its root.

    True in the process that goes on inside; False when the kernel refuses, and nothing has changed
    that matters. Forks: the caller becomes a parent that only waits.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        _call("unshare", _NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError:
        return False
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    try:
        _build_root(root)
    except OSError:
        return False
    return True


def confine(*, private: bool, address_space_bytes: int, cpu_s: int) -> None:
    """Limit this process for good: memory, time, files, rights, then system calls."""
    if private:
        _call("unshare", _NEWNS)
        _mount("tmpfs", SCRATCH, "tmpfs", _NOSUID | _NODEV, f"size={_SCRATCH_BYTES},mode=777")
        os.chdir(SCRATCH)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    for kind, limit in (
        (resource.RLIMIT_AS, address_space_bytes),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, 8 * 1024 * 1024),
    ):
        resource.setrlimit(kind, (limit, limit))
    _drop_rights(keep_user=private)
    seccomp.install(files=private)


def _build_root(root: Path) -> None:
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("tmpfs", str(root), "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for folder in _library_folders():
        target = root / folder.relative_to("/")
        target.mkdir(parents=True, exist_ok=True)
        _mount(str(folder), str(target), None, _BIND | _REC)
        _mount("none", str(target), None, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV)
    (root / SCRATCH.strip("/")).mkdir(exist_ok=True)
    (root / "old").mkdir()
    _call("pivot_root", str(root).encode(), str(root / "old").encode())
    os.chdir("/")
    _call("umount2", b"/old", _DETACH)
    os.rmdir("/old")
    _mount("none", "/", None, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV)


def _library_folders() -> list[Path]:
    """Python's standard library and the shared libraries its modules load; no site-packages."""
    home = Path(sys.base_prefix).resolve()
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    wanted = [home / "lib" / python / "lib-dynload", home / "lib" / python]
    wanted += [Path("/lib"), Path("/lib64"), Path("/usr/lib/x86_64-linux-gnu")]
    wanted.append(Path("/usr/lib/aarch64-linux-gnu"))
    real = {folder.resolve() for folder in wanted if folder.is_dir()}
    real -= {Path("/usr/lib")}  # /lib is a link to it on merged systems: only its libraries
    return sorted(
        f for f in real if not any(f != other and f.is_relative_to(other) for other in real)
    )


def _drop_rights(*, keep_user: bool) -> None:
    if os.getuid() == 0 and not keep_user:  # root of the machine itself, not of a namespace
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    libc = ctypes.CDLL(None, use_errno=True)
    capability = 0
    while libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:  # fails past the last one
        capability += 1
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if libc.capset(ctypes.byref(header), ctypes.byref(nothing)) != 0:
        raise OSError(ctypes.get_errno(), "cannot drop capabilities")


def address_space_bytes() -> int:
    """What this process maps now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    _call(
        "mount",
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        flags,
        data.encode(),
    )


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    function = getattr(libc, name, None)
    if function is None:  # glibc has no wrapper for pivot_root
        numbers = {"pivot_root": {"x86_64": 155, "aarch64": 41}}
        function, arguments = libc.syscall, (numbers[name][os.uname().machine], *arguments)
    converted = [
        ctypes.c_ulong(argument) if isinstance(argument, int) else argument
        for argument in arguments
    ]
    if function(*converted) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
