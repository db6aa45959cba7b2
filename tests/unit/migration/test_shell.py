"""Reader of shell scripts. The oracle is bash: both read the same script, and the words of `record` must be equal."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_bash")

from mcore_rl.migration.shell.interpreter import Evaluation, evaluate_script

SCRIPTS = {
    "assignment": "a=1; b=$a; record $a ${b} x$b",
    "quotes": """a='x y'; record "$a" '$a' $a a"b"c "it's" 'say "x"' "" """,
    "escapes": r"""record a\ b "\$HOME \"q\" \\ \x" \'""",
    "ansi_c": r"record $'a\tb'",
    "continuation": "record a \\\n  b \\\n  \\\n  c",
    "continuation_in_quotes": 'a="x \\\n  y"; record $a',
    "comments": "# record no\nrecord a # b\nrecord 'a#b' a#b",
    "default": 'record ${A:-1} ${A-2} ${A:-} "${A:-x y}" ${A:=3} $A',
    "default_of_empty": 'A=; record ${A:-1} "${A-2}" ${A:+set} "${A+set}"',
    "alternative": "A=x; record a${A:+_$A} b${B:+_$B}",
    "nested_default": "B=7; record ${A:-${C:-$B}}",
    "default_with_arithmetic": 'x=3; record ${A:-$((x * 2))} "${A:-$((1024 * 2))}" ${A:-$(((x + 1) * 2))}',
    "blanks_between_variables": 'a=1; b=2; record "$a $b  ${a} $((a + b))"',
    "case_change": "A=AbC; record ${A,,} ${A^^} ${A,} ${A^}",
    "trim": "p=/a/b.c/d.e.f; record ${p##*/} ${p#*/} ${p%.*} ${p%%.*}",
    "replace": "p=a-b-c; record ${p/-/_} ${p//-/_} ${p//-/}",
    "length": "p=abcd; record ${#p}",
    "arithmetic": "a=7; record $((a * 2 + 1)) $((a / 2)) $((-a / 2)) $((a % 4)) $((2 ** 10)) $(( (a) ))",
    "arithmetic_wraps": "record $((2 ** 63)) $((3 ** 50 * 3 ** 50)) $(((9 ** 40) ** 40)) $((-(1 << 63)))",
    "arithmetic_choice": "a=7; record $((a > 3 ? 1 : 0)) $((a < 3 || a == 7))",
    "arithmetic_bases": "record $((0x10 + 010)) $((1 << 4)) $((5 & 3)) $((!0))",
    "array": 'a=(x "y z" $((1 + 1))); a+=(w); record "${a[@]}" ${#a[@]} ${a[1]} "${a[-1]}" ${a[@]:1:2}',
    "array_with_comments": "a=(\n  --x 1\n  # --y 2\n  --z\n)\nrecord ${a[@]}",
    "array_unquoted_splits_items": 'a=("x y"); record ${a[@]}',
    "array_empty": 'a=(); record "${a[@]}" ${a[@]} "x${a[@]}y" end',
    "array_joined": 'a=(x y); b="${a[*]}"; record "$b"',
    "two_assignments_on_a_line": "a=1 b=2\nrecord $a $b",
    "assignments_before_loop": "a=1 b=2\nfor f in x; do record $f $a; done",
    "append": "a=x; a+=y; record $a",
    "word_split": 'a="x  y"; record $a "$a" p$a',
    "if_string": 'a=x; if [ "$a" = "y" ]; then record 1; elif [[ $a == x* ]]; then record 2; else record 3; fi',
    "if_number": "a=3; if [ $a -gt 2 ] && [ $a -lt 4 ]; then record in; fi; if (( a > 5 )); then record no; fi",
    "if_unset": 'if [ -z "$A" ]; then record unset; fi; if [ -n "$A" ]; then record set; fi',
    "if_negated": 'a=x; if ! [ "$a" = y ]; then record ok; fi; [[ ! $a = x ]] || record ok2',
    "if_test": "a=x; if test $a = x; then record ok; fi",
    "and_or": "a=2; [ $a -gt 1 ] && b=big || b=small; record $b; [ $a -gt 5 ] && c=big || c=small; record $c",
    "braces_in_condition": 'a=x; if [ "$a" != 0 ] && { [ "$a" = x ] || [ "$a" = y ]; }; then record ok; fi',
    "case": "a=foo; case $a in x|f*) record 1 ;; *) record 2 ;; esac; case $a in y) record 3 ;; *) record 4 ;; esac",
    "function": 'f() { local b=$1; shift; record $b "$@" $#; }; f x y "z w"',
    "positional": 'set_args() { record "$1" "${2:-d}" "$@"; }; set_args "a b"',
    "here_document_value": 'x=5\na=$(cat <<EOF\nv $x\nw\nEOF\n)\nrecord "$a"',
    "here_document_quoted": "a=$(cat <<'EOF'\n$x\nEOF\n)\nrecord \"$a\"",
    "here_document_ignored": "cat > /dev/null <<EOF\nrecord no\nEOF\nrecord yes",
    "substitution": "p=/a/b.sh; record $(basename $p) $(basename $p .sh) $(dirname $p) $(echo a  b) $(seq 2 3 9)",
    "substitution_of_lists": "record $(false && echo a || echo b) $(true && echo a || echo b) $(echo x > /dev/null)",
    "substitution_of_directories": 'a=/usr/lib; record $(cd "$a/.." && pwd) $(cd -- /usr/../tmp &>/dev/null && pwd)',
    "eval": """c='record a "b c"'; eval "$c" """,
    "declaration": "export A=1; readonly B=2; declare C=$A; record $A $B $C",
    "unset": 'A=1; unset A; record "${A:-gone}"',
    "subshell_and_group": "( record a ); { record b; }",
    "pipeline": "record a 2>&1 | cat",
    "unicode": "a='ä ö'; record \"$a\" é$((1+1))",
}


def recorded_by_bash(script: str) -> list[str]:
    """Run a script in which `record` prints its arguments, each with a final newline as NUL."""
    prelude = "record() { printf '%s\\0' \"$@\"; }\nunset A B C\n"
    done = subprocess.run(["bash", "-c", prelude + script], capture_output=True, check=False)
    return done.stdout.decode().split("\0")[:-1]


def recorded(script: str) -> list[str]:
    evaluation = evaluate_script(script, {}, Path())
    return [word.text for words in evaluation.commands if words[0].text == "record" for word in words[1:]]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is the oracle")
@pytest.mark.parametrize("name", SCRIPTS)
def test_reader_expands_words_like_bash(name: str) -> None:
    assert recorded(SCRIPTS[name]) == recorded_by_bash(SCRIPTS[name])


def evaluate(script: str, directory: Path = Path(), **given: str) -> Evaluation:
    return evaluate_script(script, given, directory)


def test_reader_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    touch = f"touch {marker}"
    evaluate(
        f"{touch}\na=$({touch})\nb=`{touch}`\neval '{touch}'\nbash -c '{touch}'\n. <({touch})\n"
        f"f() {{ {touch}; }}; f\nif {touch}; then {touch}; fi\npython3 <<EOF\n{touch}\nEOF\n"
        f"trap '{touch}' EXIT\ncat <<EOF\n$({touch})\nEOF\na[$({touch})]=1\necho $(( $({touch}) ))\n",
        tmp_path,
    )
    assert not marker.exists()


def test_reader_keeps_unknown_parts_visible() -> None:
    evaluation = evaluate('record $HOME/x "a${NAME}b" $(hostname) ${1} $((N * 2)) ${P##*/} ${Q:?no}')
    assert [word.text for word in evaluation.commands[0]] == [
        *("record", "${HOME}/x", "a${NAME}b", "$(hostname)", "${1}", "$((N * 2))", "$(${P##*/})", "${Q}"),
    ]


def test_reader_given_values_replace_assignments_and_arguments() -> None:
    evaluation = evaluate_script("N=${N:-1}\nM=2\nrecord $N $M $1 $2", {"N": "4", "M": "5", "2": "y"}, Path())
    assert [word.text for word in evaluation.commands[0]] == ["record", "4", "5", "${1}", "y"]


def test_reader_words_have_their_lines() -> None:
    evaluation = evaluate('a=(x\n  y)\n\nrecord b \\\n  c "${a[@]}"')
    assert [(word.text, word.line) for word in evaluation.commands[0]] == [
        *(("record", 4), ("b", 4), ("c", 5), ("x", 1), ("y", 2)),
    ]


def test_reader_sources_files_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "v.sh").write_text("A=(1 2)\n")
    script = 'D="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nsource "$D/lib/v.sh"\nrecord "${A[@]}"\n. missing.sh\n'
    evaluation = evaluate(script, tmp_path)
    assert [word.text for word in evaluation.commands[0]] == ["record", "1", "2"]
    assert evaluation.notes == ["source missing.sh: there is no such file here; its variables are not known"]


def test_reader_unknown_condition_is_false_with_a_note() -> None:
    evaluation = evaluate('n=$(nvidia-smi | wc -l)\nif [ "$n" -gt 0 ]; then a=1; else a=0; fi\nrecord $a')
    assert [word.text for word in evaluation.commands[-1]] == ["record", "0"]
    assert evaluation.notes == [
        'line 2: `[ "$n" -gt 0 ]` is not known here and counts as false; --set n=VALUE decides it'
    ]


def test_reader_variables_of_a_loop_are_unknown_after_it() -> None:
    evaluation = evaluate("a=()\nfor ((i=0; i<3; i++)); do a+=($i); b=$i; done\nrecord ${a[@]} $b")
    assert [word.text for word in evaluation.commands[0]] == ["record", "${b}"]


@pytest.mark.parametrize("shell", ["sbatch", "bash", "ssh node bash -s"])
def test_reader_reads_scripts_in_here_documents(shell: str) -> None:
    evaluation = evaluate(f"x=1\n{shell} <<EOF\n#!/bin/bash\nrecord a$x \\$y\nEOF\n")
    assert [word.text for word in evaluation.commands[-1]] == ["record", "a1", "${y}"]


@pytest.mark.parametrize("script", ["f() { f; }; f", "eval 'eval \"$0\"'", 'a=\'eval "$a"\'; eval "$a"'])
def test_reader_recursion_ends(script: str) -> None:
    assert evaluate(script).commands is not None


def test_reader_broken_syntax_is_noted() -> None:
    evaluation = evaluate("record a\nif [ x = ; then\n")
    assert [word.text for word in evaluation.commands[0]] == ["record", "a"]
