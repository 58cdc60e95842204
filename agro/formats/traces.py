"""Traces of verifiers: messages in a tree, of which each path to a leaf is a sequence to learn from.

A message that several paths share is learned from once. Log-probs are rounded to 4 decimals in the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agro.errors import Refused
from agro.formats.conversation import split
from agro.formats.fields import entry, fingerprinted, flags, integer, integers, numbers, objects
from agro.formats.protocol import Context

DECIMALS = 4  # of log-probs, RECORD_FLOAT_DECIMALS of verifiers


@dataclass(frozen=True)
class _Node:
    """A message, and the tokens that it adds to the sequence."""

    parent: int | None
    message: dict[str, Any]
    sampled: bool
    tokens: list[int]
    action: list[bool]
    logps: list[float | None]
    links: list[dict[str, Any]]  # to nodes that it continues in meaning, such as what a summary replaces

    @classmethod
    def of(cls, value: dict[str, Any], number: int, where: str) -> _Node:
        parent, sampled = value.get("parent"), value.get("sampled", False)
        if parent is not None and (not isinstance(parent, int) or not 0 <= parent < number):
            raise Refused(f"{where}.parent: expected the number of an earlier node, got {parent!r:.80}")
        if not isinstance(sampled, bool):
            raise Refused(f"{where}.sampled: expected true or false, got {sampled!r:.80}")
        said = entry(value.get("message"), f"{where}.message")
        if not isinstance(said.get("role"), str):
            raise Refused(f"{where}.message: expected an object with a role, got {said!r:.80}")
        tokens = integers(value.get("token_ids") or [], f"{where}.token_ids")
        action = flags(value.get("mask") or [], f"{where}.mask", len(tokens))
        logps = _spread(value.get("logprobs") or [], action, f"{where}.logprobs")
        links = objects(value.get("semantic_parents") or [], f"{where}.semantic_parents")
        return cls(parent, message(said), sampled, tokens, action, logps, links)


def _spread(values: Any, action: list[bool], where: str) -> list[float | None]:
    """The values of the tokens that were sampled, one a token; unknown where there are none."""
    if not values:
        return [None] * len(action)
    known = iter(numbers(values, where, sum(action)))
    return [next(known) if own else None for own in action]


def message(value: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates have it: tool calls with their function inside."""
    said = {name: part for name, part in value.items() if part is not None}
    calls = said.pop("tool_calls", None)
    if calls:
        said["tool_calls"] = [_call(call) for call in objects(calls, "tool_calls")]
    else:
        said.setdefault("content", "")
    return said


def _call(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return call
    function = {"name": call.get("name"), "arguments": call.get("arguments")}
    return {"id": call.get("id"), "type": "function", "function": function}


def _by_node(calls: list[dict[str, Any]], where: str) -> dict[int, dict[str, Any]]:
    """The calls of the model by the node that each made."""
    by_node = {}
    for i, call in enumerate(calls):
        if call.get("node") is not None:
            by_node[integer(call["node"], f"{where}.calls[{i}].node")] = call
    return by_node


@dataclass
class Trace:
    """One agent's messages, and the calls of the model."""

    nodes: list[_Node]
    calls: dict[int, dict[str, Any]]  # by the node that they made
    where: str
    left_out: list[str] = field(default_factory=list)  # what isn't learned from, and why

    @classmethod
    def of(cls, value: dict[str, Any], where: str) -> Trace:
        given = objects(value.get("nodes"), f"{where}.nodes")
        nodes = [_Node.of(node, i, f"{where}.nodes[{i}]") for i, node in enumerate(given)]
        calls = objects(value.get("calls") or [], f"{where}.calls")
        return cls(nodes, _by_node(calls, where), where)

    def records(self, context: Context) -> list[tuple[str, dict[str, Any]]]:
        """A record for each path with a message that no path before has, and the path's name."""
        seen: set[int] = set()
        found = []
        prompt: list[dict[str, Any]] | None = None
        for number, path in enumerate(self._paths()):
            sampled = [i for i in path if self.nodes[i].sampled]
            new = [i for i in sampled if i not in seen]
            if not new:
                self.left_out.append(f"{self.where}: branch {number} has no sampled message of its own")
                continue
            path = path[: path.index(new[-1]) + 1]
            prompt = prompt or self._said(path[: path.index(sampled[0])])
            record = self._record(path, new, prompt)
            if "tokens" in record:
                record = fingerprinted(record, context)
            found.append((f"branch[{number}]", record))
            seen.update(new)
        return found

    def _paths(self) -> list[list[int]]:
        """From a root to each leaf, but to attempts to compact the history that nothing went on from."""
        inner = {node.parent for node in self.nodes}
        links = [link for node in self.nodes for link in node.links]
        accepted = {link.get("node") for link in links if link.get("type") == "compaction"}
        paths = []
        for leaf in (i for i in range(len(self.nodes)) if i not in inner):
            attempts = [k for k in self.nodes[leaf].links if k.get("type") == "compaction_attempt"]
            if attempts and leaf not in accepted:
                self.left_out.append(f"{self.where}: node {leaf}, an attempt to compact that wasn't used")
                continue
            path, at = [], leaf
            while True:
                path.append(at)
                parent = self.nodes[at].parent
                if parent is None:
                    break
                at = parent
            paths.append(path[::-1])
        return paths

    def _said(self, path: list[int]) -> list[dict[str, Any]]:
        return [self.nodes[i].message for i in path]

    def _record(self, path: list[int], new: list[int], prompt: list[dict[str, Any]]) -> dict[str, Any]:
        has_tokens = all(any(self.nodes[i].action) for i in path if self.nodes[i].sampled)
        record = self._of_tokens(path, new, prompt) if has_tokens else self._of_text(path, new)
        made = [self.calls[i] for i in new if i in self.calls]
        sampling = _sampling(made)
        if has_tokens and any(x is not None for x in record["behavior_logp"]):
            sampling["logp_decimals"] = DECIMALS
        if sampling:
            record["sampling"] = sampling
        if made and made[-1].get("finish_reason") is not None:
            record["meta"]["finish"] = made[-1]["finish_reason"]
        if made and isinstance(made[-1].get("model"), str):
            record["model"] = made[-1]["model"]
        return record

    def _of_text(self, path: list[int], new: list[int]) -> dict[str, Any]:
        """The new turns after all before them. Without tokens what wasn't sampled can't stand among them."""
        begins = path.index(new[0])
        for i in path[begins:]:
            if self.nodes[i].message["role"] == "assistant" and not self.nodes[i].sampled:
                raise Refused(
                    f"{self.where}.nodes[{i}]: a turn of the assistant that wasn't sampled stands among "
                    "sampled ones, and without token_ids they can't be told apart"
                )
        return split({"messages": self._said(path), "prompt": self._said(path[:begins])})

    def _of_tokens(self, path: list[int], new: list[int], prompt: list[dict[str, Any]]) -> dict[str, Any]:
        """The complete sequence. Its context is another one than the prompt where history was rewritten."""
        nodes = [self.nodes[i] for i in path]
        first = next(i for i, node in enumerate(nodes) if node.sampled)
        head, turns = self._said(path[:first]), self._said(path[first:])
        action = [own for node in nodes for own in node.action]
        learn = [own and i in new for i, node in zip(path, nodes) for own in node.action]
        record: dict[str, Any] = {"prompt": prompt, "response": turns[-1].get("content") or "", "meta": {}}
        foreign = any(n.message["role"] == "assistant" and not n.sampled for n in nodes[first:])
        if head == prompt and action == learn and not foreign:
            record = split({"messages": head + turns, "prompt": head})
        tokens = [token for node in nodes for token in node.tokens]
        if head != prompt:
            record["context_tokens"] = tokens[: action.index(True)]
        record |= {"tokens": tokens, "mask": learn}
        if learn != action:
            record["action"] = action
        return record | {"behavior_logp": [x for node in nodes for x in node.logps]}


def _sampling(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """How the calls were sampled: the first one's settings, and each one's where they differ."""
    settings = [_settings(call) for call in calls]
    if not settings:
        return {}
    return dict(settings[0]) | ({"of_calls": settings} if any(s != settings[0] for s in settings) else {})


def _settings(call: dict[str, Any]) -> dict[str, Any]:
    given = entry(call.get("sampling"), "calls.sampling")
    inside = entry(given.get("extra_body"), "calls.sampling.extra_body")
    return inside | {name: value for name, value in given.items() if name != "extra_body"}
