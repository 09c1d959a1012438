"""A process that has imported what workers need, and becomes workers by forking.

That is TensorFlow, Keras and the strategies.

`warm.py` starts it, in pytest's process, and asks it for workers; this module is its
script and imports nothing else of `tests/`.

1. It says how many threads it has, when it has imported them.
2. It receives a request: script, arguments, folder, environment, tag, and files.
3. It forks a process in the middle, which forks the worker, and ends.
4. It answers with the worker's process id.

Since the middle one has ended, the worker is a child of pytest, which takes in orphans
(see `conftest.py`): it is waited for, stopped and killed like one that pytest has
started by itself. This process ends when pytest closes the socket, or is gone.
"""

import atexit
import ctypes
import fcntl
import gc
import json
import os
import select
import socket
import sys
import types
from typing import Any

# Of a request, in bytes. Environments are a few kilobytes.
_LARGEST = 1 << 20
# Above all numbers that anybody has asked for.
_HIGH_FD = 200
_CLONE_NEWNET = 0x40000000


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    name, tag = sys.argv[2], os.environ[sys.argv[2]]
    before = dict(os.environ)
    # First, hence the last at the end.
    kept: list[str] = []
    atexit.register(_forget, kept)
    gc.disable()  # a sixth of it is collections, which find nothing
    import keras  # noqa: F401
    import tensorflow
    from tensorflow.python.util import tf_stack

    # Each operation of a graph keeps its caller's whole stack, for messages: a seventh
    # of a small job. Here all keep this one.
    here = tf_stack.extract_stack()
    tf_stack.extract_stack = lambda stacklevel=1: here
    # Grappler takes an eighth of a small job.
    set_options = tensorflow.config.optimizer.set_experimental_options
    set_options({"disable_meta_optimizer": True})
    # 150 modules, which take a worker of a small job a fifth of its time. The import
    # changes nothing of Keras and TensorFlow: the first strategy does.
    from kerasdist import (  # noqa: F401
        ModelParallelStrategy,
        ParameterServerStrategy,
        RingStrategy,
    )

    # The import sets variables, in each process that does it.
    by_import = {k: v for k, v in os.environ.items() if before.get(k) != v}
    # What lives now lives on in all workers: no collection has to look at it, which
    # would copy its memory into each of them.
    gc.enable()
    gc.collect()
    _keep_alive()  # all that will be frozen
    kept += _of_others()
    gc.freeze()
    control.send(json.dumps({"threads": len(os.listdir("/proc/self/task"))}).encode())
    while True:
        message, fds, _, _ = socket.recv_fds(control, _LARGEST, 8)
        if not message:
            return  # pytest has closed the socket
        request = json.loads(message)
        worker = _fork_twice(f"{name}={tag}", f"{name}={request['tag']}")
        if worker is None:
            control.close()
            _become({**request, "env": request["env"] | by_import}, fds)
            if "OPTIMIZED" in os.environ:
                set_options({"disable_meta_optimizer": False})
            _run(request["script"])
            return
        for fd in fds:
            os.close(fd)
        control.send(json.dumps({"pid": worker}).encode())


def _keep_alive() -> None:
    """Gives all objects that exist a reference that is never given back.

    Otherwise each worker takes TensorFlow and Keras apart when it ends, object by
    object: that takes longer than many a test. What a worker makes itself ends as
    it does elsewhere: its modules are emptied, threads waited for, exit functions
    called.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(gc.get_objects()))


def _of_others() -> list[str]:
    """The modules that are neither Python's nor kerasdist's."""
    own = {"__main__", "kerasdist", *sys.stdlib_module_names, *sys.builtin_module_names}
    return [name for name in sys.modules if name.partition(".")[0] not in own]


def _forget(names: list[str]) -> None:
    """Takes modules out of the interpreter's table, so that it doesn't empty them.

    It would write into most of the memory that a worker shares with this process until
    then, which takes longer than many a test.
    """
    for name in names:
        sys.modules.pop(name, None)


def _fork_twice(before: str, after: str) -> int | None:
    """Forks a worker that is nobody's child here: its process id; None in it."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        # Here, so that nobody ever sees a worker without its own tag.
        _overwrite_environment(before, after)
        ended = os.pidfd_open(os.getpid())
        worker = os.fork()
        if worker == 0:
            select.select([ended], [], [])  # then this one has its new parent
            for fd in (reader, writer, ended):
                os.close(fd)
            return None
        os.write(writer, str(worker).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read()
    os.waitpid(middle, 0)
    return int(said)


def _overwrite_environment(before: str, after: str) -> None:
    """Changes a variable in the memory that others see as /proc/PID/environ.

    The kernel shows the place where the environment was when the process began,
    whatever becomes of it; `os.environ` leaves that place as it is.
    """
    if len(before) != len(after):
        raise ValueError(f"Not equally long. Received: {before!r}, {after!r}")
    with open("/proc/self/stat", "rb") as file:
        # The second field, a name in parentheses, may hold anything.
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    offset = ctypes.string_at(start, end - start).find(before.encode())
    if offset < 0:
        raise RuntimeError(f"{before!r} isn't in this process's environment.")
    ctypes.memmove(start + offset, after.encode(), len(after))


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Makes this fork what a new interpreter would be, but for the imports."""
    os.setsid()
    if request["namespace"] is not None:
        _enter(request["namespace"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    # First all out of the way: a number may be free, or one of the others'.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, target in zip(high, request["fds"], strict=True):
        if target > 2 and os.path.exists(f"/proc/self/fd/{target}"):
            raise RuntimeError(f"File descriptor {target} is in use.")
        os.dup2(fd, target)
        os.close(fd)
    # Python's own generator is seeded anew in each fork, by Python.
    import numpy

    numpy.random.seed()
    sys.argv[:] = [request["script"], *request["args"]]
    sys.orig_argv[:] = [sys.executable, *sys.argv]
    sys.path[0] = os.path.dirname(os.path.realpath(request["script"]))


def _enter(namespace: str) -> None:
    """Goes to a host of `hosts.py`; what `ip netns exec` does for the network."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns", namespace)


def _run(script: str) -> None:
    """Runs the script as `python script` does, with the interpreter's own function.

    So nothing of this module is in a traceback, and `sys.exit` and Ctrl-C end the
    process as they do there.
    """
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    fopen = ctypes.CDLL(None).fopen
    fopen.argtypes, fopen.restype = [ctypes.c_char_p] * 2, ctypes.c_void_p
    stream = fopen(os.fsencode(script), b"rb")
    if not stream:
        sys.exit(f"{script} can't be opened.")
    run = ctypes.pythonapi.PyRun_SimpleFileExFlags
    run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
    failed = run(stream, os.fsencode(script), 1, None)
    # After Ctrl-C the interpreter ends by that signal, if it ends by itself.
    if failed and getattr(sys, "last_type", None) is not KeyboardInterrupt:
        sys.exit(1)


if __name__ == "__main__":
    main()
