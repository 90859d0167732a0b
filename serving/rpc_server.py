"""Calls about text, the model and the server itself."""

from __future__ import annotations

import importlib.metadata

from jaxstate.errors import InputError
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving import messages, prompts
from jaxstate.serving.rpc_calls import Call


async def tokenize(request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
    """Encode a text."""
    tokenizer = call.with_tokenizer()
    try:
        ids = await call.run_text(
            tokenizer.encode, request.text, add_bos=request.add_bos,
            parse_special=request.parse_special, continues=request.continues,
        )  # fmt: skip
    except ValueError as error:
        raise InputError(str(error)) from error
    return pb.TokenizeResponse(token_ids=ids)


async def detokenize(request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
    """Decode token ids."""
    tokenizer = call.with_tokenizer()
    most = max(request.token_ids, default=0)
    if most >= call.service.model.vocab_size:
        raise InputError(
            f"token_ids: expected less than {call.service.model.vocab_size}, got {most}"
        )
    text = await call.run_text(
        tokenizer.decode, list(request.token_ids), skip_special=request.skip_special
    )
    return pb.DetokenizeResponse(text=text)


async def render_template(
    request: pb.RenderTemplateRequest, call: Call
) -> pb.RenderTemplateResponse:
    """Render a conversation in the model's chat template."""
    tokenizer = call.with_tokenizer()
    chat = await call.run_text(prompts.chat, request.chat, "chat", tokenizer)
    return pb.RenderTemplateResponse(text=chat.text, token_ids=chat.ids)


async def get_model_info(request: pb.GetModelInfoRequest, call: Call) -> pb.ModelInfo:
    """Describe the model and the engine's sizes."""
    model, config, tokenizer = call.service.model, call.service.config, call.tokenizer
    return pb.ModelInfo(
        name=call.model_name,
        family=model.family,
        vocab_size=model.vocab_size,
        num_layers=len(model.layers),
        max_positions=model.max_positions,
        context_tokens=config.context_len,
        page_size=config.page_size,
        cells=config.num_pages * config.page_size,
        bytes_per_cell=model.bytes_per_cell,
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
        eos_ids=tokenizer.eos_ids if tokenizer else (),
        server_version=importlib.metadata.version("jaxstate"),
    )


async def get_stats(request: pb.GetStatsRequest, call: Call) -> pb.Stats:
    """Say what the server has done and holds; to one of several tenants, what is his."""
    if not call.tenant:
        return messages.stats(await call.run(call.service.stats))
    used = await call.run(call.service.usage, call.tenant)
    return pb.Stats(sessions=used.sessions, cells_used=used.cells)
