"""Stands for the notebook in a rank: `__main__.__file__` points here.

A process that multiprocessing spawns inside a rank (a DataLoader worker, say) runs its parent's `__main__` file to have
the classes that it will unpickle. A notebook has no such file; this one rebuilds the cells' names from the payload.
In the rank itself `linecache` has the cells' text under this file's name, so that `inspect.getsource` finds it.
"""

import os
import sys
import types

PAYLOAD = "NBLAUNCH_PAYLOAD"
"""The variable that says where the payload can be opened."""

if __name__ == "__mp_main__":
    from nblaunch.wire.payload import load_call

    _main = types.ModuleType("__main__")
    _former = sys.modules["__main__"]
    sys.modules["__main__"] = _main
    try:
        _fd = os.open(os.environ[PAYLOAD], os.O_RDONLY | os.O_CLOEXEC)
        load_call(_fd, _main)
        os.close(_fd)
    finally:
        sys.modules["__main__"] = _former
    globals().update({name: value for name, value in vars(_main).items() if not name.startswith("__")})
