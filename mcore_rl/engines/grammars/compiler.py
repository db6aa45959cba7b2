"""Compilation of formats to grammars, outside of the engine's steps."""

from __future__ import annotations

import re
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from mcore_rl.engines.grammars.vocabulary import Vocabulary
from mcore_rl.errors import DataError
from mcore_rl.types import JsonFormat

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

    from mcore_rl.engines.grammars.matcher import FormatMatcher

MAX_SECONDS = 30.0
"""Time limit of a compilation, with the wait for others."""
MAX_GRAMMARS = 64
"""Number of grammars that are kept, besides those in use. Most take less than 1 MiB, large ones 50 MiB."""
MAX_THREADS = 2
"""Number of compilations at the same time. One that exceeds its limit cannot be stopped, and keeps its thread."""
MAX_SPACES = 32
"""Maximum number of white space characters between two parts of JSON: unsure models repeat them."""
_PLACE = re.compile(r"^\[\S+\] \S+: ")
"""Time and source line at the beginning of xgrammar's errors."""
_BOUNDED, _ESCAPED = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
"""Characters of bounded strings in xgrammar 0.2.8, and without the control characters, which JSON excludes."""


class FormatCompiler:
    """Grammars of formats. All methods may be called from any thread. A grammar is kept while a format with which it
    was prepared exists, so that a request that is paused and continued is never compiled again; the last used ones are
    kept longer.

    tokenizer: None for an engine without one, which refuses all formats.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        stop_ids: Sequence[int],
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, stop_ids
        self._max_seconds = max_seconds
        self._vocabulary: Vocabulary | None = None
        self._grammars: OrderedDict[JsonFormat, Future[xgrammar.CompiledGrammar]] = OrderedDict()
        self._in_use: Counter[JsonFormat] = Counter()
        """Number of living formats with which a grammar was prepared."""
        self._prepared: weakref.WeakValueDictionary[int, JsonFormat] = weakref.WeakValueDictionary()
        """These formats by their id."""
        self._unused: deque[JsonFormat] = deque()
        """Equals of formats that no longer exist and are still counted in _in_use."""
        self._lock = threading.Lock()
        self._setup = threading.Lock()
        self._threads = threading.BoundedSemaphore(MAX_THREADS)

    def prepare(self, form: JsonFormat) -> xgrammar.CompiledGrammar:
        """Return the grammar of a format.

        Raises: DataError for a format that cannot be compiled, or not within the time limit.
        """
        with self._lock:
            found = self._grammars.get(form)
            if found is None:
                key = replace(form)  # a format of its own, which no request keeps
                found = self._grammars[key] = Future()
                # A daemon: a compilation without end must not keep the process alive.
                threading.Thread(target=self._compile, args=(key, found), name="grammar", daemon=True).start()
            self._grammars.move_to_end(form)
            self._use(form)
            if len(self._grammars) > MAX_GRAMMARS + len(self._in_use):
                for old in [key for key in self._grammars if key not in self._in_use][:-MAX_GRAMMARS]:
                    del self._grammars[old]
        try:
            return found.result(self._max_seconds)
        except TimeoutError:
            raise DataError(
                f"the format was not compiled within {self._max_seconds:g} s; simplify its schema, mainly "
                "patterns and large bounds"
            ) from None

    def matcher(self, form: JsonFormat, begun: Sequence[int]) -> FormatMatcher:
        """Return the state of a response with the tokens `begun`. Compiles a format that is not kept any more."""
        from mcore_rl.engines.grammars.matcher import FormatMatcher

        grammar = self.prepare(form)
        assert self._vocabulary is not None
        return FormatMatcher(grammar, self._vocabulary, begun)

    def _use(self, form: JsonFormat) -> None:
        """Count a format as long as it exists. The caller holds the lock."""
        if self._prepared.get(id(form)) is not form:
            self._prepared[id(form)] = form
            key = replace(form)
            self._in_use[key] += 1
            weakref.finalize(form, self._unused.append, key).atexit = False
        while self._unused:  # finalizers take no lock: they may run in any place
            key = self._unused.popleft()
            self._in_use[key] -= 1
            if not self._in_use[key]:
                del self._in_use[key]

    def _compile(self, form: JsonFormat, result: Future[xgrammar.CompiledGrammar]) -> None:
        if not self._threads.acquire(timeout=self._max_seconds):
            with self._lock:  # another request may try again
                if self._grammars.get(form) is result:
                    del self._grammars[form]
            result.set_exception(DataError("other formats are being compiled; send the request again later"))
            return
        try:
            result.set_result(self._compiled(form))
        except DataError as error:
            result.set_exception(error)
        except Exception as error:  # xgrammar raises RuntimeError for every fault of a schema
            reason = _PLACE.sub("", str(error).strip())[:300] or type(error).__name__
            result.set_exception(DataError(f"the format cannot be compiled: {reason}"))
        finally:
            self._threads.release()

    def _compiled(self, form: JsonFormat) -> xgrammar.CompiledGrammar:
        import xgrammar

        if self._tokenizer is None:
            raise DataError("this engine has no tokenizer, so it does not enforce formats; leave out the format")
        with self._setup:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._stop_ids)
        compiler = xgrammar.GrammarCompiler(
            self._vocabulary.info(form.thought or ()), max_threads=MAX_THREADS, cache_enabled=False
        )
        return compiler.compile_grammar(grammar_of(form))


def grammar_of(form: JsonFormat) -> xgrammar.Grammar:
    """Return the grammar of a format over characters."""
    from xgrammar import Grammar

    json = Grammar.from_json_schema(form.schema, max_whitespace_cnt=MAX_SPACES)
    json = Grammar.from_ebnf(str(json).replace(_BOUNDED, _ESCAPED))
    if form.thought is None:
        return json
    opening, close = form.thought
    tag = {"type": "tag", "begin": "" if form.in_thought else opening, "content": {"type": "any_text"}, "end": close}
    space = Grammar.from_ebnf(rf"root ::= [ \n\r\t]{{0,{MAX_SPACES}}}")
    thought = Grammar.concat(Grammar.from_structural_tag({"type": "structural_tag", "format": tag}), space)
    return Grammar.concat(thought if form.in_thought else Grammar.union(thought, space), json)
