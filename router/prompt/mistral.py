"""Chats in mistral's own format, for models that bring a tekken.json: written by code there, not by a template.

As vLLM writes them with `--tokenizer-mode mistral`, which it picks by itself for mistral's own repositories: messages
go to mistral-common (protocol/instruct/normalize.py, tokens/tokenizers/instruct.py), which merges neighbours of a role
and puts control tokens around each. What is refused there is refused here only where it could not be written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from router.prompt.chat import TemplateError, medium, parsed_arguments, tried_efforts
from router.prompt.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSIONS = (3, 7, 11, 13, 15)
"""The versions of the format that can be written here."""

_ID_CHARACTERS = 9  # vLLM cuts longer ids of tool calls (tokenizers/mistral.py `truncate_tool_call_ids`)
_MEDIA = frozenset({"image_url", "image", "input_audio", "audio_url"})
_BETWEEN_MESSAGES = "\n\n"


class _Thought(NamedTuple):
    text: str
    closed: bool = True


class _Medium(NamedTuple):
    part: dict[str, Any]


_Part = str | _Thought | _Medium


@dataclass(slots=True)
class _Message:
    role: str
    parts: list[_Part] = field(default_factory=list)
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    """Id, name and arguments of each."""
    call_id: str = ""


class MistralChat:
    """Writes chats for one model; in place of a `ChatTemplate`, and with the same uses.

    `version`: of VERSIONS. `tokens`: the control tokens' texts (["[INST]"]) and by which name the tokenizer finds each;
    no text of a client's has such a name. `efforts`: what the model allows as `reasoning_effort`, and its default.
    """

    media_begin = ""
    """As a `ChatTemplate` has it."""

    def __init__(
        self, version: int, tokens: Mapping[str, str], efforts: tuple[frozenset[str], str | None] = (frozenset(), None)
    ) -> None:
        if version not in VERSIONS:
            raise ValueError(f"version {version} of mistral's chat format is not known here")
        self.version = version
        self._tokens = dict(tokens)
        self._efforts, self._usual_effort = efforts

    @property
    def sources(self) -> str:
        """All the text in which the control tokens' names stand."""
        return "\n".join(self._tokens.values())

    def prove(self) -> None:
        """There is nothing to find out."""

    def system_first(self) -> bool:
        """Whether vLLM joins the system messages of /v1/messages: it does wherever there is no template."""
        return True

    def thinking_off(self) -> str:
        """The `reasoning_effort` by which vLLM asks for no thinking."""
        return tried_efforts(lambda extra: self.render([{"role": "user", "content": "Hi"}], extra=extra))

    def turns(self, tools: list[Any] | None, template: str | None = None) -> Turns | None:
        """Messages are written one by one but where tools or settings move on with the last question."""
        return None if self.version < 13 and tools else Turns(lookahead=False)

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
        """The same text as `render` gives, in parts: what comes before the messages, each message, nothing; and all
        of them, however few are wanted.

        None where messages are not written one by one: where they are merged, or stand in another order. Raises
        TemplateError.
        """
        chat = [_message(each) for each in messages]
        self._check(chat, add_generation_prompt, False)
        if self.turns(tools) is None or not self._apart(chat):
            return None
        for each in chat:
            each.parts = self._joined([each.parts])
        return [self._token("<s>"), *self._texts(chat, "", self._told(tools, extra)), ""]

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
        """The prompt's text, control tokens by their names. Raises TemplateError for what the engine refuses."""
        if template is not None:
            raise TemplateError("the engine takes no chat template for this model")
        chat = [_message(each) for each in messages]
        self._check(chat, add_generation_prompt, continue_final_message)
        system = ""
        if self.version < 7:
            system = self._system(chat)
            chat = [each for each in self._merged(chat) if each.role != "system"]
            if not chat or chat[0].role != "user":
                chat.insert(0, _Message("user"))
        else:
            chat = self._merged(chat)
        texts = self._texts(chat, system, self._told(tools, extra))
        if continue_final_message:
            texts[-1] = texts[-1].removesuffix(self._token("</s>"))
        return self._token("<s>") + "".join(texts)

    @staticmethod
    def _check(chat: list[_Message], add_generation_prompt: bool, continue_final_message: bool) -> None:
        by_assistant = bool(chat) and chat[-1].role == "assistant"
        if continue_final_message and not by_assistant:
            raise TemplateError("only an assistant's message can be continued")
        if add_generation_prompt and by_assistant and not continue_final_message:
            raise TemplateError("the chat ends with an answer")

    def _told(self, tools: list[Any] | None, extra: Mapping[str, Any] | None) -> str:
        """What stands before one question: the tools, and settings of the model."""
        effort = (extra or {}).get("reasoning_effort")
        return self._tools(tools) + self._settings(effort if isinstance(effort, str) else None)

    def _texts(self, chat: list[_Message], system: str, told: str) -> list[str]:
        """The text of each message, as they stand now."""
        users = [i for i, each in enumerate(chat) if each.role == "user"]
        first, last = (users[0], users[-1]) if users else (-1, -1)
        where = last if self.version < 13 else first
        texts = []
        for i, message in enumerate(chat):
            match message.role:
                case "system":
                    begin, end = self._token("[SYSTEM_PROMPT]"), self._token("[/SYSTEM_PROMPT]")
                    text = f"{begin}{self._written(message.parts)}{end}"
                case "user":
                    asked = self._asked(message, system if i == last else "")
                    text = f"{told if i == where else ''}{self._token('[INST]')}{asked}{self._token('[/INST]')}"
                case "tool":
                    text = self._result(message)
                case _:
                    text = self._answer(message) + self._token("</s>")
            texts.append(text)
        return texts

    def _apart(self, chat: list[_Message]) -> bool:
        """Whether each message is written by itself, at its place, however the chat goes on."""
        if "user" not in [each.role for each in chat[:2]]:
            return False  # what is told may stand where a middle is left out (turns.stand_in)
        if self.version < 7 and (chat[0].role != "user" or any(each.role == "system" for each in chat)):
            return False
        places: dict[str, int] = {}
        before, at = "", -1
        for each in chat:
            if each.role == before and before in ("user", "assistant"):
                return False
            before = each.role
            if each.role == "assistant":
                if self.version < 7 and each.parts and each.calls:
                    return False  # refused, which a whole rendering tells
                places, at = {call[0]: i for i, call in enumerate(each.calls)}, -1
            elif each.role == "tool" and self.version >= 11:
                place = places.get(each.call_id, -1)
                if place <= at:
                    return False
                at = place
        return True

    # -- neighbours ----------------------------------------------------------------------------------------------

    @property
    def _between_parts(self) -> str:
        return "" if self.version >= 15 else _BETWEEN_MESSAGES

    def _merged(self, chat: list[_Message]) -> list[_Message]:
        """Neighbours of one role in one, but what each system message and each tool's result is to itself."""
        merged: list[_Message] = []
        called: list[str] = []
        for role, group in groupby(chat, attrgetter("role")):
            some = list(group)
            if role in ("system", "tool"):
                for each in some:
                    each.parts = self._joined([each.parts])
                if role == "tool":
                    some = self._in_order(some, called)
                    called = []
                merged += some
                continue
            one = _Message(role, self._joined([each.parts for each in some]))
            one.calls = [call for each in some for call in each.calls]
            if role == "assistant":
                if self.version < 7 and any(each.parts and each.calls for each in some):
                    raise TemplateError("an answer either says something or calls tools")
                called += [call[0] for call in one.calls]
            merged.append(one)
        return merged

    def _in_order(self, results: list[_Message], called: list[str]) -> list[_Message]:
        """From version 11 on, results stand as their calls stood."""
        if self.version < 11:
            return results
        calls = {call_id: i for i, call_id in enumerate(called)}
        places = {each.call_id: i for i, each in enumerate(results)}
        return sorted(results, key=lambda each: (calls.get(each.call_id, len(called)), places[each.call_id]))

    def _joined(self, contents: list[list[_Part]]) -> list[_Part]:
        """Parts of several messages with neighbouring texts in one."""
        joined: list[_Part] = []
        texts: list[str] = []
        for parts in contents:
            between = _BETWEEN_MESSAGES
            for part in parts:
                if not isinstance(part, str):
                    if texts:
                        joined.append("".join(texts))
                    joined.append(part)
                    texts = []
                elif part:
                    if texts:
                        texts.append(between)
                    texts.append(part)
                    between = self._between_parts
        return [*joined, "".join(texts)] if texts else joined

    def _system(self, chat: list[_Message]) -> str:
        """Before version 7 all system messages are one text, which stands before the last question."""
        given = [self._joined([each.parts]) for each in chat if each.role == "system" and each.parts]
        return _BETWEEN_MESSAGES.join(self._written(parts) for parts in given)

    # -- one message ---------------------------------------------------------------------------------------------

    def _token(self, text: str) -> str:
        name = self._tokens.get(text)
        if name is None:
            raise TemplateError(f"the model has no token {text}")
        return name

    def _written(self, parts: list[_Part]) -> str:
        return "".join(map(self._part, parts))

    def _part(self, part: _Part) -> str:
        if isinstance(part, str):
            return part
        if isinstance(part, _Medium):
            return medium(part.part, self.media_begin)
        if self.version < 13:
            raise TemplateError("the model takes no thoughts")
        return self._token("[THINK]") + part.text + (self._token("[/THINK]") if part.closed else "")

    def _asked(self, message: _Message, system: str) -> str:
        parts = message.parts
        if len(parts) > 1 and isinstance(parts[-1], _Medium) and all(isinstance(part, str) for part in parts[:-1]):
            parts = [parts[-1], *parts[:-1]]
        if not system:
            return self._written(parts)
        if any(isinstance(part, _Medium) for part in parts):
            # The engine tokenizes the two apart, which only a token between them can tell: no longer its own ids.
            parts = [_Medium({}), *parts]
        return system + _BETWEEN_MESSAGES + self._written(parts)

    def _answer(self, message: _Message) -> str:
        if not message.parts and not message.calls:
            raise TemplateError("an answer says nothing and calls nothing")
        text = self._written(message.parts)
        if len(message.parts) == 1 and isinstance(message.parts[0], str):
            text = text.rstrip(" ")
        return text + self._calls(message.calls)

    def _calls(self, calls: list[tuple[str, str, Any]]) -> str:
        if not calls:
            return ""
        begin = self._token("[TOOL_CALLS]")
        if self.version < 11:
            listed = []
            for call_id, name, arguments in calls:
                call = {"name": name, "arguments": arguments}
                listed.append({**call, "id": call_id} if call_id and call_id != "null" else call)
            return begin + _json(listed)
        written = []
        for call_id, name, arguments in calls:
            written += [begin, name]
            if self.version < 13 and call_id and call_id != "null":
                written += [self._token("[CALL_ID]"), call_id]
            written += [self._token("[ARGS]"), _json(arguments)]
        return "".join(written)

    def _result(self, message: _Message) -> str:
        begin, end = self._token("[TOOL_RESULTS]"), self._token("[/TOOL_RESULTS]")
        text = self._written(message.parts)
        if self.version < 7:
            return begin + _json({"content": _as_json(text), "call_id": message.call_id}) + end
        if self.version < 13:
            return begin + message.call_id + self._token("[TOOL_CONTENT]") + text + end
        return begin + text + end

    def _tools(self, tools: list[Any] | None) -> str:
        if not tools:
            return ""
        return (
            self._token("[AVAILABLE_TOOLS]")
            + _json([_tool(each) for each in tools])
            + self._token("[/AVAILABLE_TOOLS]")
        )

    def _settings(self, effort: str | None) -> str:
        """From version 15 on, what the request asks of the model itself."""
        if self.version < 15 or not self._efforts:
            return ""
        effort = effort or self._usual_effort
        if effort not in self._efforts:
            raise TemplateError(f"the model takes no reasoning_effort {effort}")
        return self._token("[MODEL_SETTINGS]") + _json({"reasoning_effort": effort}) + self._token("[/MODEL_SETTINGS]")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _as_json(text: str) -> Any:
    if not text:
        return {}
    try:
        return json.loads(text)
    except ValueError:
        return text


def _tool(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise TemplateError("a tool is an object with a function")
    described = function.get("description") or ""
    seen = {"name": function.get("name"), "description": described, "parameters": function.get("parameters") or {}}
    return {"type": "function", "function": seen}


def _message(message: object) -> _Message:
    if not isinstance(message, dict):
        raise TemplateError("a message is an object")
    role = message.get("role")
    if role == "developer":
        role = "system"
    if role not in ("system", "user", "assistant", "tool"):
        raise TemplateError("a message's role is not known to the model")
    seen = _Message(role, _parts(message.get("content")))
    if role == "assistant":
        thought = message.get("reasoning")
        if thought is None:
            thought = message.get("reasoning_content")
        if thought is not None:
            seen.parts.insert(0, _Thought(_text(thought)))
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                raise TemplateError("a tool call is an object with a function")
            arguments = parsed_arguments(function.get("arguments"))
            seen.calls.append((_text(call.get("id"))[-_ID_CHARACTERS:], _text(function.get("name")), arguments))
    elif role == "tool":
        seen.call_id = _text(message.get("tool_call_id"))[-_ID_CHARACTERS:]
    return seen


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TemplateError("what is a text in a chat is none here")
    return value


def _parts(content: object) -> list[_Part]:
    if content is None or isinstance(content, str):
        return [content] if content else []
    if not isinstance(content, list):
        raise TemplateError("a message's content is text or a list of parts")
    parts: list[_Part] = []
    for part in content:
        if not isinstance(part, dict):
            raise TemplateError("a content part is an object")
        match part.get("type"):
            case "text":
                parts.append(_text(part.get("text")))
            case "thinking":
                parts.append(_Thought(_text(part.get("thinking")), part.get("closed") is not False))
            case str(kind) if kind in _MEDIA:
                parts.append(_Medium(part))
            case None | "":
                pass
            case _:
                raise TemplateError("a content part is of a kind that the model does not take")
    return parts
