"""Chat messages to the text that the engine would tokenize."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections import deque
from datetime import datetime
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.prompt.frames import MEMBERS_OF_DICTS, Frame, samples, stand_ins, verbatim
from router.prompt.turns import MARK, analyse, marked, plain, tried

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from jinja2.parser import Parser

    from router.prompt.turns import Turns


_ROLE: Final = itemgetter("role")
# Most short chats have the same roles, and so have most long ones, of which the first and last messages are rendered
# (turns.stand_in) with an answer and a question behind them, or a few.
_MOST_FRAMED: Final = 12
_MOST_FRAMES: Final = 64
_FRAMED_ROLES: Final = frozenset({"system", "user", "assistant", "tool"})


class TemplateError(Exception):
    """The messages can't be rendered: the template refuses them, or they aren't what a chat is made of."""


class ChatTemplate:
    """A model's chat template(s), rendered as vLLM and transformers render them.

    `templates`: Jinja source by name; "default" serves all but requests with tools where there is a "tool_use".
    `special_tokens`: text by role ("bos_token", ...), which templates may use.
    """

    media_begin = ""
    """What stands before the name of an image or other medium: a special token of the model, so that the text before
    it has the tokens that it has in the engine."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._proven: dict[str, _Compiled] = {}
        self._special_tokens = dict(special_tokens)
        # By whether in parts, whether an answer is to begin, and the roles.
        self._frames: dict[tuple[object, ...], list[Frame]] = {}
        self._plain = [self._all_variables(None, generates, {}) for generates in (False, True)]

    def prove(self) -> None:
        """Find out which of the model's templates write message by message; takes some 100 ms each."""
        for source in self._templates.values():
            with contextlib.suppress(TemplateError):  # it is told when a chat is rendered
                compiled = _Compiled(source)
                compiled.prove()
                self._proven[source] = compiled

    def system_first(self) -> bool:
        """Whether system messages can only come first: then vLLM joins those of /v1/messages into one.

        Tried as vLLM does, without what templates may use elsewhere (entrypoints/anthropic/serving.py
        `_detect_merge_inline_system`).
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        chat = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        variants: tuple[list[Any] | None, ...] = (None, [])
        for tools in variants:
            try:
                template = environment.from_string(self._source(tools))
                template.render(messages=chat, add_generation_prompt=False)
            except (jinja2.TemplateError, TemplateError):
                return True
        return False

    def thinking_off(self) -> str:
        """The `reasoning_effort` by which vLLM tells a template not to think: "low" where "none" does nothing."""
        return tried_efforts(lambda extra: self.render([{"role": "user", "content": "Hi"}], extra=extra))

    def _compile(self, tools: list[Any] | None, template: str | None) -> _Compiled:
        if template is not None:
            return _compiled(template)
        source = self._source(tools)
        return self._proven.get(source) or _compiled(source)

    @property
    def sources(self) -> str:
        """All the text in which this model's special tokens may stand."""
        return "\n".join([*self._templates.values(), *self._special_tokens.values()])

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
        template: str | None = None,
    ) -> str:
        """The prompt's text.

        `extra`: the request's `chat_template_kwargs`, which win over special tokens and `tools`. `template`: Jinja
        source from the request, in place of the model's. Raises TemplateError.
        """
        compiled = self._compile(tools, template)
        variables = self._variables(tools, add_generation_prompt, extra)
        if not continue_final_message:
            framed = self._framed(compiled, messages, variables, in_parts=False)
            if framed is not None:
                return framed[0]
        chat = conversation(messages, compiled.content_format, self.media_begin)
        if not compiled.knows_developer and "developer" in map(_ROLE, chat):
            chat = _developer_as_system(chat)
        if continue_final_message:
            return compiled.render_open(chat, variables)
        return compiled.render(chat, variables)

    def _framed(
        self,
        compiled: _Compiled,
        messages: Sequence[Any],
        variables: Mapping[str, Any],
        *,
        in_parts: bool,
        last: int | None = None,
    ) -> list[str] | None:
        """The same as rendering a chat, in one or in parts (see `render_parts`); None for one that has no frames."""
        begins: bool = variables["add_generation_prompt"]
        # Only the model's own template without tools is verbatim, of which there is one.
        if not compiled.verbatim or variables is not self._plain[begins]:
            return None
        contents = _only_contents(messages)
        if not contents:
            return None
        roles: list[str] = [message["role"] for message in messages]
        key = (in_parts, begins, *roles)
        frames = self._frames.get(key)
        if frames is None:
            frames = compiled.frames(roles, contents, variables, in_parts=in_parts)
            if frames is None:
                return None
            if len(self._frames) == _MOST_FRAMES:
                self._frames.clear()
            self._frames[key] = frames
        left_out = 0 if last is None else max(0, len(frames) - 1 - last)
        if not left_out:
            return [frame.fill(contents) for frame in frames]
        wanted = [frame.fill(contents) for frame in frames[1 + left_out :]]
        return [frames[0].fill(contents), *[""] * left_out, *wanted]

    def turns(self, tools: list[Any] | None, template: str | None = None) -> Turns | None:
        """How the template in use writes a chat message by message; None where it doesn't (or there is none)."""
        return self._compile(tools, template).turns

    def render_parts(
        self,
        messages: Sequence[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        template: str | None = None,
        last: int | None = None,
    ) -> list[str] | None:
        """The same text as `render` gives, in parts: what comes before the messages, each message, what comes behind.
        `last`: of those behind the first one only so many are wanted, the last ones; the others may be empty.

        None where the template doesn't write message by message, or not these. Raises TemplateError.
        """
        compiled = self._compile(tools, template)
        if compiled.turns is None:
            return None
        variables = self._variables(tools, add_generation_prompt, extra)
        parts = self._framed(compiled, messages, variables, in_parts=True, last=last)
        if parts is None:
            chat = conversation(messages, compiled.content_format, self.media_begin)
            if not compiled.knows_developer and "developer" in map(_ROLE, chat):
                return None
            parts = compiled.render_parts(chat, variables)
        return parts if plain(parts, len(messages), 0) else None

    def _source(self, tools: list[Any] | None) -> str:
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise TemplateError(f"the chat template has no default, only {', '.join(sorted(self._templates))}")

    def _variables(
        self, tools: list[Any] | None, add_generation_prompt: bool, extra: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Not to be changed: most requests share them."""
        if tools is None and not extra:
            return self._plain[add_generation_prompt]
        return self._all_variables(tools, add_generation_prompt, extra or {})

    def _all_variables(
        self, tools: list[Any] | None, add_generation_prompt: bool, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        # None and "auto" count as not given (vLLM renderers/params.py `merge_kwargs`).
        given = {k: v for k, v in extra.items() if v is not None and v != "auto"}
        dumped = None if tools is None else [_tool(t) for t in tools]
        return {
            "documents": None,
            "tools": dumped,
            **self._special_tokens,
            **given,
            "add_generation_prompt": add_generation_prompt,
        }


def tried_efforts(render: Callable[[dict[str, Any]], str]) -> str:
    """The `reasoning_effort` that asks for no thinking: "none" where it makes a difference to a prompt, else "low"."""

    def probe(effort: str) -> str | None:
        try:
            return render({"reasoning_effort": effort, "enable_thinking": effort != "none"})
        except TemplateError:
            return None

    none = probe("none")
    same = none is None or any(probe(effort) == none for effort in ("low", "medium", "high", "xhigh", "max"))
    return "low" if same else "none"


def conversation(
    messages: Sequence[Any], content_format: Literal["string", "openai"], media_begin: str = ""
) -> list[dict[str, Any]]:
    """Messages as templates see them (vLLM renderers/chat_utils.py `parse_chat_messages`). Raises TemplateError.

    Text parts are joined by line feeds in the "string" format and stay a list of parts in the "openai" one. Arguments
    of tool calls, JSON text in a request, become objects. Images and other media, which only the engine can expand,
    are named (MEDIUM) where their text begins: before the message's text in the "string" format, as the engine puts it.
    """
    return [_message(m, content_format, media_begin) for m in messages]


def _message(message: object, content_format: Literal["string", "openai"], media_begin: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise TemplateError("a message is an object with a role")
    content = message.get("content")
    seen: dict[str, Any] = {"role": role, "content": content}
    # Text is the most common by far, and what its one part would come to in the end.
    if (
        isinstance(content, str)
        and content_format == "string"
        and not (role == "system" and content.startswith(_BILLING))
    ):
        if len(message) == 2 and role != "developer":
            return seen  # nothing else is said
    else:
        seen["content"] = _content(content, role, content_format, media_begin)
    if role == "assistant":
        if calls := _tool_calls(message.get("tool_calls")):
            seen["tool_calls"] = calls
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            seen["reasoning"] = seen["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        seen["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            seen[name] = message[name]
    if role == "developer":
        seen["tools"] = message.get("tools")
    return seen


def _content(
    content: object, role: str, content_format: Literal["string", "openai"], media_begin: str
) -> str | list[dict[str, Any]]:
    parts = [] if content is None else [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise TemplateError("a message's content is text or a list of parts")
    if role == "system":
        parts = _without_billing_header(parts)
    if content_format == "string":
        parts = sorted(parts, key=lambda part: not _is_medium(part))
    texts = [p for part in parts if (p := _text_part(part, media_begin)) is not None]
    if content_format == "string":
        return "\n".join(p["text"] for p in texts if p["text"])
    return "\n".join(p["text"] for p in texts) if role == "tool" else texts


_BILLING: Final = "x-anthropic-billing-header"

_TEXT_OF_PART: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


MEDIUM: Final = "\ue0f2medium:"
"""Begins the name of a medium in a rendered text, which is the same in every router. A client that writes it only makes
its own prompt look as if it weren't exact."""

_MEDIA: Final = frozenset(
    {
        "image_url",
        "input_image",
        "image_pil",
        "image_embeds",
        "input_audio",
        "audio_url",
        "audio_embeds",
        "video_url",
        "image",
    }
)


def medium(part: dict[str, Any], media_begin: str) -> str:
    """The name of an image or another medium: by the id that the client gives it, which the engine goes by too, else by
    all that the request says of it."""
    if isinstance(uuid := part.get("uuid"), str) and uuid:
        part = {"type": part.get("type"), "uuid": uuid}
    what = hashlib.sha256(json.dumps(part, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{media_begin}{MEDIUM}{what}"


def _is_medium(part: object) -> bool:
    return isinstance(part, dict) and str(part.get("type")) in _MEDIA


def _text_part(part: object, media_begin: str) -> dict[str, Any] | None:
    """One content part as {"type": "text", "text": ...}; None for a part that has no text in it."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise TemplateError("a content part is text or an object")
    if _is_medium(part):
        return {"type": "text", "text": medium(part, media_begin)}
    if (member := _TEXT_OF_PART.get(str(part.get("type")))) is None:
        raise TemplateError("only text and media can be read here; other parts are the engine's to expand")
    text = part.get(member)
    if text is None:
        return None
    if not isinstance(text, str):
        raise TemplateError("a text part's text is a string")
    return {"type": "text", "text": text}


def _without_billing_header(parts: list[Any]) -> list[Any]:
    """Drop the first line of a system text that some coding agents change with every request; vLLM drops it too."""
    kept: list[Any] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if isinstance(text, str) and text.startswith(_BILLING):
            rest = text.partition("\n")[2]
            if rest:
                kept.append({"type": "text", "text": rest})
        else:
            kept.append(part)
    return kept


def _tool_calls(calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        return []
    seen = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
            raise TemplateError("a tool call is an object with a function")
        arguments = parsed_arguments(function.get("arguments"))
        seen.append({**call, "function": {**function, "arguments": arguments}})
    return seen


def parsed_arguments(arguments: object) -> dict[str, Any]:
    """A tool call's arguments, JSON text in a request, as the object that vLLM makes of them."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _tool(tool: object) -> object:
    """A tool with the members that vLLM's request model gives it, in its order."""
    if not isinstance(tool, dict) or not isinstance(function := tool.get("function"), dict):
        return tool
    seen: dict[str, Any] = {name: function.get(name) for name in ("name", "description", "parameters")}
    seen.update({name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None})
    defer = tool.get("defer_loading")
    if defer is not None:
        seen.setdefault("defer_loading", defer)
    whole: dict[str, Any] = {"type": tool.get("type", "function"), "function": seen}
    if defer is not None:
        whole["defer_loading"] = defer
    return whole


def _developer_as_system(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that don't know the role: developer messages are system ones, all of them merged into the first."""
    systems: list[str] = []
    rest: list[dict[str, Any]] = []
    scattered = False
    for i, message in enumerate(chat):
        if message["role"] not in ("developer", "system"):
            rest.append(message)
            continue
        scattered = scattered or i > 0 or bool(systems)
        content = message["content"]
        systems.append(content if isinstance(content, str) else "\n".join(p["text"] for p in content))
    if not scattered:
        return [
            {k: v for k, v in m.items() if k != "tools"} | {"role": "system"} if m["role"] == "developer" else m
            for m in chat
        ]
    return [{"role": "system", "content": "\n\n".join(filter(None, systems))}, *rest]


def _only_contents(messages: Sequence[Any]) -> list[str]:
    """The contents of a short chat, as templates see them; none unless all of them say something, and nothing else but
    the roles does."""
    contents: list[str] = []
    if len(messages) > _MOST_FRAMED:
        return contents
    for message in messages:
        if not isinstance(message, dict) or len(message) != 2:
            return []
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in _FRAMED_ROLES or not isinstance(content, str) or not content:
            return []
        if role == "system" and content.startswith(_BILLING):
            return []
        contents.append(content)
    return contents


_OPEN_END: Final = "CONTINUE_FINAL_MESSAGE_TAG "


class _Compiled:
    """One template's source, compiled, with what its syntax tree tells about it."""

    def __init__(self, source: str) -> None:
        self._source = source
        environment = _environment()
        try:
            self._template = environment.template(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template isn't valid Jinja: {error}") from error
        self.content_format: Literal["string", "openai"] = "openai" if _loops_over_content(tree) else "string"
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.turns: Turns | None = None
        self.verbatim = False
        """Whether contents are put into a `Frame`."""
        self._parts: jinja2.Template | None = None

    def prove(self) -> None:
        """Find out whether the template writes message by message, and contents as they are."""
        environment = _environment()
        tree = environment.parse(self._source)
        self.verbatim = self.content_format == "string" and verbatim(tree)
        if found := analyse(tree):
            turns, loop = found
            marked(tree, loop)
            self._parts = environment.template(tree)
            if tried(turns, self._probe, parts_of_text=self.content_format == "openai"):
                self.turns = turns

    def _probe(self, chat: list[dict[str, Any]]) -> list[str] | None:
        variables = {"tools": None, "documents": None, "bos_token": "<s>", "eos_token": "</s>"}
        try:
            parts = self.render_parts(chat, variables | {"add_generation_prompt": True})
            return parts if "".join(parts) == self.render(chat, variables | {"add_generation_prompt": True}) else []
        except TemplateError:
            return None

    def render_parts(self, chat: list[dict[str, Any]], variables: Mapping[str, Any]) -> list[str]:
        assert self._parts is not None
        return self._rendered(self._parts, chat, variables).split(MARK)

    def render(self, chat: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        return self._rendered(self._template, chat, variables)

    @staticmethod
    def _rendered(template: jinja2.Template, chat: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        if "messages" in variables:
            raise TemplateError("chat_template_kwargs has messages of its own")
        try:
            # Not `Template.render`, which copies the variables twice and notes which of them are the template's own.
            whole = {**template.globals, **variables, "messages": chat}
            return "".join(
                template.root_render_func(Context(template.environment, whole, template.name, template.blocks))
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise TemplateError(f"the chat template refuses this chat: {error}") from error
        except RecursionError as error:
            raise TemplateError("the chat is nested too deep for its template") from error

    def frames(
        self, roles: list[str], contents: list[str], variables: Mapping[str, Any], *, in_parts: bool
    ) -> list[Frame] | None:
        """The frames of chats with these roles, of which one has these `contents`: one of the whole text, or one of
        each part. None if they do not prove right; then no others are to be trusted. Raises TemplateError."""

        def render(contents: list[str]) -> list[str]:
            chat = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
            return self.render_parts(chat, variables) if in_parts else [self.render(chat, variables)]

        right, probe = render(contents), samples(len(contents))
        frames = [Frame(text) for text in render(stand_ins(len(contents)))]
        for given, texts in ((contents, right), (probe, render(probe))):
            if [frame.fill(given) for frame in frames] != texts:
                self.verbatim = False  # nothing says why
                return None
        return frames

    def render_open(self, chat: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """The text up to the end of the last message's content, which the engine is to continue."""
        chat = copy.deepcopy(chat)
        content = chat[-1].get("content")
        if isinstance(content, list):
            if not content:
                raise TemplateError("the final message has no text to continue")
            final = content[-1]["text"]
            content[-1]["text"] += _OPEN_END
        elif isinstance(content, str):
            final = content
            chat[-1]["content"] += _OPEN_END
        else:
            raise TemplateError("the final message has no content to continue")
        text = self.render(chat, variables)
        at = text.rfind(_OPEN_END.strip())
        if at < 0 or final.strip() not in text:
            raise TemplateError("the chat template changes the final message, so it can't be continued")
        whole = text[at : at + len(_OPEN_END)] == _OPEN_END
        return text[:at] if whole else text[:at].rstrip()


@lru_cache(maxsize=32)
def _compiled(source: str) -> _Compiled:
    return _Compiled(source)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; rendering passes them through."""

    tags = {"generation"}  # noqa: RUF012 - the name and shape that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_words"), [], [], body).set_lineno(line)

    def _words(self, caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a shorter way to what templates read most: members of messages, which are dicts.

    `missing`: what stands for the members of these that are not there, by name. Of the dict they only tell that it is
    one.
    """

    missing: dict[str, jinja2.Undefined]

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in MEMBERS_OF_DICTS:
            # What the sandbox comes to after an AttributeError.
            if attribute in obj:
                return obj[attribute]
            missing = self.missing.get(attribute)
            if missing is None:  # as many as a template names
                missing = self.missing[attribute] = self.undefined(obj={}, name=attribute)
            return missing
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is dict and type(argument) is str and argument not in MEMBERS_OF_DICTS:
            return obj[argument] if argument in obj else self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def template(self, source: str | nodes.Template) -> jinja2.Template:
        """A compiled template. Its globals are a dict: every rendering copies them, and a ChainMap is slow at it."""
        return jinja2.Template.from_code(self, self.compile(source), dict(self.globals))


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.missing = {}
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)  # local time, as the engine gives it


# How a template reads content decides which format vLLM hands it (renderers/hf.py `_detect_content_format`): a loop
# over message content, directly or through a macro's parameter, asks for the list of parts.


def _loops_over_content(tree: nodes.Template) -> bool:
    messages = _names_of(tree, "messages")
    loops = list(tree.find_all(nodes.For))
    message_names = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in messages)
    }
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        given = set(_content_parameters(tree, macro, message_names))
        for loop in macro.find_all(nodes.For):
            if given or id(loop) not in in_macros:
                in_macros[id(loop)] = given
    for loop in loops:
        if any(_reads(loop.iter, name, "content") for name in message_names):
            return True
        if isinstance(loop.iter, nodes.Name):
            given_here = in_macros.get(id(loop))
            if loop.iter.name in (given_here or ()) or (given_here is None and loop.iter.name == "content"):
                return True
    return False


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, message_names: set[str]) -> Iterator[str]:
    """Parameters of a macro that some call gives a message's content."""
    parameters = [a.name for a in macro.args]
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [
            *zip(parameters, call.args, strict=False),
            *((k.key, k.value) for k in call.kwargs if k.key in parameters),
        ]
        for parameter, value in given:
            if any(_reads(value, name, "content") for name in message_names):
                yield parameter


def _names_of(tree: nodes.Template, name: str) -> list[str]:
    """`name` and every variable that is assigned from it or from a slice of it."""
    names, waiting = [name], deque([name])
    while waiting:
        source = waiting.popleft()
        for assign in tree.find_all(nodes.Assign):
            target = assign.target
            if isinstance(target, nodes.Name) and target.name not in names and _reads(assign.node, source):
                names.append(target.name)
                waiting.append(target.name)
    return names


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable `name` (or its member `key`), filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _reads(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _reads(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == key and _reads(node.node, name)
