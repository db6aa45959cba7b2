"""Programs that try to pass assertions without solving the task. They run in the real sandbox."""

# ruff: noqa: E501 (one attack on each line)
from __future__ import annotations

import pytest

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.rewards.graders.code import RunProgram, grade_asserts
from mcore_rl.rewards.graders.programs.wire import Decoder, Owner, WireError
from tests.unit.rewards.trusted import fenced
from tests.unit.sandbox.conftest import working

ADD = {
    "prompt": 'def add(a, b):\n    """The sum."""\n',
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n",
    "entry_point": "add",
}
CLOSE = {"test_list": ["assert abs(area(2) - 3.5) < 1e-6", "assert isclose(area(3), 7.25)"]}
MEMBER = {"test_list": ["assert 42 in primes(50)", "assert primes(9).count(7) == 3"]}
SORTED = {
    "test_list": ["assert sorted(parts(3)) == [5, 8]", "assert set(parts(3)) == {5, 8}", "assert len(parts(3)) == 2"]
}
LOOP = {
    "test": "def check(candidate):\n    assert all(map(lambda case: candidate(case[0]) == case[1], [(1, 7), (2, 9)]))\n"
    "    for given, wanted in [(1, 7), (2, 9)]:\n        assert candidate(given) == wanted\n",
    "entry_point": "f",
}
POLY = {
    "prompt": "def poly(xs, x):\n    return sum(c * x**i for i, c in enumerate(xs))\n\n\n"
    'def zero(xs):\n    """A root."""\n',
    "test": "def check(candidate):\n    import math\n    assert math.fabs(poly([-6, 2], candidate([-6, 2]))) < 1e-4\n",
    "entry_point": "zero",
}
CALLBACK = {
    "test": "WANTED = 31337\ndef square(x):\n    return x * x\ndef check(candidate):\n    assert candidate(square) == WANTED\n",
    "entry_point": "f",
}
CONTEXT = {"test_list": ["with locked() as value:\n    assert value == 17"]}
KODCODE = {"test": "from solution import add\n\ndef test_add():\n    assert add(20, 22) == 42\n"}
PRINT_SECRETS = """
import os, re
def show(data):
    for found in set(re.findall(rb"[0-9a-f]{64}", data)):
        for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
            for fd in ("1", "2"):
                try:
                    with open("/proc/%s/fd/%s" % (pid, fd), "wb", 0) as out: out.write(b"\\n" + found + b"\\n")
                except OSError: pass
        for fd in range(1, 64):
            try: os.write(fd, b"\\n" + found + b"\\n")
            except OSError: pass
"""
ANYTHING = """
class Anything:
    def __init__(self, *a): pass
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __contains__ = __lt__
    def __sub__(self, other): return 0.0
    __rsub__ = __add__ = __radd__ = __mul__ = __mod__ = __sub__
    def __abs__(self): return 0.0
    __float__ = __abs__
    def __hash__(self): return 0
    def __bool__(self): return True
    def count(self, item): return item and 3
    def __getattr__(self, name): return lambda *a: True
    def __enter__(self): return self
    def __exit__(self, *a): return True
    def __fspath__(self): return ""
"""
FAKE = "def add(*a):\n    raise ValueError\n"

ATTACKS = {
    "last line of its own file": (ADD, "import sys, os\nexec(open(sys.argv[0]).read().rstrip().splitlines()[-1]); sys.stdout.flush(); os._exit(0)"),
    "every file of the directory": (ADD, PRINT_SECRETS + "for d in ('/tmp', '.', '/dev/shm'):\n  for f in os.listdir(d):\n    try: show(open(os.path.join(d, f), 'rb').read())\n    except OSError: pass\nos._exit(0)"),
    "command lines": (ADD, PRINT_SECRETS + "import glob\nfor f in glob.glob('/proc/*/cmdline'): show(open(f, 'rb').read())\nos._exit(0)"),
    "environments": (ADD, PRINT_SECRETS + "import glob\nfor f in glob.glob('/proc/*/environ'):\n  try: show(open(f, 'rb').read())\n  except OSError: pass\nos._exit(0)"),
    "memory of other processes": (ADD, PRINT_SECRETS + """
import glob
for maps in glob.glob('/proc/[0-9]*/maps'):
    try:
        pid = maps.split('/')[2]
        if int(pid) == os.getpid(): continue
        with open(maps) as lines, open(f'/proc/{pid}/mem', 'rb', 0) as memory:
            for line in lines:
                if ' rw' in line:
                    first, last = (int(x, 16) for x in line.split()[0].split('-'))
                    try:
                        memory.seek(first); show(memory.read(last - first))
                    except (OSError, ValueError, OverflowError): pass
    except OSError: pass
os._exit(0)"""),
    "descriptors of other processes": (ADD, PRINT_SECRETS + "import glob\nfor f in glob.glob('/proc/[0-9]*/fd/*'):\n  try:\n    fd = os.open(f, os.O_RDONLY | os.O_NONBLOCK); show(os.read(fd, 1 << 20))\n  except OSError: pass\nos._exit(0)"),
    "ptrace": (ADD, PRINT_SECRETS + "import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.ptrace(16, os.getppid(), 0, 0))\n" + FAKE),
    "process_vm_readv": (ADD, "import ctypes, os\nlibc = ctypes.CDLL(None)\nlibc.process_vm_readv(os.getppid(), None, 0, None, 0, 0)\n" + FAKE),
    "frames": (ADD, PRINT_SECRETS + "import sys\nf = sys._getframe()\nwhile f:\n  show(repr((f.f_globals, f.f_locals)).encode()); f = f.f_back\n" + FAKE),
    "inspect.stack": (ADD, PRINT_SECRETS + "import inspect\nfor f in inspect.stack():\n  f.frame.f_globals.update(check=lambda c: None, AssertionError=ValueError); show(repr(f).encode())\n" + FAKE),
    "garbage collector": (ADD, PRINT_SECRETS + "import gc\nfor o in gc.get_objects():\n  try: show(repr(o).encode())\n  except Exception: pass\n" + FAKE),
    "main module": (ADD, PRINT_SECRETS + "import sys\nfor m in list(sys.modules.values()): show(repr(vars(m)).encode('utf-8', 'replace'))\nsys.modules['__main__'].check = lambda c: None\n" + FAKE),
    "exit handlers": (ADD, PRINT_SECRETS + "import atexit\natexit.register(lambda: [os.write(fd, b'\\nTrue\\n') for fd in range(1, 9)])\nraise SystemExit(0)"),
    "early exit": (ADD, "raise SystemExit(0)"),
    "early exit in a call": (ADD, "import os\ndef add(a, b):\n    os._exit(0)"),
    "overridden builtins": (ADD, "import builtins\nbuiltins.AssertionError = type('A', (), {})\nbuiltins.print = lambda *a: None\nbuiltins.all = builtins.any = builtins.bool = lambda *a: True\nbuiltins.__build_class__ = None\ndef add(a, b): return 0"),
    "own check function": (ADD, "def check(candidate): pass\ndef add(a, b): return 0"),
    "trace function": (ADD, "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\nsys.excepthook = lambda *a: None\ndef add(a, b): return 0"),
    "equal to everything": (ADD, ANYTHING + "def add(a, b): return Anything()"),
    "function that is a class": (ADD, ANYTHING + "add = Anything"),
    "class in place of the function": (CLOSE, ANYTHING.replace("class Anything", "class area")),
    "number that is equal to everything": (ADD, "class N(int):\n    def __eq__(self, other): return True\n    __ne__ = lambda *a: False\n    __hash__ = None\ndef add(a, b): return N(1)"),
    "text and list that are equal to everything": (ADD, "class L(list):\n    def __eq__(self, other): return True\ndef add(a, b): return L()"),
    "operators that return zero": (CLOSE, ANYTHING + "def area(x): return Anything()"),
    "own abs and isclose": (CLOSE, "def abs(x): return 0\ndef isclose(*a, **k): return True\ndef area(x): return 0.0"),
    "not a number": (CLOSE, "def area(x): return float('nan')"),
    "container that contains everything": (MEMBER, ANYTHING + "def primes(n): return Anything()"),
    "elements that are equal to everything": (SORTED, ANYTHING + "def parts(n): return [Anything(), Anything()]"),
    "own sorted and set": (SORTED, "def sorted(x): return [5, 8]\ndef set(x): return {5, 8}\ndef len(x): return 2\ndef parts(n): return []"),
    "end of the iteration over the tests": (LOOP, "def f(x): raise StopIteration"),
    "subclass of StopIteration": (LOOP, "class S(StopIteration): pass\ndef f(x): raise S"),
    "helper of the prompt": (POLY, "def poly(xs, x): return 0.0\ndef zero(xs): return 0.0"),
    "globals of a callback": (CALLBACK, "def f(g):\n    for name in ('__globals__', '__code__', '__closure__', '__self__', '__class__'):\n        try: return getattr(g, name)['WANTED']\n        except Exception: pass\n    return 0"),
    "context that swallows errors": (CONTEXT, ANYTHING + "def locked(): return Anything()"),
    "dead parent": (ADD, "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n" + FAKE),
    "stopped parent": (ADD, "import os, signal, time\nos.kill(os.getppid(), signal.SIGUSR1)\n" + FAKE),
    "module of the tests": (CLOSE | {"test_imports": ["from statistics import mean as abs", "import bdb, colorsys"]}, "for n in ('bdb', 'colorsys', 'statistics', 'random', 'numbers', 'sitecustomize'):\n  for d in ('.', '/tmp'):\n    open(f'{d}/{n}.py', 'w').write('import os; os._exit(0)')\ndef area(x): return 0"),
    "patched modules": (CLOSE | {"test_imports": ["import math", "from math import isclose"]}, "import math, sys\nmath.isclose = lambda *a, **k: True\nsys.modules['math'] = math\nimport builtins\nbuiltins.abs = lambda x: 0\ndef area(x): return 3.5"),
    "thread that outlives": (ADD, "import threading, time, os\ndef late():\n  time.sleep(0.3)\n  [os.write(fd, b'\\nTrue\\n') for fd in range(1, 9)]\nthreading.Thread(target=late).start()\n" + FAKE),
    "daemon": (ADD, "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(0.3)\n  os._exit(0)\n" + FAKE),
    "forged replies": (ADD, """
import os, json, struct
def frame(m):
    d = json.dumps(m).encode(); return struct.pack('>I', len(d)) + d
for fd in range(3, 64):
    try: os.write(fd, frame({'ok': True, 'root': True, 'nodes': [], 'changed': [], 'printed': ''}) * 9)
    except OSError: pass
def add(a, b): return 0"""),
    "damaged replies": (ADD, "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'\\x00\\x00\\x00\\x02[[')\n  except OSError: pass\n" + FAKE),
    "endless replies": (ADD, "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'\\xff' * 100)\n  except OSError: pass\n" + FAKE),
    "deeply nested result": (ADD, "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x"),
    "test file of pytest": (KODCODE, "import sys, types\nm = types.ModuleType('solution'); m.add = lambda *a: 42\nsys.modules['solution'] = m\nsys.modules['tests'] = m\ndef add(a, b): return 0"),
}  # fmt: skip
SOLUTIONS = [
    (ADD, "def add(a, b):\n    return a + b"),
    (CLOSE, "def area(x): return {2: 3.5, 3: 7.25}[x]"),
    (SORTED, "def parts(n): return iter([8, 5]) if n > 3 else [8, 5]"),
    (LOOP, "def f(x): return 5 + 2 * x"),
    (POLY, "def zero(xs): return -xs[0] / xs[1]"),
    (CALLBACK, "def f(g): return g(177) + 8"),
    (CONTEXT, "import contextlib\n@contextlib.contextmanager\ndef locked(): yield 17"),
    (KODCODE, "def add(a, b): return a + b"),
]


@pytest.fixture(scope="module")
def run() -> RunProgram:
    return working(SandboxConfig(seconds=10.0)).run


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_program_that_does_not_solve_the_task_gets_nothing(run: RunProgram, name: str) -> None:
    truth, program = ATTACKS[name]
    assert grade_asserts(fenced(program), truth, run, 30.0).reward == 0.0


@pytest.mark.parametrize(("truth", "program"), SOLUTIONS)
def test_program_that_solves_the_task_passes(run: RunProgram, truth: dict[str, object], program: str) -> None:
    assert grade_asserts(fenced(program), truth, run, 30.0).reward == 1.0


@pytest.mark.parametrize(("tag", "argument"), [("list", {}), ("timedelta", {}), ("dict", []), ("dict", bytearray())])
def test_change_of_an_argument_to_another_type_is_damaged(tag: str, argument: object) -> None:
    with pytest.raises(WireError, match="damaged content"):
        Decoder(Owner(), [[tag, 1, 2]]).content(0, argument)
