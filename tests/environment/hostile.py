"""Programs that try to get out, to stay, or to take everything down. None may succeed."""

SECRET_MARK = "the-services-secret"
"""In the environment of the test process: no program may ever print it."""

PROGRAMS = {
    "read_passwd": "print(open('/etc/passwd').read())",
    "read_proc_environ": "print(open('/proc/self/environ').read())",
    "read_parents_environ": """
import os
print(open(f'/proc/{os.getppid()}/environ').read())
""",
    "read_all_proc": """
import os
for name in os.listdir('/proc'):
    print(open(f'/proc/{name}/environ').read())
""",
    "environment_variables": "import os\nprint(dict(os.environ))\nraise SystemExit(5)",
    "libc_getenv": """
import ctypes
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
print(libc.getenv(b'DELTAWIRE_TEST_SECRET'))
raise SystemExit(5)
""",
    "fork_bomb": "import os\nwhile True: os.fork()",
    "fork_by_libc": """
import ctypes
pid = ctypes.CDLL(None).fork()
raise SystemExit(5 if pid == -1 else 0)
""",
    "thread_bomb": """
import threading, time
while True: threading.Thread(target=time.sleep, args=(100,)).start()
""",
    "run_a_shell": "import os\nraise SystemExit(5 if os.system('id') else 0)",
    "spawn": "import subprocess\nprint(subprocess.run(['/bin/ls', '/'], capture_output=True))",
    "exec": "import os\nos.execv('/bin/sh', ['sh', '-c', 'id'])",
    "memory_in_one_piece": "x = bytearray(10**10)",
    "memory_bit_by_bit": "x = []\nwhile True: x.append(bytearray(10**6))",
    "memory_mapped": "import mmap\nx = [mmap.mmap(-1, 10**8) for _ in range(100)]",
    "endless_loop": "while True: pass",
    "ignores_the_cpu_limit": """
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True: pass
""",
    "endless_sleep": "import time\ntime.sleep(10**6)",
    "endless_output": "while True: print('x' * 10**5)",
    "endless_error_output": "import sys\nwhile True: sys.stderr.write('x' * 10**5)",
    "endless_results": "import os\nwhile True: os.write(3, b'{}\\n' * 10**4)",
    "deep_recursion": "def f(n): return f(n + 1)\nimport sys\nsys.setrecursionlimit(10**9)\nf(0)",
    "huge_number": "print(9 ** 9 ** 9)",
    "catastrophic_regex": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "fill_the_disk": """
at = 0
while True:
    open(f'/tmp/{at}', 'wb').write(b'x' * 10**6)
    at += 1
""",
    "write_outside": "open('/usr/evil', 'w').write('x')",
    "write_to_the_root": "open('/evil', 'w').write('x')",
    "symlink_out": """
import os
os.symlink('/etc', '/tmp/etc')
print(open('/tmp/etc/passwd').read())
""",
    "hard_link_out": "import os\nos.link('/usr/lib/os-release', '/tmp/x')",
    "dot_dot": "print(open('/tmp/../../../etc/passwd').read())",
    "chroot_trick": "import os\nos.chroot('/tmp')",
    "mount": """
import ctypes
code = ctypes.CDLL(None).mount(b'none', b'/tmp', b'proc', 0, None)
raise SystemExit(5 if code else 0)
""",
    "new_namespace": """
import ctypes
raise SystemExit(5 if ctypes.CDLL(None).unshare(0x10000000) else 0)
""",
    "ptrace_parent": """
import ctypes, os
raise SystemExit(5 if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) else 0)
""",
    "kill_everything": "import os\nos.kill(-1, 9)",
    "kill_the_server": "import os\nos.kill(os.getppid(), 9)",
    "open_a_socket": "import socket\nsocket.create_connection(('127.0.0.1', 80))",
    "unix_socket": "import socket\nsocket.socket(socket.AF_UNIX)",
    "raise_limits": """
import resource
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
x = bytearray(10**10)
""",
    "many_open_files": "x = [open('/tmp/a', 'w') for _ in range(10**6)]",
    "become_root": "import os\nos.setuid(0)\nos.setgid(0)\nprint(open('/etc/shadow').read())",
    "io_uring": """
import ctypes
raise SystemExit(5 if ctypes.CDLL(None).syscall(425, 1, 0) == -1 else 0)
""",
    "old_x32_call": """
import ctypes
raise SystemExit(5 if ctypes.CDLL(None).syscall(0x40000000 + 57) == -1 else 0)
""",
    "segmentation_fault": "import ctypes\nctypes.string_at(0)",
    "close_all_descriptors": "import os\nos.closerange(0, 100)\nraise SystemExit(5)",
    "exit_handlers": """
import atexit, os
atexit.register(lambda: os.fork())
raise SystemExit(5)
""",
    "replace_the_harness": """
import sys, json
json.dumps = lambda *a, **k: '{"value": 1}'
sys.modules['os']._exit = lambda code: None
raise RuntimeError
""",
    "inspect_the_harness": """
import sys
frame = sys._getframe()
while frame.f_back: frame = frame.f_back
print([k for k in frame.f_globals])
raise SystemExit(5)
""",
}
