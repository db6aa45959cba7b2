"""Correct programs in the formats of APPS, TACO, LiveCodeBench, PrimeIntellect, HumanEval, MBPP, KodCode, and LeetCode.

Each program passes the harness of its data set.
"""

# ruff: noqa: E501 (one program on each line)
from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from mcore_rl.rewards.graders import code
from mcore_rl.rewards.graders.programs.extraction import extract_program
from tests.unit.rewards.trusted import fenced, run_trusted

grade_outputs = partial(code.grade_outputs, run=run_trusted, seconds=60.0)
grade_asserts = partial(code.grade_asserts, run=run_trusted, seconds=60.0)
TWO_SUM = """class Solution:
    def twoSum(self, nums: List[int], target: int) -> List[int]:
        seen = {}
        for i, n in enumerate(nums):
            if target - n in seen:
                return [seen[target - n], i]
            seen[n] = i
"""
GUARDED = TWO_SUM + "if __name__ == '__main__':\n    n = int(input())\n    print(n)\n"
REVERSE = """class Solution:
    def reverseList(self, head: Optional[ListNode]) -> Optional[ListNode]:
        before = None
        while head:
            head.next, before, head = before, head, head.next
        return before
"""
DEPTH = "def depth(root: Optional[TreeNode]) -> int:\n    return 0 if root is None else 1 + max(depth(root.left), depth(root.right))"
LEETCODE = """from typing import *

class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next

def list_node(values: list):
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head

def is_same_list(a, b):
    while a and b and a.val == b.val:
        a, b = a.next, b.next
    return a is None and b is None
"""


@pytest.mark.parametrize(
    ("program", "truth"),
    [
        (TWO_SUM, {"fn_name": "twoSum", "inputs": [[[2, 7], 9]], "outputs": [[0, 1]]}),
        (GUARDED, {"fn_name": "twoSum", "inputs": [[[2, 7], 9]], "outputs": [[[0, 1]]]}),
        (TWO_SUM, {"fn_name": "twoSum", "inputs": ["[2, 7]\n9"], "outputs": ["[0, 1]"]}),
        (TWO_SUM, {"fn_name": "twoSum", "inputs": ["nums = [2, 7], target = 9"], "outputs": ["[0,1]"]}),
        (TWO_SUM, {"fn_name": "twoSum", "inputs": [{"nums": [2, 7], "target": 9}], "outputs": [(0, 1)]}),
        (TWO_SUM, {"fn_name": "twoSum", "inputs": ["(2, 7)\n9"], "outputs": ["(0, 1)"]}),
        ("def f(x): return x / 3", {"fn_name": "f", "inputs": [[1]], "outputs": [[0.3333333333]]}),
        ("def f(x): return 'a' * x", {"fn_name": "f", "inputs": [[2]], "outputs": [["aa"]]}),
        ("def f(x): return {x}", {"fn_name": "f", "inputs": [[2]], "outputs": [[[2]]]}),
        ("def f(d): return {k: d[k] + 1 for k in d if k > 1}", {"fn_name": "f", "inputs": [[{"1": 2, "2": 3}]], "outputs": [{"2": 4}]}),
        ("def f(x): return sqrt(x) + gcd(4, 6) + inf * 0 if x else Counter('aab')", {"fn_name": "f", "inputs": [[0]], "outputs": [{"a": 2, "b": 1}]}),
        ("from __future__ import annotations\ndef f(x: int) -> int: return x", {"fn_name": "f", "inputs": [[5]], "outputs": [5]}),
        ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", {"fn_name": "f", "inputs": [[20000]], "outputs": [20000]}),
        ("def f(n): return n == 2", {"fn_name": "f", "inputs": [[2]], "outputs": ["true"]}),
        (REVERSE, {"fn_name": "reverseList", "inputs": [[[1, 2, 3]]], "outputs": [[3, 2, 1]]}),
        (DEPTH, {"fn_name": "depth", "inputs": [[[3, 9, 20, None, None, 15, 7]]], "outputs": [3]}),
        ("import threading\ndef f(x):\n    threading.Thread(target=lambda: print('late')).start()\n    return x", {"fn_name": "f", "inputs": [[5]], "outputs": [5]}),
        ("a, b = map(int, input().split())\nprint(a + b)", {"inputs": ["1 2\n"], "outputs": [["3"]]}),
        ("n = int(input())\nfor _ in range(n): print(*sorted(map(int, input().split())))", {"inputs": [["2", "3 1", "5 4"]], "outputs": [["1 3", "4 5"]]}),
        ("n = int(input())\nfor _ in range(n): print(*sorted(map(int, input().split())))", {"inputs": [["1", [3, 1]]], "outputs": [[["1", "3"]]]}),
        ("if __name__ == '__main__':\n    print(int(stdin.readline()) * 2)", {"inputs": ["4\n"], "outputs": ["8\n"]}),
        ("print(bisect_left([1, 2], 2), sep='')\nprint()\nprint(math.pi)", {"inputs": [""], "outputs": ["1\n3.1415926"]}),
        ("import io, os\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\nprint(int(input()) + int(input()))", {"inputs": ["7\n8\n"], "outputs": ["15"]}),
        ("print(len(str(2**20000)))", {"inputs": [""], "outputs": ["6021"]}),
        ("print(1e-7)", {"inputs": [""], "outputs": ["0.0000001"]}),
        (TWO_SUM, {"fn_name": "twoSum", "inputs": np.array([np.array([np.array([2, 7]), 9], dtype=object), None], dtype=object)[:1], "outputs": [np.array([0, 1])]}),
        ("print(int(input()) + 1)", {"fn_name": "", "inputs": "12\n", "outputs": "13\n"}),
        ("def f(a, b): return a + b", [{"input": "1\n2", "output": "3", "metadata": '{"func_name": "f"}'}]),
        ("print(int(input()) + 1)", [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]),
        ("def f(a, b): return a + b", [{"input": "1\n2", "output": "3", "metadata": {"func_name": "f"}}]),
        ("def f(a, b): return a + b", {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [1, 2], "output": [3]}]}),
    ],
)  # fmt: skip
def test_program_right_by_its_harness_passes_examples(program: str, truth: Any) -> None:
    assert grade_outputs(fenced(program), truth).accuracy == 1.0


@pytest.mark.parametrize(
    ("program", "truth"),
    [
        ("def f(x): return [x]", {"fn_name": "f", "inputs": [[5]], "outputs": [5]}),
        ("def f(x): return '5'", {"fn_name": "f", "inputs": [[5]], "outputs": [5]}),
        ("def f(x): return 10**20 + 1", {"fn_name": "f", "inputs": [[5]], "outputs": [10**20]}),
        ("def f(x): return x + 1e-3", {"fn_name": "f", "inputs": [[5]], "outputs": [5.0]}),
        ("def f(x):\n    y = []\n    for _ in range(5000): y = [y]\n    return y", {"fn_name": "f", "inputs": [[5]], "outputs": [[]]}),
        ("print('[' * 100000)", {"inputs": [""], "outputs": ["["]}),
        ("print('3')\ndef f(x):\n    import os\n    os._exit(0)", {"fn_name": "f", "inputs": [[5]], "outputs": [3]}),
        (REVERSE, {"fn_name": "reverseList", "inputs": [[[1, 2, 3]]], "outputs": [[1, 2, 3]]}),
        ("print('1_0')", {"inputs": [""], "outputs": ["10.0"]}),
        ("print('a b')", {"inputs": [""], "outputs": [["a", "b"]]}),
    ],
)  # fmt: skip
def test_program_that_is_wrong_fails_examples(program: str, truth: Any) -> None:
    assert grade_outputs(fenced(program), truth).accuracy == 0.0


FIXTURES = """import pytest
from solution import f

@pytest.fixture
def two():
    return 2

@pytest.fixture
def four(two):
    yield f(two)
    two = 0

@pytest.fixture(autouse=True)
def greet():
    print('start')

def test_own(four, capsys, unused=1):
    print('end')
    assert four == 4 and capsys.readouterr().out == 'start\\nhi\\nend\\n'

def test_folder(tmp_path, tmpdir):
    (tmp_path / 'a.txt').write_text('5')
    assert f(int((tmp_path / 'a.txt').read_text())) == 10 and tmpdir != tmp_path

class TestTwice:
    @classmethod
    def setup_class(cls):
        cls.base = 1

    @pytest.fixture
    def three(self):
        return 2 + self.base

    @pytest.mark.parametrize('given, wanted', [(1, 2), (4, 8)])
    def test_all(self, given, wanted, three):
        assert f(given) == wanted and f(three) == 6
"""


STACK = """class Empty(IndexError):
    def __init__(self, code):
        super().__init__('empty')
        self.code = code
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, x): self.items.append(x)
    def pop(self):
        if not self.items: raise Empty(7)
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __contains__(self, x): return x in self.items
    def __add__(self, other): return Stack(self.items + other.items)
    def __eq__(self, other): return self.items == other.items
    @property
    def size(self): return len(self.items)
def make(n):
    for i in range(n): yield i
"""
TEST_STACK = """from solution import Stack, Empty, make

def test_items():
    s = Stack()
    s.push(1)
    s.push([2])
    assert len(s) == 2 and s.pop() == [2] and 1 in s
    assert (s + s).size == 2 and s.items == [1] and s == Stack([1]) and isinstance(s, Stack)
    assert list(make(3)) == [0, 1, 2]

class TestErrors:
    def setup_method(self):
        self.stack = Stack()

    def test_empty(self):
        try:
            self.stack.pop()
        except Empty as error:
            assert error.code == 7 and isinstance(error, IndexError)
        else:
            raise AssertionError
"""
CLOSE = "def has_close(numbers: List[float], threshold: float) -> bool:\n"
CLOSE_BODY = "    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[:i])"
HUMANEVAL = {
    "prompt": f'from typing import List\n\n\n{CLOSE}    """ Whether two numbers are close.\n    """\n',
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate([1.0, 2.0], 0.5) == False\n    assert candidate([1.0, 1.2], 0.5)\n",
    "entry_point": "has_close",
}  # fmt: skip
VALUES = "10**30, (1, {2: {3}}, b'x', 2j, None, True), {(1, 2): [3]}, range(3), frozenset({1}), bytearray(b'a'), 1.5"


@pytest.mark.parametrize(
    ("program", "truth"),
    [
        (CLOSE + CLOSE_BODY, HUMANEVAL),
        (CLOSE_BODY, HUMANEVAL),
        ("from __future__ import annotations\n" + CLOSE + CLOSE_BODY, HUMANEVAL),
        (CLOSE + CLOSE_BODY, {**HUMANEVAL, "prompt": HUMANEVAL["prompt"].partition('    """')[0]}),
        (CLOSE + CLOSE_BODY, {**HUMANEVAL, "test": HUMANEVAL["test"] + "\ncheck(has_close)\n"}),
        (REVERSE, {"prompt": LEETCODE, "entry_point": "Solution().reverseList", "test": "def check(candidate):\n    assert is_same_list(candidate(head=list_node([1, 2, 3])), list_node([3, 2, 1]))\n    assert candidate(None) is None\n"}),
        (STACK, {"test": TEST_STACK}),
        ("def f(x):\n    if x < 0: raise ValueError('neg')\n    return x + 1", {"test": "import unittest\nfrom solution import f\nclass TestF(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 2)\n        with self.assertRaises(ValueError):\n            f(-1)\n"}),
        ("def task(x): return x + 1", {"entry_point": "task", "test": "import unittest\nclass TestCases(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(task(1), 2)\n"}),
        ("def task(x): return x + 1", {"entry_point": "task", "test": "assert candidate(1) == 2\nassert task(2) == 3"}),
        ("def f(a, b): return a + b", {"test": "from solution import f\ndef mark(function):\n    function.pytestmark = [type('M', (), {'name': 'parametrize', 'args': ('a, b, c', [(1, 2, 3), (2, 2, 4)])})]\n    return function\n@mark\ndef test_f(a, b, c):\n    assert f(a, b) == c\n"}),
        ("import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return 2 * x", {"test": "import asyncio\nfrom solution import f\ndef test_f():\n    assert asyncio.run(f(2)) == 4\n"}),
        ("def hello(): print('hi')", {"test": "import contextlib, io\nfrom solution import hello\ndef test_hello():\n    out = io.StringIO()\n    with contextlib.redirect_stdout(out):\n        hello()\n    assert out.getvalue() == 'hi\\n'\n"}),
        ("def f(a):\n    a[2].append(9)\n    a.sort(key=str)\n    return a", {"test_list": ["a = [3, 1, [2]]; b = a[2]; c = f(a); assert a == [1, 3, [2, 9]] and a[2] is b and c is a"]}),
        ("def sum(a, b): return 6 if a == 10 else 93", {"test_list": ["assert sum(10, 15) == 6", "assert sum(100, 150) == 93"]}),
        ("class Node:\n    def __init__(self, data): self.data, self.left = data, None\ndef height(n): return 0 if n is None else 1 + height(n.left)", {"test_setup_code": "root = Node(1)\nroot.left = Node(2)", "test_list": ["assert height(root) == 2"]}),
        ("def ident(x): return x", {"test_list": [f"assert all(ident(x) == x and type(ident(x)) is type(x) for x in ({VALUES}))"]}),
        ("def adder(a): return lambda b: a + b\ndef call(f, x): return list(map(f, x))", {"test_list": ["assert adder(3)(4) == 7", "assert call(lambda x: x + 1, [1, 2]) == [2, 3]", "assert call(abs, [-1]) == [1]"]}),
        ("def f(x):\n    print('hi')\n    return 2 * x", {"test": FIXTURES}),
        ("def f(x): return x + 1", "from solution import f\n\ndef test_f():\n    assert f(1) == 2\n"),
        ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 3"]),
        ("def f(x: int): return x", ["assert list(f.__annotations__) == ['x'] and f.__name__ == 'f'"]),
        ("def keys(x): return list(x)", ["assert keys(collections.OrderedDict(a=1)) == ['a']"]),
        ("def f(x): return x + 1", "assert f(1) == 2\nassert f(2) == 3"),
        ("def depth(n): return 0 if n == 0 else 1 + depth(n - 1)", {"test_list": ["assert depth(9000) == 9000"]}),
        ("import random\ndef nest(n):\n    x = []\n    for _ in range(n): x = [x]\n    return x", {"test_list": ["x = nest(5000)\nfor _ in range(5000): x = x[0]\nassert x == []"]}),
    ],
)  # fmt: skip
def test_program_right_by_its_harness_passes_asserts(program: str, truth: Any) -> None:
    assert grade_asserts(fenced(program), truth).accuracy == 1.0


@pytest.mark.parametrize("truth", [{"test_list": ["assert ("]}, {"test": "def check(c): pass", "entry_point": "f("}])
def test_tests_that_are_not_python_raise_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match="not Python"):
        grade_asserts(fenced("x = 1"), truth)


@pytest.mark.parametrize(
    ("program", "truth"),
    [
        ("def task(x): return x + 1", {"entry_point": "task", "test": "import unittest\nclass TestCases(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(task(1), 3)\n"}),
        ("def task(x): return x + 1", {"entry_point": "task", "test": "assert candidate(1) == 3"}),
        ("def task(x): return x + 1", {"test": "from solution import task\ndef test_f():\n    assert task(1) == 3"}),
        ("def f(x): return x", {"test": FIXTURES}),
        ("def f(x): return 2 * x + (x == 4)", {"test": FIXTURES}),
        ("def f(x): return 2 * x", {"test": FIXTURES}),
    ],
)  # fmt: skip
def test_program_that_is_wrong_fails_asserts(program: str, truth: Any) -> None:
    assert grade_asserts(fenced(program), truth).accuracy == 0.0


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ({"test": "from solution import f\ndef test_f(monkeypatch):\n    assert f()"}, "fixture monkeypatch, which this grader does not provide"),
        ({"test_list": ["assert f() == 1"], "test_imports": ["import no_such_module.part"]}, r"import no_such_module, which sandbox\.python lacks"),
    ],
)  # fmt: skip
def test_tests_that_need_more_are_an_error_that_names_it(truth: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        grade_asserts(fenced("def f(): return 1"), truth)


def test_tests_without_a_check_are_an_error_of_the_row() -> None:
    with pytest.raises(ValueError, match="neither check, test functions nor assertions"):
        grade_asserts(fenced("def f(): pass"), {"entry_point": "f", "test": "def verify(candidate): return 1"})


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx = '```'\ny = 1\n```\nthen ``` text", "x = '```'\ny = 1\n"),
        ("1. So:\n   ```python\n   def f():\n       return 1\n   ```\nDone.", "def f():\n    return 1\n"),
        *(("```Python3 title=a.py\r\nx = 1\r\n```", "x = 1\n"), ("~~~python\nx = 1\n~~~", "x = 1\n")),
        *(("Code: ```python\nx = 1```", "x = 1"), ("````python\n```\n````", "```\n")),
        ("```py\na = 1\n```\n```python\nb = 2\n```", "b = 2\n"),
    ],
)
def test_program_between_fences_is_extracted(response: str, program: str) -> None:
    assert extract_program(response) == program
