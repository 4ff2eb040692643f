"""POST /tokenize and /detokenize."""

from fake_backend import errors
from fake_backend.errors import JSON_HEADERS, compact
from fake_backend.replica import Replica
from fake_backend.validate import Fields, invalid, read_body
from fake_backend.wire import Exchange
from router.prompt.reader import PromptError
from router.prompt.request import Ask


async def tokenize(replica: Replica, exchange: Exchange) -> None:
    fields = Fields(read_body(exchange.request))
    replica.adapter(fields.text("model"))
    if "messages" in fields.body:
        messages = fields.array("messages")
        ask = Ask(
            kind="chat",
            messages=messages or [],
            tools=fields.array("tools"),
            add_generation_prompt=fields.flag("add_generation_prompt", True),
            continue_final_message=fields.flag("continue_final_message"),
            add_special_tokens=fields.flag("add_special_tokens"),
            chat_template=fields.text("chat_template"),
            chat_template_kwargs=dict(fields.mapping("chat_template_kwargs") or {}),
        )
    else:
        prompt = fields.required("prompt")
        if not isinstance(prompt, str):
            raise invalid("string_type", "body.prompt", "Input should be a valid string", prompt)
        ask = Ask(kind="completion", prompts=[prompt], add_special_tokens=fields.flag("add_special_tokens", True))
    try:
        (ids,) = replica.reader.tokenize(ask)
    except PromptError as error:
        raise errors.ApiError(400, errors.without_surrogates(str(error))) from error
    assert isinstance(ids, list)
    texts = replica.token_texts(ids) if fields.flag("return_token_strs") else None
    answer = {
        "count": len(ids),
        "max_model_len": replica.settings.max_model_len,
        "tokens": ids,
        "token_strs": texts,
    }
    exchange.reply(200, compact(answer), JSON_HEADERS)


async def detokenize(replica: Replica, exchange: Exchange) -> None:
    fields = Fields(read_body(exchange.request))
    replica.adapter(fields.text("model"))
    ids = fields.required("tokens")
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise invalid("list_type", "body.tokens", "Input should be a valid list", ids)
    if ids and max(ids) >= replica.tokenizer.vocab_size:
        raise errors.ApiError(400, f"Token id {max(ids)} is out of vocabulary")
    exchange.reply(200, compact({"prompt": replica.tokenizer.decode(ids)}), JSON_HEADERS)
