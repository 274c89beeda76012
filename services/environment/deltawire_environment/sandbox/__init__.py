"""Run programs that a policy wrote, contained.

    service ── control socket ── server (pid 1 of its own namespaces) ── fork ── one child a program

`pool.py` is the service's side, `server.py` forks, `confine.py` takes everything away, `child.py`
runs the program. Nothing of a program's own word is trusted: expected answers never enter the
sandbox; they are compared outside.
"""
