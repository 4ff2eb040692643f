"""Does a chat template write its messages one by one, so that earlier ones need not be read again?

Then the text of a message depends on itself, its neighbours, the first two messages, and on nothing else in the chat. A
chat with its middle left out gives the same text for its last messages, and what comes before them is known already.
That is read from the template's syntax tree, and tried out on chats before it is relied on.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from jinja2 import nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

MARK: Final = f"\ue0f0{secrets.token_hex(8)}\ue0f1"
"""Stands in a rendering where a message's text begins, and behind the last one. No client can know it."""

_FIRST, _LAST = 2, 4


def stand_in(messages: Sequence[T]) -> list[T]:
    """The chat with its middle left out: its first two messages, its last ones, and as many between them as make the
    number left out even (templates may look at whether a message's place in the chat is odd)."""
    left_out = max(0, (len(messages) - _FIRST - _LAST) // 2 * 2)
    return [*messages[:_FIRST], *messages[_FIRST + left_out :]]


@dataclass(frozen=True, slots=True)
class Turns:
    """What is known of a template that writes messages one by one.

    `lookahead`: whether a message's text also depends on the message behind it (or on there being none).
    """

    lookahead: bool

    def settled(self, parts: Sequence[str]) -> tuple[str, str]:
        """A marked rendering's text in two: what stays as it is however the chat goes on, and the rest."""
        end = len(parts) - 2 if self.lookahead else len(parts) - 1
        return "".join(parts[:end]), "".join(parts[end:])

    def unsettled(self, messages: int) -> int:
        """How many parts of a marked rendering are not settled yet, where `messages` are new."""
        return messages + self.lookahead + 1

    def new(self, parts: Sequence[str], messages: int) -> Sequence[str]:
        """Of the marked rendering of a stand-in followed by `messages` more: the parts that were not settled yet."""
        return parts[len(parts) - self.unsettled(messages) :]


def plain(parts: Sequence[str], count: int, messages: int) -> bool:
    """Whether a marked rendering has a part for each of `messages` messages (one may be the template's header)."""
    return count - 1 <= len(parts) - 2 <= count and len(parts) - 2 >= messages


def analyse(tree: nodes.Template) -> tuple[Turns, nodes.For] | None:
    """The template's loop over messages, if it writes them one by one; None if that can't be told."""
    names = lists_of_messages(tree)
    loops = [loop for loop in tree.find_all(nodes.For) if from_front(loop.iter, names)]
    if len(loops) != 1:
        return None
    loop = loops[0]
    if loop.test is not None or loop.recursive or loop.else_ or not isinstance(loop.target, nodes.Name):
        return None
    if loop.target.name in names or not any(node is loop for body in _bodies(tree) for node in body):
        return None
    walk = _Walk(names, loop)
    try:
        walk.visit(tree, ())
    except _RefusedError:
        return None
    return Turns(walk.lookahead), loop


def lists_of_messages(tree: nodes.Template) -> set[str]:
    """The names of all messages, or of all but the first."""
    names = {"messages"}
    for _ in range(4):
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and from_front(assign.node, names):
                names.add(assign.target.name)
    return names


def marked(tree: nodes.Template, loop: nodes.For) -> None:
    """Put MARK at the beginning of each turn of `loop`, and behind it."""

    def mark() -> nodes.Output:
        return nodes.Output([nodes.TemplateData(MARK)])

    loop.body.insert(0, mark())
    for body in _bodies(tree):
        for i, node in enumerate(body):
            if node is loop:
                body.insert(i + 1, mark())
                return


def _bodies(node: nodes.Template | nodes.If) -> Iterator[list[nodes.Node]]:
    """Where the loop may stand: at the top, or in a branch there."""
    yield node.body
    for inner in node.body:
        if isinstance(inner, nodes.If):
            yield from _bodies(inner)
    if isinstance(node, nodes.If):
        for other in node.elif_:
            yield from _bodies(other)
        yield node.else_
        for inner in node.else_:
            if isinstance(inner, nodes.If):
                yield from _bodies(inner)


def from_front(node: nodes.Node | None, names: set[str]) -> bool:
    """Whether an expression is all messages, or all but the first."""
    if isinstance(node, nodes.Getitem) and isinstance(part := node.arg, nodes.Slice):
        start = part.start.value if isinstance(part.start, nodes.Const) else part.start
        return start in (None, 0, 1) and part.stop is None and part.step is None and from_front(node.node, names)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names


class _RefusedError(Exception):
    pass


_LAZY: Final = {"map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "unique"}
"""Filters that give an iterator: one that is made once is used up by the first message that reads it."""


@dataclass
class _Walk:
    """Visits every node in the order in which it stands, and refuses what could carry knowledge between messages."""

    names: set[str]
    loop: nodes.For
    lookahead: bool = False
    inside: bool = False  # the loop over messages
    passed: bool = False
    nested: int = 0  # loops within it, in which `loop` is another
    macro: int = 0

    def visit(self, node: nodes.Node, above: tuple[nodes.Node, ...]) -> None:
        self._check(node, above)
        below = (node, *above)
        if node is self.loop:
            self.inside = True
            for part in self.loop.body:
                self.visit(part, below)
            self.inside, self.passed = False, True
        elif isinstance(node, nodes.For):
            self.visit(node.iter, below)
            self.nested += 1
            for child in (node.target, node.test, *node.body, *node.else_):
                if child is not None:
                    self.visit(child, below)
            self.nested -= 1
        else:
            self.macro += isinstance(node, nodes.Macro)
            for child in node.iter_child_nodes():
                self.visit(child, below)
            self.macro -= isinstance(node, nodes.Macro)

    def _check(self, node: nodes.Node, above: tuple[nodes.Node, ...]) -> None:
        match node:
            case nodes.Name():
                fine = self._name(node, above)
            case nodes.NSRef():
                fine = not self.inside and not self.macro
            case nodes.Break():
                fine = not self.inside or self.nested > 0
            case nodes.Macro():
                fine = not self.inside
            case nodes.Filter():
                fine = node.name != "random" and not (node.name in _LAZY and isinstance(above[0], nodes.Assign))
            case nodes.Include() | nodes.Import() | nodes.FromImport() | nodes.Extends() | nodes.Block():
                fine = False
            case _:
                fine = True
        if not fine:
            raise _RefusedError

    def _name(self, node: nodes.Name, above: tuple[nodes.Node, ...]) -> bool:
        name = node.name
        if name in self.names:
            return self._messages(node, above)
        if name == "loop" and self.inside and not self.nested:
            return self._of_loop(above)
        if name == "add_generation_prompt":
            return self.passed and not self.macro
        if name == "strftime_now":
            return not self.inside and not self.macro
        return name not in ("continue_final_message", "cycler", "joiner")

    def _messages(self, node: nodes.Name, above: tuple[nodes.Node, ...]) -> bool:
        parent = above[0]
        if isinstance(parent, nodes.Assign):
            return isinstance(parent.target, nodes.Name) and from_front(parent.node, self.names)
        if node.ctx != "load":
            return False
        if isinstance(parent, nodes.If | nodes.CondExpr):
            return parent.test is node
        return isinstance(parent, nodes.Not) or (isinstance(parent, nodes.Getitem) and self._item(parent, above[1]))

    def _item(self, item: nodes.Getitem, parent: nodes.Node) -> bool:
        place = item.arg
        if isinstance(place, nodes.Slice):
            return (
                isinstance(parent, nodes.Assign)
                and isinstance(parent.target, nodes.Name)
                and from_front(parent.node, self.names)
            )
        if isinstance(place, nodes.Const):
            return place.value in (0, 1)
        if isinstance(place, nodes.Neg):
            # The last message, which only what stands behind all of them may know.
            return isinstance(place.node, nodes.Const) and place.node.value == 1 and self.passed and not self.macro
        if not (_is_a_step(place) and self.inside and not self.nested):
            return False
        self.lookahead = self.lookahead or isinstance(place, nodes.Add)
        return True

    def _of_loop(self, above: tuple[nodes.Node, ...]) -> bool:
        use = above[0]
        if not isinstance(use, nodes.Getattr):
            return False
        if use.attr in ("last", "nextitem"):
            self.lookahead = True
            return True
        return use.attr in ("first", "previtem") or (use.attr in ("index0", "index") and _steady(use, above[1]))


def _steady(counter: nodes.Getattr, parent: nodes.Node) -> bool:
    """Whether this use of a message's place in the chat gives the same where an even number of messages behind the
    first two are left out."""
    match parent:
        case nodes.Compare(expr=expr, ops=[nodes.Operand(expr=nodes.Const(value=bound))]):
            return expr is counter and bound in ((0, 1) if counter.attr == "index0" else (1, 2))
        case nodes.Mod(left=left, right=nodes.Const(value=2)):
            return left is counter
        case nodes.Sub() | nodes.Add():
            return _is_a_step(parent)
    return False


def _is_a_step(place: nodes.Node) -> bool:
    """`loop.index0 - 1` or `loop.index0 + 1`."""
    match place:
        case (
            nodes.Sub(left=nodes.Getattr(node=nodes.Name(name="loop"), attr="index0"), right=nodes.Const(value=1))
            | nodes.Add(left=nodes.Getattr(node=nodes.Name(name="loop"), attr="index0"), right=nodes.Const(value=1))
        ):
            return True
    return False


def tried(turns: Turns, render: Callable[[list[dict[str, Any]]], list[str] | None], *, parts_of_text: bool) -> bool:
    """Whether it is so for chats of many shapes. `render` gives the marked rendering of messages, None for a chat that
    the template refuses."""
    done = 0
    for chat in _chats(parts_of_text):
        for known in range(1, len(chat)):
            for more in range(3):
                short = stand_in(chat[:known]) + chat[known : known + more]
                whole, before, part = render(chat[: known + more]), render(chat[:known]), render(short)
                if whole is None or before is None or part is None:
                    continue
                added = len(chat[known : known + more])
                if not plain(part, len(short), added + turns.lookahead) or not plain(before, known, turns.lookahead):
                    return False
                if turns.settled(before)[0] + "".join(turns.new(part, added)) != "".join(whole):
                    return False
                done += 1
    return done > 0


def _chats(parts_of_text: bool) -> Iterator[list[dict[str, Any]]]:
    """Chats with all that a message may have; contents as the template gets them."""

    def said(role: str, text: str, **more: Any) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if parts_of_text else text, **more}

    def call(name: str) -> dict[str, Any]:
        return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": {"x": 1, "y": "é"}}}

    turns = [said("user" if i % 2 == 0 else "assistant", f" word{i}\nline <b> ") for i in range(11)]
    system = said("system", "Be brief.")
    tools: list[dict[str, Any]] = []
    thought: list[dict[str, Any]] = []
    for i in range(3):
        calls = [call(f"a{i}"), call(f"b{i}")]
        tools += [said("user", f"ask{i}"), said("assistant", "", tool_calls=calls)]
        tools += [said("tool", f"r{i}a", tool_call_id=f"call_a{i}"), said("tool", f"r{i}b", tool_call_id=f"call_b{i}")]
        tools.append(said("assistant", f"so{i}"))
        thinks = {"reasoning": f"hm{i}", "reasoning_content": f"hm{i}"}
        thought += [said("user", f"ask{i}"), said("assistant", f"<think>\nhm{i}\n</think>\n\nso{i}", **thinks)]
    for chat in (turns, tools, thought, thought + tools):
        yield chat
        yield [system, *chat]
    yield [*turns[:4], said("system", "Now be long."), *turns[4:]]
    yield [system, *turns[:3], *tools, *thought, *turns[:5]]
    yield [{**turn, "name": f"n{i % 3}"} for i, turn in enumerate(turns)]
