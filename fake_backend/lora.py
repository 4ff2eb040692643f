"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)."""

from fake_backend.errors import ApiError
from fake_backend.replica import Replica
from fake_backend.settings import LoraModule
from fake_backend.validate import Fields, read_body
from fake_backend.wire import Exchange

_TEXT = (("vary", "Origin"),)


async def load(replica: Replica, exchange: Exchange) -> None:
    fields = Fields(read_body(exchange.request))
    name, path = fields.required("lora_name"), fields.required("lora_path")
    fields.text("lora_name")
    fields.text("lora_path")
    if not name or not path:
        raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
    if name in replica.settings.served_names:
        raise ApiError(400, f"The lora adapter '{name}' conflicts with a served base model.", "InvalidUserInput")
    if name in replica.loras and not fields.flag("load_inplace"):
        raise ApiError(
            400,
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True.",
            "InvalidUserInput",
        )
    replica.add_lora(LoraModule(name, path))
    exchange.reply(200, f"Success: LoRA adapter '{name}' added successfully.".encode(), _TEXT)


async def unload(replica: Replica, exchange: Exchange) -> None:
    fields = Fields(read_body(exchange.request))
    name = fields.required("lora_name")
    fields.text("lora_name")
    if not name:
        raise ApiError(400, "'lora_name' needs to be provided to unload a LoRA adapter.", "InvalidUserInput")
    if name not in replica.loras:
        raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
    del replica.loras[name]
    exchange.reply(200, f"Success: LoRA adapter '{name}' removed successfully.".encode(), _TEXT)
