"""Programs and functions that solve a task, and ones that do not: what a grader of code must tell apart.

A program doubles the number that it reads (`DOUBLE`), unless it says what it is given; a function is `add`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

DOUBLE = [{"input": "3\n", "output": "6\n"}, {"input": "21\n", "output": "42\n"}]
ADD = {"fn_name": "add", "inputs": [[1, 2], [30, 4]], "outputs": [3, 34]}


class Code(NamedTuple):
    text: str
    tests: Any = DOUBLE


def program(given: str, printed: str, text: str) -> Code:
    return Code(text, [{"input": given, "output": printed}])


def function(text: str, name: str, given: list[Any], returned: Any) -> Code:
    return Code(text, {"fn_name": name, "inputs": [given], "outputs": [returned]})


N = "n = int(input())\n"
RIGHT = {
    # The value of a last expression is not output.
    "ends with write": Code("import sys\nsys.stdout.write(str(2 * int(input())))"),
    "ends with os.write": Code("import os\nn = int(input())\nos.write(1, b'%d' % (2 * n))"),
    "ends with a list of prints": Code("[print(2 * int(x)) for x in open(0)]"),
    "ends with a call that returns a number": Code(
        "def main():\n    print(2 * int(input()))\n    return 0\nmain()"
    ),
    "ends with a call that returns true": Code(
        "def main():\n    print(2 * int(input()))\n    return True\nmain()"
    ),
    "ends with pop": Code(N + "stack = [n]\nprint(2 * n)\nstack.pop()"),
    "ends with a string": Code(N + "print(2 * n)\n'''the end'''"),
    "ends with a comparison": Code(N + "print(2 * n)\nn == 3"),
    "ends with a name": Code(N + "print(2 * n)\nn"),
    "ends with a generator": Code(N + "print(2 * n)\n(x for x in 'ab')"),
    "ends with setdefault": Code(N + "d = {}\nprint(2 * n)\nd.setdefault(n, 7)"),
    "ends with map": Code("list(map(lambda x: print(2 * int(x)), open(0)))"),
    # The ends of an interpreter.
    "exit": Code(N + "print(2 * n)\nexit()"),
    "exit with 0": Code(N + "print(2 * n)\nexit(0)\nprint('never')"),
    "quit": Code(N + "print(2 * n)\nquit()"),
    "sys.exit": Code("import sys\n" + N + "print(2 * n)\nsys.exit()"),
    "sys.exit of main": Code("import sys\ndef main():\n    print(2 * int(input()))\nsys.exit(main())"),
    "SystemExit": Code(N + "print(2 * n)\nraise SystemExit"),
    "os._exit": Code("import os\n" + N + "print(2 * n, flush=True)\nos._exit(0)"),
    "exit in a function": Code("def solve():\n    print(2 * int(input()))\n    exit()\nsolve()"),
    "a thread": Code(
        "import threading\ndef main():\n    print(2 * int(input()))\nthreading.Thread(target=main).start()"
    ),
    "a thread with a large stack": Code(
        "import sys, threading\nsys.setrecursionlimit(1 << 20)\nthreading.stack_size(1 << 26)\n"
        "def deep(n):\n    return 0 if n == 0 else 1 + deep(n - 1)\n"
        "def main():\n    deep(9000)\n    print(2 * int(input()))\n"
        "t = threading.Thread(target=main)\nt.start()\nt.join()"
    ),
    "a daemon thread that is left": Code(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print(2 * int(input()))"
    ),
    "a pool of threads": Code(
        "from concurrent.futures import ThreadPoolExecutor as Pool\nwith Pool(2) as pool:\n"
        "    print(*pool.map(lambda x: 2 * int(x), [input()]))"
    ),
    "a timer": Code(N + "import threading\nthreading.Timer(0.01, lambda: print(2 * n)).start()"),
    "atexit": Code(N + "import atexit\natexit.register(print, 2 * n)"),
    "buffered until the end": Code(
        "import atexit, io, sys\nbuffer = io.StringIO()\nsys.stdout = buffer\n"
        "atexit.register(lambda: sys.__stdout__.write(buffer.getvalue()))\nprint(2 * int(input()))"
    ),
    "a file of its own on standard output": Code(
        "out = open(1, 'w', closefd=False)\nout.write(str(2 * int(input())))"
    ),
    "an object that prints when it goes": Code(
        "class Out:\n    def __init__(self): self.write, self.held = print, []\n"
        "    def __del__(self): self.write(*self.held)\nout = Out()\nout.held.append(2 * int(input()))"
    ),
    "output that flushes itself": Code(
        "import io, os, sys\nclass Fast(io.IOBase):\n    def __init__(self): self.held = io.BytesIO()\n"
        "    def write(self, s): self.held.write(s.encode())\n"
        "    def flush(self):\n        os.write(1, self.held.getvalue())\n"
        "        self.held = io.BytesIO()\n    writable = lambda self: True\n"
        "sys.stdout = Fast()\nprint(2 * int(input()))"
    ),
    "standard output is closed": Code("import sys\nprint(2 * int(input()))\nsys.stdout.close()"),
    "an event loop": Code(
        "import asyncio\nasync def main():\n    print(2 * int(input()))\nasyncio.run(main())"
    ),
    # Standard error is apart.
    "prints errors": Code("import sys\n" + N + "print('n =', n, file=sys.stderr)\nprint(2 * n)"),
    "prints many errors": Code("import sys\n" + N + "print('x' * 300000, file=sys.stderr)\nprint(2 * n)"),
    "an invalid escape": Code("import re\nprint(2 * int(re.findall('\\d+', input())[0]))"),
    "is with a literal": Code(N + "if n is 3: pass\nprint(2 * n)"),
    "a warning": Code("import warnings\nwarnings.warn('old')\nprint(2 * int(input()))"),
    "a traceback that is shown": Code(
        "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()\n"
        "print(2 * int(input()))"
    ),
    "logging": Code("import logging\nlogging.warning('here')\nprint(2 * int(input()))"),
    "a thread that fails": Code(
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\n"
        "print(2 * int(input()))"
    ),
    # The module is __main__.
    "a guard": Code("if __name__ == '__main__':\n    print(2 * int(input()))"),
    "pickle of a class": Code(
        "import pickle\nclass P:\n    def __init__(self, n): self.n = n\n"
        "print(2 * pickle.loads(pickle.dumps(P(int(input())))).n)"
    ),
    "deep copy": Code(
        "import copy\nclass P: pass\np = P()\np.n = int(input())\nprint(2 * copy.deepcopy(p).n)"
    ),
    "type hints of a class": Code(
        "import typing\nclass Node:\n    next: 'Node'\nassert typing.get_type_hints(Node)['next'] is Node\n"
        "print(2 * int(input()))"
    ),
    "a dataclass": Code(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass(order=True)\n"
        "class P:\n    n: int\n    other: P | None = None\nprint(2 * P(int(input())).n)"
    ),
    "itself among the modules": Code(
        "import sys\nFACTOR = 2\nprint(sys.modules['__main__'].FACTOR * int(input()))"
    ),
    "import of itself": Code("FACTOR = 2\nimport __main__\nprint(__main__.FACTOR * int(input()))"),
    "an enum": Code(
        "from enum import Enum\nclass F(Enum):\n    TWO = 2\nprint(F['TWO'].value * int(input()))"
    ),
    "globals": Code("globals()['n'] = int(input())\nprint(2 * n)"),
    "builtins by name": Code("__builtins__.print(2 * int(input()))"),
    "a process of its own": Code(
        "import multiprocessing\ndef double(n): return 2 * n\nif __name__ == '__main__':\n"
        "    with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "        print(pool.map(double, [int(input())])[0])"
    ),
    # Ways to read.
    "sys.stdin.read": Code("import sys\nprint(2 * int(sys.stdin.read()))"),
    "sys.stdin.buffer": Code("import sys\nprint(2 * int(sys.stdin.buffer.readline()))"),
    "sys.__stdin__": Code("import sys\nprint(2 * int(sys.__stdin__.readline()))"),
    "os.read": Code("import os\nprint(2 * int(os.read(0, os.fstat(0).st_size)))"),
    "iter(input, '')": Code("import sys\nprint(*(2 * int(x) for x in iter(sys.stdin.readline, '')))"),
    "until the end of input": Code(
        "while True:\n    try:\n        print(2 * int(input()))\n    except EOFError:\n        break"
    ),
    "a memory map": Code("import mmap\nprint(2 * int(mmap.mmap(0, 0, access=mmap.ACCESS_READ).read()))"),
    "/dev/stdin": Code("print(2 * int(open('/dev/stdin').read()))"),
    "a file that may be there": Code(
        "import os, sys\nif os.path.exists('input.txt'):\n    sys.stdin = open('input.txt')\n"
        "print(2 * int(input()))"
    ),
    "a file that may lie beside it": Code(
        "import os\nbeside = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'input.txt')\n"
        "print(2 * int(open(beside if os.path.exists(beside) else 0).read()))"
    ),
    # Input and output in other shapes.
    "no new line at the end": Code("print(2 * int(input()), end='')"),
    "space at the ends": Code("print(2 * int(input()), '', '\\n\\n')"),
    "numpy": Code("import numpy as np\nprint(2 * np.array([int(input())])[0])"),
    "long output": program("30000", " ".join(map(str, range(30000))), "print(*range(int(input())))"),
    "much input": program("1 " * 200_000, "200000", "print(sum(map(int, input().split())))"),
    "lists of lines": Code(
        "a, b = map(int, input().split())\nprint(a + b)\nprint(input())",
        {"inputs": [["3 4", "x"]], "outputs": [["7", "x"]]},
    ),
    "the last digit of a float": program("", "0.3", "print(0.1 + 0.2)"),
    "a rounded float": program("", "0.333333", "print(1 / 3)"),
    "digits of zero": program("", "2.500\n1e3", "print(2.5)\nprint(1000.0)"),
    "a whole number as a float": program("", "3", "print(9 / 3)"),
    "a whole number and the noise of floats": program("", "3", "print(2.9999999999999996)"),
    "other text": program("", "żółw ✓", "print('żółw ✓')"),
    # Functions.
    "a function": Code("def add(a, b):\n    return a + b", ADD),
    "a method": Code("class Solution:\n    def add(self, a, b):\n        return a + b", ADD),
    "a static method": Code("class Solution:\n    @staticmethod\n    def add(a, b): return a + b", ADD),
    "a lambda": Code("add = lambda a, b: a + b", ADD),
    "a partial": Code("from functools import partial\nadd = partial(lambda x, a, b: x + a + b, 0)", ADD),
    "a guard that reads": Code(
        "def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    print(add(int(input()), 1))", ADD
    ),
    "a guard that tests": Code(
        "import unittest\ndef add(a, b):\n    return a + b\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(add(1, 1), 2)\nif __name__ == '__main__':\n"
        "    unittest.main()", ADD,
    ),
    "a guard that exits": Code(
        "import sys\ndef add(a, b): return a + b\nif __name__ == '__main__':\n    sys.exit(add(1, 2))", ADD
    ),
    "exits without a guard": Code("import sys\ndef add(a, b):\n    return a + b\nsys.exit(0)", ADD),
    "reads without a guard": Code("def add(a, b):\n    return a + b\nprint(add(int(input()), 1))", ADD),
    "tests without a guard": Code(
        "import unittest\ndef add(a, b):\n    return a + b\nunittest.main()", ADD
    ),
    "a function that prints": Code("def add(a, b):\n    print('adding', a, b)\n    return a + b", ADD),
    "a function that prints no whole line": Code(
        "import sys\ndef add(a, b):\n    sys.stdout.write('...')\n    return a + b", ADD
    ),
    "a module that prints": Code("def add(a, b):\n    return a + b\nprint(add(1, 2), 'as expected')", ADD),
    "a module with assertions": Code("def add(a, b):\n    return a + b\nassert add(1, 2) == 3", ADD),
    "a function and pickle": Code(
        "import pickle\nclass P: pass\ndef add(a, b):\n    pickle.loads(pickle.dumps(P()))\n    return a + b",
        ADD,
    ),
    "a function and the future": Code(
        "from __future__ import annotations\ndef add(a: Later, b) -> Later:\n    return a + b", ADD
    ),
    "annotations that are not imported": Code(
        "class Solution:\n    def add(self, a: Any, b: Optional[int]) -> List[int]: return a + b", ADD
    ),
    "modules that are not imported": function(
        "def count(words):\n    return dict(Counter(words)), math.gcd(4, 6), pow(2, 10, 7)", "count",
        [["a", "b", "a"]], [{"a": 2, "b": 1}, 2, 2],
    ),
    "a recursive function": function(
        "import functools\n@functools.cache\ndef fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)",
        "fib", [90], 2880067194370816120,
    ),
    "a tuple": function("def pair(a):\n    return a, a", "pair", [1], [1, 1]),
    "a number of numpy": function("import numpy as np\ndef f(a):\n    return np.sum(a)", "f", [[1, 2]], 3),
    "an array of numpy": function("import numpy\ndef f(a): return numpy.array(a)", "f", [[1, 2]], [1, 2]),
    "a float": function("def f(a):\n    return a + 0.2", "f", [0.1], 0.3),
    "nothing": function("def f(a):\n    pass", "f", [1], None),
    "text": function("def f(a):\n    return a + '\"\\n✓'", "f", ["x'"], "x'\"\n✓"),
    "wrapped outputs": Code("def add(a, b):\n    return a + b",
                            {"fn_name": "add", "inputs": [[3, 4], [4, 4]], "outputs": [[7], [8]]}),
    "outputs that are lists": function("def f(a):\n    return [a]", "f", [1], [1]),
    "a long list": function("def f(n):\n    return list(range(n))", "f", [9000], list(range(9000))),
    "much of its own output": Code("def add(a, b):\n    print('x' * 5000)\n    return a + b", ADD),
    "errors of a function": Code(
        "import sys\ndef add(a, b):\n    print('x' * 50000, file=sys.stderr)\n    return a + b", ADD
    ),
    "a function with defaults": Code("def add(a, b=0, *rest, **more):\n    return a + b", ADD),
    "a class with a state": Code(
        "class Solution:\n    def __init__(self): self.n = 0\n    def add(self, a, b):\n"
        "        self.n += a + b\n        return self.n", ADD,
    ),
}  # fmt: skip
WRONG = {
    "nothing at all": Code(""),
    "does not compile": Code("print(2 *"),
    "a wrong number": Code("print(3 * int(input()))"),
    "one test only": Code("print(6)"),
    "raises at the end": Code("print(2 * int(input()), flush=True)\nraise ValueError"),
    "exits with 1": Code("print(2 * int(input()))\nexit(1)"),
    "exits with words": Code("print(2 * int(input()))\nexit('bad')"),
    "ends by a signal": Code("import os\nprint(2 * int(input()), flush=True)\nos.kill(os.getpid(), 9)"),
    "stops at once": Code("raise SystemExit"),
    "leaves at once": Code("import os\nos._exit(0)"),
    "an expression without print": Code("2 * int(input())"),
    "goes on after much space": Code("print(2 * int(input()), ' ' * 10**6, 7)"),
    "prints errors only": Code("import sys\nprint(2 * int(input()), file=sys.stderr)"),
    "a prompt": Code("print(2 * int(input('n = ')))"),
    "too much": Code("n = int(input())\nprint(2 * n)\nprint(2 * n)"),
    "everything that may be": Code("print(*range(1000))"),
    "another line": Code("print(2)\nprint(2 * int(input()))"),
    "on two lines": program("", "1 2", "print(1)\nprint(2)"),
    "without end": Code("print(2 * int(input()), flush=True)\nwhile True: pass"),
    "prints without end": Code("while True: print(2 * 3)"),
    "a thread without end": Code(
        "import threading, time\nprint(2 * int(input()), flush=True)\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()"
    ),
    "memory without end": Code("x = []\nwhile True: x.append(bytearray(1 << 24))"),
    "recursion without end": Code("def f(): return f()\nprint(f())"),
    "a float that is off": program("", "3.14159265", "print(3.1416)"),
    "a float that is off by more than its digits": program("", "2.5", "print(2.54)"),
    "zero for little": program("", "1e-7", "print(0.0)"),
    "an integer off by one": program("", "1000000007", "print(1000000008)"),
    "a large integer off by one": program("", "1000000000000000001", "print(1e18)"),
    "an integer and a half": program("", "1000000007", "print(1000000007.5)"),
    "leading zeros": program("", "00101", "print(101)"),
    "infinity": program("", "1e308", "print('1e999')"),
    "not a number": program("", "0.5", "print(float('nan'))"),
    "a number in words": program("", "6", "print('six')"),
    "looks for what is expected": program(
        "", "6", "import gc, glob\nt = [str(o) for o in gc.get_objects()]\nprint(glob.glob('/tmp/*'))"
    ),
    "an answer beside": Code("import os\nos.write(3, b'6')"),
    "a function that is wrong": Code("def add(a, b):\n    return a - b", ADD),
    "no function": Code("print(3)\nprint(34)", ADD),
    "not callable": Code("add = 3", ADD),
    "a function that leaves": Code("def add(a, b):\n    import os; os._exit(0)", ADD),
    "a function that exits": Code("def add(a, b):\n    exit()", ADD),
    "a module that is guarded away": Code(
        "if __name__ == '__main__':\n    def add(a, b): return a + b", ADD
    ),
    "equal to everything": Code(
        "class E(int):\n    __eq__ = lambda s, o: True\ndef add(a, b): return E(0)", ADD
    ),
    "another json": Code("import json\njson.dumps = lambda v: '3'\ndef add(a, b): return 1", ADD),
    "another encoder": Code(
        "import json\njson.JSONEncoder.encode = lambda s, v: '3'\ndef add(a, b): return 1", ADD
    ),
    "another print": Code("import builtins\nbuiltins.print = lambda *a: 0\ndef add(a, b): return 0", ADD),
    "a function without end": Code("def add(a, b):\n    while True: pass", ADD),
    "a function that prints too much": Code("def add(a, b):\n    print('x' * 10**6)\n    return a + b", ADD),
    "text for a number": Code("def add(a, b): return '3'", ADD),
    "a list for a number": Code("def add(a, b): return [a + b]", ADD),
    "truth for a number": function("def f(a): return True", "f", [1], 1),
    "a set for a list": function("def f(a): return {1}", "f", [1], [1]),
    "too few arguments": Code("def add(a): return a", ADD),
    "an object": Code("def add(a, b): return object()", ADD),
    "a generator": Code("def add(a, b): yield a + b", ADD),
    "what a function prints": Code("def add(a, b): print(a + b)", ADD),
    "one of a list of two": function("def f(a): return 1", "f", [1], [1, 2]),
    "a list too deep": function(
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(a):\n    for _ in range(9000): a = [a]\n"
        "    return a",
        "f", [1], 1,
    ),
    "wrapped twice": Code("def add(a, b): return [[a + b]]",
                          {"fn_name": "add", "inputs": [[3, 4]], "outputs": [[7]]}),
    "its own source": Code(
        "import sys\ndef add(a, b):\n    code = sys._getframe(1).f_code\n    return code.co_consts", ADD
    ),
}  # fmt: skip
