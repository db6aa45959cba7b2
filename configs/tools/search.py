"""Search in a file of texts (BM25), as a tool in verl's form. One index for all episodes of a tool process."""

from __future__ import annotations

import heapq
import json
import math
import os
import re
from collections import Counter, defaultdict
from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

K1, B = 1.5, 0.75
"""How soon a word's repetitions stop counting, and how much a long text is held against it (Robertson and Zaragoza,
The Probabilistic Relevance Framework, 2009, section 3.5)."""


class Index:
    """Texts by their words."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        words = [words_of(text) for text in texts]
        mean_length = sum(map(len, words)) / max(len(words), 1)
        self._scores: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for i, counts in enumerate(map(Counter, words)):
            norm = K1 * (1 - B + B * len(words[i]) / mean_length) if words[i] else K1
            for word, count in counts.items():
                self._scores[word].append((i, count * (K1 + 1) / (count + norm)))

    def search(self, query: str, k: int) -> list[tuple[float, str]]:
        """The k best texts that share a word with the query, best first, with their scores."""
        totals: dict[int, float] = defaultdict(float)
        for word in set(words_of(query)):
            found = self._scores.get(word, [])
            weight = math.log(1 + (len(self.texts) - len(found) + 0.5) / (len(found) + 0.5))
            for i, score in found:
                totals[i] += weight * score
        best = heapq.nsmallest(k, totals, key=lambda i: (-totals[i], i))
        return [(totals[i], self.texts[i]) for i in best]


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class SearchTool(BaseTool):
    """config: `path` of a jsonl file, `text_key` of its texts, `max_results`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        key = config.get("text_key", "text")
        with open(os.path.expanduser(config["path"]), encoding="utf-8") as lines:
            self.index = Index([json.loads(line)[key] for line in lines if line.strip()])

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        found = self.index.search(parameters["query"], self.config.get("max_results", 3))
        text = "\n\n".join(f"[{i}] {text}" for i, (_, text) in enumerate(found, 1)) or "Nothing was found."
        return ToolResponse(text=text), None, {"results": len(found)}
