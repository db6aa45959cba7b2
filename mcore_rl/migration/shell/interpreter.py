"""Evaluation of a script: follows assignments, conditions, functions and sourced files, and collects the commands that
the script would run. Nothing is run."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.errors import ConfigError
from mcore_rl.migration.shell.arithmetic import integer
from mcore_rl.migration.shell.conditions import holds
from mcore_rl.migration.shell.expansion import Expander
from mcore_rl.migration.shell.nested import SHELLS, find_script, script_argument, script_file, text_of_file
from mcore_rl.migration.shell.slurm import job_variables
from mcore_rl.migration.shell.substitution import document_of
from mcore_rl.migration.shell.syntax import line_of, parse, text_of
from mcore_rl.migration.shell.words import UNKNOWN, Variables, Word

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_STATEMENTS = 100_000
"""Maximum number of evaluated statements: functions that call each other would otherwise take for ever."""
MAX_FILES = 100
"""Maximum number of scripts that a script starts or sources, directly or not."""
MAX_DEPTH = 20
"""Maximum depth of calls, sourced files and scripts in arguments."""
_VARIABLE = re.compile(r"\$\{?(\w+)")
_FILE_TEST = re.compile(r"\[ +(! +)?-[defrs] ")
DOCUMENT_READERS = (*SHELLS, "sbatch", "ssh", "srun")
"""Commands whose here-document is a script."""


@dataclass
class Evaluation:
    """Commands of a script in order, with expanded words, and notes about the parts that could not be determined."""

    commands: list[list[Word]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def evaluate_script(text: str, given: Mapping[str, str], directory: Path) -> Evaluation:
    """Evaluate a script with the variables and numbered arguments in `given`. `directory` is the script's directory.

    Raises: ConfigError if tree-sitter is not installed, or if the script is too deep, long or large to follow.
    """
    variables = Variables.given({**job_variables(text), **given}, directory)
    interpreter = _Interpreter(variables, frozenset(given))
    try:
        interpreter.run(parse(text))
    except RecursionError:
        raise ConfigError("the script is nested too deeply to be read") from None
    return interpreter.evaluation


class _Interpreter:
    """State of an evaluation."""

    def __init__(self, variables: Variables, fixed: frozenset[str]) -> None:
        self.variables, self.fixed = variables, fixed
        self.expander = Expander(variables)
        self.evaluation = Evaluation()
        self.functions: dict[str, Node] = {}
        self.depth, self.count, self.num_files = 0, 0, 0
        self.statements: dict[str, Callable[[Node], bool | None]] = {
            "variable_assignment": self._assign,
            "variable_assignments": self._declare,
            "declaration_command": self._declare,
            "unset_command": self._unset,
            "function_definition": self._define,
            "if_statement": self._run_if,
            "case_statement": self._run_case,
            "for_statement": self._run_loop,
            "c_style_for_statement": self._run_loop,
            "while_statement": self._run_loop,
            "list": self._run_list,
            "command": self._run_command,
            "redirected_statement": self._run_command,
            "comment": lambda node: True,
            "heredoc_body": lambda node: True,
        }

    def run(self, node: Node) -> bool | None:
        """Evaluate a statement. Returns its success as far as it is known, for `&&` and `||`."""
        self.count += 1
        if self.count > MAX_STATEMENTS:
            raise ConfigError(f"the script evaluates more than {MAX_STATEMENTS} statements, too many to be read")
        if node.type in ("test_command", "negated_command") or text_of(node).startswith("(("):
            return holds(node, self.expander)
        statement = self.statements.get(node.type, self._run_children)
        return statement(node)

    def _run_children(self, node: Node) -> bool | None:
        """Evaluate the parts of a program, subshell, pipeline, { } or loop body."""
        # A backslash at the end of the file is harmless.
        if node.type == "ERROR" and text_of(node).strip("\\ \n"):
            self.evaluation.notes.append(f"line {line_of(node)}: cannot be parsed, skipped")
        for child in node.named_children:
            self.run(child)
        return True

    def _declare(self, node: Node) -> bool | None:
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child)
        return True

    def _unset(self, node: Node) -> bool | None:
        for child in node.named_children:
            self.variables.forget(text_of(child))
        return True

    def _define(self, node: Node) -> bool | None:
        self.functions[text_of(node.named_children[0])] = node.named_children[-1]
        return True

    def _assign(self, node: Node) -> bool | None:
        target, value = node.named_children[0], node.named_children[-1]
        append = any(child.type == "+=" for child in node.children)
        name = text_of(target.named_children[0] if target.type == "subscript" else target)
        if name in self.fixed:
            return True
        if target.type == "subscript":
            self.variables.forget(name)
        elif value == target:
            self.variables.set(name, "", append=append)
        elif value.type == "array":
            children = [child for child in value.named_children if child.type != "comment"]
            self.variables.set_array(name, [w for c in children for w in self.expander.words(c)], append=append)
        else:
            self.variables.set(name, self.expander.text(value), append=append)
        return True

    def _run_if(self, node: Node) -> bool | None:
        """Run the branch whose condition holds. A condition that is not known counts as false, with a note."""
        clauses = [node, *(child for child in node.named_children if child.type in ("elif_clause", "else_clause"))]
        for clause in clauses:
            condition = clause.child_by_field_name("condition") or (
                None if clause.type == "else_clause" else clause.named_children[0]
            )
            if condition is not None and not self._is_true(condition):
                continue
            for child in clause.named_children:
                if child != condition and child.type not in ("elif_clause", "else_clause"):
                    self.run(child)
            break
        return True

    def _is_true(self, condition: Node) -> bool:
        value = holds(condition, self.expander)
        if value is None:
            shown = " ".join(text_of(condition).split())
            self._note_unknown(condition, f"`{shown}` is not known here and counts as false")
        return value is True

    def _note_unknown(self, node: Node, text: str) -> None:
        """Add a note about a condition or subject, with the variables that would decide it."""
        source = text_of(node)
        name = next((name for name in _VARIABLE.findall(source) if self._is_unknown(name)), None)
        # A test of a file depends on the machine, not only on the variable.
        remedy = "" if name is None or _FILE_TEST.search(source) else f"; --set {name}=VALUE decides it"
        self.evaluation.notes.append(f"line {line_of(node)}: {text}{remedy}")

    def _is_unknown(self, name: str) -> bool:
        value = self.variables.get(name)
        return value is None or UNKNOWN.search(value) is not None

    def _run_case(self, node: Node) -> bool | None:
        subject, *items = [child for child in node.named_children if child.type != "comment"]
        value = self.expander.known(subject)
        if value is None:
            self._note_unknown(subject, f"`case {text_of(subject)}` is not known here, skipped")
            return True
        for item in items:
            before, _, _ = text_of(item).partition(")")
            patterns = [pattern.strip().strip("\"'") for pattern in before.lstrip("(").split("|")]
            if any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns):
                end = item.start_byte + len(before.encode())
                for child in item.named_children:
                    if child.start_byte > end:
                        self.run(child)
                break
        return True

    def _run_loop(self, node: Node) -> bool | None:
        """Run the body once, then forget the variables that it assigns, since the number of passes is not followed."""
        name = next((text_of(child) for child in node.named_children if child.type == "variable_name"), None)
        body = node.child_by_field_name("body") or node.named_children[-1]
        if node.type == "c_style_for_statement":
            for child in node.named_children:
                if child.type == "variable_assignment":
                    self._assign(child)
        if node.type == "for_statement" and name is not None:
            items = [w for c in node.named_children if c not in (body,) for w in self.expander.words(c)][1:]
            if items:
                self.variables.set(name, items[0].text)
            if len(items) > 1:
                self.evaluation.notes.append(f"line {line_of(node)}: only the first pass of the loop is read")
        self.run(body)
        for assigned in _assigned(body):
            if assigned not in self.fixed:
                self.variables.forget(assigned)
        return True

    def _run_list(self, node: Node) -> bool | None:
        children = [child for child in node.children if child.type != "comment"]
        if len(children) != 3:
            for child in node.named_children:
                self.run(child)
            return None
        left, sign, right = children
        succeeded = self.run(left)
        # A program is expected to succeed; a condition that is not known counts as false.
        if sign.type == ("&&" if succeeded else "||") and right.is_named:
            return self.run(right)
        return succeeded

    def _run_command(self, node: Node) -> bool | None:
        document = None
        if node.type == "redirected_statement":
            redirect = next((child for child in node.named_children if child.type == "heredoc_redirect"), None)
            document = None if redirect is None else document_of(redirect, self.expander)
            body = node.child_by_field_name("body") or node.named_children[0]
            if body.type != "command":
                return self.run(body)
            node = body
        words = [
            word
            for child in node.named_children
            if child.type not in ("variable_assignment", "comment", "file_redirect", "herestring_redirect")
            for word in (
                self.expander.words(child.named_children[0])
                if child.type == "command_name"
                else self.expander.words(child)
            )
        ]
        if not words:
            return None
        assignments = [child for child in node.named_children if child.type == "variable_assignment"]
        return self._call_with(assignments, words, document) if assignments else self._call(words, document)

    def _call_with(self, assignments: list[Node], words: list[Word], document: str | None) -> bool | None:
        """Handle a command after assignments, as in `NNODES=2 bash run.sh`, which hold for this command only."""
        before = self.variables.copy()
        for each in assignments:
            self._assign(each)
        succeeded = self._call(words, document)
        for name in {name for each in assignments for name in _assigned(each)}:
            self.variables.restore(name, before)
        return succeeded

    def _call(self, words: list[Word], document: str | None) -> bool | None:
        """Handle a command of the shell: true, shift, source, read, eval; others are started."""
        texts = [word.text for word in words]
        match texts:
            case ["true" | ":"]:
                return True
            case ["false"]:
                return False
            case ["shift", *count]:
                number = integer(count[0]) if count else 1
                del self.variables.positional[: 1 if number is None else max(number, 0)]
            case ["source" | ".", path, *_]:
                self._source(path)
            case ["eval", *rest]:
                self._run_text(" ".join(rest))
            case ["read", *options] if document is not None:
                self.variables.set(options[-1], document)
            case _:
                self._start(words, document)
        return True

    def _start(self, words: list[Word], document: str | None) -> None:
        """Follow a function or a script; collect another command."""
        name, texts = words[0].text, [word.text for word in words]
        script, place = script_argument(texts), script_file(texts)
        if name in self.functions:
            self._run_function(name, words[1:])
        elif script is not None:
            self._run_text(script)
        elif document is not None and name in DOCUMENT_READERS:
            self._run_text(document)
        elif place is not None:
            self._run_file(words, place)
        else:
            self.evaluation.commands.append(words)

    def _source(self, path: str) -> None:
        text = text_of_file(self.variables.directory / path)
        if text is None:
            self.evaluation.notes.append(f"source {path}: there is no such file here; its variables are not known")
        else:
            self._count_file()
            self._run_text(text)

    def _count_file(self) -> None:
        self.num_files += 1
        if self.num_files > MAX_FILES:
            raise ConfigError(f"the script starts more than {MAX_FILES} other scripts, too many to be read")

    def _run_file(self, words: list[Word], place: int) -> None:
        """Read the script that a command starts, such as `bash run.sh key=value`; a missing one remains a command."""
        path = words[place].text.removeprefix("${PWD}/")
        found = find_script(path, self.variables.directory)
        if found is None:
            self.evaluation.notes.append(f"line {words[0].line}: {path} is another script, which is not here")
            self.evaluation.commands.append(words)
            return
        file, text = found
        self._count_file()
        self.evaluation.notes.append(
            f"line {words[0].line}: {path} is read; lines of its arguments are lines of this file"
        )
        before = self.variables
        self.variables = before.copy()
        self.variables.positional, self.variables.directory = words[place + 1 :], file.parent
        self.expander.variables = self.variables
        self._run_text(text)
        self.variables = self.expander.variables = before

    def _run_function(self, name: str, arguments: list[Word]) -> None:
        before, self.variables.positional = self.variables.positional, arguments
        if self.depth < MAX_DEPTH:
            self.depth += 1
            self.run(self.functions[name])
            self.depth -= 1
        self.variables.positional = before

    def _run_text(self, text: str) -> None:
        if self.depth < MAX_DEPTH:
            self.depth += 1
            self.run(parse(text))
            self.depth -= 1


def _assigned(node: Node) -> set[str]:
    """Return the names of the variables that are assigned below a node."""
    found, pending = set(), [node]
    while pending:
        each = pending.pop()
        pending += each.children
        if each.type == "variable_assignment":
            found.add(text_of(each.named_children[0]).partition("[")[0])
    return found
