"""What a chat template writes around the contents of messages, rendered once for all chats of the same roles.

Where a template writes contents as they are, whatever else they say, the rest of a rendering is a frame to put them
into, and Jinja need not be asked again. That is read from the template's syntax tree.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Final

from jinja2 import nodes

from router.prompt.turns import from_front, lists_of_messages

if TYPE_CHECKING:
    from collections.abc import Sequence

# Stand for contents in a rendering from which a frame is made. No client can know them. The spaces at the edges are of
# kinds that templates do not write: where they are gone, the template has stripped the content. Two kinds, since one
# content may follow right behind another.
_NAME: Final = secrets.token_hex(8)
_LEFT, _RIGHT = "\u2003", "\u2002"
_SLOT: Final = re.compile(f"({_LEFT}?)\ue0f3{_NAME}-([0-9]+)\ue0f4({_RIGHT}?)")

MEMBERS_OF_DICTS: Final = frozenset(dir(dict))
_CONSTANT_TESTS: Final = ("string", "defined", "undefined", "none", "mapping")
_NEVER_THE_SAME: Final = ("strftime_now", "lipsum")
_OTHER_TEMPLATES: Final = nodes.Include | nodes.Import | nodes.FromImport | nodes.Extends | nodes.Block


def stand_ins(count: int) -> list[str]:
    """In place of the contents of so many messages."""
    return [f"{_LEFT}\ue0f3{_NAME}-{place}\ue0f4{_RIGHT}" for place in range(count)]


def samples(count: int) -> list[str]:
    """Contents that show whether a frame strips what the template strips."""
    return [f" {_NAME}-{place} " for place in range(count)]


class Frame:
    """All of a rendering but the contents."""

    __slots__ = ("_first", "_slots")

    def __init__(self, rendering: str) -> None:
        """`rendering`: of a chat whose contents are `stand_ins`."""
        parts = _SLOT.split(rendering)
        self._first = parts[0]
        self._slots = [
            (int(parts[at + 1]), not parts[at], parts[at + 3])  # of which message; stripped; what stands behind it
            for at in range(1, len(parts), 4)
        ]

    def fill(self, contents: Sequence[str]) -> str:
        """The rendering of a chat with these contents, none of them empty."""
        text = [self._first]
        for place, stripped, behind in self._slots:
            content = contents[place]
            text.append(content.strip() if stripped else content)
            text.append(behind)
        return "".join(text)


def verbatim(tree: nodes.Template) -> bool:
    """Whether a template writes contents as they are, or stripped, and nothing in it depends on what they say but on
    whether they say anything."""
    lists = lists_of_messages(tree)
    loops = [loop for loop in tree.find_all(nodes.For) if from_front(loop.iter, lists)]
    if not all(isinstance(loop.target, nodes.Name) for loop in loops):
        return False
    walk = _Walk(lists, {loop.target.name for loop in loops if isinstance(loop.target, nodes.Name)})
    known = -1
    while known < len(walk.carriers):
        known = len(walk.carriers)
        if not walk.passes(tree, ()):
            return False
    return True


class _Walk:
    """Visits every node, and refuses what could let a content have another effect than to be written."""

    def __init__(self, lists: set[str], messages: set[str]) -> None:
        self._lists = lists
        self._messages = messages
        self.carriers: set[str] = set()
        """Variables that hold text with a content in it, as far as they are known yet."""

    def passes(self, node: nodes.Node, above: tuple[nodes.Node, ...]) -> bool:
        if not self._fine(node, above):
            return False
        below = (node, *above)
        return all(self.passes(child, below) for child in node.iter_child_nodes())

    def _fine(self, node: nodes.Node, above: tuple[nodes.Node, ...]) -> bool:
        if isinstance(node, nodes.Name):
            if node.ctx != "load":
                return True
            if node.name in self._lists:
                return self._list(node, above)
            if node.name in self._messages:
                return self._message(node, above)
            if node.name in self.carriers:
                return self._written(node, above)
            if node.name == "loop":
                return isinstance(above[0], nodes.Getattr) and above[0].attr not in ("previtem", "nextitem")
            return node.name not in _NEVER_THE_SAME
        if isinstance(node, nodes.Filter):
            return node.name != "random"
        return not isinstance(node, _OTHER_TEMPLATES)

    def _list(self, node: nodes.Name, above: tuple[nodes.Node, ...]) -> bool:
        """Whether this use of all messages gives none away but to what is looked at by itself."""
        parent = above[0]
        if isinstance(parent, nodes.Getitem) and parent.node is node and not isinstance(parent.arg, nodes.Slice):
            return self._message(parent, above[1:])
        if isinstance(parent, nodes.Filter):
            return parent.name in ("length", "count")
        if isinstance(parent, nodes.If):
            return parent.test is node
        whole: nodes.Node = node
        while isinstance(parent, nodes.Getitem) and from_front(parent, self._lists):
            whole, above = parent, above[1:]
            parent = above[0]
        if isinstance(parent, nodes.For):
            return parent.iter is whole
        return isinstance(parent, nodes.Assign) and isinstance(parent.target, nodes.Name) and parent.node is whole

    def _message(self, node: nodes.Node, above: tuple[nodes.Node, ...]) -> bool:
        """Whether this use of one message reads a member of it, and a content only to write it."""
        use = above[0]
        if isinstance(use, nodes.Operand):
            return use.op in ("in", "notin")  # whether it has a member
        if isinstance(use, nodes.Getattr):
            member: object = use.attr
        elif isinstance(use, nodes.Getitem) and use.node is node and isinstance(use.arg, nodes.Const):
            member = use.arg.value
        else:
            return False
        if member == "content":
            return self._content(use, above[1:])
        return isinstance(member, str) and member not in MEMBERS_OF_DICTS

    def _content(self, node: nodes.Node, above: tuple[nodes.Node, ...]) -> bool:
        """Whether this content is only written, or asked what is the same for each that says anything."""
        parent = above[0]
        if isinstance(parent, nodes.If | nodes.CondExpr) and parent.test is node:
            return True
        if isinstance(parent, nodes.Test):
            return parent.node is node and parent.name in _CONSTANT_TESTS
        if isinstance(parent, nodes.Or) and parent.left is node:
            return self._written(parent, above[1:])
        if isinstance(parent, nodes.Filter):
            return parent.name == "trim" and not parent.args and not parent.kwargs and self._written(parent, above[1:])
        return self._written(node, above)

    def _written(self, node: nodes.Node, above: tuple[nodes.Node, ...]) -> bool:
        """Whether this text is only put between others, and these are written or held for that."""
        end = above[0]
        while isinstance(end, nodes.Add | nodes.Concat) or (isinstance(end, nodes.CondExpr) and end.test is not node):
            node, above = end, above[1:]
            end = above[0]
        if isinstance(end, nodes.Assign):
            if not isinstance(end.target, nodes.Name) or end.target.name in self._lists | self._messages | {"loop"}:
                return False
            self.carriers.add(end.target.name)
        elif not isinstance(end, nodes.Output):
            return False
        return all(isinstance(each, nodes.If | nodes.For | nodes.Template) for each in above[1:])
